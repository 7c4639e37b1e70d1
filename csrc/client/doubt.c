#include "client/doubt.h"

#include <stdlib.h>

#include "base/clock.h"
#include "client/call.h"

uint32_t call_doubt(struct call *call, uint64_t buffer_offset, uint32_t bytes, int state)
{
    struct smb_doubt *doubt = call->outcome->doubt;
    if (!doubt) {
        doubt = calloc(1, sizeof *doubt);
        if (!doubt)
            return UINT32_MAX;
        doubt->references = 1;
        call->outcome->doubt = doubt;
    }
    if (doubt->count == doubt->room) {
        uint32_t room = doubt->room ? 2 * doubt->room : 16;
        struct doubt_piece *pieces = realloc(doubt->pieces, room * sizeof *pieces);
        if (!pieces)
            return UINT32_MAX;
        doubt->pieces = pieces;
        doubt->room = room;
    }
    doubt->pieces[doubt->count] = (struct doubt_piece){.buffer_offset = buffer_offset, .bytes = bytes, .state = state};
    doubt->pending += state == SMB_DOUBT_PENDING;
    return doubt->count++;
}

void doubt_settled(struct smb_doubt *doubt, uint32_t index, int state)
{
    if (doubt->pieces[index].state != SMB_DOUBT_PENDING)
        return;
    doubt->pieces[index].state = state;
    if (--doubt->pending > 0 || !doubt->settler)
        return;
    doubt->settler->settles = NULL;
    doubt->settler->streams_left = 0;
    doubt->settler = NULL;
}

int smb_doubt_settle(struct smb_client *client, struct smb_doubt *doubt, uint32_t timeout_ms)
{
    struct smb_outcome outcome = {0};
    struct call call = {.outcome = &outcome, .deadline_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U,
                        .streams_left = 1, .settles = doubt};
    client_run(client, &call, NULL, NULL);
    return outcome.status;
}

bool smb_doubt_part(const struct smb_doubt *doubt, uint32_t index, uint64_t *offset, uint32_t *bytes, int *state)
{
    if (index >= doubt->count)
        return false;
    *offset = doubt->pieces[index].buffer_offset;
    *bytes = doubt->pieces[index].bytes;
    *state = doubt->pieces[index].state;
    return true;
}

void smb_doubt_release(struct smb_doubt *doubt)
{
    if (atomic_fetch_sub_explicit(&doubt->references, 1, memory_order_acq_rel) != 1)
        return;
    free(doubt->pieces);
    free(doubt);
}
