#include "sync/sync.h"

#include <stddef.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/failpoint.h"
#include "sync/sync_barrier.h"
#include "sync/sync_lock.h"
#include "sync/sync_queue.h"
#include "sync/sync_version.h"

/* Checks the words that an earlier run left. Done only at the start: later, calls with slightly
 * different times would take each other's longest lease for garbage. */
static void mend_words(struct sync_words *words, uint64_t now_ns)
{
    struct sync_lock_words *publisher = &words->locks[SYNC_PUBLISHER];
    uint64_t version = word_get(&words->version), writing = word_get(&words->writing);
    version_mend_words(words);
    for (int i = 0; i < SYNC_LOCKS; i++)
        if (word_get(&words->locks[i].expires_ns) > clock_later(now_ns, SYNC_TTL_MS_MAX))
            word_put(&words->locks[i].expires_ns, 0);
    /* A holder writes the version after the published one. This holder published, and was killed
     * before it released the lock. Its repeated PUBLISH succeeds for as long as a repeated UNLOCK
     * does, whatever became of its lease. */
    if (word_get(&publisher->expires_ns) != 0 && writing == version) {
        word_put(&publisher->released,
                 word_get(&publisher->released) | lock_released_bit(word_get(&publisher->token)));
        FAILPOINT("sync.mended");
        word_put(&publisher->expires_ns, 0);
    }
}

/* 0: no lock was ever requested, so no waiting request can come back. */
static uint64_t grace_end_ns(const struct sync_words *words, uint64_t now_ns)
{
    bool locked_before = word_get(&words->locks[SYNC_USER].token) ||
                         word_get(&words->locks[SYNC_PUBLISHER].token);
    return locked_before ? clock_later(now_ns, SYNC_GRACE_MS) : 0;
}

int sync_create(struct sync_words *words, void *seats, uint64_t seats_bytes, bool grace,
                uint64_t now_ns, struct sync **sync)
{
    struct sync *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    pthread_mutex_init(&made->mutex, NULL);
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    /* Fenced changes may follow each other without a gap; a grant must get in between. */
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&made->fence, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    made->weights = tree_random();
    made->pins.weights = tree_random();
    made->holders.weights = tree_random();
    made->counters = &made->own;
    made->words = words;
    made->seats = seats;
    made->capacity = seats_bytes / SYNC_SEAT_BYTES / 2;
    if (made->capacity > SYNC_PARTIES_MAX)
        made->capacity = SYNC_PARTIES_MAX;
    mend_words(words, now_ns);
    lock_forget_holders(made);
    made->grace_ns = grace ? grace_end_ns(words, now_ns) : 0;
    made->due_ns = made->pinned_ns = UINT64_MAX;
    made->asked_ns = now_ns;
    made->closed = word_get(&words->retired) == SYNC_RETIRED ? SMB_NOT_FOUND : 0;
    if (grace && !barrier_find_parties(made, now_ns)) {
        sync_destroy(made);
        return SMB_OUT_OF_MEMORY;
    }
    *sync = made;
    return SMB_OK;
}

void sync_destroy(struct sync *sync)
{
    SMB_ASSERT(sync->locks[SYNC_USER].turns.count == 0 &&
               sync->locks[SYNC_PUBLISHER].turns.count == 0);
    SMB_ASSERT(sync->barrier.turns.count == 0 && sync->versions.turns.count == 0);
    barrier_clear(sync);
    pins_drop_expired(&sync->pins, UINT64_MAX);
    pins_drop_expired(&sync->holders, UINT64_MAX);
    pthread_rwlock_destroy(&sync->fence);
    pthread_mutex_destroy(&sync->mutex);
    free(sync);
}

void sync_on_sooner(struct sync *sync, void (*sooner)(void *argument, uint64_t at_ns),
                    void *argument)
{
    pthread_mutex_lock(&sync->mutex);
    sync->sooner = sooner;
    sync->sooner_argument = argument;
    pthread_mutex_unlock(&sync->mutex);
}

void sync_on_change(struct sync *sync,
                    void (*changed)(void *argument, const uint8_t image[SYNC_IMAGE_BYTES]),
                    void *argument)
{
    pthread_mutex_lock(&sync->mutex);
    sync->changed = changed;
    sync->changed_argument = argument;
    pthread_mutex_unlock(&sync->mutex);
}

void sync_show(struct sync *sync, uint64_t now_ns)
{
    pthread_mutex_lock(&sync->mutex);
    sync->now_ns = now_ns;
    sync_tell_change(sync, true);
    pthread_mutex_unlock(&sync->mutex);
}

void sync_install(struct sync *sync, const uint8_t image[SYNC_IMAGE_BYTES], uint64_t now_ns)
{
    _Atomic uint64_t *words = (_Atomic uint64_t *)sync->words;
    pthread_mutex_lock(&sync->mutex);
    pthread_rwlock_wrlock(&sync->fence);
    for (size_t at = 0; at < SYNC_IMAGE_BYTES; at += 8) {
        if (at >= offsetof(struct sync_words, round) && at < offsetof(struct sync_words, slots))
            /* the barrier's words, because a barrier has only one copy, and `retired`, which is the
             * primary's own */
            continue;
        uint64_t word = smb_load64(image + at);
        for (int i = 0; i < SYNC_LOCKS; i++)
            if (at == sync_expiry_at(i) && word != 0)
                word = word > UINT64_MAX - now_ns ? UINT64_MAX : now_ns + word;
        word_put(&words[at / 8], word);
    }
    pthread_rwlock_unlock(&sync->fence);
    pthread_mutex_unlock(&sync->mutex);
}

void sync_take_over(struct sync *sync, uint64_t now_ns)
{
    struct news news = sync_acquire(sync);
    sync->asked_ns = sync->now_ns = now_ns; /* a backup does not note when it was asked */
    mend_words(sync->words, now_ns);
    lock_forget_holders(sync);
    sync->grace_ns = grace_end_ns(sync->words, now_ns);
    news_due(&news, now_ns); /* a lease may have expired without anybody noticing */
    sync_release(sync, &news);
}

static void send_all_away(struct sync *sync, int status, struct news *news)
{
    for (int i = 0; i < SYNC_LOCKS; i++)
        queue_answer_all(sync, &sync->locks[i], status, news);
    queue_answer_all(sync, &sync->versions, status, news);
}

void sync_send_away(struct sync *sync, int status)
{
    struct news news = sync_acquire(sync);
    send_all_away(sync, status, &news);
    lock_forget_holders(sync); /* they renew elsewhere */
    sync_release(sync, &news);
}

void sync_ask_again(struct sync *sync, uint64_t now_ns)
{
    pthread_mutex_lock(&sync->mutex);
    for (int i = 0; i < SYNC_LOCKS; i++)
        if (sync->locks[i].turns.count > 0)
            sync->grace_ns = grace_end_ns(sync->words, now_ns);
    pthread_mutex_unlock(&sync->mutex);
    struct news news = sync_acquire(sync);
    send_all_away(sync, SMB_STALE_EPOCH, &news);
    sync_release(sync, &news);
}

void sync_count_into(struct sync *sync, struct sync_counters *counters)
{
    pthread_mutex_lock(&sync->mutex);
    sync->counters = counters;
    pthread_mutex_unlock(&sync->mutex);
}

/* Fenced changes under way are waited for: a lock of this segment may fence changes of another,
 * which stays. */
static void refuse_from_now_on(struct sync *sync, int status)
{
    pthread_rwlock_wrlock(&sync->fence);
    sync->closed = status;
    pthread_rwlock_unlock(&sync->fence);
}

void sync_close(struct sync *sync, int status)
{
    struct news news = sync_acquire(sync);
    refuse_from_now_on(sync, status);
    for (int i = 0; i < SYNC_LOCKS; i++)
        queue_answer_all(sync, &sync->locks[i], status, &news);
    queue_answer_all(sync, &sync->barrier, status, &news);
    queue_answer_all(sync, &sync->versions, status, &news);
    sync_release(sync, &news);
}

static bool idle(const struct sync *sync, uint64_t idle_ns, uint64_t now_ns)
{
    /* The times of concurrent calls differ a little, so these calls may come in either order. */
    bool used = now_ns < sync->grace_ns || now_ns < sync->asked_ns ||
                now_ns - sync->asked_ns < idle_ns || barrier_arrived(sync) > 0 ||
                sync->barrier.turns.count || sync->versions.turns.count || sync->pins.names.count;
    for (int i = 0; i < SYNC_LOCKS; i++)
        used |= lock_is_held(&sync->words->locks[i], now_ns) || sync->locks[i].turns.count;
    return !used;
}

int sync_retire(struct sync *sync, uint64_t idle_ns, uint64_t now_ns, uint64_t *token)
{
    pthread_mutex_lock(&sync->mutex);
    bool before = word_get(&sync->words->retired) == SYNC_RETIRED;
    int status = before || (!sync->closed && idle(sync, idle_ns, now_ns)) ? SMB_OK : SMB_BUSY;
    if (status == SMB_OK && !before) {
        word_put(&sync->words->retired, SYNC_RETIRED);
        refuse_from_now_on(sync, SMB_NOT_FOUND);
    }
    *token = word_get(&sync->words->locks[SYNC_USER].token);
    pthread_mutex_unlock(&sync->mutex);
    return status;
}

int sync_raise_token(struct sync *sync, uint64_t token)
{
    struct sync_lock_words *lock = &sync->words->locks[SYNC_USER];
    if (token % SYNC_LOCKS != SYNC_USER)
        return SMB_INVALID;
    pthread_mutex_lock(&sync->mutex);
    if (word_get(&lock->token) < token)
        word_put(&lock->token, token);
    pthread_mutex_unlock(&sync->mutex);
    return SMB_OK;
}

static int ask_locked(struct sync *sync, struct waiter *waiter, uint64_t now_ns,
                      struct sync_answer *reply, struct news *news)
{
    const struct sync_request *request = &waiter->request;
    switch (request->opcode) {
    case SMB_LOCK: return lock_ask(sync, waiter, now_ns, reply, news);
    case SMB_UNLOCK: return lock_ask_unlock(sync, request, now_ns, news);
    case SMB_RENEW: return lock_ask_renew(sync, request, now_ns, news);
    case SMB_FENCE: return lock_ask_fence(sync, request);
    case SMB_ARRIVE: return barrier_ask_arrive(sync, request, now_ns, reply, news);
    case SMB_AWAIT_BARRIER: return barrier_ask_await(sync, waiter, now_ns, news);
    case SMB_AWAIT_VERSION: return version_ask_await(sync, waiter, now_ns, reply, news);
    case SMB_PUBLISH: return version_ask_publish(sync, request, now_ns, reply, news);
    case SMB_PIN: return version_ask_pin(sync, request, now_ns, reply, news);
    case SMB_UNPIN:
        version_unpin(sync, request->session, request->words[0], now_ns);
        lock_grant_next(sync, SYNC_PUBLISHER, now_ns, news);
        return SMB_OK;
    default: return SMB_INVALID;
    }
}

int sync_ask(struct sync *sync, const struct sync_request *request, struct waiter *waiter,
             uint64_t now_ns, struct sync_answer *answer)
{
    waiter->request = *request;
    waiter->request.slots = 0;
    waiter->request.shared = false;
    if (request->opcode == SMB_LOCK || request->opcode == SMB_UNLOCK ||
        request->opcode == SMB_RENEW) {
        uint64_t above = request->argument >> SYNC_LOCK_BITS;
        waiter->request.argument &= ((uint64_t)1 << SYNC_LOCK_BITS) - 1;
        waiter->request.shared = waiter->request.argument == SYNC_USER && above == SYNC_SHARED;
        waiter->request.slots = waiter->request.shared ? 0 : above;
    }
    waiter->sync = sync;
    waiter->kept = false;
    *answer = (struct sync_answer){0};
    struct news news = sync_acquire(sync);
    sync->asked_ns = sync->now_ns = now_ns;
    int status = sync->closed ? sync->closed : ask_locked(sync, waiter, now_ns, answer, &news);
    sync_release(sync, &news);
    answer->status = status;
    return status;
}

bool sync_forget(struct waiter *waiter, uint64_t now_ns)
{
    struct sync *sync = waiter->sync;
    struct news news = sync_acquire(sync);
    sync->now_ns = now_ns;
    bool kept = waiter->kept;
    if (kept) {
        queue_take_out(queue_of(sync, waiter), waiter);
        struct party *party = waiter->request.opcode == SMB_AWAIT_BARRIER
                                  ? barrier_party(sync, waiter->request.session)
                                  : NULL;
        if (party) {
            party->waiting--;
            barrier_judge_presence(sync, party, now_ns, &news);
        }
    }
    sync_release(sync, &news);
    return kept;
}

void sync_end_session(struct sync *sync, uint64_t session, uint64_t now_ns)
{
    struct news news = sync_acquire(sync);
    sync->now_ns = now_ns;
    for (int i = 0; i < SYNC_LOCKS; i++)
        queue_answer_session(sync, &sync->locks[i], session, &news);
    queue_answer_session(sync, &sync->versions, session, &news);
    queue_answer_session(sync, &sync->barrier, session, &news);
    if (barrier_party(sync, session))
        barrier_end_round(sync, true, &news);
    pins_drop_session(&sync->pins, session);
    lock_end_session(sync, session, now_ns);
    for (int i = 0; i < SYNC_LOCKS; i++) {
        struct sync_lock_words *lock = &sync->words->locks[i];
        if (lock_is_held(lock, now_ns) && word_get(&lock->session) == session) {
            counter_add(&sync->counters->revoked);
            lock_set_expiry(sync, lock, 0);
        }
        lock_grant_next(sync, i, now_ns, &news);
    }
    sync_release(sync, &news);
}

uint64_t sync_tick(struct sync *sync, uint64_t now_ns)
{
    struct news news = sync_acquire(sync);
    sync->now_ns = now_ns;
    if (!sync->closed) {
        pins_drop_expired(&sync->pins, now_ns);
        news_due(&news, pins_first_end_ns(&sync->pins));
        lock_drop_expired(sync, now_ns);
        news_due(&news, pins_first_end_ns(&sync->holders));
        for (int i = 0; i < SYNC_LOCKS; i++) {
            struct sync_lock_words *lock = &sync->words->locks[i];
            if (word_get(&lock->expires_ns) != 0 && !lock_is_held(lock, now_ns)) {
                counter_add(&sync->counters->expired);
                lock_set_expiry(sync, lock, 0);
            }
            queue_time_out(sync, &sync->locks[i], now_ns, &news);
            lock_grant_next(sync, i, now_ns, &news);
            if (lock_is_held(lock, now_ns))
                news_due(&news, word_get(&lock->expires_ns));
        }
        queue_time_out(sync, &sync->versions, now_ns, &news);
        uint64_t end_ns = barrier_end_ns(sync);
        if (end_ns <= now_ns)
            barrier_end_round(sync, true, &news);
        else
            news_due(&news, end_ns);
    }
    uint64_t next_ns = sync->due_ns = sync->closed ? UINT64_MAX : news.due_ns;
    sync_release(sync, &news);
    return next_ns;
}

void sync_status(struct sync *sync, uint64_t now_ns, struct sync_status *status)
{
    pthread_mutex_lock(&sync->mutex);
    *status = (struct sync_status){.version = word_get(&sync->words->version),
                                   .broken_rounds = sync->broken_rounds,
                                   .barrier_waiting = sync->barrier.turns.count,
                                   .arrived = barrier_arrived(sync),
                                   .versions_waiting = sync->versions.turns.count};
    status->parties = status->arrived ? word_get(&sync->words->parties) : 0;
    for (int which = 0; which < SYNC_LOCKS; which++) {
        const struct sync_lock_words *lock = &sync->words->locks[which];
        status->locks[which].waiting = sync->locks[which].turns.count;
        if (!lock_is_held(lock, now_ns))
            continue;
        status->locks[which].session = word_get(&lock->session);
        status->locks[which].token = word_get(&lock->token);
        status->locks[which].left_ms = (word_get(&lock->expires_ns) - now_ns) / MS;
    }
    pthread_mutex_unlock(&sync->mutex);
}

void sync_each_holder(struct sync *sync, uint64_t now_ns,
                      void (*see)(void *argument, uint64_t session, uint64_t token,
                                  uint64_t left_ms),
                      void *argument)
{
    pthread_mutex_lock(&sync->mutex);
    for (struct tree_node *node = tree_first(&sync->holders.names); node; node = tree_next(node)) {
        const struct pin *holder = TREE_OWNER(node, struct pin, by_name);
        if (holder->expires_ns > now_ns)
            see(argument, holder->session, holder->version, (holder->expires_ns - now_ns) / MS);
    }
    pthread_mutex_unlock(&sync->mutex);
}
