#include "sync/sync_lock.h"

#include "base/failpoint.h"
#include "sync/sync_queue.h"
#include "sync/sync_version.h"

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

/* ---- shared holders of the user's lock ------------------------------------------------------ */

static bool is_shared(const struct sync_lock_words *lock, uint64_t now_ns)
{
    return lock_is_held(lock, now_ns) && word_get(&lock->session) == 0;
}

/* NULL: the session has no holding of that name under the present token. */
static struct pin *holder_of(const struct sync *sync, uint64_t session, uint64_t name,
                             uint64_t now_ns)
{
    const struct sync_lock_words *lock = &sync->words->locks[SYNC_USER];
    struct pin *holder = pins_find(&sync->holders, session, name);
    return holder && is_shared(lock, now_ns) && holder->version == word_get(&lock->token) ? holder
                                                                                          : NULL;
}

static bool shares(const struct sync *sync, uint64_t session, uint64_t now_ns)
{
    const struct sync_lock_words *lock = &sync->words->locks[SYNC_USER];
    const struct pin *any = pins_of(&sync->holders, session);
    return any && is_shared(lock, now_ns) && any->version == word_get(&lock->token);
}

/* NULL: out of memory, or the session has too many. */
static struct pin *add_holder(struct sync *sync, uint64_t session, uint64_t name, uint64_t token,
                              uint64_t expires_ns)
{
    struct pin *left = pins_find(&sync->holders, session, name); /* the peer chooses the name */
    if (left)
        pins_drop(&sync->holders, left);
    return pins_add(&sync->holders, session, name, token, expires_ns);
}

/* The lock ends no sooner than any of its holdings. */
static void renew_holder(struct sync *sync, struct pin *holder, uint64_t expires_ns,
                         struct news *news)
{
    struct sync_lock_words *lock = &sync->words->locks[SYNC_USER];
    pins_renew(&sync->holders, holder, expires_ns);
    if (word_get(&lock->expires_ns) < expires_ns)
        lock_set_expiry(sync, lock, expires_ns);
    news_due(news, expires_ns);
}

/* After the last holder the lock is free, once no others can come back. */
static void free_after_last(struct sync *sync, bool released, uint64_t now_ns)
{
    struct sync_lock_words *lock = &sync->words->locks[SYNC_USER];
    sync->all_released &= released;
    if (sync->holders.names.count || word_get(&lock->session) != 0)
        return;
    if (sync->all_released)
        word_put(&lock->released,
                 word_get(&lock->released) | lock_released_bit(word_get(&lock->token)));
    FAILPOINT("sync.releasing");
    lock_set_expiry(sync, lock, sync->unknown_ns > now_ns ? sync->unknown_ns : 0);
    FAILPOINT("sync.released");
}

void lock_drop_expired(struct sync *sync, uint64_t now_ns)
{
    uint64_t before = sync->holders.names.count;
    pins_drop_expired(&sync->holders, now_ns);
    uint64_t dropped = before - sync->holders.names.count;
    atomic_fetch_add_explicit(&sync->counters->expired, dropped, memory_order_relaxed);
    if (dropped)
        free_after_last(sync, false, now_ns);
}

void lock_end_session(struct sync *sync, uint64_t session, uint64_t now_ns)
{
    uint64_t before = sync->holders.names.count;
    pins_drop_session(&sync->holders, session);
    uint64_t dropped = before - sync->holders.names.count;
    atomic_fetch_add_explicit(&sync->counters->revoked, dropped, memory_order_relaxed);
    if (dropped)
        free_after_last(sync, false, now_ns);
}

void lock_forget_holders(struct sync *sync)
{
    const struct sync_lock_words *lock = &sync->words->locks[SYNC_USER];
    pins_drop_expired(&sync->holders, UINT64_MAX);
    sync->all_released = false;
    sync->unknown_ns = word_get(&lock->session) == 0 ? word_get(&lock->expires_ns) : 0;
}

/* ---- grants --------------------------------------------------------------------------------- */

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
    const struct sync_lock_words *lock = &sync->words->locks[which];
    return now_ns >= sync->grace_ns &&
           (!lock_is_held(lock, now_ns) || (request->shared && is_shared(lock, now_ns))) &&
           (which == SYNC_USER || publisher_may_begin(sync, request, now_ns));
}

static struct sync_answer granted(const struct sync *sync, const struct sync_request *request)
{
    int which = (int)request->argument;
    uint64_t version = which == SYNC_PUBLISHER ? word_get(&sync->words->version) + 1 : 0;
    if (request->shared)
        return (struct sync_answer){SMB_OK, word_get(&sync->words->locks[which].token),
                                    request->sequence};
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
    bool joins = request->shared && is_shared(lock, now_ns);
    uint64_t token = joins ? word_get(&lock->token) : next_token(lock, which);
    if (request->shared &&
        !add_holder(sync, request->session, request->sequence, token, expires_ns))
        return (struct sync_answer){.status = SMB_OUT_OF_MEMORY};
    counter_add(&sync->counters->granted);
    news_due(news, expires_ns);
    if (joins) {
        /* set if a kill came between the last holder's UNLOCK and its effect */
        word_put(&lock->released, word_get(&lock->released) & ~lock_released_bit(token));
        if (word_get(&lock->expires_ns) < expires_ns)
            lock_set_expiry(sync, lock, expires_ns);
        return granted(sync, request);
    }
    if (word_get(&lock->expires_ns) != 0)
        counter_add(&sync->counters->expired);
    if (which == SYNC_USER) {
        sync->unknown_ns = 0;
        sync->all_released = true;
    }
    pthread_rwlock_wrlock(&sync->fence);
    word_put(&lock->expires_ns, 0);
    word_put(&lock->released, word_get(&lock->released) & ~lock_released_bit(token));
    word_put(&lock->token, token);
    FAILPOINT("sync.token");
    word_put(&lock->fence, token);
    word_put(&lock->session, request->shared ? 0 : request->session);
    word_put(&lock->request, request->sequence);
    if (which == SYNC_PUBLISHER) {
        int slots = slots_of(request), slot = version_oldest_slot(sync, slots, false);
        version_begin(sync, slot < 0 ? version_oldest_slot(sync, slots, true) : slot);
    }
    FAILPOINT("sync.granting");
    word_put(&lock->expires_ns, expires_ns);
    FAILPOINT("sync.granted");
    pthread_rwlock_unlock(&sync->fence);
    return granted(sync, request);
}

void lock_grant_next(struct sync *sync, int which, uint64_t now_ns, struct news *news)
{
    if (which == SYNC_USER)
        lock_drop_expired(sync, now_ns);
    struct waiter *first = queue_first(&sync->locks[which]);
    for (; first && may_grant(sync, which, &first->request, now_ns);
         first = queue_first(&sync->locks[which]))
        queue_answer(sync, first, grant(sync, which, &first->request, now_ns, news), news);
    if (!first)
        return;
    if (now_ns < sync->grace_ns)
        news_due(news, sync->grace_ns);
    else if (lock_is_held(&sync->words->locks[which], now_ns))
        news_due(news, word_get(&sync->words->locks[which].expires_ns));
    else
        news_due(news, pins_end_ns(sync, &first->request));
}

/* A session that shares the lock does not wait behind one that waits for it: neither wait would
 * end. What it asked for before it was known to share the lock (before its first renewal after a
 * restart) is granted here. */
static void grant_to_sharer(struct sync *sync, uint64_t session, uint64_t now_ns, struct news *news)
{
    struct waiter *waiter = queue_first_of_session(&sync->locks[SYNC_USER], session);
    while (waiter && waiter->request.session == session) {
        struct waiter *after = TREE_OWNER(tree_next(&waiter->by_name), struct waiter, by_name);
        const struct sync_request *request = &waiter->request;
        if (request->shared && may_grant(sync, SYNC_USER, request, now_ns))
            queue_answer(sync, waiter, grant(sync, SYNC_USER, request, now_ns, news), news);
        waiter = after;
    }
}

struct sync_answer lock_late(const struct sync *sync, const struct sync_request *request,
                             uint64_t now_ns)
{
    struct sync_answer late = {.status = SMB_TIMEOUT};
    const struct sync_lock_words *lock = &sync->words->locks[request->argument];
    if (request->argument == SYNC_USER && is_shared(lock, now_ns)) {
        const struct pin *any = TREE_OWNER(tree_first(&sync->holders.names), struct pin, by_name);
        late.a = any ? any->session : 0;
    } else if (lock_is_held(lock, now_ns)) {
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
    struct pin *holder = request->shared
                             ? holder_of(sync, request->session, request->sequence, now_ns)
                             : NULL;
    if (holder) {
        renew_holder(sync, holder, clock_later(now_ns, request->words[0]), news);
        *reply = granted(sync, request);
        return SMB_OK;
    }
    if (!request->shared && lock_is_held(lock, now_ns) &&
        word_get(&lock->session) == request->session &&
        word_get(&lock->request) == request->sequence) {
        lock_set_expiry(sync, lock, clock_later(now_ns, request->words[0]));
        *reply = granted(sync, request);
        return SMB_OK;
    }
    drop_repeated(sync, &sync->locks[which], request, news);
    /* grants to earlier requests, if the lock is free by now */
    lock_grant_next(sync, which, now_ns, news);
    bool next = !queue_first(&sync->locks[which]) ||
                (request->shared && shares(sync, request->session, now_ns));
    if (next && may_grant(sync, which, request, now_ns)) {
        *reply = grant(sync, which, request, now_ns, news);
        return reply->status;
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

static bool was_released(const struct sync_lock_words *lock, uint64_t token)
{
    uint64_t last = word_get(&lock->token);
    bool recent = token != 0 && token <= last && (last - token) / 2 < 64;
    return recent && word_get(&lock->released) & lock_released_bit(token);
}

static int unlock_shared(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                         struct news *news)
{
    const struct sync_lock_words *lock = &sync->words->locks[SYNC_USER];
    uint64_t token = request->words[0];
    /* No other holder can have come in between, so a holding that is gone was not overtaken. */
    bool last = token != 0 && token == word_get(&lock->token) && word_get(&lock->session) == 0;
    struct pin *holder = holder_of(sync, request->session, request->words[1], now_ns);
    if (holder && last) {
        pins_drop(&sync->holders, holder);
        free_after_last(sync, true, now_ns);
        lock_grant_next(sync, SYNC_USER, now_ns, news);
    }
    return last || was_released(lock, token) ? SMB_OK : SMB_LOCK_LOST;
}

int lock_ask_unlock(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                    struct news *news)
{
    uint64_t token = request->words[0];
    if (request->argument >= SYNC_LOCKS || request->slots ||
        token % SYNC_LOCKS != request->argument)
        return SMB_INVALID;
    if (request->shared)
        return unlock_shared(sync, request, now_ns, news);
    int which = (int)request->argument;
    struct sync_lock_words *lock = &sync->words->locks[which];
    if (lock_is_holder(lock, token, now_ns) && !is_shared(lock, now_ns)) {
        word_put(&lock->released, word_get(&lock->released) | lock_released_bit(token));
        FAILPOINT("sync.releasing");
        lock_let_go(sync, which, now_ns, news);
        return SMB_OK;
    }
    return was_released(lock, token) ? SMB_OK : SMB_LOCK_LOST;
}

static int renew_shared(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                        struct news *news)
{
    uint64_t token = request->words[0], name = request->words[2],
             expires_ns = clock_later(now_ns, request->words[1]);
    const struct sync_lock_words *lock = &sync->words->locks[SYNC_USER];
    lock_drop_expired(sync, now_ns);
    if (!is_shared(lock, now_ns) || token != word_get(&lock->token))
        return SMB_LOCK_LOST;
    struct pin *holder = holder_of(sync, request->session, name, now_ns);
    if (!holder && now_ns >= sync->unknown_ns)
        return SMB_LOCK_LOST;
    if (!holder)
        holder = add_holder(sync, request->session, name, token, expires_ns);
    if (!holder)
        return SMB_OUT_OF_MEMORY;
    renew_holder(sync, holder, expires_ns, news);
    grant_to_sharer(sync, request->session, now_ns, news);
    return SMB_OK;
}

int lock_ask_renew(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                   struct news *news)
{
    if (request->argument >= SYNC_LOCKS || request->slots || request->words[1] < SYNC_TTL_MS_MIN ||
        request->words[1] > SYNC_TTL_MS_MAX)
        return SMB_INVALID;
    if (request->shared)
        return renew_shared(sync, request, now_ns, news);
    struct sync_lock_words *lock = &sync->words->locks[request->argument];
    if (!lock_is_holder(lock, request->words[0], now_ns) || is_shared(lock, now_ns))
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
    int closed = sync->closed;
    if (closed != SMB_OK) {
        pthread_rwlock_unlock(&sync->fence);
        return closed;
    }
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
