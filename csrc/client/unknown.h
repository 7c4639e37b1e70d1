/* unknown.h: pieces of a call with an unknown outcome, and how each is resolved. Used by the
 * progress thread only. */
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
    uint32_t pending; /* used by the progress thread only; the pieces, too, until this is 0 */
    uint32_t count, room;
    struct unknown_piece *pieces;
    struct call *resolver;
    /* more pieces, none of them pending, or NULL. It belongs to the caller, who may add to it at
     * any time */
    struct smb_unknown *also;
};

/* Notes a piece of a change that is not confirmed. Returns its index, or UINT32_MAX if out of
 * memory. */
uint32_t call_note_unknown(struct call *call, uint64_t buffer_offset, uint32_t bytes, int state);
/* Sets the outcome of that piece. The last one ends a call that waits for all of them. */
void unknown_resolved(struct smb_unknown *unknown, uint32_t index, int state);

#endif
