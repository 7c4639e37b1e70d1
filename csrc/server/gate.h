/* gate.h: the only way from frames to memory. Every data request, read or write, over every
 * transport, passes the gate: it is admitted (admit.h), recognised if it was made before (once.h),
 * and executed (here).
 *
 * Threads. Called by a connection's loop, with the connection's `turn` held. */
#ifndef SMB_GATE_H
#define SMB_GATE_H

#include "server/request.h"

/* Makes a change whose payload is complete, unless it was made before. `payload` is the frame's,
 * without the token, and without words that elements follow, which lie before it in memory. `slot`
 * is the journal's slot that holds the payload, or NULL. `scratch` and `sink` are memory of one
 * chunk for the source's bytes and the new values, or NULL. `scratch` must stay unchanged until the
 * next try. SMB_BUSY: defer the request. SMB_APART: smb/types.h. *result is the old value, for
 * FETCH_ADD and COMPARE_SWAP. */
int gate_execute(struct smb_server *server, struct gate_request *request, const struct slot *slot,
                 const uint8_t *payload, uint8_t *scratch, uint8_t *sink, uint64_t *result);
/* Copies the range as it was at one instant, for a chunk that gate_open found locked. It copies
 * without the chunk's lock unless changes follow each other without end. SMB_BUSY: defer the
 * request. SMB_DEFERRED: the range of a segment with two copies was copied, and the reply must wait
 * until gate_may_tell allows it for request->order. It is not copied again, which might never end,
 * because others may change the chunk all the while. */
int gate_copy(struct gate_request *request, uint8_t *to);
bool gate_may_tell(const struct gate_request *request, uint64_t order);
/* The other way to read: gives the range itself, under its chunk's lock, so that it can be sent
 * from there. Do not wait for anything before gate_close. The lock is tried once. SMB_BUSY: defer
 * the request, or use gate_copy. */
int gate_open(struct gate_request *request, uint8_t **data);
void gate_close(struct gate_request *request);

#endif
