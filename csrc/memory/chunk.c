#include "memory/chunk.h"

#include <errno.h>

#include "base/assert.h"
#include "memory/mapping.h"

enum { LOCK_SPINS = 2000, MARKED_RETRY_NS = 1000000 };

/* The dead owner has left each element of the chunk old or new. If the owner was a daemon in the
 * middle of a journalled change, the chunk stays for that daemon's recovery: marked, and with an
 * odd count. */
static int revive(struct smb_segment *segment, struct chunk_state *chunk)
{
    uint32_t sequence = atomic_load_explicit(&chunk->sequence, memory_order_relaxed);
    /* Relaxed: if recovery makes the count even between these two loads, both sides store the same
     * value. smb_segment_lock checks the mark again. */
    if (sequence % 2 == 1 && atomic_load_explicit(&chunk->mark, memory_order_relaxed) == 0)
        atomic_store_explicit(&chunk->sequence, sequence + 1, memory_order_release);
    atomic_fetch_add_explicit(&segment->header->recovered_locks, 1, memory_order_relaxed);
    return pthread_mutex_consistent(&chunk->lock);
}

static int lock_once(struct smb_segment *segment, struct chunk_state *chunk, uint64_t deadline_ns)
{
    /* The lock is usually held for microseconds, so a short spin is cheaper than to sleep and be
     * woken. */
    int failure = pthread_mutex_trylock(&chunk->lock);
    for (int i = 0; failure == EBUSY && i < LOCK_SPINS && deadline_ns != SMB_TRY_ONCE; i++) {
        pause_cpu();
        if (i % 16 == 15)
            failure = pthread_mutex_trylock(&chunk->lock);
    }
    if (failure == EBUSY) {
        if (deadline_ns <= SMB_TRY_ONCE)
            return SMB_BUSY;
        struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / 1000000000U),
                                    .tv_nsec = (long)(deadline_ns % 1000000000U)};
        failure = pthread_mutex_clocklock(&chunk->lock, CLOCK_MONOTONIC, &deadline);
        if (failure == ETIMEDOUT)
            return SMB_TIMEOUT;
    }
    if (failure == EOWNERDEAD)
        failure = revive(segment, chunk);
    if (failure != 0) {
        errno = failure;
        return SMB_SYSTEM;
    }
    return SMB_OK;
}

int chunk_lock(struct smb_segment *segment, struct chunk_state *chunk, uint64_t deadline_ns)
{
    for (;;) {
        int status = lock_once(segment, chunk, deadline_ns);
        /* Acquire: pairs with the release in smb_segment_mark. Recovery takes no lock, so taking
         * the lock does not make recovery's bytes and even count visible. */
        if (status != SMB_OK || atomic_load_explicit(&chunk->mark, memory_order_acquire) == 0)
            return status;
        /* The daemon was killed while it changed this chunk. Its recovery will complete the
         * change. */
        pthread_mutex_unlock(&chunk->lock);
        if (deadline_ns <= SMB_TRY_ONCE)
            return SMB_BUSY;
        if (smb_now_ns() >= deadline_ns)
            return SMB_TIMEOUT;
        nanosleep(&(struct timespec){.tv_nsec = MARKED_RETRY_NS}, NULL);
    }
}

int smb_segment_lock(struct smb_segment *segment, uint64_t offset, uint64_t deadline_ns)
{
    return chunk_lock(segment, chunk_at(segment, offset), deadline_ns);
}

int smb_segment_lock_each(struct smb_segment *const *targets, int count, uint64_t offset,
                          uint64_t deadline_ns)
{
    SMB_ASSERT(count > 0);
    SMB_ASSERT(deadline_ns <= SMB_TRY_ONCE);
    int first = 0; /* the lock that this round waits for, while it holds no other */
    for (int round = 0; round <= count; round++) {
        int held = 0, status = SMB_OK;
        for (; held < count && status == SMB_OK; held += status == SMB_OK)
            status = smb_segment_lock(targets[(first + held) % count], offset,
                                      held == 0 ? deadline_ns : SMB_TRY_ONCE);
        if (status == SMB_OK)
            return SMB_OK;
        for (int i = 0; i < held; i++)
            smb_segment_unlock(targets[(first + i) % count], offset);
        if (status != SMB_BUSY || held == 0)
            return status;
        first = (first + held) % count;
    }
    return SMB_BUSY;
}

void smb_segment_unlock(struct smb_segment *segment, uint64_t offset)
{
    pthread_mutex_unlock(&chunk_at(segment, offset)->lock);
}

void smb_segment_change_begin(struct smb_segment *segment, uint64_t offset)
{
    chunk_change_begin(chunk_at(segment, offset));
}

void smb_segment_change_end(struct smb_segment *segment, uint64_t offset)
{
    chunk_change_end(chunk_at(segment, offset));
}

void smb_segment_mark(struct smb_segment *segment, uint64_t offset, uint32_t mark)
{
    /* Release: pairs with the acquire in smb_segment_lock. A thread that sees that recovery has
     * removed the mark sees recovery's bytes and the even count. It also keeps the compiler from
     * moving the removal of a mark before the stores of the count and the record, which matters if
     * the daemon dies. */
    atomic_store_explicit(&chunk_at(segment, offset)->mark, mark, memory_order_release);
}

uint32_t smb_segment_marked(const struct smb_segment *segment, uint64_t offset)
{
    return atomic_load_explicit(&chunk_at(segment, offset)->mark, memory_order_relaxed);
}

bool smb_segment_changing(const struct smb_segment *segment, uint64_t offset)
{
    return atomic_load_explicit(&chunk_at(segment, offset)->sequence, memory_order_relaxed) % 2 ==
           1;
}

bool smb_segment_untouched(const struct smb_segment *segment)
{
    if (atomic_load_explicit(&segment->header->binding, memory_order_acquire) == BINDING_STAYS)
        return false;
    uint64_t count = format_chunk_count(segment->data_bytes, segment->chunk_bytes);
    for (uint64_t i = 0; i < count; i++)
        if (atomic_load_explicit(&segment->chunks[i].sequence, memory_order_acquire) != 0)
            return false;
    return true;
}

uint64_t smb_segment_clear_marks(struct smb_segment *segment)
{
    uint64_t cleared = 0;
    uint64_t chunks = format_chunk_count(segment->data_bytes, segment->chunk_bytes);
    for (uint64_t i = 0; i < chunks; i++) {
        uint64_t offset = i * segment->chunk_bytes;
        if (smb_segment_marked(segment, offset) == 0)
            continue;
        if (smb_segment_changing(segment, offset))
            smb_segment_change_end(segment, offset);
        smb_segment_mark(segment, offset, 0);
        cleared++;
    }
    return cleared;
}
