/* stats.h: counters, kept where the counted events happen. One thread writes a tally, and any
 * thread reads it. Words are loaded and stored relaxed, so a request needs neither a bus lock nor
 * another core's cache line. A reader sees each word as it was at some instant, but not all words
 * at the same instant. */
#ifndef SMB_STATS_H
#define SMB_STATS_H

#include <stdatomic.h>

#include "base/assert.h"
#include "smb/types.h"

/* The counts of one opcode are adjacent, so that a request writes one cache line. */
struct smb_tally {
    struct {
        _Alignas(16) _Atomic uint64_t operations;
        _Atomic uint64_t bytes;
    } of[SMB_OPCODE_COUNT];
};

/* A histogram of request durations. Bucket i: at most 2^(10 + i) ns; the last bucket: longer. */
struct latency {
    _Atomic uint64_t buckets[SMB_LATENCY_BUCKETS];
    _Atomic uint64_t sum_ns;
};

/* A client's counts, once the client asks for them. Calls that complete without waiting are made
 * with Python's lock held, so only one thread at a time counts them. All other calls use atomic
 * addition. */
struct client_stats {
    _Atomic bool wanted;
    struct smb_tally at_once;
    struct smb_tally calls[SMB_TRANSPORT_COUNT];
    struct latency latency[SMB_TRANSPORT_COUNT][SMB_OPCODE_COUNT];
    _Atomic uint64_t failed[SMB_STATUS_COUNT];
    _Atomic uint64_t repeated;
};
/* One in this many of the calls that complete at once is timed, because reading the clock twice
 * takes a fifth as long as such a call. */
enum { CALLS_PER_TIMED = 64 };

/* Counts of one event loop. Only the loop's thread writes them. */
struct loop_stats {
    struct smb_tally done[SMB_TRANSPORT_COUNT];
    struct latency latency[SMB_TRANSPORT_COUNT][SMB_OPCODE_COUNT];
    _Atomic uint64_t repeated;      /* requests that were marked as sent before */
    _Atomic uint64_t backlog_bytes; /* bytes of answers that a socket could not take yet */
    /* how often a connection had to wait because its socket was full */
    _Atomic uint64_t backlog_total;
};

/* Adds to a word that only the calling thread writes. */
static inline void stats_add(_Atomic uint64_t *word, uint64_t by)
{
    atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) + by,
                          memory_order_relaxed);
}

static inline uint64_t stats_read(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static inline void tally_add(struct smb_tally *tally, int opcode, uint64_t bytes)
{
    SMB_ASSERT(opcode >= 0 && opcode < SMB_OPCODE_COUNT);
    stats_add(&tally->of[opcode].operations, 1);
    stats_add(&tally->of[opcode].bytes, bytes);
}

static inline void tally_read(const struct smb_tally *tally, uint64_t *operations, uint64_t *bytes)
{
    for (int i = 0; i < SMB_OPCODE_COUNT; i++) {
        operations[i] += stats_read(&tally->of[i].operations);
        bytes[i] += stats_read(&tally->of[i].bytes);
    }
}

static inline int latency_bucket(uint64_t ns)
{
    /* an exact power of two belongs to the bucket whose limit it is */
    uint64_t over = ns > 1 ? (ns - 1) >> 10 : 0;
    int bucket = over ? 64 - __builtin_clzll(over) : 0;
    return bucket < SMB_LATENCY_BUCKETS ? bucket : SMB_LATENCY_BUCKETS - 1;
}

static inline void latency_add(struct latency *latency, uint64_t ns)
{
    stats_add(&latency->buckets[latency_bucket(ns)], 1);
    stats_add(&latency->sum_ns, ns);
}

/* Adds to a histogram that several threads write; `times` is the number of requests this one stands
 * for. */
static inline void latency_share(struct latency *latency, uint64_t ns, uint64_t times)
{
    atomic_fetch_add_explicit(&latency->buckets[latency_bucket(ns)], times, memory_order_relaxed);
    atomic_fetch_add_explicit(&latency->sum_ns, ns * times, memory_order_relaxed);
}

static inline void latency_read(const struct latency *latency, struct smb_latency *sum)
{
    for (int i = 0; i < SMB_LATENCY_BUCKETS; i++)
        sum->buckets[i] += stats_read(&latency->buckets[i]);
    sum->sum_ns += stats_read(&latency->sum_ns);
}

#endif
