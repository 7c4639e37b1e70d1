/* copied.h: a part of a copy that is being made here, as its primary sends it: a chunk, a record,
 * words of locks and versions.
 *
 * Threads. As gate.h. */
#ifndef SMB_COPIED_H
#define SMB_COPIED_H

#include "server/request.h"

/* From the primary: a part of a copy that is being made here. SMB_BUSY: defer it. */
int gate_copied(struct gate_request *request, const uint8_t *payload);

#endif
