/* sync_state.h: what the parts of a segment's sync share: sync_queue.c (waiters), sync_lock.c,
 * sync_barrier.c, sync_version.c (versions and pins) and sync.c (requests, time). All functions are
 * called with the mutex held unless their comment says otherwise. */
#ifndef SMB_SYNC_STATE_H
#define SMB_SYNC_STATE_H

#include <pthread.h>

#include "sync/pins.h"
#include "sync/sync.h"

static const uint64_t MS = 1000000;

/* turns: locks by since_ns, versions by the awaited version, then by arrival. names: by session and
 * sequence. */
struct queue {
    struct tree turns, deadlines, names;
};

struct sync {
    pthread_mutex_t mutex;
    /* taken after the mutex; the write side is needed to change a lock's holder */
    pthread_rwlock_t fence;
    struct sync_words *words;
    uint64_t (*seats)[2]; /* session, sequence */
    uint64_t capacity;    /* seats of one round */
    struct queue locks[SYNC_LOCKS], barrier, versions;
    struct tree parties, absences; /* struct party, by session; by absent_ns */
    struct pins pins;
    /* The shared holders of the user's lock, as pins on its token. They all have that one token.
     * Without them in the words, a daemon that takes over knows a holder once it renews; until
     * unknown_ns there may be others. */
    struct pins holders;
    uint64_t unknown_ns;
    bool all_released; /* no shared holder under the present token ended but by its UNLOCK */
    uint64_t weights;  /* random state for the trees' weights */
    uint64_t kept;     /* number of waiters kept so far */
    /* since when only pins have kept the publishers waiting; UINT64_MAX: they do not */
    uint64_t pinned_ns;
    uint64_t grace_ns; /* no lock is granted before this time */
    uint64_t broken_rounds;
    uint64_t asked_ns;                   /* time of the last request, or of the start */
    int closed;                          /* the status of all requests from now on */
    uint64_t due_ns;                     /* the time last passed to `sooner` */
    struct sync_counters own, *counters; /* counters is &own unless sync_count_into was called */
    void (*sooner)(void *argument, uint64_t at_ns);
    void *sooner_argument;
    uint64_t now_ns; /* the time of the last call that had one */
    void (*changed)(void *argument, const uint8_t image[SYNC_IMAGE_BYTES]); /* or NULL */
    void *changed_argument;
    struct sync_words shown; /* with `changed`: the words as last passed to it */
};

/* Answers collected under the mutex and sent after its release. */
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
