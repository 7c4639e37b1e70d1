/* Slots that an RDMA network card fills. The card may reach them for as long as they are
 * registered, whatever becomes of the connection. So they have their own references, and go back to
 * the journal with the last one. */
#include "server/slots.h"

#include <stdlib.h>

#include "base/assert.h"
#include "memory/journal.h"
#include "server/server.h"

enum { SLOTS_MAX = 64 };

struct smb_slots {
    _Atomic uint32_t references;
    struct journal *journal; /* NULL: the memory is `own` */
    uint8_t *own;
    uint32_t count;
    struct slot slots[];
};

static int fill(struct smb_slots *slots, uint32_t wanted)
{
    int status = SMB_OK;
    if (!slots->journal) {
        /* a page before each, for a token */
        slots->own = aligned_alloc(4096, (size_t)wanted * (SMB_CHUNK_BYTES_MAX + 4096));
        for (; slots->own && slots->count < wanted; slots->count++)
            slots->slots[slots->count].payload = slots->own +
                                                 (size_t)slots->count *
                                                     (SMB_CHUNK_BYTES_MAX + 4096) +
                                                 4096;
        return slots->own ? SMB_OK : SMB_OUT_OF_MEMORY;
    }
    while (status == SMB_OK && slots->count < wanted) {
        struct slot *slot = &slots->slots[slots->count];
        status = journal_take_slot(slots->journal, slot);
        if (status != SMB_OK)
            break;
        slots->count++;
        status = journal_reserve(slots->journal, slot, SMB_CHUNK_BYTES_MAX);
    }
    return status;
}

int smb_server_take_slots(struct smb_server *server, uint32_t count, struct smb_slots **slots)
{
    if (count < 1 || count > SLOTS_MAX)
        return SMB_INVALID;
    struct smb_slots *made = calloc(1, sizeof *made + count * sizeof *made->slots);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->references = 1;
    made->journal = server->journal;
    int status = fill(made, count);
    if (status != SMB_OK) {
        smb_slots_release(made);
        return status;
    }
    *slots = made;
    return SMB_OK;
}

void *smb_slots_payload(const struct smb_slots *slots, uint32_t index)
{
    return index < slots->count ? slots->slots[index].payload : NULL;
}

const struct slot *slots_at(const struct smb_slots *slots, uint64_t index)
{
    return index < slots->count ? &slots->slots[index] : NULL;
}

void slots_retain(struct smb_slots *slots)
{
    SMB_ASSERT(atomic_load_explicit(&slots->references, memory_order_relaxed) > 0);
    atomic_fetch_add_explicit(&slots->references, 1, memory_order_relaxed);
}

void smb_slots_release(struct smb_slots *slots)
{
    /* acq_rel: all use of the slots has ended when the last reference gives them back. */
    if (atomic_fetch_sub_explicit(&slots->references, 1, memory_order_acq_rel) != 1)
        return;
    for (uint32_t i = 0; slots->journal && i < slots->count; i++)
        journal_give_slot(slots->journal, &slots->slots[i]);
    free(slots->own);
    free(slots);
}

int smb_server_hold_segment(struct smb_server *server, uint64_t id, struct smb_segment **segment)
{
    struct smb_segment *found = server_find(server, id);
    if (!found)
        return SMB_NOT_FOUND;
    *segment = found;
    return SMB_OK;
}
