#include "memory/sync_lock.h"

#include "base/failpoint.h"
#include "memory/sync_queue.h"
#include "memory/sync_version.h"

uint64_t lock_released_bit(uint64_t token)
{
    return (uint64_t)1 << (token / 2 % 64);
}

bool lock_is_held(const struct sync_lock_words *lock, uint64_t now_ns)
{
    return word_get(&lock->expires_ns) > now_ns;
}

bool lock_is_holder(const struct sync_lock_words *lock, uint64_t token, uint64_t now_ns)
{
    return token != 0 && word_get(&lock->token) == token && lock_is_held(lock, now_ns);
}

void lock_set_expiry(struct sync *sync, struct sync_lock_words *lock, uint64_t expires_ns)
{
    pthread_rwlock_wrlock(&sync->fence);
    word_put(&lock->expires_ns, expires_ns);
    pthread_rwlock_unlock(&sync->fence);
}

static uint64_t pins_end_ns(const struct sync *sync, const struct sync_request *publisher)
{
    uint64_t bound_ms = publisher->words[3] ? publisher->words[3] : SYNC_PIN_MS;
    return sync->pinned_ns == UINT64_MAX ? UINT64_MAX : clock_later(sync->pinned_ns, bound_ms);
}

/* The number of slots in a publisher's request; 2 if it gives none. */
static int slots_of(const struct sync_request *publisher)
{
    return publisher->slots ? (int)publisher->slots : 2;
}

/* Readers renew their pins, but a publisher waits for them no longer than the first publisher in
 * the queue chooses. pinned_ns never counts against a later pin. A pin on the published version
 * delays nobody until the next version, and the grant before that resets pinned_ns. A remaining pin
 * on an older version delays a publisher from the start. */
static bool publisher_may_begin(struct sync *sync, const struct sync_request *publisher,
                                uint64_t now_ns)
{
    pins_drop_expired(&sync->pins, now_ns);
    bool pinned = version_oldest_slot(sync, slots_of(publisher), false) < 0;
    if (pinned && sync->pinned_ns == UINT64_MAX)
        sync->pinned_ns = now_ns;
    return !pinned || pins_end_ns(sync, publisher) <= now_ns;
}

static bool may_grant(struct sync *sync, int which, const struct sync_request *request,
                      uint64_t now_ns)
{
    return now_ns >= sync->grace_ns && !lock_is_held(&sync->words->locks[which], now_ns) &&
           (which == SYNC_USER || publisher_may_begin(sync, request, now_ns));
}

static struct sync_answer granted(const struct sync *sync, const struct sync_request *request)
{
    int which = (int)request->argument;
    uint64_t version = which == SYNC_PUBLISHER ? word_get(&sync->words->version) + 1 : 0;
    if (request->slots)
        version |= (uint64_t)sync_find_slot(sync->words, SYNC_BEGUN | version) << SYNC_VERSION_BITS;
    return (struct sync_answer){SMB_OK, word_get(&sync->words->locks[which].token), version};
}

/* After garbage the count may wrap, and 0 is not a valid token. */
static uint64_t next_token(const struct sync_lock_words *lock, int which)
{
    uint64_t token = (word_get(&lock->token) / SYNC_LOCKS + 1) * SYNC_LOCKS + (uint64_t)which;
    return token < SYNC_LOCKS ? token + SYNC_LOCKS : token;
}

/* Writes the expiry last: until then the lock is free, whatever else was written. */
static struct sync_answer grant(struct sync *sync, int which, const struct sync_request *request,
                                uint64_t now_ns, struct news *news)
{
    struct sync_lock_words *lock = &sync->words->locks[which];
    uint64_t expires_ns = clock_later(now_ns, request->words[0]);
    if (word_get(&lock->expires_ns) != 0)
        counter_add(&sync->counters->expired);
    counter_add(&sync->counters->granted);
    pthread_rwlock_wrlock(&sync->fence);
    word_put(&lock->expires_ns, 0);
    uint64_t token = next_token(lock, which);
    word_put(&lock->released, word_get(&lock->released) & ~lock_released_bit(token));
    word_put(&lock->token, token);
    FAILPOINT("sync.token");
    word_put(&lock->fence, token);
    word_put(&lock->session, request->session);
    word_put(&lock->request, request->sequence);
    if (which == SYNC_PUBLISHER) {
        int slots = slots_of(request), slot = version_oldest_slot(sync, slots, false);
        version_begin(sync, slot < 0 ? version_oldest_slot(sync, slots, true) : slot);
    }
    FAILPOINT("sync.granting");
    word_put(&lock->expires_ns, expires_ns);
    FAILPOINT("sync.granted");
    pthread_rwlock_unlock(&sync->fence);
    news_due(news, expires_ns);
    return granted(sync, request);
}

void lock_grant_next(struct sync *sync, int which, uint64_t now_ns, struct news *news)
{
    struct waiter *first = queue_first(&sync->locks[which]);
    if (!first)
        return;
    if (now_ns < sync->grace_ns)
        news_due(news, sync->grace_ns);
    else if (may_grant(sync, which, &first->request, now_ns))
        queue_answer(sync, first, grant(sync, which, &first->request, now_ns, news), news);
    else if (lock_is_held(&sync->words->locks[which], now_ns))
        news_due(news, word_get(&sync->words->locks[which].expires_ns));
    else
        news_due(news, pins_end_ns(sync, &first->request));
}

struct sync_answer lock_late(const struct sync *sync, const struct sync_request *request,
                             uint64_t now_ns)
{
    struct sync_answer late = {.status = SMB_TIMEOUT};
    const struct sync_lock_words *lock = &sync->words->locks[request->argument];
    if (lock_is_held(lock, now_ns)) {
        late.a = word_get(&lock->session);
    } else if (request->argument == SYNC_PUBLISHER &&
               version_oldest_slot(sync, slots_of(request), false) < 0) {
        int slot = version_oldest_slot(sync, slots_of(request), true);
        uint64_t version = slot < 0 ? 0 : word_get(&sync->words->slots[slot]);
        const struct pin *pin = pins_on(&sync->pins, version);
        if (pin) {
            late.a = pin->session;
            late.b = pin->version;
        }
    }
    return late;
}

static void enqueue_for_lock(struct sync *sync, struct waiter *waiter, uint64_t now_ns,
                             struct news *news)
{
    const struct sync_request *request = &waiter->request;
    uint64_t age_ns = request->words[2] >= now_ns / MS ? now_ns : request->words[2] * MS;
    queue_keep(sync, waiter, now_ns - age_ns, request->words[1], now_ns, news);
}

/* Drops the older copy of a request that was sent again over a new connection; the new copy takes
 * its place. */
static void drop_repeated(struct sync *sync, struct queue *queue,
                          const struct sync_request *request, struct news *news)
{
    struct tree_node *found = tree_find(&queue->names, request->session, request->sequence);
    if (found)
        queue_answer(sync, TREE_OWNER(found, struct waiter, by_name),
                     (struct sync_answer){.status = SMB_DISCONNECTED}, news);
}

int lock_ask(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct sync_answer *reply,
             struct news *news)
{
    const struct sync_request *request = &waiter->request;
    if (request->argument >= SYNC_LOCKS || request->words[0] < SYNC_TTL_MS_MIN ||
        request->words[0] > SYNC_TTL_MS_MAX ||
        request->slots > (request->argument == SYNC_PUBLISHER ? SYNC_SLOTS_MAX : 0))
        return SMB_INVALID;
    int which = (int)request->argument;
    struct sync_lock_words *lock = &sync->words->locks[which];
    if (lock_is_held(lock, now_ns) && word_get(&lock->session) == request->session &&
        word_get(&lock->request) == request->sequence) {
        lock_set_expiry(sync, lock, clock_later(now_ns, request->words[0]));
        *reply = granted(sync, request);
        return SMB_OK;
    }
    drop_repeated(sync, &sync->locks[which], request, news);
    /* grants to earlier requests, if the lock is free by now */
    lock_grant_next(sync, which, now_ns, news);
    if (!queue_first(&sync->locks[which]) && may_grant(sync, which, request, now_ns)) {
        *reply = grant(sync, which, request, now_ns, news);
        return SMB_OK;
    }
    if (request->words[1] == 0) {
        counter_add(&sync->counters->timed_out);
        *reply = lock_late(sync, request, now_ns);
        return SMB_TIMEOUT;
    }
    counter_add(&sync->counters->waited);
    enqueue_for_lock(sync, waiter, now_ns, news);
    lock_grant_next(sync, which, now_ns, news);
    return SMB_DEFERRED;
}

void lock_let_go(struct sync *sync, int which, uint64_t now_ns, struct news *news)
{
    lock_set_expiry(sync, &sync->words->locks[which], 0);
    FAILPOINT("sync.released");
    lock_grant_next(sync, which, now_ns, news);
}

int lock_ask_unlock(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                    struct news *news)
{
    uint64_t token = request->words[0];
    if (request->argument >= SYNC_LOCKS || token % SYNC_LOCKS != request->argument)
        return SMB_INVALID;
    int which = (int)request->argument;
    struct sync_lock_words *lock = &sync->words->locks[which];
    if (lock_is_holder(lock, token, now_ns)) {
        word_put(&lock->released, word_get(&lock->released) | lock_released_bit(token));
        FAILPOINT("sync.releasing");
        lock_let_go(sync, which, now_ns, news);
        return SMB_OK;
    }
    uint64_t last = word_get(&lock->token);
    bool recent = token != 0 && token <= last && (last - token) / 2 < 64;
    return recent && word_get(&lock->released) & lock_released_bit(token) ? SMB_OK : SMB_LOCK_LOST;
}

int lock_ask_renew(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                   struct news *news)
{
    if (request->argument >= SYNC_LOCKS || request->words[1] < SYNC_TTL_MS_MIN ||
        request->words[1] > SYNC_TTL_MS_MAX)
        return SMB_INVALID;
    struct sync_lock_words *lock = &sync->words->locks[request->argument];
    if (!lock_is_holder(lock, request->words[0], now_ns))
        return SMB_LOCK_LOST;
    lock_set_expiry(sync, lock, clock_later(now_ns, request->words[1]));
    news_due(news, word_get(&lock->expires_ns));
    return SMB_OK;
}

int lock_ask_fence(struct sync *sync, const struct sync_request *request)
{
    uint64_t token = request->words[0];
    if (request->argument >= SYNC_LOCKS || token % SYNC_LOCKS != request->argument)
        return SMB_INVALID;
    struct sync_lock_words *lock = &sync->words->locks[request->argument];
    pthread_rwlock_wrlock(&sync->fence);
    bool lower = token < word_get(&lock->fence);
    if (!lower)
        word_put(&lock->fence, token);
    pthread_rwlock_unlock(&sync->fence);
    return lower ? SMB_LOCK_LOST : SMB_OK;
}

int sync_fence_enter(struct sync *sync, uint64_t token, uint64_t now_ns)
{
    struct sync_lock_words *lock = &sync->words->locks[token % SYNC_LOCKS];
    pthread_rwlock_rdlock(&sync->fence);
    bool home = word_get(&lock->token) != 0;
    if (home ? lock_is_holder(lock, token, now_ns)
             : token != 0 && token >= word_get(&lock->fence)) {
        uint64_t fence = word_get(&lock->fence);
        while (fence < token && !atomic_compare_exchange_weak(&lock->fence, &fence, token)) {
        }
        return SMB_OK;
    }
    pthread_rwlock_unlock(&sync->fence);
    return SMB_LOCK_LOST;
}

void sync_fence_leave(struct sync *sync)
{
    pthread_rwlock_unlock(&sync->fence);
}
