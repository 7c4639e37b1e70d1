/* gate.h: the single door between frames and memory. Every data request, read or write, over every
 * transport, passes here: it is admitted (admit.h), told from one that was made before (once.h),
 * and carried out (here).
 *
 * Threads. A connection's loop, with the connection's `turn` held.
 */
#ifndef SMB_GATE_H
#define SMB_GATE_H

#include "server/request.h"

/* With the payload in hand: do the change, unless it was done before. `payload` is the frame's,
 * without what lies before it: a token, and words that elements follow. `slot` is the journal's
 * slot that holds it, or NULL. `scratch` and `sink` are a chunk's worth of memory for the source's
 * bytes and the new values, or NULL. `scratch` stays as it is until the next try. SMB_BUSY: defer
 * it. SMB_APART: smb/types.h. The old value of the 64-bit operations goes to *result. */
int gate_execute(struct smb_server *server, struct gate_request *request, const struct slot *slot,
                 const uint8_t *payload, uint8_t *scratch, uint8_t *sink, uint64_t *result);
/* The range as it was at one instant, copied without its chunk's lock unless changes follow each
 * other without end. For a chunk that gate_open found locked. SMB_BUSY: defer it. SMB_DEFERRED: of
 * a segment with two copies, the range was copied. The reply waits until gate_may_tell allows it
 * for request->order. Copying again might never end: others may change the chunk all the while. */
int gate_copy(struct gate_request *request, uint8_t *to);
bool gate_may_tell(const struct gate_request *request, uint64_t order);
/* The other path of a read: the range itself, under its chunk's lock, for the socket to be sent
 * from. Not to be held while anything is waited for. The lock is tried once: with SMB_BUSY defer
 * it, or take another path. */
int gate_open(struct gate_request *request, uint8_t **data);
void gate_close(struct gate_request *request);

#endif
