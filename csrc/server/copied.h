/* copied.h: the parts of a copy that is being made on this server, as its primary sends them:
 * chunks, records, words of locks and versions.
 *
 * Threads. As gate.h. */
#ifndef SMB_COPIED_H
#define SMB_COPIED_H

#include "server/request.h"

/* Stores one part that the primary sent. SMB_BUSY: defer it. */
int gate_copied(struct gate_request *request, const uint8_t *payload);

#endif
