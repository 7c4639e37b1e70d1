/* wait.h: a caller waits for its call. Meanwhile it is the progress thread, if the client has none
 * (progress.h); otherwise it sleeps, and takes over when the progress thread's own call is done. */
#ifndef SMB_WAIT_H
#define SMB_WAIT_H

#include "client/call.h"

/* Called by the caller's thread: runs the call's streams to their end. `work` is called in between,
 * for one piece each, until it returns false. It may be called once more after that. */
void call_run(struct smb_client *client, struct call *call, bool (*work)(void *),
              void *work_argument);
/* The same in parts: call_submit once, then this until it returns true. */
bool call_wait(struct smb_client *client, struct call *call, uint64_t until_ns,
               bool (*work)(void *), void *work_argument);

#endif
