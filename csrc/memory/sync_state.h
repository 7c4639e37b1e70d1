/* sync_state.h: what the parts of a segment's sync share: sync_queue.c (who waits), sync_lock.c,
 * sync_barrier.c, sync_version.c (versions and pins) and sync.c (the door, time). Everything with
 * the mutex held, unless a function says otherwise. */
#ifndef SMB_SYNC_STATE_H
#define SMB_SYNC_STATE_H

#include <pthread.h>

#include "memory/pins.h"
#include "memory/sync.h"

static const uint64_t MS = 1000000;

/* turns: locks by since_ns, versions by the one that is awaited, then as they came. names: session,
 * sequence. */
struct queue {
    struct tree turns, deadlines, names;
};

struct sync {
    pthread_mutex_t mutex;
    pthread_rwlock_t fence; /* taken after the mutex; its write side to change a lock's holder */
    struct sync_words *words;
    uint64_t (*seats)[2]; /* session, sequence */
    uint64_t capacity;    /* seats of one round */
    struct queue locks[SYNC_LOCKS], barrier, versions;
    struct tree parties, absences; /* by session; by absent_ns */
    struct pins pins;
    uint64_t weights; /* of the trees */
    uint64_t kept;    /* waiters so far */
    /* since when pins alone keep the publishers from their turn; UINT64_MAX: they don't */
    uint64_t pinned_ns;
    uint64_t grace_ns; /* nothing is granted before */
    uint64_t broken_rounds;
    uint64_t asked_ns;                   /* the last request, or the start */
    int closed;                          /* status of everything from now on */
    uint64_t due_ns;                     /* the last `at_ns` of `sooner` */
    struct sync_counters own, *counters; /* it may have no other */
    void (*sooner)(void *argument, uint64_t at_ns);
    void *sooner_argument;
    uint64_t now_ns; /* of the last call that had a time */
    void (*changed)(void *argument, const uint8_t image[SYNC_IMAGE_BYTES]); /* or NULL */
    void *changed_argument;
    struct sync_words shown; /* with `changed`: as it saw them last */
};

/* Collected under the mutex, sent after its release. */
struct news {
    struct waiter *answered, *last;
    uint64_t due_ns;
};

static inline uint64_t word_get(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static inline void word_put(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static inline void counter_add(_Atomic uint64_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

static inline void news_due(struct news *news, uint64_t at_ns)
{
    if (at_ns < news->due_ns)
        news->due_ns = at_ns;
}

static inline uint64_t clock_later(uint64_t now_ns, uint64_t ms)
{
    return ms >= (UINT64_MAX - now_ns) / MS ? UINT64_MAX : now_ns + ms * MS;
}

#endif
