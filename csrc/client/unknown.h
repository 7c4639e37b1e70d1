/* unknown.h: pieces of a call of which it is not known whether they were applied, and what became of them. */
#ifndef SMB_OUTCOME_H
#define SMB_OUTCOME_H

#include <stdatomic.h>

#include "smb.h"

struct call;

/* Pieces of a call whose caller left, and what became of them. */
struct unknown_piece {
    uint64_t buffer_offset;
    uint32_t bytes;
    int state;                     /* enum smb_outcome_state */
};
struct smb_unknown {
    _Atomic uint32_t references;
    uint32_t pending;              /* the progress thread's; so are the pieces, until it is 0 */
    uint32_t count, room;
    struct unknown_piece *pieces;
    struct call *resolver;
};

/* A piece of a change that is not confirmed; returns its index, or UINT32_MAX where there is no memory to note it. */
uint32_t call_note_unknown(struct call *call, uint64_t buffer_offset, uint32_t bytes, int state);
void unknown_resolved(struct smb_unknown *unknown, uint32_t index, int state);

#endif
