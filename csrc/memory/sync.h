/* sync.h: what waits on a segment: its two locks, its barrier, its version. In the daemon only.
 *
 * The words that must survive the daemon lie in the segment's header page (struct sync_words) and,
 * for the barrier's seats, in the segment's data. The queues are this process's. Nothing here does
 * I/O: a request that has to wait is kept as a struct waiter that its owner gave, and answered
 * later through the owner's `answer`.
 *
 * Requests (four words w[0..3] each, see frame.h) and answers (two words a, b):
 *   LOCK           argument: which lock; of the publisher's, << 8, how many slots the buffer has
 *                  (0: 2). w: ttl_ms, timeout_ms (0: try; UINT64_MAX: no end), age_ms since first
 *                  sent, how long pins may delay it (0: SYNC_PIN_MS). OK: a token, b the version
 *                  that a publisher may write; if it named the slots, in its highest 8 bits the
 *                  slot for it. TIMEOUT. Repeated (same session and sequence) by its holder: the
 *                  same answer; ttl from now on.
 *   UNLOCK         argument: which lock. w: token. OK (also repeated), LOCK_LOST.
 *   RENEW          argument: which lock. w: token, ttl_ms. OK, LOCK_LOST.
 *   FENCE          argument: which lock. w: token. From now on this segment refuses lower ones. OK,
 *                  LOCK_LOST if it knows a higher one.
 *   ARRIVE         w: parties. OK: a round, b index (0 for the first). INVALID: parties differ from
 *                  those of the round under way, are 0, or more than the segment has seats for, or
 *                  than SYNC_PARTIES_MAX. Repeated: the same answer, also when the round is over.
 *   AWAIT_BARRIER  w: round, timeout_ms. OK once the round is complete; BROKEN once it is broken,
 *                  also by this timeout.
 *   AWAIT_VERSION  w: version, timeout_ms, 1 + the version that is looked for (UINT64_MAX: the one
 *                  published last; 0: none). OK once version >= w[0] (at once for 0): a version, b
 *                  version being written or 0. TIMEOUT: likewise a and b. Where one is looked for:
 *                  b 1 + its slot, 0 if that is, or is being, overwritten, or was never published.
 *   PUBLISH        w: token of the publisher's lock, version. OK: a the version; the lock is
 *                  released; waiters are woken. Also repeated. LOCK_LOST. INVALID if it is not the
 *                  next one.
 *   PIN            w: ttl_ms (0: SYNC_PIN_MS; more than that is INVALID), name of a pin to renew
 *                  (0: a new one), 1 + version (0: the one published last). OK: a version, b the
 *                  pin's name. LOCK_LOST: the pin to renew is over, or that version is not there.
 *                  Nobody may begin to overwrite its slot until UNPIN, until the
 *                  session ends, or for the ttl. Repeated: the same pin, no longer than before.
 *                  OUT_OF_MEMORY: the session has very many.
 *   UNPIN          w: the pin's name. OK, also if there is none.
 *
 * Threads. Every function may be called from any thread. One mutex per struct sync guards the
 * queues and the words, which nobody else writes. Every search among the waiters takes logarithmic
 * time: clients decide how many wait, and the loop has others to serve. `answer` is called without
 * that mutex, possibly on another thread than the one that asked. It is called exactly once for
 * each waiter that was kept, unless sync_forget took the waiter back.
 */
#ifndef SMB_SYNC_H
#define SMB_SYNC_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/frame.h"
#include "base/tree.h"
#include "memory/sync_words.h"

enum {
    SYNC_TTL_MS_MIN = 10,
    SYNC_TTL_MS_MAX = 86400000,
    /* after the start, so that those who waited longest are back before somebody is granted */
    SYNC_GRACE_MS = 500,
    /* of a pin that is not renewed; and so long publishers wait for those that are, unless they
     * say */
    SYNC_PIN_MS = 30000,
    SYNC_ABSENCE_MS = 3000, /* a barrier's party without a connection for so long has left */
    /* bounds what one ARRIVE, and a restart over garbage, looks through */
    SYNC_PARTIES_MAX = 65536,
    SYNC_SEAT_BYTES = 16 /* session, sequence */
};

struct sync_request {
    int opcode;
    uint64_t session;
    uint64_t sequence;
    uint64_t argument;
    uint64_t words[SMB_SYNC_WORDS];
    uint64_t slots; /* of a LOCK, from its argument; sync_ask sets it */
};

struct sync_answer {
    int status;
    uint64_t a, b;
};

/* A deferred request. The owner allocates it, hands it to sync_ask, and owns it again when `answer`
 * is called or sync_forget returned true. */
struct waiter {
    struct tree_node by_turn, by_deadline, by_name; /* while it is kept */
    struct waiter *next;                            /* of those that are about to be answered */
    struct sync *sync;
    struct sync_request request;
    uint64_t deadline_ns;
    bool kept;                /* under the sync's mutex: in one of its queues */
    struct sync_answer ready; /* once it is not */
    void (*answer)(struct waiter *waiter, struct sync_answer answer);
    void *owner;
};

struct sync;

/* Event counts for metrics. Relaxed, and rarely changed. */
struct sync_counters {
    _Atomic uint64_t granted, waited, timed_out; /* locks; requests for them */
    /* locks whose holder did not renew them; whose holder's session ended */
    _Atomic uint64_t expired, revoked;
    _Atomic uint64_t broken; /* rounds of barriers */
};

/* `words` and `seats` (seats_bytes of them; both may be garbage) stay mapped until sync_destroy.
 * now_ns: of this and every later call, CLOCK_BOOTTIME; passed in so that tests decide it. grace:
 * this segment is from an earlier run of the daemon. */
int sync_create(struct sync_words *words, void *seats, uint64_t seats_bytes, bool grace,
                uint64_t now_ns, struct sync **sync);
/* No waiters are left (they were answered by sync_close, or forgotten). */
void sync_destroy(struct sync *sync);
/* Answers every waiter with `status` (the segment is deleted, the daemon stops) and refuses all
 * later requests with it. */
void sync_close(struct sync *sync, int status);

/* Refuses all later requests with SMB_NOT_FOUND, also after a restart, if it is idle: nobody holds
 * or awaits anything, no round is under way, and nothing was asked for idle_ns. SMB_OK, also
 * repeated: *token is the user's lock's last one. SMB_BUSY. */
int sync_retire(struct sync *sync, uint64_t idle_ns, uint64_t now_ns, uint64_t *token);
/* The user's lock's next token will be higher than this one. SMB_INVALID for a token of another
 * lock. */
int sync_raise_token(struct sync *sync, uint64_t token);

/* SMB_DEFERRED: `waiter` is kept and will be answered. Anything else: *answer is the answer, waiter
 * is the caller's. May answer other waiters before it returns. */
int sync_ask(struct sync *sync, const struct sync_request *request, struct waiter *waiter,
             uint64_t now_ns, struct sync_answer *answer);
/* The owner's connection is gone: takes the waiter back unless it was answered already or is being
 * answered (false). In the last case `answer` may run on another thread even after this returned:
 * the waiter must live until it has. A barrier seat is kept for SYNC_ABSENCE_MS; a place in a
 * lock's queue is lost (its request, repeated, says its age). */
bool sync_forget(struct waiter *waiter, uint64_t now_ns);
/* Its locks are free and its pins are gone. The barrier's round in which it has a seat is broken.
 * Its waiters are answered SESSION_ENDED. */
void sync_end_session(struct sync *sync, uint64_t session, uint64_t now_ns);
/* Does what time demands (expired locks, timeouts, absences, end of grace). Returns when it must be
 * called again, UINT64_MAX if nothing is pending. */
uint64_t sync_tick(struct sync *sync, uint64_t now_ns);
/* Called with that next time whenever it becomes sooner than what sync_tick last returned; may be
 * NULL. */
void sync_on_sooner(struct sync *sync, void (*sooner)(void *argument, uint64_t at_ns),
                    void *argument);
/* Counts there from now on, beside others. */
void sync_count_into(struct sync *sync, struct sync_counters *counters);

/* Around a fenced change of this segment's bytes: OK and held until sync_fence_leave (no grant
 * comes in between), or LOCK_LOST. Cheap and shared: fenced changes don't exclude each other. */
int sync_fence_enter(struct sync *sync, uint64_t token, uint64_t now_ns);
void sync_fence_leave(struct sync *sync);

/* The words as they travel to a segment's other copy: little-endian, and of a lease what is left of
 * it. Locks, fences and versions are taken there; pins and queues do not travel, as they do not
 * survive a daemon either. */
enum { SYNC_IMAGE_BYTES = sizeof(struct sync_words) };
/* Called from now on after each change of the words, with the mutex held: before anybody is told of
 * it, and in their order. It takes no lock that is ever held around a call to this file. */
void sync_on_change(struct sync *sync,
                    void (*changed)(void *argument, const uint8_t image[SYNC_IMAGE_BYTES]),
                    void *argument);
/* Calls it once more: with the words of now. */
void sync_show(struct sync *sync, uint64_t now_ns);
/* At the other copy, where nobody asks: the words are these now. */
void sync_install(struct sync *sync, const uint8_t image[SYNC_IMAGE_BYTES], uint64_t now_ns);
/* Requests come here from now on. As after a restart, those who waited longest come back first. */
void sync_take_over(struct sync *sync, uint64_t now_ns);
/* Those who wait are answered so; they ask elsewhere. */
void sync_send_away(struct sync *sync, int status);
/* The same with SMB_STALE_EPOCH: they ask here again, and those who waited longest come back
 * first. */
void sync_ask_again(struct sync *sync, uint64_t now_ns);

/* For metrics and people. */
struct sync_status {
    uint64_t version, broken_rounds;
    /* session 0: nobody holds it */
    struct {
        uint64_t waiting, session, token, left_ms;
    } locks[SYNC_LOCKS];
    uint64_t barrier_waiting, arrived, parties; /* of the round under way */
    uint64_t versions_waiting;
};
void sync_status(struct sync *sync, uint64_t now_ns, struct sync_status *status);

#endif
