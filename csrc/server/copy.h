/* copy.h: a new copy of a segment, made by its primary: docs/decisions/0025, "A new copy".
 *
 * Threads. As replica.h says; parts are sent by one control thread (smb_server_copy).
 */
#ifndef SMB_COPY_H
#define SMB_COPY_H

#include <stdint.h>

struct forward;
struct replica;

enum { COPY_QUEUED_BYTES_MAX = 2 << 20 /* of a copy: changes queue up behind it */ };

/* With the lock. Before a lane gets a record there again that it lost here, the copy has to know
 * that records were lost. */
void copy_tell_evictions(struct replica *replica);
/* With the lock. A chunk that will be copied has the change then: only its record is missing. */
void copy_make_note(struct replica *replica, struct forward *forward, const uint64_t *result);

#endif
