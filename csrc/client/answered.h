/* answered.h: ends a request, by its answer or by the result of a resumption, and tells its call.
 * Called by the progress thread. */
#ifndef SMB_ANSWERED_H
#define SMB_ANSWERED_H

#include "client/inflight.h"

/* Ends a request with success and the answer's words `a` and `b`. */
void link_take_success(struct smb_link *link, struct inflight *inflight, uint64_t a, uint64_t b);
/* Ends a request with that status. */
void link_take_failure(struct smb_link *link, struct inflight *inflight, int status);

#endif
