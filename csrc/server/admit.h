/* admit.h: whether a request may reach its segment: right, epoch, dtype and bounds. This is the
 * gate's first part; gate.h has the last one.
 *
 * Threads. As gate.h. */
#ifndef SMB_ADMIT_H
#define SMB_ADMIT_H

#include "server/request.h"

/* Right to it, segment there, epoch, dtype and bounds right. Takes the reference. Once before the
 * payload is received, to know whether it is wanted; once more when it is all here. */
int gate_admit(struct smb_server *server, const struct smb_frame *frame,
               struct gate_request *request);
/* Gives back the request's references to segments. */
void gate_done(struct gate_request *request);

/* For the gate's other parts. */

/* Takes a reference to a segment if the connection has this right to it. A connection without the
 * right does not learn whether the segment is here: SMB_DENIED either way. SMB_NOT_FOUND. */
int gate_find(struct smb_server *server, const struct gate_request *request, uint64_t id,
              uint32_t right, struct smb_segment **segment);
/* Whether it asks what became of a change on a lane that the client has left: the segment had one
 * copy then, and had not been gated. Nothing more is made on that lane. */
bool gate_asks_for_the_past(const struct smb_frame *frame);

#endif
