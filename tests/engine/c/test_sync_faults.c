/* Requests that wait, under hard conditions: killed at every store and at random, with garbage for
 * words, used by many threads at once. */
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "base/failpoint.h"
#include "random.h"
#include "sync_place.h"

/* ---- killed ---------------------------------------------------------------------------------- */

/* What the child did and was told before it was killed, in shared memory. */
struct diary {
    _Atomic uint64_t locked, unlocked, published, seats;
};

static void live(struct place *place, struct diary *diary)
{
    struct asked asked;
    uint64_t version = 0;
    for (uint64_t turn = 1; turn < 50; turn++) {
        CHECK_EQ(lock(place, &asked, 1, turn, 0, 0), SMB_OK);
        diary->locked = asked.answer.a;
        CHECK_EQ(quick(place, SMB_UNLOCK, SYNC_USER, diary->locked, 0), SMB_OK);
        diary->unlocked = diary->locked;
        CHECK_EQ(ask(place, &asked, SMB_LOCK, 2, turn, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK);
        CHECK_EQ(quick(place, SMB_PUBLISH, 0, asked.answer.a, ++version), SMB_OK);
        diary->published = version;
        for (uint64_t party = 1; party <= 3; party++) {
            CHECK_EQ(ask(place, &asked, SMB_ARRIVE, party, turn, 0, 3, 0, 0), SMB_OK);
            diary->seats = turn << 8 | party;
        }
    }
    exit(0);
}

/* After a kill at any store, everything acknowledged is still true, and all operations work. */
static void killed_at_every_store(void)
{
    static const char *const points[] = {"sync.token",     "sync.granting",     "sync.granted",
                                         "sync.releasing", "sync.released",     "sync.published",
                                         "sync.begun",     "sync.placed",       "sync.seated",
                                         "sync.arrived",   "sync.round_judged", "sync.round_ended"};
    for (size_t p = 0; p < sizeof points / sizeof *points; p++) {
        for (long count = 1; count < 24; count += 1 + count / 3) {
            struct place place;
            struct asked asked;
            int status;
            place_make(&place);
            struct diary *diary = (struct diary *)((uint8_t *)place.words + 2048);
            pid_t child = check_fork();
            if (child == 0) {
                failpoint_arm(points[p], count);
                live(&place, diary);
            }
            CHECK_EQ(waitpid(child, &status, 0), child);
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); /* the point was reached */
            place_restart(&place);
            pass(&place, 2 * SECOND); /* the grace, and any running lease */
            CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, diary->unlocked, 0),
                     diary->unlocked ? SMB_OK : SMB_LOCK_LOST);
            CHECK_EQ(lock(&place, &asked, 9, 1, 0, 0), SMB_OK);
            CHECK(asked.answer.a > diary->locked); /* every token is new */
            CHECK_EQ(ask(&place, &asked, SMB_AWAIT_VERSION, 9, 2, 0, 0, 0, 0), SMB_OK);
            CHECK(asked.answer.a == diary->published || asked.answer.a == diary->published + 1);
            uint64_t version = asked.answer.a;
            CHECK_EQ(ask(&place, &asked, SMB_AWAIT_VERSION, 9, 2, 0, 0, 0, UINT64_MAX), SMB_OK);
            CHECK(asked.answer.b == 1 + version % 2); /* two slots take turns */
            CHECK_EQ(ask(&place, &asked, SMB_LOCK, 9, 3, SYNC_PUBLISHER | 2 << 8, 1000, 0, 0),
                     SMB_OK);
            CHECK_EQ(asked.answer.b, (version + 1) | ((version + 1) % 2) << 56);
            CHECK_EQ(quick(&place, SMB_PUBLISH, 0, asked.answer.a, version + 1), SMB_OK);
            CHECK_EQ(quick(&place, SMB_AWAIT_VERSION, 0, version + 1, 0), SMB_OK);
            if (diary->seats) { /* the last acknowledged seat is still the same seat */
                uint64_t turn = diary->seats >> 8, party = diary->seats & 255;
                CHECK_EQ(ask(&place, &asked, SMB_ARRIVE, party, turn, 0, 3, 0, 0), SMB_OK);
                CHECK(asked.answer.b == party - 1 && asked.answer.a == turn - 1);
            }
            place_end(&place);
        }
    }
}

static void kill_at(struct place *place, const char *point, void (*live)(struct place *place))
{
    int status;
    pid_t child = check_fork();
    if (child == 0) {
        failpoint_arm(point, 1);
        live(place);
        exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void publish_first(struct place *place)
{
    publish(place, 1);
}

static void start_again(struct place *place)
{
    CHECK_EQ(sync_create(place->words, place->seats, SEATS_BYTES, true, place->now, &place->sync),
             SMB_OK);
}

/* A publication that was visible, but whose answer was lost by a kill, is acknowledged when it is
 * repeated: also when its lease has run out, another session has the lock, and the restart was
 * killed, too. */
static void published_and_killed(void)
{
    for (int killed_twice = 0; killed_twice < 2; killed_twice++) {
        struct place place;
        struct asked other;
        place_make(&place);
        kill_at(&place, "sync.published", publish_first);
        uint64_t token = place.words->locks[SYNC_PUBLISHER].token;
        if (killed_twice)
            kill_at(&place, "sync.mended", start_again);
        place_restart(&place);
        pass(&place, 20 * SECOND);
        CHECK_EQ(ask(&place, &other, SMB_LOCK, 2, 1, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK);
        CHECK_EQ(other.answer.b, 2);
        CHECK_EQ(quick(&place, SMB_PUBLISH, 0, token, 1), SMB_OK);
        CHECK_EQ(quick(&place, SMB_PUBLISH, 0, token, 2), SMB_LOCK_LOST);
        CHECK_EQ(quick(&place, SMB_PUBLISH, 0, other.answer.a, 2), SMB_OK);
        place_end(&place);
    }
}

enum { SHARED = SYNC_USER | SYNC_SHARED << SYNC_LOCK_BITS };

static void share_and_release(struct place *place)
{
    struct asked one, made;
    CHECK_EQ(ask(place, &one, SMB_LOCK, 1, 1, SHARED, 5000, 0, 0), SMB_OK);
    ask(place, &made, SMB_UNLOCK, 1, 2, SHARED, one.answer.a, one.answer.b, 0);
}

/* The last of those who shared a lock was releasing it at the kill. Who comes to share it after the
 * restart has the same token, but has not released it, and hears so after another had it alone. */
static void released_killed_and_shared_again(void)
{
    struct place place;
    struct asked joined, alone, made;
    place_make(&place);
    kill_at(&place, "sync.releasing", share_and_release);
    uint64_t token = place.words->locks[SYNC_USER].token;
    place_restart(&place);
    pass(&place, SYNC_GRACE_MS * MS);
    CHECK_EQ(ask(&place, &joined, SMB_LOCK, 2, 1, SHARED, 1000, 0, 0), SMB_OK);
    CHECK_EQ(joined.answer.a, token);
    pass(&place, 5 * SECOND);
    CHECK_EQ(lock(&place, &alone, 3, 1, 0, 0), SMB_OK);
    CHECK_EQ(ask(&place, &made, SMB_UNLOCK, 2, 2, SHARED, token, joined.answer.b, 0),
             SMB_LOCK_LOST);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, alone.answer.a, 0), SMB_OK);
    place_end(&place);
}

static void break_the_round(struct place *place)
{
    struct asked asked;
    ask(place, &asked, SMB_AWAIT_BARRIER, 1, 2, 0, 0, 0, 0);
}

/* A round that was about to be called broken, and whose parties all came after the restart, is
 * complete. */
static void broken_and_killed(void)
{
    struct place place;
    struct asked asked;
    place_make(&place);
    CHECK_EQ(ask(&place, &asked, SMB_ARRIVE, 1, 1, 0, 2, 0, 0), SMB_OK);
    kill_at(&place, "sync.round_judged", break_the_round);
    place_restart(&place);
    CHECK_EQ(ask(&place, &asked, SMB_ARRIVE, 2, 1, 0, 2, 0, 0), SMB_OK);
    CHECK(asked.answer.a == 0 && asked.answer.b == 1);
    CHECK_EQ(ask(&place, &asked, SMB_AWAIT_BARRIER, 2, 2, 0, 0, FOREVER, 0), SMB_OK);
    place_end(&place);
}

/* ---- killed at random: each life repeats unanswered requests and checks acknowledged facts --- */

enum { PARTIES = 3, LIVES = 400, STEPS = 120 };
static const uint64_t LEASE_MS = 100000;

struct facts {
    uint64_t now, sequence;
    uint64_t token[SYNC_LOCKS], session[SYNC_LOCKS]; /* of the holder; 0: free */
    uint64_t expires_ns[SYNC_LOCKS];
    /* the last token granted; the last one that the user's holder returned */
    uint64_t highest[SYNC_LOCKS], released;
    uint64_t version, round, arrived;
    struct sync_request pending; /* opcode 0: none */
};

/* Facts count once `current` selects them. That is one store, so a kill leaves either the facts
 * before or those after. */
struct history {
    struct facts facts[2];
    _Atomic uint64_t current;
    _Atomic uint64_t steps, survived;
};

static struct facts facts_of(const struct history *history)
{
    return history->facts[history->current % 2];
}

static void now_true(struct history *history, struct facts facts)
{
    history->facts[(history->current + 1) % 2] = facts;
    history->current++;
}

static struct sync_request choose(const struct facts *facts, struct random *random)
{
    uint64_t which = random_below(random, SYNC_LOCKS), party = 1 + random_below(random, 3),
             token = facts->token[which];
    struct sync_request request = {
        .session = party, .sequence = facts->sequence, .argument = which};
    switch (random_below(random, 6)) {
    case 0:
    case 1:
        if (token == 0) {
            request.opcode = SMB_LOCK;
            request.words[0] = LEASE_MS;
        } else if (which == SYNC_PUBLISHER && random_below(random, 3)) {
            request = (struct sync_request){.opcode = SMB_PUBLISH,
                                            .session = facts->session[which],
                                            .sequence = facts->sequence,
                                            .words = {token, facts->version + 1}};
        } else {
            request.opcode = SMB_UNLOCK;
            request.words[0] = token;
        }
        break;
    case 2:
        request.opcode = token ? SMB_RENEW : SMB_LOCK;
        request.words[0] = token ? token : LEASE_MS;
        request.words[1] = token ? LEASE_MS : 0;
        break;
    case 3: request.opcode = SMB_AWAIT_VERSION; break;
    default:
        request = (struct sync_request){.opcode = SMB_ARRIVE,
                                        .session = facts->arrived + 1,
                                        .sequence = facts->sequence,
                                        .words = {PARTIES}};
    }
    return request;
}

static void forget_expired(struct facts *facts)
{
    for (int i = 0; i < SYNC_LOCKS; i++)
        if (facts->expires_ns[i] <= facts->now)
            facts->token[i] = 0;
}

/* Makes a request, first or repeated, and checks the answer against all acknowledged facts. */
static struct facts carry_out(struct place *place, struct facts facts)
{
    const struct sync_request request = facts.pending;
    uint64_t which = request.argument;
    struct asked asked;
    bool had = facts.token[request.opcode == SMB_PUBLISH ? SYNC_PUBLISHER : which] ==
               request.words[0];
    int status = ask(place, &asked, request.opcode, request.session, request.sequence, which,
                     request.words[0], request.words[1], 0);
    uint64_t a = asked.answer.a, b = asked.answer.b;
    switch (request.opcode) {
    case SMB_LOCK:
        CHECK_EQ(status, SMB_OK);
        CHECK(a > facts.highest[which] && b == (which == SYNC_PUBLISHER ? facts.version + 1 : 0));
        facts.token[which] = facts.highest[which] = a;
        facts.session[which] = request.session;
        facts.expires_ns[which] = facts.now + LEASE_MS * MS;
        break;
    case SMB_UNLOCK: /* if the lease ran out meanwhile both answers are true */
        CHECK(status == SMB_OK || (!had && status == SMB_LOCK_LOST));
        facts.token[which] = 0;
        if (status == SMB_OK && which == SYNC_USER)
            facts.released = request.words[0];
        break;
    case SMB_RENEW:
        CHECK_EQ(status, had ? SMB_OK : SMB_LOCK_LOST);
        facts.expires_ns[which] = had ? facts.now + LEASE_MS * MS : 0;
        break;
    case SMB_PUBLISH: {
        struct asked seen;
        CHECK_EQ(ask(place, &seen, SMB_AWAIT_VERSION, 1, 0, 0, 0, 0, 0), SMB_OK);
        CHECK_EQ(seen.answer.a, facts.version + (status == SMB_OK));
        CHECK(status == SMB_OK || (!had && status == SMB_LOCK_LOST));
        facts.version = seen.answer.a;
        facts.token[SYNC_PUBLISHER] = 0;
        break;
    }
    case SMB_AWAIT_VERSION: CHECK_EQ(a, facts.version); break;
    case SMB_ARRIVE:
        CHECK_EQ(status, SMB_OK);
        CHECK(a == facts.round && b == facts.arrived);
        facts.arrived = (facts.arrived + 1) % PARTIES;
        facts.round += facts.arrived == 0;
        break;
    }
    facts.pending.opcode = 0;
    return facts;
}

/* A session that was told that it holds a lock holds it, nobody else gets it, and a returned lock
 * stays returned. */
static void check_facts(struct place *place, const struct facts *facts)
{
    struct asked asked;
    for (uint64_t i = 0; i < SYNC_LOCKS; i++) {
        if (facts->token[i] == 0)
            continue;
        CHECK_EQ(ask(place, &asked, SMB_LOCK, 99, facts->sequence, i, 1000, 0, 0), SMB_TIMEOUT);
        CHECK_EQ(sync_fence_enter(place->sync, facts->token[i], place->now), SMB_OK);
        sync_fence_leave(place->sync);
    }
    if (facts->released && (facts->highest[SYNC_USER] - facts->released) / 2 < 8)
        CHECK_EQ(quick(place, SMB_UNLOCK, SYNC_USER, facts->released, 0), SMB_OK);
}

static void one_life(struct place *place, struct history *history, struct random *random)
{
    struct facts facts = facts_of(history);
    facts.now += random_below(random, 4) ? SECOND : 2 * LEASE_MS * MS;
    place->now = facts.now;
    now_true(history, facts);
    start_again(place);
    pass(place, SYNC_GRACE_MS * MS);
    facts.now = place->now;
    forget_expired(&facts);
    if (facts.pending.opcode)
        facts = carry_out(place, facts);
    now_true(history, facts);
    check_facts(place, &facts);
    for (int step = 0; step < STEPS; step++) {
        facts.sequence++;
        facts.pending = choose(&facts, random);
        now_true(history, facts);
        facts = carry_out(place, facts);
        now_true(history, facts);
        history->steps++;
    }
    history->survived++;
    raise(SIGKILL);
}

static void killed_at_random(void)
{
    static const char *const points[] = {"sync.token",       "sync.granting", "sync.granted",
                                         "sync.releasing",   "sync.released", "sync.published",
                                         "sync.seated",      "sync.arrived",  "sync.round_judged",
                                         "sync.round_ended", "sync.mended"};
    enum { POINTS = sizeof points / sizeof *points };
    struct place place;
    struct random random = random_make(20261121);
    int fired[POINTS] = {0}, status;
    place_make(&place);
    struct history *history = (struct history *)((uint8_t *)place.words + PAGE / 2);
    history->facts[0] = (struct facts){.now = place.now};
    for (int life = 0; life < LIVES; life++) {
        uint64_t point = random_below(&random, 2 * POINTS), survived = history->survived;
        uint64_t until = history->steps + random_below(&random, STEPS);
        if (life % 8 >= 6)
            /* kills a publication, and then the restart that repairs it */
            point = life % 8 == 6 ? 5 : 10;
        pid_t child = check_fork();
        if (child == 0) {
            if (point < POINTS)
                failpoint_arm(points[point], 1 + (long)random_below(&random, 3));
            random = random_make(random_next(&random) + (uint64_t)life);
            one_life(&place, history, &random);
        }
        if (point >= POINTS) {
            siginfo_t ended = {0};
            while (history->steps < until && ended.si_pid == 0)
                CHECK_EQ(waitid(P_PID, (id_t)child, &ended, WEXITED | WNOHANG | WNOWAIT), 0);
            kill(child, SIGKILL);
        }
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        if (point < POINTS)
            fired[point] += history->survived == survived;
    }
    for (int i = 0; i < POINTS; i++)
        CHECK(fired[i] > 0);
    place_end(&place);
}

/* ---- garbage, and threads -------------------------------------------------------------------- */

/* Whatever the words say: no access outside the seats, no hang, and of two requests for a lock at
 * most one gets it. */
static void garbage(void)
{
    struct random random = random_make(20261122);
    for (int round = 0; round < 3000; round++) {
        struct place place;
        struct asked a, b;
        place_make(&place);
        for (size_t i = 0; i < sizeof *place.words / 8; i++)
            if (random_below(&random, 2))
                ((uint64_t *)place.words)[i] = random_below(&random, 3)
                                                   ? random_next(&random) >>
                                                         random_below(&random, 60)
                                                   : UINT64_MAX;
        for (int i = 0; i < SEATS_BYTES; i++)
            place.seats[i] = (uint8_t)random_next(&random);
        place_restart(&place);
        pass(&place, 2 * SECOND);
        int first = lock(&place, &a, 1, 1, 0, 0), second = lock(&place, &b, 2, 1, 0, 0);
        CHECK(!(first == SMB_OK && second == SMB_OK));
        CHECK(first != SMB_OK || a.answer.a != 0);
        ask(&place, &a, SMB_ARRIVE, 1, 1, 0, 2, 0, 0);
        ask(&place, &a, SMB_ARRIVE, 2, 1, 0, 2, 0, 0);
        ask(&place, &a, SMB_AWAIT_BARRIER, 1, 2, 0, a.answer.a, 0, 0);
        uint64_t version = place.words->version;
        if (ask(&place, &a, SMB_LOCK, 3, 1, SYNC_PUBLISHER, 1000, 0, 0) == SMB_OK)
            quick(&place, SMB_PUBLISH, 0, a.answer.a, a.answer.b);
        CHECK(place.words->version >= version);
        pass(&place, 10 * SECOND);
        place_end(&place);
    }
}

/* As many seats taken as possible, by sessions that do not exist, in a segment with far more room
 * than that. */
static void garbage_seats(void)
{
    enum { BYTES = 128 << 20 };
    struct place place;
    struct asked asked;
    struct random random = random_make(5);
    place_make(&place);
    uint64_t *seats = mmap(NULL, BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(seats != MAP_FAILED);
    for (int i = 0; i < 2 * SYNC_PARTIES_MAX; i++)
        seats[i] = random_next(&random);
    for (uint64_t parties = SYNC_PARTIES_MAX; parties <= 1 << 22; parties <<= 6) {
        struct sync *sync;
        place.words->parties = parties;
        place.words->round = (uint64_t)6 << 24 | (parties - 1);
        CHECK_EQ(sync_create(place.words, seats, BYTES, true, place.now, &sync), SMB_OK);
        sync_tick(sync, place.now + SYNC_ABSENCE_MS * MS);
        struct sync *own = place.sync;
        place.sync = sync;
        CHECK_EQ(ask(&place, &asked, SMB_ARRIVE, 1, parties, 0, SYNC_PARTIES_MAX + 1, 0, 0),
                 SMB_INVALID);
        CHECK_EQ(ask(&place, &asked, SMB_ARRIVE, 1, parties, 0, 2, 0, 0), SMB_OK);
        CHECK_EQ(asked.answer.b, 0);
        place.sync = own;
        sync_close(sync, SMB_NOT_FOUND);
        sync_destroy(sync);
    }
    munmap(seats, BYTES);
    place_end(&place);
}

struct many {
    struct place *place;
    pthread_t thread;
    uint64_t session;
    _Atomic bool *stop;
};

static _Atomic int holders;
static _Atomic uint64_t highest;

static void *use(void *argument)
{
    struct many *many = argument;
    struct place place = *many->place; /* with its own clock, which stands still here */
    struct random random = random_make(many->session);
    for (uint64_t turn = 1; turn < 400; turn++) {
        struct asked asked;
        int status = lock(&place, &asked, many->session, turn, FOREVER, 0);
        WAIT_UNTIL(status != SMB_DEFERRED || asked.answers == 1);
        uint64_t token = asked.answer.a;
        CHECK_EQ(asked.answer.status, SMB_OK);
        CHECK_EQ(holders++, 0);
        CHECK(token > highest);
        highest = token;
        CHECK_EQ(sync_fence_enter(place.sync, token, place.now), SMB_OK);
        sync_fence_leave(place.sync);
        holders--;
        CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, token, 0), SMB_OK);
        if (random_below(&random, 4) == 0) {
            status = ask(&place, &asked, SMB_AWAIT_VERSION, many->session, turn, 0, UINT64_MAX,
                         FOREVER, 0);
            CHECK_EQ(status, SMB_DEFERRED);
            CHECK(sync_forget(&asked.waiter, place.now));
        }
    }
    return NULL;
}

static _Atomic uint64_t clock_ns;

static void settle(struct place *place, struct asked *asked, struct random *random)
{
    if (random_below(random, 2) && sync_forget(&asked->waiter, clock_ns))
        CHECK_EQ(asked->answers, 0);
    else
        WAIT_UNTIL(asked->answers == 1);
    place->now = clock_ns;
}

static void change_under_fence(struct place *place, uint64_t token)
{
    _Atomic uint64_t *last = &place->words->locks[SYNC_USER].token;
    if (sync_fence_enter(place->sync, token, clock_ns) != SMB_OK)
        return;
    for (int i = 0; i < 100; i++)
        CHECK_EQ(*last, token); /* no other grant in between */
    sync_fence_leave(place->sync);
}

static void *use_all(void *argument)
{
    struct many *many = argument;
    struct place place = *many->place;
    struct random random = random_make(many->session);
    for (uint64_t turn = 1; turn < 300; turn++) {
        struct asked asked;
        uint64_t session = many->session, which = random_below(&random, SYNC_LOCKS),
                 timeout = random_below(&random, 30);
        place.now = clock_ns;
        if (ask(&place, &asked, SMB_LOCK, session, 4 * turn, which, SYNC_TTL_MS_MIN, timeout, 0) ==
            SMB_DEFERRED)
            settle(&place, &asked, &random);
        if (which == SYNC_USER)
            change_under_fence(&place, asked.answer.a);
        else if (asked.answer.a)
            ask(&place, &asked, SMB_PUBLISH, session, 4 * turn + 1, 0, asked.answer.a,
                asked.answer.b, 0);
        if (ask(&place, &asked, SMB_AWAIT_VERSION, session, 4 * turn + 2, 0, UINT64_MAX, timeout,
                0) == SMB_DEFERRED)
            settle(&place, &asked, &random);
        if (ask(&place, &asked, SMB_ARRIVE, session, 4 * turn + 3, 0, 4, 0, 0) == SMB_OK &&
            ask(&place, &asked, SMB_AWAIT_BARRIER, session, 4 * turn + 3, 0, asked.answer.a, 30,
                0) == SMB_DEFERRED)
            settle(&place, &asked, &random);
        ask(&place, &asked, SMB_PIN, session, 4 * turn, 0, 0, 0, 0);
        if (random_below(&random, 8) == 0)
            sync_end_session(place.sync, session, clock_ns);
        else
            ask(&place, &asked, SMB_UNPIN, session, 4 * turn, 0, asked.answer.b, 0, 0);
    }
    return NULL;
}

static void *clock_on(void *argument)
{
    struct many *many = argument;
    while (!*many->stop)
        sync_tick(many->place->sync, clock_ns += MS / 4);
    return NULL;
}

static void *tick_on(void *argument)
{
    struct many *many = argument;
    while (!*many->stop)
        sync_tick(many->place->sync, many->place->now);
    return NULL;
}

static void run_threads(void *(*work)(void *), void *(*clock)(void *))
{
    enum { THREADS = 8 };
    struct place place;
    _Atomic bool stop = false;
    struct many many[THREADS + 1];
    place_make(&place);
    clock_ns = place.now;
    for (int i = 0; i <= THREADS; i++) {
        many[i] = (struct many){.place = &place, .session = (uint64_t)i + 1, .stop = &stop};
        CHECK_EQ(pthread_create(&many[i].thread, NULL, i < THREADS ? work : clock, &many[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(many[i].thread, NULL);
    stop = true;
    pthread_join(many[THREADS].thread, NULL);
    place_end(&place);
}

/* Eight threads and a clock that stands still: one holder at a time, tokens grow, every waiter is
 * answered once. */
static void threads(void)
{
    run_threads(use, tick_on);
}

/* Everything at once, while leases run out, waits time out, sessions end and links close: each
 * waiter is answered once, or taken back. */
static void threads_and_time(void)
{
    run_threads(use_all, clock_on);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(killed_at_every_store),
        TEST(published_and_killed),
        TEST(released_killed_and_shared_again),
        TEST(broken_and_killed),
        TEST(killed_at_random),
        TEST(garbage),
        TEST(garbage_seats),
        TEST(threads),
        TEST(threads_and_time),
    };
    return RUN_TESTS(tests);
}
