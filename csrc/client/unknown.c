#include "client/unknown.h"

#include <stdlib.h>

#include "base/assert.h"
#include "client/call.h"

uint32_t call_note_unknown(struct call *call, uint64_t buffer_offset, uint32_t bytes, int state)
{
    struct smb_unknown *unknown = call->outcome->unknown;
    if (!unknown) {
        unknown = calloc(1, sizeof *unknown);
        if (!unknown)
            return UINT32_MAX;
        unknown->references = 1;
        call->outcome->unknown = unknown;
    }
    if (unknown->count == unknown->room) {
        uint32_t room = unknown->room ? 2 * unknown->room : 16;
        struct unknown_piece *pieces = realloc(unknown->pieces, room * sizeof *pieces);
        if (!pieces)
            return UINT32_MAX;
        unknown->pieces = pieces;
        unknown->room = room;
    }
    unknown->pieces[unknown->count] = (struct unknown_piece){
        .buffer_offset = buffer_offset, .bytes = bytes, .state = state};
    unknown->pending += state == SMB_OUTCOME_PENDING;
    return unknown->count++;
}

void unknown_resolved(struct smb_unknown *unknown, uint32_t index, int state)
{
    SMB_ASSERT(index < unknown->count);
    if (unknown->pieces[index].state != SMB_OUTCOME_PENDING)
        return;
    unknown->pieces[index].state = state;
    if (--unknown->pending > 0 || !unknown->resolver)
        return;
    unknown->resolver->resolves = NULL;
    unknown->resolver->streams_left = 0;
    unknown->resolver = NULL;
}

bool smb_unknown_part(const struct smb_unknown *unknown, uint32_t index, uint64_t *offset,
                      uint32_t *bytes, int *state)
{
    if (index >= unknown->count)
        return unknown->also &&
               smb_unknown_part(unknown->also, index - unknown->count, offset, bytes, state);
    *offset = unknown->pieces[index].buffer_offset;
    *bytes = unknown->pieces[index].bytes;
    *state = unknown->pieces[index].state;
    return true;
}

void smb_unknown_release(struct smb_unknown *unknown)
{
    SMB_ASSERT(atomic_load_explicit(&unknown->references, memory_order_relaxed) > 0);
    if (atomic_fetch_sub_explicit(&unknown->references, 1, memory_order_acq_rel) != 1)
        return;
    if (unknown->also)
        smb_unknown_release(unknown->also);
    free(unknown->pieces);
    free(unknown);
}

void smb_outcome_release(struct smb_outcome *outcome)
{
    if (outcome->unknown)
        smb_unknown_release(outcome->unknown);
    outcome->unknown = NULL;
}
