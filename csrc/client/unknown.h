/* unknown.h: pieces of a call with an unknown outcome, and how each is resolved. The progress
 * thread's. */
#ifndef SMB_UNKNOWN_H
#define SMB_UNKNOWN_H

#include <stdatomic.h>

#include "smb/client.h"

struct call;

struct unknown_piece {
    uint64_t buffer_offset;
    uint32_t bytes;
    int state; /* enum smb_outcome_state */
};
struct smb_unknown {
    _Atomic uint32_t references;
    uint32_t pending; /* the progress thread's; so are the pieces, until it is 0 */
    uint32_t count, room;
    struct unknown_piece *pieces;
    struct call *resolver;
    /* more pieces, none of them pending, or NULL: the caller's, who may add to it at any time */
    struct smb_unknown *also;
};

/* Notes a piece of a change that is not confirmed. Returns its index, or UINT32_MAX without
 * memory. */
uint32_t call_note_unknown(struct call *call, uint64_t buffer_offset, uint32_t bytes, int state);
/* The outcome of that piece is known now; the last one ends a call that waits for all. */
void unknown_resolved(struct smb_unknown *unknown, uint32_t index, int state);

#endif
