/* answered.h: a request is over, by its answer or by what a resumption has found out: what its call
 * is told. The progress thread's. */
#ifndef SMB_ANSWERED_H
#define SMB_ANSWERED_H

#include "client/inflight.h"

/* With success, and `a` and `b`. */
void link_take_success(struct smb_link *link, struct inflight *inflight, uint64_t a, uint64_t b);
/* With that status. */
void link_take_failure(struct smb_link *link, struct inflight *inflight, int status);

#endif
