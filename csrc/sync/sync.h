/* sync.h: requests that may wait on a segment: its two locks, its barrier, its versions. In the
 * daemon only. This folder is a room: it includes csrc/base alone and knows no connection; others
 * enter it by this header and sync_words.h.
 *
 * The words that must survive the daemon lie in the segment's header page (struct sync_words) and,
 * for the barrier's seats, in the segment's data. The queues are this process's. Nothing here does
 * I/O: a request that has to wait is kept as a struct waiter that its owner gave, and answered
 * later through the owner's `answer`.
 *
 * Requests (four words w[0..3] each, see frame.h) and answers (two words a, b):
 *   LOCK           argument: which lock; for the publisher's, << 8, the number of the buffer's
 *                  slots (0: 2). w: ttl_ms, timeout_ms (0: try; UINT64_MAX: no limit), age_ms since
 *                  first sent, how long pins may delay it (0: SYNC_PIN_MS). OK: a token, b the
 *                  version that a publisher may write; the highest 8 bits of b are the slot for
 *                  that version if the request gave the slots. TIMEOUT: a the session of the
 *                  holder, or of a reader whose pin keeps the publisher waiting, and then b the
 *                  version that it pins; 0: neither. Repeated (same session and sequence) by its
 *                  holder: the same answer; the ttl starts again.
 *                  For the user's lock, SYNC_SHARED << 8 asks for a shared holding: all shared
 *                  holders have one token, and nobody holds the lock alone. A request that comes
 *                  while others wait waits behind them, unless its session shares the lock: it
 *                  would wait for itself. b: the holding's name. OUT_OF_MEMORY: the session has
 *                  too many.
 *   UNLOCK         argument: which lock, and SYNC_SHARED. w: token, and a shared holding's name.
 *                  OK (also repeated), LOCK_LOST: another holder may have been granted the lock.
 *   RENEW          argument: which lock, and SYNC_SHARED. w: token, ttl_ms, and a shared holding's
 *                  name. OK, LOCK_LOST.
 *   FENCE          argument: which lock. w: token. From now on this segment refuses lower tokens.
 *                  OK, LOCK_LOST if it knows a higher token.
 *   ARRIVE         w: parties. OK: a round, b index (0 for the first). INVALID: parties differ from
 *                  those of the present round, are 0, or more than the segment has seats for, or
 *                  than SYNC_PARTIES_MAX. Repeated: the same answer, also when the round is over.
 *   AWAIT_BARRIER  w: round, timeout_ms. OK once the round is complete; BROKEN once it is broken,
 *                  also by this timeout.
 *   AWAIT_VERSION  w: version, timeout_ms, 1 + the version whose slot is wanted (UINT64_MAX: the
 *                  version published last; 0: none wanted). OK once version >= w[0] (at once for
 *                  0): a version, b version being written or 0. TIMEOUT: likewise a and b. If a
 *                  slot is wanted, b is 1 + that slot, or 0 if the version is overwritten, is being
 *                  overwritten, or was never published.
 *   PUBLISH        w: token of the publisher's lock, version. OK: a the version; the lock is
 *                  released; waiters are woken. Also repeated. LOCK_LOST. INVALID if the version is
 *                  not the next one.
 *   PIN            w: ttl_ms (0: SYNC_PIN_MS; more than SYNC_PIN_MS is INVALID), name of a pin to
 *                  renew (0: a new pin), 1 + version (0: the version published last). OK: a
 *                  version, b the pin's name. LOCK_LOST: the pin to renew has ended, or the buffer
 *                  no longer has that version. No publisher may begin to overwrite the version's
 *                  slot until UNPIN, until the session ends, or for the ttl. Repeated: the same
 *                  pin, no longer than before. OUT_OF_MEMORY: the session has too many pins.
 *   UNPIN          w: the pin's name. OK, also if no such pin exists.
 *
 * Threads. Every function may be called from any thread. One mutex per struct sync guards the
 * queues and the words, which only this process writes. Every search among the waiters takes
 * logarithmic time, because clients decide how many requests wait, and the loop has other clients
 * to serve. `answer` is called without that mutex, possibly on another thread than the one that
 * called sync_ask. It is called exactly once for each waiter that was kept, unless sync_forget took
 * the waiter back. */
#ifndef SMB_SYNC_H
#define SMB_SYNC_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/frame.h"
#include "base/tree.h"
#include "sync/sync_words.h"

enum {
    SYNC_TTL_MS_MIN = 10,
    SYNC_TTL_MS_MAX = 86400000,
    /* no grants for this long after the start, so that the longest waiting requests come back
     * first */
    SYNC_GRACE_MS = 500,
    /* the life of a pin that is not renewed, and for how long publishers wait for renewed pins
     * unless their requests say otherwise */
    SYNC_PIN_MS = 30000,
    SYNC_ABSENCE_MS = 3000, /* a party of a barrier without a connection for this long has left */
    /* bounds the work of one ARRIVE, and of a restart over garbage */
    SYNC_PARTIES_MAX = 65536,
    SYNC_SEAT_BYTES = 16 /* session, sequence */
};

struct sync_request {
    int opcode;
    uint64_t session;
    uint64_t sequence;
    uint64_t argument;
    uint64_t words[SMB_SYNC_WORDS];
    /* from the argument of LOCK, UNLOCK and RENEW; set by sync_ask */
    uint64_t slots;
    bool shared;
};

struct sync_answer {
    int status;
    uint64_t a, b;
};

/* A deferred request. The owner allocates it, hands it to sync_ask, and owns it again when `answer`
 * is called or sync_forget returned true. */
struct waiter {
    struct tree_node by_turn, by_deadline, by_name; /* while the waiter is kept */
    struct waiter *next;                            /* in the list of waiters to be answered */
    struct sync *sync;
    struct sync_request request;
    uint64_t deadline_ns;
    bool kept;                /* under the sync's mutex: the waiter is in a queue */
    struct sync_answer ready; /* the answer, once the waiter has left its queue */
    void (*answer)(struct waiter *waiter, struct sync_answer answer);
    void *owner;
};

struct sync;

/* Event counts for metrics. Written rarely, relaxed. */
struct sync_counters {
    /* granted locks; lock requests that waited; lock requests that timed out */
    _Atomic uint64_t granted, waited, timed_out;
    /* locks whose holder did not renew them, and locks whose holder's session ended */
    _Atomic uint64_t expired, revoked;
    _Atomic uint64_t broken; /* rounds of barriers that broke */
};

/* `words` and `seats` (seats_bytes of them) may contain garbage, and must stay mapped until
 * sync_destroy. now_ns, here and in all calls below, is the time of CLOCK_BOOTTIME; it is passed in
 * so that tests can choose it. grace: this segment is from an earlier run of the daemon. */
int sync_create(struct sync_words *words, void *seats, uint64_t seats_bytes, bool grace,
                uint64_t now_ns, struct sync **sync);
/* No waiter may be left: all were answered by sync_close, or forgotten. */
void sync_destroy(struct sync *sync);
/* Answers every waiter with `status` (the segment is deleted, the daemon stops) and refuses all
 * later requests with it. */
void sync_close(struct sync *sync, int status);

/* Refuses all later requests with SMB_NOT_FOUND, also after a restart, if the segment is idle: no
 * lock is held, no request waits, no barrier round is under way, and no request has come for
 * idle_ns. SMB_OK, also repeated: *token is the last token of the user's lock. SMB_BUSY: not
 * idle. */
int sync_retire(struct sync *sync, uint64_t idle_ns, uint64_t now_ns, uint64_t *token);
/* Makes the next token of the user's lock higher than `token`. SMB_INVALID for a token of another
 * lock. */
int sync_raise_token(struct sync *sync, uint64_t token);

/* Executes a request. SMB_DEFERRED: `waiter` is kept and will be answered. Any other status:
 * *answer is the answer, and the caller keeps the waiter. May answer other waiters before it
 * returns. */
int sync_ask(struct sync *sync, const struct sync_request *request, struct waiter *waiter,
             uint64_t now_ns, struct sync_answer *answer);
/* Takes the waiter back because its owner's connection is gone. False: the waiter was answered
 * already or is being answered. In the latter case `answer` may run on another thread even after
 * this call returned, and the waiter must live until then. A barrier seat is kept for
 * SYNC_ABSENCE_MS. A place in a lock's queue is lost (when the request is repeated, it says its
 * age). */
bool sync_forget(struct waiter *waiter, uint64_t now_ns);
/* Ends a session: its locks and pins are released, a barrier round in which it has a seat is
 * broken, and its waiters are answered SESSION_ENDED. */
void sync_end_session(struct sync *sync, uint64_t session, uint64_t now_ns);
/* Does everything that is due (expired locks, timeouts, absences, end of grace). Returns when it
 * must be called again, UINT64_MAX if nothing is pending. */
uint64_t sync_tick(struct sync *sync, uint64_t now_ns);
/* Sets a function that is called with the next due time whenever that time becomes earlier than the
 * last result of sync_tick; may be NULL. */
void sync_on_sooner(struct sync *sync, void (*sooner)(void *argument, uint64_t at_ns),
                    void *argument);
/* From now on counts into `counters`, which other segments share. */
void sync_count_into(struct sync *sync, struct sync_counters *counters);

/* Surround a fenced change of this segment's bytes. SMB_OK: the token is valid, and no lock is
 * granted until sync_fence_leave. SMB_LOCK_LOST, or after sync_close its status. Cheap and shared:
 * fenced changes do not exclude each other. */
int sync_fence_enter(struct sync *sync, uint64_t token, uint64_t now_ns);
void sync_fence_leave(struct sync *sync);

/* The words as they are sent to a segment's other copy: little-endian, with the remaining time of a
 * lease in place of its end. The image contains locks, fences and versions. Pins and queues are
 * left out, as they do not survive a daemon either. */
enum { SYNC_IMAGE_BYTES = sizeof(struct sync_words) };
/* From now on `changed` is called after each change of the words, with the mutex held: before
 * anybody is told of the change, and in the order of the changes. It must not take a lock that is
 * ever held around a call to this file. */
void sync_on_change(struct sync *sync,
                    void (*changed)(void *argument, const uint8_t image[SYNC_IMAGE_BYTES]),
                    void *argument);
/* Calls `changed` once more with the present words. */
void sync_show(struct sync *sync, uint64_t now_ns);
/* At the other copy, which gets no requests: replaces the words. */
void sync_install(struct sync *sync, const uint8_t image[SYNC_IMAGE_BYTES], uint64_t now_ns);
/* This copy gets the requests from now on. As after a restart, the longest waiting requests come
 * back first. */
void sync_take_over(struct sync *sync, uint64_t now_ns);
/* Answers all waiting requests with `status`, so that they are sent elsewhere. */
void sync_send_away(struct sync *sync, int status);
/* Answers all waiting requests with SMB_STALE_EPOCH. They are sent here again, the longest waiting
 * first. */
void sync_ask_again(struct sync *sync, uint64_t now_ns);

/* A snapshot for metrics and `smb status`. */
struct sync_status {
    uint64_t version, broken_rounds;
    /* session 0: the lock is free, or shared */
    struct {
        uint64_t waiting, session, token, left_ms;
    } locks[SYNC_LOCKS];
    uint64_t barrier_waiting, arrived, parties; /* the present round's */
    uint64_t versions_waiting;
};
void sync_status(struct sync *sync, uint64_t now_ns, struct sync_status *status);
/* Calls `see` for each shared holder of the user's lock, with the mutex held. */
void sync_each_holder(struct sync *sync, uint64_t now_ns,
                      void (*see)(void *argument, uint64_t session, uint64_t token,
                                  uint64_t left_ms),
                      void *argument);

#endif
