#include "memory/sync.h"

#include <stdlib.h>

#include "base/failpoint.h"
#include "memory/pins.h"

enum { ROUND_SHIFT = 24, ARRIVED_MASK = (1 << ROUND_SHIFT) - 1, ROUNDS_KEPT = 62 };
static const uint64_t MS = 1000000;

/* turns: locks by since_ns, versions by the one that is awaited, then as they came. names: session, sequence. */
struct queue {
    struct tree turns, deadlines, names;
};

/* A session with seats in the round under way. */
struct party {
    struct tree_node by_session, by_absence; /* the latter while it is absent */
    uint64_t session;
    uint32_t seats, waiting;
    uint64_t absent_ns;            /* since when fewer wait than have seats; UINT64_MAX: they are there */
};

struct sync {
    pthread_mutex_t mutex;
    pthread_rwlock_t fence;        /* taken after the mutex; its write side by whoever changes who holds a lock */
    struct sync_words *words;
    uint64_t (*seats)[2];          /* session, sequence */
    uint64_t capacity;             /* seats of one round */
    struct queue locks[SYNC_LOCKS], barrier, versions;
    struct tree parties, absences; /* by session; by absent_ns */
    struct pins pins;
    uint64_t weights;              /* of the trees */
    uint64_t kept;                 /* waiters so far */
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
    struct waiter *answered, *last;
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

static struct waiter *first_in_turn(const struct queue *queue)
{
    return TREE_OWNER(tree_first(&queue->turns), struct waiter, by_turn);
}

static struct waiter *first_of_session(const struct queue *queue, uint64_t session)
{
    struct waiter *waiter = TREE_OWNER(tree_from(&queue->names, session, 0), struct waiter, by_name);
    return waiter && waiter->request.session == session ? waiter : NULL;
}

static struct waiter *first_deadline(const struct queue *queue)
{
    return TREE_OWNER(tree_first(&queue->deadlines), struct waiter, by_deadline);
}

static void take_out(struct queue *queue, struct waiter *waiter)
{
    tree_take(&queue->turns, &waiter->by_turn);
    tree_take(&queue->deadlines, &waiter->by_deadline);
    tree_take(&queue->names, &waiter->by_name);
    waiter->kept = false;
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
    waiter->ready = ready;
    waiter->next = NULL;
    *(news->last ? &news->last->next : &news->answered) = waiter;
    news->last = waiter;
}

static void answer_all(struct sync *sync, struct queue *queue, int status, struct news *news)
{
    for (struct waiter *waiter = first_in_turn(queue); waiter; waiter = first_in_turn(queue))
        answer(sync, waiter, (struct sync_answer){.status = status}, news);
}

static void answer_session(struct sync *sync, struct queue *queue, uint64_t session, struct news *news)
{
    struct waiter *waiter = first_of_session(queue, session);
    for (; waiter; waiter = first_of_session(queue, session))
        answer(sync, waiter, (struct sync_answer){.status = SMB_SESSION_ENDED}, news);
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
    for (struct waiter *waiter = news->answered; waiter;) {
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
    pins_drop_expired(&sync->pins, now_ns);
    bool pinned = pins_hold(&sync->pins, version - 1);
    if (pinned && sync->pinned_ns == UINT64_MAX)
        sync->pinned_ns = now_ns;
    return !pinned || pins_end_ns(sync, publisher) <= now_ns;
}

static bool may_grant(struct sync *sync, int which, const struct sync_request *request, uint64_t now_ns)
{
    return now_ns >= sync->grace_ns && !held(&sync->words->locks[which], now_ns) &&
           (which == SYNC_USER || publisher_may_begin(sync, request, now_ns));
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
        /* Those on the copy that is about to be overwritten: overtaken. Their readers are told at their next renewal. */
        pins_drop_version(&sync->pins, get(&sync->words->version) - 1);
        sync->pinned_ns = UINT64_MAX;
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
    struct waiter *first = first_in_turn(&sync->locks[which]);
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

/* Its turn comes after all of a lower `turn`, and those of the same that came before. */
static void keep(struct sync *sync, struct waiter *waiter, uint64_t turn, uint64_t timeout_ms, uint64_t now_ns,
                 struct news *news)
{
    struct queue *queue = queue_of(sync, waiter);
    const struct sync_request *request = &waiter->request;
    waiter->deadline_ns = timeout_ms == UINT64_MAX ? UINT64_MAX : later(now_ns, timeout_ms);
    waiter->kept = true;
    waiter->sync = sync;
    tree_add(&queue->turns, &waiter->by_turn, turn, sync->kept++, &sync->weights);
    tree_add(&queue->deadlines, &waiter->by_deadline, waiter->deadline_ns, 0, &sync->weights);
    tree_add(&queue->names, &waiter->by_name, request->session, request->sequence, &sync->weights);
    due(news, waiter->deadline_ns);
}

static void enqueue_for_lock(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct news *news)
{
    const struct sync_request *request = &waiter->request;
    uint64_t age_ns = request->words[2] >= now_ns / MS ? now_ns : request->words[2] * MS;
    keep(sync, waiter, now_ns - age_ns, request->words[1], now_ns, news);
}

/* Its connection was replaced, and it was asked for again: the place is the new one's. */
static void drop_repeated(struct sync *sync, struct queue *queue, const struct sync_request *request, struct news *news)
{
    struct tree_node *found = tree_find(&queue->names, request->session, request->sequence);
    if (found)
        answer(sync, TREE_OWNER(found, struct waiter, by_name), (struct sync_answer){.status = SMB_DISCONNECTED}, news);
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
    if (!first_in_turn(&sync->locks[which]) && may_grant(sync, which, request, now_ns)) {
        *told = grant(sync, which, request, now_ns, news);
        return SMB_OK;
    }
    if (request->words[1] == 0) {
        count(&sync->counters->timed_out);
        return SMB_TIMEOUT;
    }
    count(&sync->counters->waited);
    enqueue_for_lock(sync, waiter, now_ns, news);
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

static struct party *party_of(const struct sync *sync, uint64_t session)
{
    return TREE_OWNER(tree_find(&sync->parties, session, 0), struct party, by_session);
}

/* Since when the one that left first has been away; UINT64_MAX: all are there. */
static uint64_t first_absent_ns(const struct sync *sync)
{
    const struct party *party = TREE_OWNER(tree_first(&sync->absences), struct party, by_absence);
    return party ? party->absent_ns : UINT64_MAX;
}

static uint64_t absence_end_ns(const struct sync *sync)
{
    uint64_t since_ns = first_absent_ns(sync);
    return since_ns == UINT64_MAX ? UINT64_MAX : later(since_ns, SYNC_ABSENCE_MS);
}

static void judge_presence(struct sync *sync, struct party *party, uint64_t now_ns, struct news *news)
{
    bool was_absent = party->absent_ns != UINT64_MAX, is_absent = party->waiting < party->seats;
    if (was_absent && !is_absent) {
        tree_take(&sync->absences, &party->by_absence);
        party->absent_ns = UINT64_MAX;
    } else if (!was_absent && is_absent) {
        party->absent_ns = now_ns;
        tree_add(&sync->absences, &party->by_absence, now_ns, 0, &sync->weights);
    }
    due(news, absence_end_ns(sync));
}

static bool seat_party(struct sync *sync, uint64_t session, uint64_t now_ns, struct news *news)
{
    struct party *party = party_of(sync, session);
    if (!party) {
        party = calloc(1, sizeof *party);
        if (!party)
            return false;
        party->session = session;
        party->absent_ns = UINT64_MAX;
        tree_add(&sync->parties, &party->by_session, session, 0, &sync->weights);
    }
    party->seats++;
    judge_presence(sync, party, now_ns, news);
    return true;
}

static void clear_parties(struct sync *sync)
{
    for (struct tree_node *node = tree_first(&sync->parties); node; node = tree_first(&sync->parties)) {
        tree_take(&sync->parties, node);
        free(TREE_OWNER(node, struct party, by_session));
    }
    sync->absences = (struct tree){0};
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
    answer_all(sync, &sync->barrier, broken ? SMB_BROKEN : SMB_OK, news);
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
    judge_presence(sync, party, now_ns, news);
    keep(sync, waiter, 0, waiter->request.words[1], now_ns, news);
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
    keep(sync, waiter, waiter->request.words[0], waiter->request.words[1], now_ns, news);
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
    struct waiter *waiter = first_in_turn(&sync->versions);
    for (; waiter && waiter->request.words[0] <= version; waiter = first_in_turn(&sync->versions))
        answer(sync, waiter, version_answer(sync, SMB_OK), news);
    let_go(sync, SYNC_PUBLISHER, now_ns, news);
    return SMB_OK;
}

static int ask_pin(struct sync *sync, const struct sync_request *request, uint64_t now_ns, struct sync_answer *told,
                   struct news *news)
{
    uint64_t ttl_ms = request->words[0] ? request->words[0] : SYNC_PIN_MS, expires_ns = later(now_ns, ttl_ms);
    uint64_t name = request->words[1] ? request->words[1] : request->sequence;
    if (ttl_ms > SYNC_PIN_MS)
        return SMB_INVALID;
    struct pin *pin = pins_find(&sync->pins, request->session, name);
    if (request->words[1]) { /* renewed; one that is not there any more was overtaken by a publisher */
        if (!pin)
            return SMB_LOCK_LOST;
        pins_renew(&sync->pins, pin, expires_ns);
        due(news, expires_ns);
    }
    if (!pin) {
        pin = pins_add(&sync->pins, request->session, name, get(&sync->words->version), expires_ns);
        if (!pin)
            return SMB_OUT_OF_MEMORY;
        due(news, expires_ns);
    }
    told->a = pin->version;
    told->b = pin->name;
    return SMB_OK;
}

static void unpin(struct sync *sync, uint64_t session, uint64_t name, uint64_t now_ns)
{
    pins_drop_expired(&sync->pins, now_ns);
    struct pin *pin = pins_find(&sync->pins, session, name);
    if (pin)
        pins_drop(&sync->pins, pin);
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
    made->weights = tree_random();
    made->pins.weights = tree_random();
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
    pins_drop_expired(&sync->pins, UINT64_MAX);
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

void sync_close(struct sync *sync, int status)
{
    struct news news = acquire(sync);
    sync->closed = status;
    for (int i = 0; i < SYNC_LOCKS; i++)
        answer_all(sync, &sync->locks[i], status, &news);
    answer_all(sync, &sync->barrier, status, &news);
    answer_all(sync, &sync->versions, status, &news);
    release(sync, &news);
}

static bool idle(const struct sync *sync, uint64_t idle_ns, uint64_t now_ns)
{
    /* Calls whose times are a little apart may come in either order. */
    bool used = now_ns < sync->grace_ns || now_ns < sync->asked_ns || now_ns - sync->asked_ns < idle_ns || arrived_of(sync) > 0 ||
                sync->barrier.turns.count || sync->versions.turns.count || sync->pins.names.count;
    for (int i = 0; i < SYNC_LOCKS; i++)
        used |= held(&sync->words->locks[i], now_ns) || sync->locks[i].turns.count;
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
        unpin(sync, request->session, request->words[0], now_ns);
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
        struct party *party = waiter->request.opcode == SMB_AWAIT_BARRIER ? party_of(sync, waiter->request.session) : NULL;
        if (party) {
            party->waiting--;
            judge_presence(sync, party, now_ns, &news);
        }
    }
    release(sync, &news);
    return kept;
}

void sync_end_session(struct sync *sync, uint64_t session, uint64_t now_ns)
{
    struct news news = acquire(sync);
    for (int i = 0; i < SYNC_LOCKS; i++)
        answer_session(sync, &sync->locks[i], session, &news);
    answer_session(sync, &sync->versions, session, &news);
    answer_session(sync, &sync->barrier, session, &news);
    if (party_of(sync, session))
        end_round(sync, true, &news);
    pins_drop_session(&sync->pins, session);
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
    struct waiter *waiter = first_deadline(queue);
    for (; waiter && waiter->deadline_ns <= now_ns; waiter = first_deadline(queue)) {
        if (waiter->request.opcode == SMB_LOCK)
            count(&sync->counters->timed_out);
        answer(sync, waiter, version_answer(sync, SMB_TIMEOUT), news);
    }
    if (waiter)
        due(news, waiter->deadline_ns);
}

/* When its round is broken: a party has been away for too long, or one that waits gives up. */
static uint64_t barrier_end_ns(const struct sync *sync)
{
    const struct waiter *waiter = first_deadline(&sync->barrier);
    uint64_t absence_ns = absence_end_ns(sync);
    return waiter && waiter->deadline_ns < absence_ns ? waiter->deadline_ns : absence_ns;
}

uint64_t sync_tick(struct sync *sync, uint64_t now_ns)
{
    struct news news = acquire(sync);
    if (!sync->closed) {
        pins_drop_expired(&sync->pins, now_ns);
        due(&news, pins_first_end_ns(&sync->pins));
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
        uint64_t end_ns = barrier_end_ns(sync);
        if (end_ns <= now_ns)
            end_round(sync, true, &news);
        else
            due(&news, end_ns);
    }
    uint64_t next_ns = sync->due_ns = sync->closed ? UINT64_MAX : news.due_ns;
    release(sync, &news);
    return next_ns;
}

void sync_status(struct sync *sync, uint64_t now_ns, struct sync_status *status)
{
    pthread_mutex_lock(&sync->mutex);
    *status = (struct sync_status){.version = get(&sync->words->version), .broken_rounds = sync->broken_rounds,
                                   .barrier_waiting = sync->barrier.turns.count, .arrived = arrived_of(sync),
                                   .versions_waiting = sync->versions.turns.count};
    status->parties = status->arrived ? get(&sync->words->parties) : 0;
    for (int which = 0; which < SYNC_LOCKS; which++) {
        const struct sync_lock_words *lock = &sync->words->locks[which];
        status->locks[which].waiting = sync->locks[which].turns.count;
        if (!held(lock, now_ns))
            continue;
        status->locks[which].session = get(&lock->session);
        status->locks[which].token = get(&lock->token);
        status->locks[which].left_ms = (get(&lock->expires_ns) - now_ns) / MS;
    }
    pthread_mutex_unlock(&sync->mutex);
}
