/* progress.h: the thread that moves the bytes of all calls of a client; see client.h. */
#ifndef SMB_PROGRESS_H
#define SMB_PROGRESS_H

#include "client/call.h"
#include "client/client.h"

/* Runs the progress thread until its own call is done, or until_ns. Returns whether `work` is
 * done. */
bool progress_run(struct smb_client *client, struct call *own, uint64_t until_ns,
                  bool (*work)(void *), void *work_argument);

#endif
