/* admit.h: decides whether a request may reach its segment: right, epoch, dtype and bounds. This is
 * the gate's first part; gate.h has the last one.
 *
 * Threads. As gate.h. */
#ifndef SMB_ADMIT_H
#define SMB_ADMIT_H

#include "server/request.h"

/* Checks the right to the segment, that the segment exists, epoch, dtype and bounds, and takes a
 * reference to the segment. Called twice: before the payload is received, to decide whether to keep
 * the payload, and again when the payload is complete. */
int gate_admit(struct smb_server *server, const struct smb_frame *frame,
               struct gate_request *request);
/* Releases the request's references to segments. */
void gate_done(struct gate_request *request);

/* For the gate's other parts. */

/* Takes a reference to a segment if the connection has this right to it. SMB_DENIED: it does not
 * have the right; the answer is the same whether or not the segment exists here. SMB_NOT_FOUND. */
int gate_find(struct smb_server *server, const struct gate_request *request, uint64_t id,
              uint32_t right, struct smb_segment **segment);
/* Whether a WATERMARK asks for the outcome of a change on a lane that the client has left, from the
 * time when the segment had one copy and was not gated. No more changes are made on that lane. */
bool gate_asks_for_the_past(const struct smb_frame *frame);

#endif
