/* once.h: makes each change count once. The completion record of a request's lane says whether the
 * change was made, and remembers which changes were refused.
 *
 * Threads. As gate.h. */
#ifndef SMB_ONCE_H
#define SMB_ONCE_H

#include "server/request.h"

/* SMB_EXISTS: the change was made before. SMB_OK: it was not, and its lane's record is held until
 * gate_let_go. */
int gate_take_record(struct gate_request *request);
void gate_let_go(struct gate_request *request);
/* How far the frame's lane has come on its segment, and up to where some changes were refused. */
int gate_watermark(struct gate_request *request, uint64_t *watermark, uint64_t *refused);
/* Notes that a change is about to be answered with a failure, so that a later change of the lane
 * does not make it look applied. If the client has no right to change the segment, nothing is
 * noted. SMB_BUSY: it cannot be noted now, so it must not be answered; defer it. SMB_STALE_EPOCH:
 * it was not noted, and a later change of that epoch may be served here. */
int gate_refused(struct smb_server *server, const struct gate_request *refused);
/* Stores the primary's note that it refused the change. */
int gate_note_refused(struct gate_request *request);

#endif
