/* doubt.h: pieces of a call of which it is not known whether they were applied, and what became of them. */
#ifndef SMB_DOUBT_H
#define SMB_DOUBT_H

#include <stdatomic.h>

#include "smb.h"

struct call;

/* Pieces of a call whose caller left, and what became of them. */
struct doubt_piece {
    uint64_t buffer_offset;
    uint32_t bytes;
    int state;                     /* enum smb_doubt_state */
};
struct smb_doubt {
    _Atomic uint32_t references;
    uint32_t pending;              /* the driver's; so are the pieces, until it is 0 */
    uint32_t count, room;
    struct doubt_piece *pieces;
    struct call *settler;
};

/* A piece of a change that is not confirmed; returns its index, or UINT32_MAX where there is no memory to note it. */
uint32_t call_doubt(struct call *call, uint64_t buffer_offset, uint32_t bytes, int state);
void doubt_settled(struct smb_doubt *doubt, uint32_t index, int state);

#endif
