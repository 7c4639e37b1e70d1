/* tokens.h: the tokens of a link, shown on each of its connections (base/access.h). Any thread,
 * under the client's mutex. */
#ifndef SMB_TOKENS_H
#define SMB_TOKENS_H

#include "base/access.h"
#include "base/channel.h"
#include "client/dial.h"
#include "client/link.h"

/* Shows the link's tokens on a connection that is not the link's yet. After a refused token the
 * others are shown all the same. A server that must prove its identity has to take at least one; no
 * refusal before that counts. */
int tokens_show(struct smb_link *link, const struct channel *channel, bool by_reference,
                const struct access_connection *proof, struct until until, bool *proven);

#endif
