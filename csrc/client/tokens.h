/* tokens.h: the tokens of a link, shown on each of its connections (channel/access.h). Called by
 * any thread, under the client's mutex. */
#ifndef SMB_TOKENS_H
#define SMB_TOKENS_H

#include "channel/access.h"
#include "channel/channel.h"
#include "client/dial.h"
#include "client/link.h"

/* Shows the link's tokens on a connection that the link does not have yet. After a refused token
 * the others are shown nevertheless. A server that must prove its identity has to accept at least
 * one token; a refusal before that does not count. */
int tokens_show(struct smb_link *link, const struct channel *channel, bool by_reference,
                const struct access_connection *proof, struct until until, bool *proven);

#endif
