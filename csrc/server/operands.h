/* operands.h: makes a change from its frame and the operands in other segments: sources to be
 * added, a gradient, an optimizer's state.
 *
 * Threads. As gate.h. */
#ifndef SMB_OPERANDS_H
#define SMB_OPERANDS_H

#include "memory/change.h"
#include "server/request.h"

/* After SMB_OK the operands of other segments are in `scratch`, and references to the segments in
 * request->others. SMB_BUSY: defer the request. SMB_APART, SMB_INVALID, SMB_DENIED,
 * SMB_NOT_FOUND. */
int gate_describe(struct smb_server *server, struct gate_request *request, const uint8_t *payload,
                  uint8_t *scratch, uint8_t *sink, struct smb_change *change);
/* Takes a reference, in request->warden, to the segment whose lock fences the change. SMB_APART,
 * SMB_INVALID, SMB_DENIED, SMB_NOT_FOUND. */
int gate_find_warden(struct smb_server *server, struct gate_request *request, uint64_t id);
/* SMB_OK: from now on neither the request's segment nor its warden can leave the other's server
 * without it. SMB_INVALID: one of them may do so already. */
int gate_bind_warden(struct gate_request *request);
/* The status for an operand, or a warden, that is missing. If the segment has two copies, the
 * client would take SMB_NOT_FOUND as a sign that the primary has changed, so it gets SMB_APART. */
int gate_missing(const struct gate_request *request, int status);

#endif
