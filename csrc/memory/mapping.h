/* mapping.h: the struct of a mapped segment, for segment.c, chunk.c and change.c only: no other
 * code touches shared memory. */
#ifndef SMB_MAPPING_H
#define SMB_MAPPING_H

#include "base/assert.h"
#include "memory/format.h"

struct smb_segment {
    _Atomic uint32_t references;
    int fd;
    struct header *header; /* shared; the code relies on the private copies below */
    struct chunk_state *chunks;
    struct record *records;
    uint32_t record_count;
    uint8_t *data;
    void *companion; /* the daemon's object beside the segment */
    void (*free_companion)(void *);
    uint64_t id;
    uint64_t data_bytes;
    uint64_t data_offset;
    uint64_t file_bytes;
    uint32_t epoch;
    uint32_t dtype;
    uint32_t chunk_bytes;
    uint32_t pid_namespace; /* this process's */
};

static inline struct chunk_state *chunk_at(const struct smb_segment *segment, uint64_t offset)
{
    SMB_ASSERT(offset < segment->data_bytes);
    return &segment->chunks[offset / segment->chunk_bytes];
}

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Every operation reads this. Inlined, because a function call is a twentieth of a small
 * operation. */
static inline uint32_t mapping_state(const struct smb_segment *segment)
{
    return atomic_load_explicit(&segment->header->state, memory_order_acquire);
}

static inline bool mapping_is_deleted(const struct smb_segment *segment)
{
    return mapping_state(segment) == STATE_DELETED;
}

/* Whether this process may read or change the segment now. SMB_NOT_FOUND: it is deleted.
 * SMB_STALE_EPOCH: only its daemon may, which is the process with a companion. */
static inline int mapping_check(const struct smb_segment *segment)
{
    uint32_t state = mapping_state(segment);
    if (state == STATE_SHARED)
        return SMB_OK;
    return state == STATE_DELETED ? SMB_NOT_FOUND : segment->companion ? SMB_OK : SMB_STALE_EPOCH;
}

static inline bool mapping_is_shared(const struct smb_segment *segment)
{
    return atomic_load_explicit(&segment->header->pid_namespace, memory_order_acquire) ==
           segment->pid_namespace;
}

static inline bool mapping_holds(const struct smb_segment *segment, uint64_t offset, uint64_t bytes)
{
    return bytes > 0 && bytes <= segment->data_bytes && offset <= segment->data_bytes - bytes &&
           offset / segment->chunk_bytes == (offset + bytes - 1) / segment->chunk_bytes;
}

/* Orders stores for a network card that reads counts and bytes (RDMA). On ARM release orders stores
 * only for the inner shareable domain, and devices may lie outside it; this is like the kernel's
 * dma_wmb. On x86 devices see stores in order. */
static inline void order_for_devices(void)
{
#if defined(__aarch64__)
    __asm__ volatile("dmb oshst" ::: "memory");
#endif
}

static inline void chunk_change_begin(struct chunk_state *chunk)
{
    /* Set to odd here, instead of adding one, and to even below: whatever the count was, it is
     * right from the next change on. */
    uint32_t sequence = atomic_load_explicit(&chunk->sequence, memory_order_relaxed) | 1U;
    atomic_store_explicit(&chunk->sequence, sequence, memory_order_relaxed);
    /* Makes the odd count visible before any changed byte; pairs with the acquire fence in
     * read_unlocked. */
    atomic_thread_fence(memory_order_release);
    order_for_devices();
}

static inline void chunk_change_end(struct chunk_state *chunk)
{
    uint32_t sequence = (atomic_load_explicit(&chunk->sequence, memory_order_relaxed) | 1U) + 1;
    order_for_devices();
    /* Pairs with the acquire load at the start of read_unlocked. */
    atomic_store_explicit(&chunk->sequence, sequence, memory_order_release);
}

/* smb_segment_lock for a chunk that was already looked up. */
int chunk_lock(struct smb_segment *segment, struct chunk_state *chunk, uint64_t deadline_ns);

#endif
