#include "sync.h"

#include <stdlib.h>

#include "failpoint.h"

enum { ROUND_SHIFT = 24, ARRIVED_MASK = (1 << ROUND_SHIFT) - 1, ROUNDS_KEPT = 62, PARTY_LISTS = 256, SESSION_PINS_MAX = 1024 };
static const uint64_t MS = 1000000;

struct queue {
    struct waiter *first, *last;
};

/* A session with seats in the round under way. */
struct party {
    struct party *next;
    uint64_t session;
    uint32_t seats, waiting;
    uint64_t absent_ns;            /* since when fewer wait than have seats; UINT64_MAX: they are there */
};

struct pin {
    struct pin *next;
    uint64_t session, name, version, expires_ns;
};

struct sync {
    pthread_mutex_t mutex;
    pthread_rwlock_t fence;        /* taken after the mutex; its write side by whoever changes who holds a lock */
    struct sync_words *words;
    uint64_t (*seats)[2];          /* session, sequence */
    uint64_t capacity;             /* seats of one round */
    struct queue locks[SYNC_LOCKS], barrier, versions;
    struct party *parties[PARTY_LISTS]; /* by party_list */
    struct pin *pins;
    uint64_t pinned_ns;            /* since when pins alone keep the publishers from their turn; UINT64_MAX: they don't */
    uint64_t grace_ns;             /* nothing is granted before */
    uint64_t broken_rounds;
    uint64_t asked_ns;             /* the last request, or the start */
    int closed;                    /* status of everything from now on */
    uint64_t due_ns;               /* as last told */
    struct sync_counters own, *counters; /* it may have no other */
    void (*sooner)(void *argument, uint64_t at_ns);
    void *sooner_argument;
};

/* What is to be told once the mutex is released. */
struct news {
    struct queue answered;
    uint64_t due_ns;
};

static uint64_t get(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static void put(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static void count(_Atomic uint64_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

/* ---- queues ------------------------------------------------------------------------------------------------------- */

static void insert_before(struct queue *queue, struct waiter *waiter, struct waiter *next)
{
    waiter->next = next;
    waiter->previous = next ? next->previous : queue->last;
    *(waiter->previous ? &waiter->previous->next : &queue->first) = waiter;
    *(next ? &next->previous : &queue->last) = waiter;
}

static void take_out(struct queue *queue, struct waiter *waiter)
{
    *(waiter->previous ? &waiter->previous->next : &queue->first) = waiter->next;
    *(waiter->next ? &waiter->next->previous : &queue->last) = waiter->previous;
    waiter->next = waiter->previous = NULL;
}

static struct queue *queue_of(struct sync *sync, const struct waiter *waiter)
{
    switch (waiter->request.opcode) {
    case SMB_LOCK: return &sync->locks[waiter->request.argument];
    case SMB_AWAIT_BARRIER: return &sync->barrier;
    default: return &sync->versions;
    }
}

static void answer(struct sync *sync, struct waiter *waiter, struct sync_answer ready, struct news *news)
{
    take_out(queue_of(sync, waiter), waiter);
    waiter->kept = false;
    waiter->ready = ready;
    insert_before(&news->answered, waiter, NULL);
}

static void due(struct news *news, uint64_t at_ns)
{
    if (at_ns < news->due_ns)
        news->due_ns = at_ns;
}

static uint64_t later(uint64_t now_ns, uint64_t ms)
{
    return ms >= (UINT64_MAX - now_ns) / MS ? UINT64_MAX : now_ns + ms * MS;
}

/* Unlocks, then tells. A waiter may be freed by whoever it is told to. */
static void release(struct sync *sync, struct news *news)
{
    bool sooner = sync->sooner && news->due_ns < sync->due_ns && !sync->closed;
    if (sooner)
        sync->due_ns = news->due_ns;
    pthread_mutex_unlock(&sync->mutex);
    if (sooner)
        sync->sooner(sync->sooner_argument, news->due_ns);
    for (struct waiter *waiter = news->answered.first; waiter;) {
        struct waiter *next = waiter->next;
        waiter->answer(waiter, waiter->ready);
        waiter = next;
    }
}

static struct news acquire(struct sync *sync)
{
    pthread_mutex_lock(&sync->mutex);
    return (struct news){.due_ns = UINT64_MAX};
}

/* ---- locks -------------------------------------------------------------------------------------------------------- */

static uint64_t released_bit(uint64_t token)
{
    return (uint64_t)1 << (token / 2 % 64);
}

static bool held(const struct sync_lock_words *lock, uint64_t now_ns)
{
    return get(&lock->expires_ns) > now_ns;
}

static bool is_holder(const struct sync_lock_words *lock, uint64_t token, uint64_t now_ns)
{
    return token != 0 && get(&lock->token) == token && held(lock, now_ns);
}

/* No fenced change is under way while somebody stops or begins to hold. */
static void set_expiry(struct sync *sync, struct sync_lock_words *lock, uint64_t expires_ns)
{
    pthread_rwlock_wrlock(&sync->fence);
    put(&lock->expires_ns, expires_ns);
    pthread_rwlock_unlock(&sync->fence);
}

static uint64_t pins_end_ns(const struct sync *sync, const struct sync_request *publisher)
{
    uint64_t bound_ms = publisher->words[3] ? publisher->words[3] : SYNC_PIN_MS;
    return sync->pinned_ns == UINT64_MAX ? UINT64_MAX : later(sync->pinned_ns, bound_ms);
}

/* Readers renew their pins; but publishers wait for them no longer than the first of those chooses, whoever asks in between.
 * pinned_ns never counts against a later pin: pins are made on the published version, so one that is new is in nobody's way until
 * the next version, and before that is a grant, which resets it. */
static bool publisher_may_begin(struct sync *sync, const struct sync_request *publisher, uint64_t now_ns)
{
    uint64_t version = get(&sync->words->version);
    const struct pin *pin = sync->pins;
    while (pin && (pin->version + 1 != version || pin->expires_ns <= now_ns))
        pin = pin->next;
    if (pin && sync->pinned_ns == UINT64_MAX)
        sync->pinned_ns = now_ns;
    return !pin || pins_end_ns(sync, publisher) <= now_ns;
}

static bool may_grant(struct sync *sync, int which, const struct sync_request *request, uint64_t now_ns)
{
    return now_ns >= sync->grace_ns && !held(&sync->words->locks[which], now_ns) &&
           (which == SYNC_USER || publisher_may_begin(sync, request, now_ns));
}

/* Those on the copy that is about to be overwritten: run out, or overtaken. Their readers are told at their next renewal. */
static void drop_pins(struct sync *sync)
{
    uint64_t version = get(&sync->words->version);
    sync->pinned_ns = UINT64_MAX;
    for (struct pin **at = &sync->pins; *at;) {
        struct pin *pin = *at;
        if (pin->version + 1 == version) {
            *at = pin->next;
            free(pin);
        } else {
            at = &pin->next;
        }
    }
}

static struct sync_answer granted(const struct sync *sync, int which)
{
    uint64_t version = which == SYNC_PUBLISHER ? get(&sync->words->version) + 1 : 0;
    return (struct sync_answer){SMB_OK, get(&sync->words->locks[which].token), version};
}

/* After garbage the count may wrap; 0 is no token. */
static uint64_t next_token(const struct sync_lock_words *lock, int which)
{
    uint64_t token = (get(&lock->token) / SYNC_LOCKS + 1) * SYNC_LOCKS + (uint64_t)which;
    return token < SYNC_LOCKS ? token + SYNC_LOCKS : token;
}

/* The expiry last: until then nobody holds it, whatever else was written. */
static struct sync_answer grant(struct sync *sync, int which, const struct sync_request *request, uint64_t now_ns,
                                struct news *news)
{
    struct sync_lock_words *lock = &sync->words->locks[which];
    uint64_t expires_ns = later(now_ns, request->words[0]);
    if (get(&lock->expires_ns) != 0)
        count(&sync->counters->expired);
    count(&sync->counters->granted);
    pthread_rwlock_wrlock(&sync->fence);
    put(&lock->expires_ns, 0);
    uint64_t token = next_token(lock, which);
    put(&lock->released, get(&lock->released) & ~released_bit(token));
    put(&lock->token, token);
    FAILPOINT("sync.token");
    put(&lock->fence, token);
    put(&lock->session, request->session);
    put(&lock->request, request->sequence);
    if (which == SYNC_PUBLISHER) {
        drop_pins(sync);
        put(&sync->words->writing, get(&sync->words->version) + 1);
    }
    FAILPOINT("sync.granting");
    put(&lock->expires_ns, expires_ns);
    FAILPOINT("sync.granted");
    pthread_rwlock_unlock(&sync->fence);
    due(news, expires_ns);
    return granted(sync, which);
}

static void grant_next(struct sync *sync, int which, uint64_t now_ns, struct news *news)
{
    struct waiter *first = sync->locks[which].first;
    if (!first)
        return;
    if (now_ns < sync->grace_ns)
        due(news, sync->grace_ns);
    else if (may_grant(sync, which, &first->request, now_ns))
        answer(sync, first, grant(sync, which, &first->request, now_ns, news), news);
    else if (held(&sync->words->locks[which], now_ns))
        due(news, get(&sync->words->locks[which].expires_ns));
    else
        due(news, pins_end_ns(sync, &first->request));
}

static void keep(struct sync *sync, struct queue *queue, struct waiter *waiter, struct waiter *next, uint64_t timeout_ms,
                 uint64_t now_ns, struct news *news)
{
    waiter->deadline_ns = timeout_ms == UINT64_MAX ? UINT64_MAX : later(now_ns, timeout_ms);
    waiter->kept = true;
    waiter->sync = sync;
    insert_before(queue, waiter, next);
    due(news, waiter->deadline_ns);
}

static void enqueue_for_lock(struct sync *sync, int which, struct waiter *waiter, uint64_t now_ns, struct news *news)
{
    const struct sync_request *request = &waiter->request;
    struct queue *queue = &sync->locks[which];
    uint64_t age_ns = request->words[2] >= now_ns / MS ? now_ns : request->words[2] * MS;
    waiter->since_ns = now_ns - age_ns;
    struct waiter *next = NULL, *before = queue->last;
    while (before && before->since_ns > waiter->since_ns) {
        next = before;
        before = before->previous;
    }
    keep(sync, queue, waiter, next, request->words[1], now_ns, news);
}

/* Its connection was replaced, and it was asked for again: the place is the new one's. */
static void drop_repeated(struct sync *sync, struct queue *queue, const struct sync_request *request, struct news *news)
{
    for (struct waiter *waiter = queue->first; waiter; waiter = waiter->next) {
        if (waiter->request.session == request->session && waiter->request.sequence == request->sequence) {
            answer(sync, waiter, (struct sync_answer){.status = SMB_DISCONNECTED}, news);
            return;
        }
    }
}

static int ask_lock(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct sync_answer *told, struct news *news)
{
    const struct sync_request *request = &waiter->request;
    if (request->argument >= SYNC_LOCKS || request->words[0] < SYNC_TTL_MS_MIN || request->words[0] > SYNC_TTL_MS_MAX)
        return SMB_INVALID;
    int which = (int)request->argument;
    struct sync_lock_words *lock = &sync->words->locks[which];
    if (held(lock, now_ns) && get(&lock->session) == request->session && get(&lock->request) == request->sequence) {
        set_expiry(sync, lock, later(now_ns, request->words[0]));
        *told = granted(sync, which);
        return SMB_OK;
    }
    drop_repeated(sync, &sync->locks[which], request, news);
    grant_next(sync, which, now_ns, news); /* those before us, if it is free by now */
    if (!sync->locks[which].first && may_grant(sync, which, request, now_ns)) {
        *told = grant(sync, which, request, now_ns, news);
        return SMB_OK;
    }
    if (request->words[1] == 0) {
        count(&sync->counters->timed_out);
        return SMB_TIMEOUT;
    }
    count(&sync->counters->waited);
    enqueue_for_lock(sync, which, waiter, now_ns, news);
    grant_next(sync, which, now_ns, news);
    return SMB_PARKED;
}

static void let_go(struct sync *sync, int which, uint64_t now_ns, struct news *news)
{
    set_expiry(sync, &sync->words->locks[which], 0);
    FAILPOINT("sync.released");
    grant_next(sync, which, now_ns, news);
}

static int ask_unlock(struct sync *sync, const struct sync_request *request, uint64_t now_ns, struct news *news)
{
    uint64_t token = request->words[0];
    if (request->argument >= SYNC_LOCKS || token % SYNC_LOCKS != request->argument)
        return SMB_INVALID;
    int which = (int)request->argument;
    struct sync_lock_words *lock = &sync->words->locks[which];
    if (is_holder(lock, token, now_ns)) {
        put(&lock->released, get(&lock->released) | released_bit(token));
        FAILPOINT("sync.releasing");
        let_go(sync, which, now_ns, news);
        return SMB_OK;
    }
    uint64_t last = get(&lock->token);
    bool recent = token != 0 && token <= last && (last - token) / 2 < 64;
    return recent && get(&lock->released) & released_bit(token) ? SMB_OK : SMB_LOCK_LOST;
}

static int ask_renew(struct sync *sync, const struct sync_request *request, uint64_t now_ns, struct news *news)
{
    if (request->argument >= SYNC_LOCKS || request->words[1] < SYNC_TTL_MS_MIN || request->words[1] > SYNC_TTL_MS_MAX)
        return SMB_INVALID;
    struct sync_lock_words *lock = &sync->words->locks[request->argument];
    if (!is_holder(lock, request->words[0], now_ns))
        return SMB_LOCK_LOST;
    set_expiry(sync, lock, later(now_ns, request->words[1]));
    due(news, get(&lock->expires_ns));
    return SMB_OK;
}

static int ask_fence(struct sync *sync, const struct sync_request *request)
{
    uint64_t token = request->words[0];
    if (request->argument >= SYNC_LOCKS || token % SYNC_LOCKS != request->argument)
        return SMB_INVALID;
    struct sync_lock_words *lock = &sync->words->locks[request->argument];
    pthread_rwlock_wrlock(&sync->fence);
    bool lower = token < get(&lock->fence);
    if (!lower)
        put(&lock->fence, token);
    pthread_rwlock_unlock(&sync->fence);
    return lower ? SMB_LOCK_LOST : SMB_OK;
}

int sync_fence_enter(struct sync *sync, uint64_t token, uint64_t now_ns)
{
    struct sync_lock_words *lock = &sync->words->locks[token % SYNC_LOCKS];
    pthread_rwlock_rdlock(&sync->fence);
    bool home = get(&lock->token) != 0;
    if (home ? is_holder(lock, token, now_ns) : token != 0 && token >= get(&lock->fence)) {
        uint64_t fence = get(&lock->fence);
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

/* ---- barrier ------------------------------------------------------------------------------------------------------ */

static uint64_t round_of(const struct sync *sync)
{
    return get(&sync->words->round) >> ROUND_SHIFT;
}

/* 0 where the words can't be: more parties than there are seats, or more seats taken than parties. */
static uint64_t arrived_of(const struct sync *sync)
{
    uint64_t arrived = get(&sync->words->round) & ARRIVED_MASK, parties = get(&sync->words->parties);
    return parties <= sync->capacity && arrived < parties ? arrived : 0;
}

static uint64_t (*seats_of(const struct sync *sync, uint64_t round))[2]
{
    return sync->seats + round % 2 * sync->capacity;
}

/* Lists by session: after a restart as many parties as there are seats may have to be found, garbage or not. */
static struct party **party_list(struct sync *sync, uint64_t session)
{
    return &sync->parties[session * 0x9E3779B97F4A7C15U >> 56];
}

static struct party *party_of(struct sync *sync, uint64_t session)
{
    struct party *party = *party_list(sync, session);
    while (party && party->session != session)
        party = party->next;
    return party;
}

static void judge_presence(struct party *party, uint64_t now_ns, struct news *news)
{
    if (party->waiting >= party->seats)
        party->absent_ns = UINT64_MAX;
    else if (party->absent_ns == UINT64_MAX)
        party->absent_ns = now_ns;
    if (party->absent_ns != UINT64_MAX)
        due(news, later(party->absent_ns, SYNC_ABSENCE_MS));
}

static bool seat_party(struct sync *sync, uint64_t session, uint64_t now_ns, struct news *news)
{
    struct party *party = party_of(sync, session);
    if (!party) {
        party = calloc(1, sizeof *party);
        if (!party)
            return false;
        struct party **list = party_list(sync, session);
        *party = (struct party){.next = *list, .session = session, .absent_ns = UINT64_MAX};
        *list = party;
    }
    party->seats++;
    judge_presence(party, now_ns, news);
    return true;
}

static void clear_parties(struct sync *sync)
{
    for (int i = 0; i < PARTY_LISTS; i++) {
        while (sync->parties[i]) {
            struct party *party = sync->parties[i];
            sync->parties[i] = party->next;
            free(party);
        }
    }
}

/* The round under way is over. Its own bit is right before the word moves on: until then nobody looks at it, so what an older
 * round, or a judgement that a kill interrupted, left there does not matter. */
static void end_round(struct sync *sync, bool broken, struct news *news)
{
    uint64_t round = round_of(sync);
    uint64_t bits = get(&sync->words->broken), own = (uint64_t)1 << (round % 64);
    put(&sync->words->broken, broken ? bits | own : bits & ~own);
    FAILPOINT("sync.round_judged");
    put(&sync->words->round, (round + 1) << ROUND_SHIFT);
    FAILPOINT("sync.round_ended");
    sync->broken_rounds += broken;
    if (broken)
        count(&sync->counters->broken);
    clear_parties(sync);
    for (struct waiter *waiter = sync->barrier.first; waiter;) {
        struct waiter *following = waiter->next;
        answer(sync, waiter, (struct sync_answer){.status = broken ? SMB_BROKEN : SMB_OK}, news);
        waiter = following;
    }
}

static bool find_seat(const struct sync *sync, const struct sync_request *request, uint64_t round, uint64_t seats,
                      struct sync_answer *told)
{
    uint64_t(*row)[2] = seats_of(sync, round);
    for (uint64_t i = 0; i < seats; i++) {
        if (row[i][0] == request->session && row[i][1] == request->sequence) {
            *told = (struct sync_answer){SMB_OK, round, i};
            return true;
        }
    }
    return false;
}

static int ask_arrive(struct sync *sync, const struct sync_request *request, uint64_t now_ns, struct sync_answer *told,
                      struct news *news)
{
    uint64_t parties = request->words[0], round = round_of(sync), arrived = arrived_of(sync);
    if (parties == 0 || parties > sync->capacity)
        return SMB_INVALID;
    if (find_seat(sync, request, round, arrived, told) ||
        (round > 0 && find_seat(sync, request, round - 1, sync->capacity, told)))
        return SMB_OK;
    if (arrived > 0 && parties != get(&sync->words->parties))
        return SMB_INVALID;
    if (!seat_party(sync, request->session, now_ns, news))
        return SMB_OUT_OF_MEMORY;
    if (arrived == 0) {
        put(&sync->words->round, round << ROUND_SHIFT); /* garbage, if it was any */
        put(&sync->words->parties, parties);
    }
    uint64_t *seat = seats_of(sync, round)[arrived];
    seat[0] = request->session;
    seat[1] = request->sequence;
    FAILPOINT("sync.seated");
    *told = (struct sync_answer){SMB_OK, round, arrived};
    if (arrived + 1 == parties)
        end_round(sync, false, news);
    else
        put(&sync->words->round, round << ROUND_SHIFT | (arrived + 1));
    FAILPOINT("sync.arrived");
    return SMB_OK;
}

static int ask_await_barrier(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct news *news)
{
    uint64_t asked = waiter->request.words[0], round = round_of(sync);
    if (asked > round)
        return SMB_INVALID;
    if (asked < round)
        return round - asked > ROUNDS_KEPT || get(&sync->words->broken) >> (asked % 64) & 1 ? SMB_BROKEN : SMB_OK;
    struct party *party = party_of(sync, waiter->request.session);
    if (!party)
        return SMB_INVALID; /* it has no seat */
    if (waiter->request.words[1] == 0) {
        end_round(sync, true, news);
        return SMB_BROKEN;
    }
    party->waiting++;
    judge_presence(party, now_ns, news);
    keep(sync, &sync->barrier, waiter, NULL, waiter->request.words[1], now_ns, news);
    return SMB_PARKED;
}

/* After a restart: who had a seat is expected back. False: out of memory. */
static bool find_parties(struct sync *sync, uint64_t now_ns)
{
    struct news untold = {.due_ns = UINT64_MAX}; /* the first sync_tick finds it */
    uint64_t(*row)[2] = seats_of(sync, round_of(sync));
    for (uint64_t i = 0, arrived = arrived_of(sync); i < arrived; i++)
        if (!seat_party(sync, row[i][0], now_ns, &untold))
            return false;
    return true;
}

/* ---- versions ----------------------------------------------------------------------------------------------------- */

static struct sync_answer version_answer(const struct sync *sync, int status)
{
    return (struct sync_answer){status, get(&sync->words->version), get(&sync->words->writing)};
}

static int ask_await_version(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct sync_answer *told,
                             struct news *news)
{
    *told = version_answer(sync, SMB_OK);
    if (told->a >= waiter->request.words[0])
        return SMB_OK;
    if (waiter->request.words[1] == 0)
        return SMB_TIMEOUT;
    keep(sync, &sync->versions, waiter, NULL, waiter->request.words[1], now_ns, news);
    return SMB_PARKED;
}

static int ask_publish(struct sync *sync, const struct sync_request *request, uint64_t now_ns, struct sync_answer *told,
                       struct news *news)
{
    struct sync_lock_words *lock = &sync->words->locks[SYNC_PUBLISHER];
    uint64_t token = request->words[0], version = request->words[1], published = get(&sync->words->version);
    bool holds = is_holder(lock, token, now_ns);
    told->a = version;
    if (!holds)
        return published >= version && version > 0 && ask_unlock(sync, &(struct sync_request){.argument = SYNC_PUBLISHER,
                                                                                              .words = {token}},
                                                                 now_ns, news) == SMB_OK
                   ? SMB_OK : SMB_LOCK_LOST;
    if (version == 0 || version != published + 1) /* 0: after garbage the count may wrap */
        return SMB_INVALID;
    put(&sync->words->version, version);
    FAILPOINT("sync.published");
    put(&lock->released, get(&lock->released) | released_bit(token));
    for (struct waiter *waiter = sync->versions.first; waiter;) {
        struct waiter *following = waiter->next;
        if (waiter->request.words[0] <= version)
            answer(sync, waiter, version_answer(sync, SMB_OK), news);
        waiter = following;
    }
    let_go(sync, SYNC_PUBLISHER, now_ns, news);
    return SMB_OK;
}

static int ask_pin(struct sync *sync, const struct sync_request *request, uint64_t now_ns, struct sync_answer *told,
                   struct news *news)
{
    uint64_t pins = 0, ttl_ms = request->words[0] ? request->words[0] : SYNC_PIN_MS;
    struct pin *pin = sync->pins;
    uint64_t name = request->words[1] ? request->words[1] : request->sequence;
    if (ttl_ms > SYNC_PIN_MS)
        return SMB_INVALID;
    while (pin && (pin->session != request->session || pin->name != name)) {
        pins += pin->session == request->session;
        pin = pin->next;
    }
    if (request->words[1]) { /* renewed; one that is not there any more was overtaken by a publisher */
        if (!pin)
            return SMB_LOCK_LOST;
        pin->expires_ns = later(now_ns, ttl_ms);
        due(news, pin->expires_ns);
    }
    if (!pin) {
        pin = pins < SESSION_PINS_MAX ? calloc(1, sizeof *pin) : NULL;
        if (!pin)
            return SMB_OUT_OF_MEMORY;
        *pin = (struct pin){.next = sync->pins, .session = request->session, .name = request->sequence,
                            .version = get(&sync->words->version), .expires_ns = later(now_ns, ttl_ms)};
        sync->pins = pin;
        due(news, pin->expires_ns);
    }
    told->a = pin->version;
    told->b = pin->name;
    return SMB_OK;
}

/* `session`'s pin of that name, or all of its pins; and those that are over. */
static void unpin(struct sync *sync, uint64_t session, uint64_t name, bool all, uint64_t now_ns)
{
    for (struct pin **at = &sync->pins; *at;) {
        struct pin *pin = *at;
        if (pin->expires_ns <= now_ns || (pin->session == session && (all || pin->name == name))) {
            *at = pin->next;
            free(pin);
        } else {
            at = &pin->next;
        }
    }
}

/* ---- the whole ---------------------------------------------------------------------------------------------------- */

/* What an earlier run left. Here only: afterwards the words are ours, and calls whose times are a little apart must not take
 * each other's longest lease for garbage. */
static void mend_words(struct sync_words *words, uint64_t now_ns)
{
    struct sync_lock_words *publisher = &words->locks[SYNC_PUBLISHER];
    uint64_t version = get(&words->version), writing = get(&words->writing);
    for (int i = 0; i < SYNC_LOCKS; i++)
        if (get(&words->locks[i].expires_ns) > later(now_ns, SYNC_TTL_MS_MAX))
            put(&words->locks[i].expires_ns, 0);
    /* A holder writes the version after the published one: this one has published, and was killed before it let go. Its
     * repeated PUBLISH is told so for as long as any UNLOCK is, whether its lease went on or not. */
    if (get(&publisher->expires_ns) != 0 && writing == version) {
        put(&publisher->released, get(&publisher->released) | released_bit(get(&publisher->token)));
        FAILPOINT("sync.mended");
        put(&publisher->expires_ns, 0);
    }
    if (writing != version && writing != version + 1)
        put(&words->writing, version + 1); /* garbage: that may have begun */
}

int sync_create(struct sync_words *words, void *seats, uint64_t seats_bytes, bool grace, uint64_t now_ns, struct sync **sync)
{
    struct sync *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    pthread_mutex_init(&made->mutex, NULL);
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    /* Fenced changes come without end; a grant must get in between. */
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&made->fence, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    made->counters = &made->own;
    made->words = words;
    made->seats = seats;
    made->capacity = seats_bytes / SYNC_SEAT_BYTES / 2;
    if (made->capacity > SYNC_PARTIES_MAX)
        made->capacity = SYNC_PARTIES_MAX;
    mend_words(words, now_ns);
    bool locked_before = get(&words->locks[SYNC_USER].token) || get(&words->locks[SYNC_PUBLISHER].token);
    made->grace_ns = grace && locked_before ? later(now_ns, SYNC_GRACE_MS) : 0;
    made->due_ns = made->pinned_ns = UINT64_MAX;
    made->asked_ns = now_ns;
    made->closed = get(&words->retired) == SYNC_RETIRED ? SMB_NOT_FOUND : 0;
    if (grace && !find_parties(made, now_ns)) {
        sync_destroy(made);
        return SMB_OUT_OF_MEMORY;
    }
    *sync = made;
    return SMB_OK;
}

void sync_destroy(struct sync *sync)
{
    clear_parties(sync);
    while (sync->pins) {
        struct pin *pin = sync->pins;
        sync->pins = pin->next;
        free(pin);
    }
    pthread_rwlock_destroy(&sync->fence);
    pthread_mutex_destroy(&sync->mutex);
    free(sync);
}

void sync_on_sooner(struct sync *sync, void (*sooner)(void *argument, uint64_t at_ns), void *argument)
{
    pthread_mutex_lock(&sync->mutex);
    sync->sooner = sooner;
    sync->sooner_argument = argument;
    pthread_mutex_unlock(&sync->mutex);
}

void sync_count_into(struct sync *sync, struct sync_counters *counters)
{
    pthread_mutex_lock(&sync->mutex);
    sync->counters = counters;
    pthread_mutex_unlock(&sync->mutex);
}

static void answer_all(struct sync *sync, struct queue *queue, uint64_t session, int status, struct news *news)
{
    for (struct waiter *waiter = queue->first; waiter;) {
        struct waiter *following = waiter->next;
        if (session == 0 || waiter->request.session == session)
            answer(sync, waiter, (struct sync_answer){.status = status}, news);
        waiter = following;
    }
}

void sync_close(struct sync *sync, int status)
{
    struct news news = acquire(sync);
    sync->closed = status;
    for (int i = 0; i < SYNC_LOCKS; i++)
        answer_all(sync, &sync->locks[i], 0, status, &news);
    answer_all(sync, &sync->barrier, 0, status, &news);
    answer_all(sync, &sync->versions, 0, status, &news);
    release(sync, &news);
}

static bool idle(const struct sync *sync, uint64_t idle_ns, uint64_t now_ns)
{
    /* Calls whose times are a little apart may come in either order. */
    bool used = now_ns < sync->grace_ns || now_ns < sync->asked_ns || now_ns - sync->asked_ns < idle_ns || arrived_of(sync) > 0 ||
                sync->barrier.first || sync->versions.first || sync->pins;
    for (int i = 0; i < SYNC_LOCKS; i++)
        used |= held(&sync->words->locks[i], now_ns) || sync->locks[i].first;
    return !used;
}

int sync_retire(struct sync *sync, uint64_t idle_ns, uint64_t now_ns, uint64_t *token)
{
    pthread_mutex_lock(&sync->mutex);
    bool before = get(&sync->words->retired) == SYNC_RETIRED;
    int status = before || (!sync->closed && idle(sync, idle_ns, now_ns)) ? SMB_OK : SMB_BUSY;
    if (status == SMB_OK && !before) {
        put(&sync->words->retired, SYNC_RETIRED);
        sync->closed = SMB_NOT_FOUND;
    }
    *token = get(&sync->words->locks[SYNC_USER].token);
    pthread_mutex_unlock(&sync->mutex);
    return status;
}

int sync_raise_token(struct sync *sync, uint64_t token)
{
    struct sync_lock_words *lock = &sync->words->locks[SYNC_USER];
    if (token % SYNC_LOCKS != SYNC_USER)
        return SMB_INVALID;
    pthread_mutex_lock(&sync->mutex);
    if (get(&lock->token) < token)
        put(&lock->token, token);
    pthread_mutex_unlock(&sync->mutex);
    return SMB_OK;
}

static int ask_locked(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct sync_answer *told, struct news *news)
{
    const struct sync_request *request = &waiter->request;
    switch (request->opcode) {
    case SMB_LOCK: return ask_lock(sync, waiter, now_ns, told, news);
    case SMB_UNLOCK: return ask_unlock(sync, request, now_ns, news);
    case SMB_RENEW: return ask_renew(sync, request, now_ns, news);
    case SMB_FENCE: return ask_fence(sync, request);
    case SMB_ARRIVE: return ask_arrive(sync, request, now_ns, told, news);
    case SMB_AWAIT_BARRIER: return ask_await_barrier(sync, waiter, now_ns, news);
    case SMB_AWAIT_VERSION: return ask_await_version(sync, waiter, now_ns, told, news);
    case SMB_PUBLISH: return ask_publish(sync, request, now_ns, told, news);
    case SMB_PIN: return ask_pin(sync, request, now_ns, told, news);
    case SMB_UNPIN:
        unpin(sync, request->session, request->words[0], false, now_ns);
        grant_next(sync, SYNC_PUBLISHER, now_ns, news);
        return SMB_OK;
    default: return SMB_INVALID;
    }
}

int sync_ask(struct sync *sync, const struct sync_request *request, struct waiter *waiter, uint64_t now_ns,
             struct sync_answer *answer)
{
    waiter->request = *request;
    waiter->sync = sync;
    waiter->kept = false;
    *answer = (struct sync_answer){0};
    struct news news = acquire(sync);
    sync->asked_ns = now_ns;
    int status = sync->closed ? sync->closed : ask_locked(sync, waiter, now_ns, answer, &news);
    release(sync, &news);
    answer->status = status;
    return status;
}

bool sync_forget(struct waiter *waiter, uint64_t now_ns)
{
    struct sync *sync = waiter->sync;
    struct news news = acquire(sync);
    bool kept = waiter->kept;
    if (kept) {
        take_out(queue_of(sync, waiter), waiter);
        waiter->kept = false;
        struct party *party = waiter->request.opcode == SMB_AWAIT_BARRIER ? party_of(sync, waiter->request.session) : NULL;
        if (party) {
            party->waiting--;
            judge_presence(party, now_ns, &news);
        }
    }
    release(sync, &news);
    return kept;
}

void sync_end_session(struct sync *sync, uint64_t session, uint64_t now_ns)
{
    struct news news = acquire(sync);
    for (int i = 0; i < SYNC_LOCKS; i++)
        answer_all(sync, &sync->locks[i], session, SMB_SESSION_ENDED, &news);
    answer_all(sync, &sync->versions, session, SMB_SESSION_ENDED, &news);
    answer_all(sync, &sync->barrier, session, SMB_SESSION_ENDED, &news);
    if (party_of(sync, session))
        end_round(sync, true, &news);
    unpin(sync, session, 0, true, now_ns);
    for (int i = 0; i < SYNC_LOCKS; i++) {
        struct sync_lock_words *lock = &sync->words->locks[i];
        if (held(lock, now_ns) && get(&lock->session) == session) {
            count(&sync->counters->revoked);
            set_expiry(sync, lock, 0);
        }
        grant_next(sync, i, now_ns, &news);
    }
    release(sync, &news);
}

/* ---- time --------------------------------------------------------------------------------------------------------- */

static void time_out(struct sync *sync, struct queue *queue, uint64_t now_ns, struct news *news)
{
    for (struct waiter *waiter = queue->first; waiter;) {
        struct waiter *following = waiter->next;
        if (waiter->deadline_ns <= now_ns) {
            if (waiter->request.opcode == SMB_LOCK)
                count(&sync->counters->timed_out);
            answer(sync, waiter, version_answer(sync, SMB_TIMEOUT), news);
        } else {
            due(news, waiter->deadline_ns);
        }
        waiter = following;
    }
}

static bool barrier_is_late(struct sync *sync, uint64_t now_ns, struct news *news)
{
    bool late = false;
    for (int i = 0; i < PARTY_LISTS; i++) {
        for (const struct party *party = sync->parties[i]; party; party = party->next) {
            uint64_t end_ns = party->absent_ns == UINT64_MAX ? UINT64_MAX : later(party->absent_ns, SYNC_ABSENCE_MS);
            late |= end_ns <= now_ns;
            due(news, end_ns);
        }
    }
    for (struct waiter *waiter = sync->barrier.first; waiter; waiter = waiter->next) {
        late |= waiter->deadline_ns <= now_ns;
        due(news, waiter->deadline_ns);
    }
    return late;
}

uint64_t sync_tick(struct sync *sync, uint64_t now_ns)
{
    struct news news = acquire(sync);
    if (!sync->closed) {
        unpin(sync, 0, 0, false, now_ns);
        for (const struct pin *pin = sync->pins; pin; pin = pin->next)
            due(&news, pin->expires_ns);
        for (int i = 0; i < SYNC_LOCKS; i++) {
            struct sync_lock_words *lock = &sync->words->locks[i];
            if (get(&lock->expires_ns) != 0 && !held(lock, now_ns)) {
                count(&sync->counters->expired);
                set_expiry(sync, lock, 0);
            }
            time_out(sync, &sync->locks[i], now_ns, &news);
            grant_next(sync, i, now_ns, &news);
            if (held(lock, now_ns))
                due(&news, get(&lock->expires_ns));
        }
        time_out(sync, &sync->versions, now_ns, &news);
        struct news ignored = {.due_ns = UINT64_MAX};
        if (barrier_is_late(sync, now_ns, &ignored))
            end_round(sync, true, &news);
        else
            due(&news, ignored.due_ns);
    }
    uint64_t next_ns = sync->due_ns = sync->closed ? UINT64_MAX : news.due_ns;
    release(sync, &news);
    return next_ns;
}

static uint64_t length(const struct queue *queue)
{
    uint64_t waiters = 0;
    for (const struct waiter *waiter = queue->first; waiter; waiter = waiter->next)
        waiters++;
    return waiters;
}

void sync_status(struct sync *sync, uint64_t now_ns, struct sync_status *status)
{
    pthread_mutex_lock(&sync->mutex);
    *status = (struct sync_status){.version = get(&sync->words->version), .broken_rounds = sync->broken_rounds,
                                   .barrier_waiting = length(&sync->barrier), .arrived = arrived_of(sync),
                                   .versions_waiting = length(&sync->versions)};
    status->parties = status->arrived ? get(&sync->words->parties) : 0;
    for (int which = 0; which < SYNC_LOCKS; which++) {
        const struct sync_lock_words *lock = &sync->words->locks[which];
        status->locks[which].waiting = length(&sync->locks[which]);
        if (!held(lock, now_ns))
            continue;
        status->locks[which].session = get(&lock->session);
        status->locks[which].token = get(&lock->token);
        status->locks[which].left_ms = (get(&lock->expires_ns) - now_ns) / MS;
    }
    pthread_mutex_unlock(&sync->mutex);
}
