/* What waits: locks, fences, barriers and versions, with the time passed in; killed at every store; with garbage for words; and by
 * many threads at once. */
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "check.h"
#include "failpoint.h"
#include "random.h"
#include "sync.h"

enum { SEATS_BYTES = 1024, CAPACITY = SEATS_BYTES / SYNC_SEAT_BYTES / 2, WAITERS = 64 };
static const uint64_t SECOND = 1000000000U, FOREVER = UINT64_MAX;

/* ---- one client after the other */

struct asked {
    struct waiter waiter;
    struct sync_answer answer;
    _Atomic int answers;
};

struct place {
    struct sync_words *words;
    uint8_t *seats;
    struct sync *sync;
    uint64_t now;
};

static void place_make(struct place *place)
{
    /* Shared, so that a child's work is seen when it was killed. */
    uint8_t *memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    *place = (struct place){.words = (struct sync_words *)memory, .seats = memory + 4096, .now = 1000 * SECOND};
    CHECK_EQ(sync_create(place->words, place->seats, SEATS_BYTES, false, place->now, &place->sync), SMB_OK);
}

static void place_restart(struct place *place)
{
    sync_close(place->sync, SMB_DISCONNECTED);
    sync_destroy(place->sync);
    CHECK_EQ(sync_create(place->words, place->seats, SEATS_BYTES, true, place->now, &place->sync), SMB_OK);
}

static void place_end(struct place *place)
{
    sync_close(place->sync, SMB_NOT_FOUND);
    sync_destroy(place->sync);
}

static void told(struct waiter *waiter, struct sync_answer answer)
{
    struct asked *asked = waiter->owner;
    asked->answer = answer;
    asked->answers++;
}

static int ask(struct place *place, struct asked *asked, int opcode, uint64_t session, uint64_t sequence, uint64_t argument,
               uint64_t a, uint64_t b, uint64_t c)
{
    struct sync_request request = {.opcode = opcode, .session = session, .sequence = sequence, .argument = argument,
                                   .words = {a, b, c, 0}};
    struct sync_answer answer;
    *asked = (struct asked){.waiter = {.answer = told, .owner = asked}};
    int status = sync_ask(place->sync, &request, &asked->waiter, place->now, &answer);
    if (status != SMB_PARKED) /* else it may be answered by now, by another thread */
        asked->answer = answer;
    return status;
}

static int lock(struct place *place, struct asked *asked, uint64_t session, uint64_t sequence, uint64_t timeout, uint64_t age)
{
    return ask(place, asked, SMB_LOCK, session, sequence, SYNC_USER, 1000, timeout, age);
}

static int quick(struct place *place, int opcode, uint64_t argument, uint64_t a, uint64_t b)
{
    struct asked asked;
    return ask(place, &asked, opcode, 1, 1, argument, a, b, 0);
}

static void pass(struct place *place, uint64_t ns)
{
    place->now += ns;
    sync_tick(place->sync, place->now);
}

/* Who asked first is first; a repetition keeps its place by its age; tokens grow; a lease that runs out frees it. */
static void locks(void)
{
    struct place place;
    struct asked a, b, c, d;
    place_make(&place);
    CHECK_EQ(lock(&place, &a, 1, 1, 0, 0), SMB_OK);
    uint64_t first = a.answer.a;
    CHECK(first > 0 && first % 2 == SYNC_USER);
    CHECK_EQ(lock(&place, &d, 1, 1, 0, 0), SMB_OK); /* repeated */
    CHECK_EQ(d.answer.a, first);
    CHECK_EQ(lock(&place, &b, 2, 1, 0, 0), SMB_TIMEOUT);
    CHECK_EQ(lock(&place, &b, 2, 2, FOREVER, 0), SMB_PARKED);
    place.now += 1000000;
    CHECK_EQ(lock(&place, &c, 3, 1, FOREVER, 500), SMB_PARKED); /* asked before b, says its age */
    CHECK_EQ(lock(&place, &d, 4, 1, 300, 0), SMB_PARKED);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, first, 0), SMB_OK);
    CHECK(c.answers == 1 && c.answer.status == SMB_OK && c.answer.a > first && b.answers == 0);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, first, 0), SMB_OK); /* repeated */
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, first, 1000), SMB_LOCK_LOST);
    pass(&place, SECOND / 2);
    CHECK(d.answers == 1 && d.answer.status == SMB_TIMEOUT);
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, c.answer.a, 1000), SMB_OK);
    pass(&place, SECOND * 9 / 10);
    CHECK_EQ(b.answers, 0);
    pass(&place, SECOND / 5); /* its lease is over */
    CHECK(b.answers == 1 && b.answer.status == SMB_OK && b.answer.a > c.answer.a);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, c.answer.a, 0), SMB_LOCK_LOST);
    CHECK_EQ(ask(&place, &d, SMB_LOCK, 1, 9, 2, 1000, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &d, SMB_LOCK, 1, 9, SYNC_USER, 1, 0, 0), SMB_INVALID);
    sync_end_session(place.sync, 2, place.now);
    CHECK_EQ(lock(&place, &a, 1, 5, 0, 0), SMB_OK);
    place_end(&place);
}

/* A restart keeps holder and tokens; nobody is granted in the grace after it, then the oldest first. */
static void locks_over_a_restart(void)
{
    struct place place;
    struct asked a, b, c;
    place_make(&place);
    CHECK_EQ(lock(&place, &a, 1, 1, 0, 0), SMB_OK);
    place_restart(&place);
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, a.answer.a, 1000), SMB_OK);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, a.answer.a, 0), SMB_OK);
    CHECK_EQ(lock(&place, &b, 2, 1, FOREVER, 10), SMB_PARKED);
    CHECK_EQ(lock(&place, &c, 3, 1, FOREVER, 2000), SMB_PARKED);
    CHECK(b.answers + c.answers == 0);
    pass(&place, SYNC_GRACE_MS * 1000000U);
    CHECK(c.answers == 1 && b.answers == 0 && c.answer.a > a.answer.a);
    CHECK(sync_forget(&b.waiter, place.now));
    CHECK(!sync_forget(&c.waiter, place.now));
    place_end(&place);
}

/* Only the holder's token is let through at the home; elsewhere the highest that was told. */
static void fences(void)
{
    struct place home, other;
    struct asked a, b;
    place_make(&home);
    place_make(&other);
    CHECK_EQ(lock(&home, &a, 1, 1, 0, 0), SMB_OK);
    CHECK_EQ(sync_fence_enter(home.sync, a.answer.a, home.now), SMB_OK);
    sync_fence_leave(home.sync);
    CHECK_EQ(sync_fence_enter(home.sync, a.answer.a, home.now + 2 * SECOND), SMB_LOCK_LOST);
    CHECK_EQ(sync_fence_enter(home.sync, a.answer.a + 2, home.now), SMB_LOCK_LOST);
    CHECK_EQ(sync_fence_enter(other.sync, a.answer.a, other.now), SMB_OK);
    sync_fence_leave(other.sync);
    pass(&home, 2 * SECOND);
    CHECK_EQ(lock(&home, &b, 2, 1, 0, 0), SMB_OK);
    CHECK_EQ(quick(&other, SMB_FENCE, SYNC_USER, b.answer.a, 0), SMB_OK);
    CHECK_EQ(sync_fence_enter(other.sync, a.answer.a, other.now), SMB_LOCK_LOST);
    CHECK_EQ(quick(&other, SMB_FENCE, SYNC_USER, a.answer.a, 0), SMB_LOCK_LOST);
    CHECK_EQ(sync_fence_enter(other.sync, 0, other.now), SMB_LOCK_LOST);
    place_end(&home);
    place_end(&other);
}

/* All arrive, all leave; repetitions change nothing; the next round follows; other numbers of parties are refused. */
static void barriers(void)
{
    struct place place;
    struct asked a, b, c, waiting;
    place_make(&place);
    CHECK_EQ(ask(&place, &a, SMB_ARRIVE, 1, 1, 0, 2, 0, 0), SMB_OK);
    CHECK(a.answer.a == 0 && a.answer.b == 0);
    CHECK_EQ(ask(&place, &c, SMB_ARRIVE, 1, 1, 0, 2, 0, 0), SMB_OK);
    CHECK(c.answer.a == 0 && c.answer.b == 0);
    CHECK_EQ(ask(&place, &c, SMB_ARRIVE, 3, 1, 0, 3, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &c, SMB_ARRIVE, 3, 1, 0, 0, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &c, SMB_ARRIVE, 3, 1, 0, CAPACITY + 1, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &c, SMB_AWAIT_BARRIER, 1, 2, 0, 5, FOREVER, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &waiting, SMB_AWAIT_BARRIER, 1, 2, 0, 0, FOREVER, 0), SMB_PARKED);
    CHECK_EQ(ask(&place, &b, SMB_ARRIVE, 2, 1, 0, 2, 0, 0), SMB_OK);
    CHECK(b.answer.a == 0 && b.answer.b == 1);
    CHECK(waiting.answers == 1 && waiting.answer.status == SMB_OK);
    CHECK_EQ(ask(&place, &c, SMB_AWAIT_BARRIER, 2, 2, 0, 0, FOREVER, 0), SMB_OK);
    CHECK_EQ(ask(&place, &c, SMB_ARRIVE, 2, 1, 0, 2, 0, 0), SMB_OK); /* repeated when the round is over */
    CHECK(c.answer.a == 0 && c.answer.b == 1);
    CHECK_EQ(ask(&place, &a, SMB_ARRIVE, 1, 3, 0, 2, 0, 0), SMB_OK);
    CHECK(a.answer.a == 1 && a.answer.b == 0);
    place_end(&place);
}

static void seat_and_wait(struct place *place, uint64_t session, uint64_t timeout, struct asked *waiting)
{
    struct asked seat;
    CHECK_EQ(ask(place, &seat, SMB_ARRIVE, session, place->now, 0, 3, 0, 0), SMB_OK);
    CHECK_EQ(ask(place, waiting, SMB_AWAIT_BARRIER, session, place->now + 1, 0, seat.answer.a, timeout, 0), SMB_PARKED);
}

/* A timeout, an absence, a session's end and a restart that a party does not survive break the round for all in it. */
static void broken_barriers(void)
{
    for (int how = 0; how < 4; how++) {
        struct place place;
        struct asked one, two, next;
        place_make(&place);
        seat_and_wait(&place, 1, FOREVER, &one);
        seat_and_wait(&place, 2, how == 0 ? 100 : FOREVER, &two);
        if (how == 1)
            CHECK(sync_forget(&two.waiter, place.now));
        if (how == 2)
            sync_end_session(place.sync, 2, place.now);
        if (how == 3) {
            place_restart(&place);
            CHECK_EQ(ask(&place, &one, SMB_AWAIT_BARRIER, 1, 7, 0, 0, FOREVER, 0), SMB_PARKED);
        }
        pass(&place, SECOND);
        if (how == 1 || how == 3) {
            CHECK_EQ(one.answers, 0);
            pass(&place, SYNC_ABSENCE_MS * 1000000U);
        }
        CHECK(one.answers == 1 && one.answer.status == SMB_BROKEN);
        CHECK_EQ(ask(&place, &next, SMB_AWAIT_BARRIER, 2, 99, 0, 0, FOREVER, 0), SMB_BROKEN);
        CHECK_EQ(ask(&place, &next, SMB_ARRIVE, 1, 50, 0, 1, 0, 0), SMB_OK); /* the next round is clean */
        CHECK_EQ(ask(&place, &next, SMB_AWAIT_BARRIER, 1, 51, 0, 1, FOREVER, 0), SMB_OK);
        place_end(&place);
    }
}

/* Publications are numbered, wake who waits, and wait for pins on the copy that they overwrite. */
static void versions(void)
{
    struct place place;
    struct asked turn, waiting, pin, later;
    place_make(&place);
    CHECK_EQ(ask(&place, &waiting, SMB_AWAIT_VERSION, 5, 1, 0, 1, FOREVER, 0), SMB_PARKED);
    CHECK_EQ(ask(&place, &later, SMB_AWAIT_VERSION, 5, 2, 0, 2, 100, 0), SMB_PARKED);
    for (uint64_t version = 1; version <= 3; version++) {
        CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, version, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK);
        CHECK(turn.answer.b == version && turn.answer.a % 2 == SYNC_PUBLISHER);
        CHECK_EQ(ask(&place, &pin, SMB_AWAIT_VERSION, 5, 3, 0, 0, 0, 0), SMB_OK);
        CHECK(pin.answer.a == version - 1 && pin.answer.b == version);
        CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, version + 1), SMB_INVALID);
        CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a + 2, version), SMB_LOCK_LOST);
        CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, version), SMB_OK);
        CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, version), SMB_OK); /* repeated */
        if (version == 1) {
            CHECK(waiting.answers == 1 && waiting.answer.a == 1 && later.answers == 0);
            pass(&place, SECOND / 2);
            CHECK(later.answers == 1 && later.answer.status == SMB_TIMEOUT && later.answer.a == 1);
        }
    }
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 1, 0, 0, 0, 0), SMB_OK);
    CHECK_EQ(pin.answer.a, 3);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 10, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK); /* 4 overwrites the copy of 2 */
    CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, 4), SMB_OK);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 11, SYNC_PUBLISHER, 1000, FOREVER, 0), SMB_PARKED); /* 5 that of 3: pinned */
    sync_end_session(place.sync, 6, place.now);
    CHECK(turn.answers == 1 && turn.answer.status == SMB_OK && turn.answer.b == 5);
    place_end(&place);
}

/* A thousand that wait are told by one publication, each once. */
static void thousand_waiters(void)
{
    enum { MANY = 1000 };
    struct place place;
    struct asked turn, *many = calloc(MANY, sizeof *many);
    place_make(&place);
    for (uint64_t i = 0; i < MANY; i++)
        CHECK_EQ(ask(&place, &many[i], SMB_AWAIT_VERSION, i + 1, 1, 0, 1, FOREVER, 0), SMB_PARKED);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 2, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK);
    CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, 1), SMB_OK);
    for (int i = 0; i < MANY; i++)
        CHECK(many[i].answers == 1 && many[i].answer.status == SMB_OK);
    place_end(&place);
    free(many);
}

/* ---- killed */

/* What the child did and was told before it was killed; in shared memory. */
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

/* What was acknowledged holds after a kill at every store, and all of it works on. */
static void killed_at_every_store(void)
{
    static const char *const points[] = {"sync.token", "sync.granting", "sync.granted", "sync.releasing", "sync.released",
                                         "sync.published", "sync.seated", "sync.arrived", "sync.round_judged",
                                         "sync.round_ended"};
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
            pass(&place, 2 * SECOND); /* the grace, and whatever lease was running */
            CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, diary->unlocked, 0), diary->unlocked ? SMB_OK : SMB_LOCK_LOST);
            CHECK_EQ(lock(&place, &asked, 9, 1, 0, 0), SMB_OK);
            CHECK(asked.answer.a > diary->locked); /* no token twice */
            CHECK_EQ(ask(&place, &asked, SMB_AWAIT_VERSION, 9, 2, 0, 0, 0, 0), SMB_OK);
            CHECK(asked.answer.a == diary->published || asked.answer.a == diary->published + 1);
            if (diary->seats) { /* the last acknowledged seat is the same seat still */
                uint64_t turn = diary->seats >> 8, party = diary->seats & 255;
                CHECK_EQ(ask(&place, &asked, SMB_ARRIVE, party, turn, 0, 3, 0, 0), SMB_OK);
                CHECK(asked.answer.b == party - 1 && asked.answer.a == turn - 1);
            }
            place_end(&place);
        }
    }
}

/* ---- garbage, and threads */

/* Whatever the words say: nothing leaves the seats, nothing hangs, and of two that ask one at most holds. */
static void garbage(void)
{
    struct random random = random_make(20261122);
    for (int round = 0; round < 3000; round++) {
        struct place place;
        struct asked a, b;
        place_make(&place);
        for (size_t i = 0; i < sizeof *place.words / 8; i++)
            if (random_below(&random, 2))
                ((uint64_t *)place.words)[i] = random_below(&random, 3) ? random_next(&random) >> random_below(&random, 60)
                                                                       : UINT64_MAX;
        for (int i = 0; i < SEATS_BYTES; i++)
            place.seats[i] = (uint8_t)random_next(&random);
        place_restart(&place);
        pass(&place, 2 * SECOND);
        int first = lock(&place, &a, 1, 1, 0, 0), second = lock(&place, &b, 2, 1, 0, 0);
        CHECK(!(first == SMB_OK && second == SMB_OK));
        ask(&place, &a, SMB_ARRIVE, 1, 1, 0, 2, 0, 0);
        ask(&place, &a, SMB_ARRIVE, 2, 1, 0, 2, 0, 0);
        ask(&place, &a, SMB_AWAIT_BARRIER, 1, 2, 0, a.answer.a, 0, 0);
        if (ask(&place, &a, SMB_LOCK, 3, 1, SYNC_PUBLISHER, 1000, 0, 0) == SMB_OK)
            quick(&place, SMB_PUBLISH, 0, a.answer.a, a.answer.b);
        pass(&place, 10 * SECOND);
        place_end(&place);
        munmap(place.words, 8192);
    }
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
    struct place place = *many->place; /* its own clock: time stands still here */
    struct random random = random_make(many->session);
    for (uint64_t turn = 1; turn < 400; turn++) {
        struct asked asked;
        int status = lock(&place, &asked, many->session, turn, FOREVER, 0);
        WAIT_UNTIL(status != SMB_PARKED || asked.answers == 1);
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
            status = ask(&place, &asked, SMB_AWAIT_VERSION, many->session, turn, 0, UINT64_MAX, FOREVER, 0);
            CHECK_EQ(status, SMB_PARKED);
            CHECK(sync_forget(&asked.waiter, place.now));
        }
    }
    return NULL;
}

static void *tick_on(void *argument)
{
    struct many *many = argument;
    while (!*many->stop)
        sync_tick(many->place->sync, many->place->now);
    return NULL;
}

/* Eight threads and a clock: one holder at a time, tokens grow, every waiter is told once. */
static void threads(void)
{
    enum { THREADS = 8 };
    struct place place;
    _Atomic bool stop = false;
    struct many many[THREADS + 1];
    place_make(&place);
    for (int i = 0; i <= THREADS; i++) {
        many[i] = (struct many){.place = &place, .session = (uint64_t)i + 1, .stop = &stop};
        CHECK_EQ(pthread_create(&many[i].thread, NULL, i < THREADS ? use : tick_on, &many[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(many[i].thread, NULL);
    stop = true;
    pthread_join(many[THREADS].thread, NULL);
    place_end(&place);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(locks),    TEST(locks_over_a_restart), TEST(fences),  TEST(barriers), TEST(broken_barriers), TEST(versions),
        TEST(thousand_waiters), TEST(killed_at_every_store), TEST(garbage), TEST(threads),
    };
    return RUN_TESTS(tests);
}
