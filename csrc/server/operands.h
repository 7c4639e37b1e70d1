/* operands.h: a change, from its frame, with what it takes from other segments: sources that are
 * added, a gradient, an optimizer's state.
 *
 * Threads. As gate.h. */
#ifndef SMB_OPERANDS_H
#define SMB_OPERANDS_H

#include "memory/change.h"
#include "server/request.h"

/* The operands of other segments are in `scratch` after SMB_OK, their references in
 * request->others. SMB_BUSY: defer it. SMB_APART, SMB_INVALID, SMB_DENIED, SMB_NOT_FOUND. */
int gate_describe(struct smb_server *server, struct gate_request *request, const uint8_t *payload,
                  uint8_t *scratch, uint8_t *sink, struct smb_change *change);

#endif
