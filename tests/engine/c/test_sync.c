/* Requests that wait: the rules of locks, fences, barriers and versions, at times that the test
 * chooses. */
#include <stddef.h>
#include <pthread.h>
#include <string.h>

#include "random.h"
#include "sync_place.h"

/* The first to ask is the first to get the lock. A repeated request keeps its place by its age,
 * tokens grow, and a lease that runs out frees the lock. */
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
    CHECK(b.answer.a == 1 && b.answer.b == 0); /* the holder's session */
    CHECK_EQ(lock(&place, &b, 2, 2, FOREVER, 0), SMB_DEFERRED);
    place.now += 1000000;
    /* asked before b, and says its age */
    CHECK_EQ(lock(&place, &c, 3, 1, FOREVER, 500), SMB_DEFERRED);
    CHECK_EQ(lock(&place, &d, 4, 1, 300, 0), SMB_DEFERRED);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, first, 0), SMB_OK);
    CHECK(c.answers == 1 && c.answer.status == SMB_OK && c.answer.a > first && b.answers == 0);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, first, 0), SMB_OK); /* repeated */
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, first, 1000), SMB_LOCK_LOST);
    pass(&place, SECOND / 2);
    CHECK(d.answers == 1 && d.answer.status == SMB_TIMEOUT);
    CHECK(d.answer.a == 3 && d.answer.b == 0);
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, c.answer.a, 1000), SMB_OK);
    pass(&place, SECOND * 9 / 10);
    CHECK_EQ(b.answers, 0);
    pass(&place, SECOND / 5); /* its lease has run out */
    CHECK(b.answers == 1 && b.answer.status == SMB_OK && b.answer.a > c.answer.a);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, c.answer.a, 0), SMB_LOCK_LOST);
    CHECK_EQ(ask(&place, &d, SMB_LOCK, 1, 9, 2, 1000, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &d, SMB_LOCK, 1, 9, SYNC_USER, 1, 0, 0), SMB_INVALID);
    sync_end_session(place.sync, 2, place.now);
    CHECK_EQ(lock(&place, &a, 1, 5, 0, 0), SMB_OK);
    place_end(&place);
}

/* A restart keeps holder and tokens. No lock is granted during the grace after it, then the oldest
 * request is granted first. */
static void locks_over_a_restart(void)
{
    struct place place;
    struct asked a, b, c;
    place_make(&place);
    CHECK_EQ(lock(&place, &a, 1, 1, 0, 0), SMB_OK);
    place_restart(&place);
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, a.answer.a, 1000), SMB_OK);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, a.answer.a, 0), SMB_OK);
    CHECK_EQ(lock(&place, &b, 2, 1, FOREVER, 10), SMB_DEFERRED);
    CHECK_EQ(lock(&place, &c, 3, 1, FOREVER, 2000), SMB_DEFERRED);
    CHECK(b.answers + c.answers == 0);
    pass(&place, SYNC_GRACE_MS * 1000000U);
    CHECK(c.answers == 1 && b.answers == 0 && c.answer.a > a.answer.a);
    CHECK(sync_forget(&b.waiter, place.now));
    CHECK(!sync_forget(&c.waiter, place.now));
    place_end(&place);
}

static void told_sooner(void *argument, uint64_t at_ns)
{
    *(uint64_t *)argument = at_ns;
}

/* During the grace the holder is answered at once, and a request with timeout 0 gets TIMEOUT. The
 * clock is set for the end of the grace. */
static void grace(void)
{
    struct place place;
    struct asked a, b, c;
    uint64_t at_ns = 0;
    place_make(&place);
    CHECK_EQ(lock(&place, &a, 1, 1, 0, 0), SMB_OK);
    place_restart(&place);
    sync_on_sooner(place.sync, told_sooner, &at_ns);
    CHECK_EQ(lock(&place, &b, 1, 1, 0, 0), SMB_OK); /* repeated */
    CHECK_EQ(b.answer.a, a.answer.a);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, a.answer.a, 0), SMB_OK);
    CHECK_EQ(lock(&place, &b, 2, 1, 0, 0), SMB_TIMEOUT);
    CHECK_EQ(lock(&place, &c, 3, 1, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(at_ns, place.now + SYNC_GRACE_MS * MS);
    pass(&place, SYNC_GRACE_MS * MS - 1);
    CHECK_EQ(c.answers, 0);
    pass(&place, 1);
    CHECK(c.answers == 1 && c.answer.status == SMB_OK);
    place_end(&place);
}

/* A call whose time is slightly behind does not take the longest lease for garbage; a longer lease
 * is garbage. */
static void longest_lease(void)
{
    struct place place;
    struct asked a, b;
    place_make(&place);
    CHECK_EQ(ask(&place, &a, SMB_LOCK, 1, 1, SYNC_USER, SYNC_TTL_MS_MAX, 0, 0), SMB_OK);
    place.now -= MS;
    CHECK_EQ(lock(&place, &b, 2, 1, 0, 0), SMB_TIMEOUT);
    CHECK_EQ(sync_fence_enter(place.sync, a.answer.a, place.now), SMB_OK);
    sync_fence_leave(place.sync);
    place.now += MS;
    place_restart(&place);
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, a.answer.a, 1000), SMB_OK);
    place.words->locks[SYNC_USER].expires_ns = place.now + SYNC_TTL_MS_MAX * MS + 1;
    place_restart(&place);
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, a.answer.a, 1000), SMB_LOCK_LOST);
    place_end(&place);
}

/* Ten thousand waiting requests are granted in the order in which they first asked, in whatever
 * order they came back. */
static void long_queue(void)
{
    enum { MANY = 10000 };
    struct place place;
    struct asked holder, *many = calloc(MANY, sizeof *many);
    struct random random = random_make(7);
    place_make(&place);
    place.now += 1000 * SECOND;
    CHECK_EQ(lock(&place, &holder, MANY + 1, 1, 0, 0), SMB_OK);
    for (uint64_t i = 0; i < MANY; i++)
        CHECK_EQ(lock(&place, &many[i], i + 1, 1, FOREVER, random_below(&random, 50)),
                 SMB_DEFERRED);
    uint64_t token = holder.answer.a, since = 0;
    for (int granted = 0; granted < MANY; granted++) {
        CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, token, 0), SMB_OK);
        uint64_t session = place.words->locks[SYNC_USER].session;
        uint64_t first_sent = many[session - 1].waiter.by_turn.key[0];
        CHECK(many[session - 1].answers == 1 && first_sent >= since);
        since = first_sent;
        token = many[session - 1].answer.a;
    }
    place_end(&place);
    free(many);
}

/* At the home only the holder's token is accepted; elsewhere the highest token that was shown. */
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

static void carry(void *argument, const uint8_t image[SYNC_IMAGE_BYTES])
{
    struct place *other = argument;
    sync_install(other->sync, image, other->now);
}

/* The words of one copy are at every moment those of the other, on a host with another clock. After
 * a fail-over leases go on there, tokens and versions do not go back, and waiting requests are sent
 * again. */
static void words_at_another_copy(void)
{
    struct place here, there, anew;
    struct asked a, b, c;
    place_make(&here);
    place_make(&there);
    there.now = 7 * SECOND;
    sync_on_change(here.sync, carry, &there);
    CHECK_EQ(lock(&here, &a, 1, 1, 0, 0), SMB_OK);
    CHECK_EQ(lock(&here, &b, 2, 1, FOREVER, 10), SMB_DEFERRED);
    CHECK_EQ(there.words->locks[SYNC_USER].token, a.answer.a);
    CHECK_EQ(there.words->locks[SYNC_USER].expires_ns, there.now + SECOND);
    CHECK_EQ(quick(&here, SMB_FENCE, SYNC_PUBLISHER, 41, 0), SMB_OK);
    CHECK_EQ(there.words->locks[SYNC_PUBLISHER].fence, 41);
    publish(&here, 1);
    publish(&here, 2);
    CHECK_EQ(there.words->version, 2);
    CHECK_EQ(ask(&here, &c, SMB_LOCK, 1, 3, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK);
    CHECK(memcmp(&here.words->version, &there.words->version,
                 sizeof(struct sync_words) - offsetof(struct sync_words, version)) == 0);
    sync_send_away(here.sync, SMB_STALE_EPOCH);
    CHECK(b.answers == 1 && b.answer.status == SMB_STALE_EPOCH);
    sync_on_change(here.sync, NULL, NULL);

    sync_take_over(there.sync, there.now);
    CHECK_EQ(lock(&there, &b, 2, 1, FOREVER, 10), SMB_DEFERRED);
    CHECK_EQ(quick(&there, SMB_RENEW, SYNC_USER, a.answer.a, 1000), SMB_OK);
    CHECK_EQ(sync_fence_enter(there.sync, a.answer.a, there.now), SMB_OK);
    sync_fence_leave(there.sync);
    CHECK_EQ(quick(&there, SMB_PUBLISH, 0, c.answer.a, 3), SMB_OK);
    CHECK_EQ(quick(&there, SMB_PUBLISH, 0, c.answer.a, 3), SMB_OK); /* repeated */
    /* the holder's lease has run out */
    pass(&there, SECOND);
    CHECK(b.answers == 1 && b.answer.status == SMB_OK && b.answer.a > a.answer.a);
    CHECK_EQ(sync_fence_enter(there.sync, a.answer.a, there.now), SMB_LOCK_LOST);
    CHECK_EQ(quick(&there, SMB_UNLOCK, SYNC_USER, a.answer.a, 0), SMB_LOCK_LOST);
    CHECK_EQ(quick(&there, SMB_UNLOCK, SYNC_USER, b.answer.a, 0), SMB_OK);

    /* to a new copy, with a lease that has run out */
    place_make(&anew);
    sync_on_change(there.sync, carry, &anew);
    sync_show(there.sync, there.now);
    CHECK_EQ(anew.words->locks[SYNC_USER].expires_ns, 0);
    CHECK_EQ(anew.words->locks[SYNC_USER].token, b.answer.a);
    CHECK_EQ(anew.words->version, 3);
    place_end(&anew);
    place_end(&here);
    place_end(&there);
}

struct next_holder {
    struct place place;
    struct asked asked;
    _Atomic int status;
};

static void *take_next(void *argument)
{
    struct next_holder *next = argument;
    next->status = lock(&next->place, &next->asked, 2, 1, 0, 0);
    return NULL;
}

/* A change that was admitted ends before the next holder gets the lock, also if its lease has run
 * out by then. */
static void fenced_change_under_way(void)
{
    struct place place;
    struct asked a;
    pthread_t thread;
    place_make(&place);
    CHECK_EQ(lock(&place, &a, 1, 1, 0, 0), SMB_OK);
    CHECK_EQ(sync_fence_enter(place.sync, a.answer.a, place.now), SMB_OK);
    struct next_holder next = {.place = place, .status = SMB_DEFERRED};
    next.place.now += 2 * SECOND;
    CHECK_EQ(pthread_create(&thread, NULL, take_next, &next), 0);
    for (uint64_t end_ns = check_now_ns() + 50 * MS; check_now_ns() < end_ns;)
        CHECK(next.status == SMB_DEFERRED && place.words->locks[SYNC_USER].token == a.answer.a);
    sync_fence_leave(place.sync);
    pthread_join(thread, NULL);
    CHECK_EQ(next.status, SMB_OK);
    place_end(&place);
}

static void *close_it(void *argument)
{
    struct next_holder *last = argument;
    sync_close(last->place.sync, SMB_NOT_FOUND);
    last->status = SMB_NOT_FOUND;
    return NULL;
}

/* A lock may fence changes of another buffer, which stays as its own is deleted. The deletion waits
 * for a change that was admitted, and none is admitted after it: the lock of a buffer of that name
 * that is made anew may have the next holder. */
static void fenced_change_beside_a_deletion(void)
{
    struct place place;
    struct asked a;
    pthread_t thread;
    place_make(&place);
    CHECK_EQ(lock(&place, &a, 1, 1, 0, 0), SMB_OK);
    CHECK_EQ(sync_fence_enter(place.sync, a.answer.a, place.now), SMB_OK);
    struct next_holder last = {.place = place, .status = SMB_DEFERRED};
    CHECK_EQ(pthread_create(&thread, NULL, close_it, &last), 0);
    for (uint64_t end_ns = check_now_ns() + 50 * MS; check_now_ns() < end_ns;)
        CHECK_EQ(last.status, SMB_DEFERRED);
    sync_fence_leave(place.sync);
    pthread_join(thread, NULL);
    CHECK_EQ(sync_fence_enter(place.sync, a.answer.a, place.now), SMB_NOT_FOUND);
    place_end(&place);
}

/* All parties arrive, all leave. Repetitions change nothing, the next round follows, and another
 * number of parties is refused. */
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
    CHECK_EQ(ask(&place, &waiting, SMB_AWAIT_BARRIER, 1, 2, 0, 0, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(ask(&place, &b, SMB_ARRIVE, 2, 1, 0, 2, 0, 0), SMB_OK);
    CHECK(b.answer.a == 0 && b.answer.b == 1);
    CHECK(waiting.answers == 1 && waiting.answer.status == SMB_OK);
    CHECK_EQ(ask(&place, &c, SMB_AWAIT_BARRIER, 2, 2, 0, 0, FOREVER, 0), SMB_OK);
    /* repeated after the round is over */
    CHECK_EQ(ask(&place, &c, SMB_ARRIVE, 2, 1, 0, 2, 0, 0), SMB_OK);
    CHECK(c.answer.a == 0 && c.answer.b == 1);
    CHECK_EQ(ask(&place, &a, SMB_ARRIVE, 1, 3, 0, 2, 0, 0), SMB_OK);
    CHECK(a.answer.a == 1 && a.answer.b == 0);
    place_end(&place);
}

static void seat_and_wait(struct place *place, uint64_t session, uint64_t timeout,
                          struct asked *waiting)
{
    struct asked seat;
    CHECK_EQ(ask(place, &seat, SMB_ARRIVE, session, place->now, 0, 3, 0, 0), SMB_OK);
    CHECK_EQ(ask(place, waiting, SMB_AWAIT_BARRIER, session, place->now + 1, 0, seat.answer.a,
                 timeout, 0),
             SMB_DEFERRED);
}

/* A timeout, an absence, a session's end and a restart that a party does not survive break the
 * round for all its parties. */
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
            CHECK_EQ(ask(&place, &one, SMB_AWAIT_BARRIER, 1, 7, 0, 0, FOREVER, 0), SMB_DEFERRED);
        }
        pass(&place, SECOND);
        if (how == 1 || how == 3) {
            CHECK_EQ(one.answers, 0);
            pass(&place, SYNC_ABSENCE_MS * 1000000U);
        }
        CHECK(one.answers == 1 && one.answer.status == SMB_BROKEN);
        CHECK_EQ(ask(&place, &next, SMB_AWAIT_BARRIER, 2, 99, 0, 0, FOREVER, 0), SMB_BROKEN);
        /* the next round is not affected */
        CHECK_EQ(ask(&place, &next, SMB_ARRIVE, 1, 50, 0, 1, 0, 0), SMB_OK);
        CHECK_EQ(ask(&place, &next, SMB_AWAIT_BARRIER, 1, 51, 0, 1, FOREVER, 0), SMB_OK);
        place_end(&place);
    }
}

/* A party is present while as many of its calls wait as it has seats; otherwise it has
 * SYNC_ABSENCE_MS. */
static void presence(void)
{
    struct place place;
    struct asked seat, one, two, again;
    place_make(&place);
    seat_and_wait(&place, 1, FOREVER, &one);
    /* a second thread of that session */
    CHECK_EQ(ask(&place, &seat, SMB_ARRIVE, 1, 77, 0, 3, 0, 0), SMB_OK);
    CHECK_EQ(seat.answer.b, 1);
    pass(&place, (SYNC_ABSENCE_MS - 1) * MS);
    CHECK_EQ(ask(&place, &two, SMB_AWAIT_BARRIER, 1, 78, 0, 0, FOREVER, 0), SMB_DEFERRED);
    pass(&place, 100 * SECOND);
    CHECK(one.answers + two.answers == 0);
    CHECK(sync_forget(&two.waiter, place.now));
    pass(&place, (SYNC_ABSENCE_MS - 1) * MS);
    CHECK_EQ(ask(&place, &again, SMB_AWAIT_BARRIER, 1, 78, 0, 0, FOREVER, 0), SMB_DEFERRED);
    pass(&place, 100 * SECOND);
    CHECK(one.answers + again.answers == 0);
    /* the session has no seat */
    CHECK_EQ(ask(&place, &two, SMB_AWAIT_BARRIER, 2, 1, 0, 0, FOREVER, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &seat, SMB_ARRIVE, 2, 1, 0, 3, 0, 0), SMB_OK);
    CHECK(one.answer.status == SMB_OK && again.answer.status == SMB_OK &&
          one.answers + again.answers == 2);
    CHECK_EQ(ask(&place, &seat, SMB_ARRIVE, 2, 2, 0, 3, 0, 0), SMB_OK);
    pass(&place, SYNC_ABSENCE_MS * MS); /* it never waited */
    CHECK_EQ(ask(&place, &two, SMB_AWAIT_BARRIER, 2, 3, 0, 1, FOREVER, 0), SMB_BROKEN);
    seat_and_wait(&place, 1, FOREVER, &one);
    CHECK_EQ(ask(&place, &seat, SMB_ARRIVE, 1, 80, 0, 3, 0, 0), SMB_OK);
    pass(&place, SYNC_ABSENCE_MS * MS); /* one of its two threads never did */
    CHECK(one.answers == 1 && one.answer.status == SMB_BROKEN);
    place_end(&place);
}

/* The result of a round is known for 62 rounds, over restarts; older rounds are reported as
 * broken. */
static void old_rounds(void)
{
    struct place place;
    struct asked asked;
    struct random random = random_make(11);
    bool broken[300];
    place_make(&place);
    for (uint64_t round = 0; round < 300; round++) {
        broken[round] = random_below(&random, 2);
        CHECK_EQ(ask(&place, &asked, SMB_ARRIVE, 1, 2 * round + 1, 0, 1 + broken[round], 0, 0),
                 SMB_OK);
        CHECK(asked.answer.a == round && asked.answer.b == 0);
        if (broken[round])
            CHECK_EQ(ask(&place, &asked, SMB_AWAIT_BARRIER, 1, 2 * round + 2, 0, round, 0, 0),
                     SMB_BROKEN);
        if (random_below(&random, 4) == 0)
            place_restart(&place);
        uint64_t old = round - (round < 80 ? round : random_below(&random, 80));
        CHECK_EQ(ask(&place, &asked, SMB_AWAIT_BARRIER, 1, 0, 0, old, FOREVER, 0),
                 broken[old] || round + 1 - old > 62 ? SMB_BROKEN : SMB_OK);
    }
    place_end(&place);
}

/* Versions are numbered. A publication wakes waiting requests, and waits for pins on the slot that
 * it overwrites. */
static void versions(void)
{
    struct place place;
    struct asked turn, waiting, pin, later;
    place_make(&place);
    CHECK_EQ(ask(&place, &waiting, SMB_AWAIT_VERSION, 5, 1, 0, 1, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(ask(&place, &later, SMB_AWAIT_VERSION, 5, 2, 0, 2, 100, 0), SMB_DEFERRED);
    for (uint64_t version = 1; version <= 3; version++) {
        CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, version, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK);
        CHECK(turn.answer.b == version && turn.answer.a % 2 == SYNC_PUBLISHER);
        CHECK_EQ(ask(&place, &pin, SMB_AWAIT_VERSION, 5, 3, 0, 0, 0, 0), SMB_OK);
        CHECK(pin.answer.a == version - 1 && pin.answer.b == version);
        CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, version + 1), SMB_INVALID);
        CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, version - 1), SMB_INVALID);
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
    /* version 4 overwrites the slot of version 2 */
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 10, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK);
    CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, 4), SMB_OK);
    /* version 5 that of version 3, which is pinned */
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 11, SYNC_PUBLISHER, 1000, FOREVER, 0), SMB_DEFERRED);
    sync_end_session(place.sync, 6, place.now);
    CHECK(turn.answers == 1 && turn.answer.status == SMB_OK && turn.answer.b == 5);
    place_end(&place);
}

static uint64_t copy_of(struct place *place, uint64_t version)
{
    struct asked asked;
    CHECK_EQ(ask(place, &asked, SMB_AWAIT_VERSION, 5, 3, 0, 0, 0, version + 1), SMB_OK);
    return asked.answer.b; /* 1 + slot, or 0 */
}

/* Publishes the next version of a buffer with so many slots; returns the slot that it got. */
static uint64_t publish_in(struct place *place, uint64_t copies, uint64_t sequence)
{
    struct asked turn;
    uint64_t latest = place->words->version;
    CHECK_EQ(ask(place, &turn, SMB_LOCK, 1, sequence, SYNC_PUBLISHER | copies << 8, 1000, 0, 0),
             SMB_OK);
    uint64_t version = turn.answer.b & (((uint64_t)1 << 56) - 1), copy = turn.answer.b >> 56;
    CHECK(version == latest + 1 && copy < copies && copy_of(place, version) == 0);
    CHECK(copies == 1 || copy_of(place, latest) != 0); /* the latest version stays where it is */
    CHECK_EQ(quick(place, SMB_PUBLISH, 0, turn.answer.a, version), SMB_OK);
    CHECK_EQ(copy_of(place, version), 1 + copy);
    return copy;
}

/* A publication uses the oldest slot that is neither the latest nor pinned. With K slots K - 1
 * versions can be read, and K - 2 readers of different versions delay no publisher. */
static void many_copies(void)
{
    static const uint64_t all[] = {2, 3, 4, 16};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct place place;
        struct asked pins[16], turn;
        uint64_t copies = all[i], sequence = 1, held[16];
        place_make(&place);
        CHECK_EQ(copy_of(&place, 0), 1); /* zeros, in the first slot */
        for (; sequence <= 40; sequence++) {
            publish_in(&place, copies, sequence);
            if (sequence % 7 == 0)
                place_restart(&place), pass(&place, SECOND);
            for (uint64_t back = 0; back < copies - 1 && back < sequence; back++)
                CHECK(copy_of(&place, sequence - back) != 0);
        }
        /* Readers, each on another version: they pin the oldest as long as a slot is free. */
        for (uint64_t pin = 0; pin < copies - 2; pin++) {
            uint64_t latest = place.words->version;
            CHECK_EQ(ask(&place, &pins[pin], SMB_PIN, 6, 100 + pin, 0, 0, 0, 0), SMB_OK);
            CHECK_EQ(pins[pin].answer.a, latest);
            held[pin] = copy_of(&place, latest);
            for (int turns = 0; turns < 20; turns++) {
                uint64_t copy = publish_in(&place, copies, sequence++);
                for (uint64_t p = 0; p <= pin; p++)
                    CHECK(1 + copy != held[p] && copy_of(&place, pins[p].answer.a) == held[p]);
            }
        }
        /* One more pin, and the publication after next has no slot. */
        uint64_t last = place.words->version;
        CHECK_EQ(ask(&place, &turn, SMB_PIN, 7, 1, 0, 0, 0, last + 1), SMB_OK);
        CHECK_EQ(turn.answer.a, last);
        CHECK_EQ(ask(&place, &turn, SMB_PIN, 7, 2, 0, 0, 0, last + 2), SMB_LOCK_LOST);
        publish_in(&place, copies, sequence++);
        CHECK_EQ(
            ask(&place, &turn, SMB_LOCK, 1, sequence++, SYNC_PUBLISHER | copies << 8, 1000, 0, 0),
            SMB_TIMEOUT);
        CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, sequence++, SYNC_PUBLISHER | copies << 8, 1000,
                     FOREVER, 0),
                 SMB_DEFERRED);
        uint64_t oldest = copies > 2 ? pins[0].answer.a : last, copy = copy_of(&place, oldest);
        pass(&place, SYNC_PIN_MS * MS); /* readers that do not renew are overtaken */
        CHECK(turn.answers == 1 && turn.answer.b == ((last + 2) | (copy - 1) << 56));
        CHECK_EQ(copy_of(&place, oldest), 0);
        CHECK_EQ(ask(&place, &pins[0], SMB_PIN, 7, 9, 0, 0, 0, oldest + 1), SMB_LOCK_LOST);
        /* The publisher dies: the next one writes the same slot. */
        pass(&place, 2 * SECOND);
        CHECK_EQ(1 + publish_in(&place, copies, sequence++), copy);
        place_end(&place);
    }
}

static int publish_as(struct place *place, uint64_t token, uint64_t begun, uint64_t number)
{
    struct asked asked;
    return ask(place, &asked, SMB_PUBLISH, 1, 1, 0, token, begun, number);
}

/* A mirror publishes with its source's numbers, and may skip some. */
static void numbers_of_a_mirror(void)
{
    static const uint64_t all[] = {2, 3, 16};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct place place;
        struct asked turn, waiting;
        uint64_t last = 0, number = 3, sequence = 1;
        place_make(&place);
        for (; sequence <= 40; sequence++) {
            CHECK_EQ(
                ask(&place, &turn, SMB_LOCK, 1, sequence, SYNC_PUBLISHER | all[i] << 8, 1000, 0, 0),
                SMB_OK);
            CHECK_EQ(ask(&place, &waiting, SMB_AWAIT_VERSION, 9, sequence, 0, last + 1, FOREVER, 0),
                     SMB_DEFERRED);
            uint64_t copy = turn.answer.b >> 56, token = turn.answer.a;
            if (last) /* 0: no number is given */
                CHECK_EQ(publish_as(&place, token, last + 1, last), SMB_INVALID);
            CHECK_EQ(publish_as(&place, token, last + 1, (uint64_t)1 << 56), SMB_INVALID);
            CHECK_EQ(publish_as(&place, token, number, number),
                     number == last + 1 ? SMB_OK : SMB_INVALID);
            CHECK_EQ(publish_as(&place, token, last + 1, number), SMB_OK);
            CHECK_EQ(publish_as(&place, token, last + 1, number), SMB_OK); /* repeated */
            CHECK(waiting.answers == 1 && waiting.answer.a == number);
            CHECK_EQ(quick(&place, SMB_AWAIT_VERSION, 0, number + 1, 0), SMB_TIMEOUT);
            CHECK(copy_of(&place, number) == 1 + copy && copy_of(&place, last) != 0);
            if (sequence % 5 == 0) { /* nothing is lost by that, not even the older version */
                place_restart(&place), pass(&place, SECOND);
                CHECK(copy_of(&place, number) == 1 + copy && copy_of(&place, last) != 0);
            }
            last = number;
            number += 1 + sequence % 4;
        }
        place_end(&place);
    }
}

/* Invalid numbers of slots, also for a lock without slots; segments from before the table of
 * slots. */
static void copies_of_others(void)
{
    struct place place;
    struct asked turn;
    place_make(&place);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 1, SYNC_PUBLISHER | 17 << 8, 1000, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 1, SYNC_USER | 2 << 8, 1000, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 1, 2, 1000, 0, 0), SMB_INVALID);
    for (uint64_t version = 2; version < 6; version++) {
        for (int began = 0; began < 2; began++) {
            memset((void *)place.words->slots, 0, sizeof place.words->slots);
            place.words->version = version;
            place.words->writing = version + (uint64_t)began;
            place_restart(&place);
            pass(&place, SECOND);
            CHECK_EQ(copy_of(&place, version), 1 + version % 2);
            CHECK_EQ(copy_of(&place, version - 1), began ? 0 : 1 + (version - 1) % 2);
        }
    }
    CHECK_EQ(publish_in(&place, 2, 50), 0);
    place_end(&place);
}

/* A pin holds for as long as was asked, at most SYNC_PIN_MS; repeating the request does not prolong
 * it. */
static void pins_run_out(void)
{
    struct place place;
    struct asked pin, turn;
    place_make(&place);
    publish(&place, 1);
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 1, 0, SYNC_PIN_MS + 1, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 2, 0, UINT64_MAX, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 3, 0, 2000, 0, 0), SMB_OK);
    CHECK_EQ(pin.answer.a, 1);
    publish(&place, 2);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 10, SYNC_PUBLISHER, 1000, FOREVER, 0), SMB_DEFERRED);
    pass(&place, SECOND);
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 3, 0, 2000, 0, 0), SMB_OK); /* repeated */
    CHECK(pin.answer.a == 1 && turn.answers == 0);
    pass(&place, SECOND - MS);
    CHECK_EQ(turn.answers, 0);
    pass(&place, MS);
    CHECK(turn.answers == 1 && turn.answer.status == SMB_OK && turn.answer.b == 3);
    place_end(&place);
}

/* Each request makes one pin, also if it is repeated. The pin holds for SYNC_PIN_MS, and a session
 * can have a limited number of pins. */
static void pins(void)
{
    struct place place;
    struct asked one, two, turn;
    place_make(&place);
    publish(&place, 1);
    CHECK_EQ(ask(&place, &one, SMB_PIN, 6, 1, 0, 0, 0, 0), SMB_OK);
    CHECK_EQ(ask(&place, &two, SMB_PIN, 6, 2, 0, 0, 0, 0), SMB_OK);
    CHECK_EQ(ask(&place, &turn, SMB_PIN, 6, 1, 0, 0, 0, 0), SMB_OK); /* repeated */
    CHECK(turn.answer.a == 1 && turn.answer.b == one.answer.b && one.answer.b != two.answer.b);
    publish(&place, 2);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 9, SYNC_PUBLISHER, 1000, 0, 0), SMB_TIMEOUT);
    CHECK(turn.answer.a == 6 && turn.answer.b == 1); /* who is in the way, and with which version */
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 19, SYNC_PUBLISHER, 1000, 500, 0), SMB_DEFERRED);
    pass(&place, SECOND);
    CHECK(turn.answers == 1 && turn.answer.status == SMB_TIMEOUT);
    CHECK(turn.answer.a == 6 && turn.answer.b == 1);
    turn = (struct asked){.answers = 0};
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 10, SYNC_PUBLISHER, 1000, FOREVER, 0), SMB_DEFERRED);
    for (int twice = 0; twice < 2; twice++)
        CHECK_EQ(ask(&place, &one, SMB_UNPIN, 6, 3, 0, one.answer.b ? one.answer.b : 1, 0, 0),
                 SMB_OK);
    /* the pin of another session */
    CHECK_EQ(ask(&place, &one, SMB_UNPIN, 7, 3, 0, two.answer.b, 0, 0), SMB_OK);
    CHECK_EQ(turn.answers, 0);
    pass(&place, SYNC_PIN_MS * MS);
    CHECK(turn.answers == 1 && turn.answer.status == SMB_OK && turn.answer.b == 3);
    uint64_t made = 0;
    while (made < 100000 && ask(&place, &one, SMB_PIN, 8, made + 1, 0, 0, 0, 0) == SMB_OK)
        made++;
    CHECK(made >= 100 && made < 100000);
    CHECK_EQ(ask(&place, &one, SMB_PIN, 9, 1, 0, 0, 0, 0), SMB_OK);
    place_end(&place);
}

/* A renewed pin holds until the waiting publisher's time for pins is over, which counts from the
 * first publisher that had to wait. */
static void pins_renewed(void)
{
    struct place place;
    struct asked pin, turn;
    struct sync_answer answer;
    place_make(&place);
    publish(&place, 1);
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 1, 0, 0, 0, 0), SMB_OK);
    uint64_t name = pin.answer.b;
    publish(&place, 2);
    struct sync_request publication = {.opcode = SMB_LOCK,
                                       .session = 1,
                                       .sequence = 10,
                                       .argument = SYNC_PUBLISHER,
                                       .words = {1000, 0, 0, 50000}};
    CHECK_EQ(sync_ask(place.sync, &publication, &turn.waiter, place.now, &answer), SMB_TIMEOUT);
    for (int i = 0; i < 49; i++) {
        pass(&place, SECOND);
        CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 2 + (uint64_t)i, 0, 2000, name, 0), SMB_OK);
        CHECK(pin.answer.a == 1 && pin.answer.b == name);
    }
    /* of another session */
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 7, 1, 0, 0, name, 0), SMB_LOCK_LOST);
    turn = (struct asked){.answers = 0};
    /* a request that would wait 30 s: these pins have ended */
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 11, SYNC_PUBLISHER, 1000, FOREVER, 0), SMB_OK);
    CHECK_EQ(turn.answer.b, 3);
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 100, 0, 2000, name, 0), SMB_LOCK_LOST);
    CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, 3), SMB_OK);
    place_end(&place);
}

/* A waiting publisher has its turn when its time for readers is over, although they renew their
 * pins. */
static void pins_overtaken(void)
{
    struct place place;
    struct asked pin, turn;
    place_make(&place);
    publish(&place, 1);
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 1, 0, 0, 0, 0), SMB_OK);
    uint64_t name = pin.answer.b;
    publish(&place, 2);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 10, SYNC_PUBLISHER, 1000, FOREVER, 0), SMB_DEFERRED);
    for (uint64_t i = 0; i < SYNC_PIN_MS / 1000 - 1; i++) {
        pass(&place, SECOND);
        CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 2 + i, 0, 0, name, 0), SMB_OK);
        CHECK_EQ(turn.answers, 0);
    }
    pass(&place, SECOND);
    CHECK(turn.answers == 1 && turn.answer.status == SMB_OK && turn.answer.b == 3);
    CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 100, 0, 0, name, 0), SMB_LOCK_LOST);
    CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, 3), SMB_OK);
    publish(&place, 4);
    place_end(&place);
}

/* A pin that delayed a publisher and was removed is not counted against a later one. */
static void pins_let_go(void)
{
    for (int how = 0; how < 3; how++) { /* unpinned, expired, session ended */
        struct place place;
        struct asked pin, turn;
        place_make(&place);
        publish(&place, 1);
        CHECK_EQ(ask(&place, &pin, SMB_PIN, 6, 1, 0, 1000, 0, 0), SMB_OK);
        publish(&place, 2);
        CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 10, SYNC_PUBLISHER, 1000, 0, 0), SMB_TIMEOUT);
        if (how == 0)
            CHECK_EQ(ask(&place, &turn, SMB_UNPIN, 6, 2, 0, pin.answer.b, 0, 0), SMB_OK);
        if (how == 2)
            sync_end_session(place.sync, 6, place.now);
        pass(&place, 2 * SYNC_PIN_MS * MS);
        CHECK_EQ(ask(&place, &pin, SMB_PIN, 7, 1, 0, 0, 0, 0), SMB_OK);
        CHECK_EQ(pin.answer.a, 2);
        publish(&place, 3);
        CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 11, SYNC_PUBLISHER, 1000, FOREVER, 0),
                 SMB_DEFERRED);
        pass(&place, SYNC_PIN_MS * MS / 2);
        CHECK_EQ(turn.answers, 0);
        CHECK_EQ(ask(&place, &pin, SMB_PIN, 7, 2, 0, 0, pin.answer.b, 0), SMB_OK);
        pass(&place, SYNC_PIN_MS * MS / 2);
        CHECK(turn.answers == 1 && turn.answer.status == SMB_OK && turn.answer.b == 4);
        place_end(&place);
    }
}

/* A waiting request is told once that the session or the segment is gone; then nothing more is done
 * there. */
static void ends(void)
{
    struct place place;
    struct asked held, waits[4], late;
    for (int whole = 0; whole < 2; whole++) {
        place_make(&place);
        CHECK_EQ(lock(&place, &held, 1, 1, 0, 0), SMB_OK);
        CHECK_EQ(lock(&place, &waits[0], 2, 1, FOREVER, 0), SMB_DEFERRED);
        CHECK_EQ(ask(&place, &waits[1], SMB_AWAIT_VERSION, 2, 2, 0, 5, FOREVER, 0), SMB_DEFERRED);
        seat_and_wait(&place, 2, FOREVER, &waits[2]);
        seat_and_wait(&place, 3, FOREVER, &waits[3]);
        if (whole)
            sync_close(place.sync, SMB_NOT_FOUND);
        else
            sync_end_session(place.sync, 2, place.now);
        for (int i = 0; i < 4; i++)
            CHECK(waits[i].answers == 1 && !sync_forget(&waits[i].waiter, place.now));
        for (int i = 0; i < 3; i++)
            CHECK_EQ(waits[i].answer.status, whole ? SMB_NOT_FOUND : SMB_SESSION_ENDED);
        CHECK_EQ(waits[3].answer.status, whole ? SMB_NOT_FOUND : SMB_BROKEN);
        CHECK_EQ(lock(&place, &late, 3, 9, 0, 0), whole ? SMB_NOT_FOUND : SMB_TIMEOUT);
        CHECK_EQ(sync_tick(place.sync, place.now) == UINT64_MAX, whole);
        place_end(&place);
    }
}

/* One publication wakes a thousand waiting requests, each once. */
static void thousand_waiters(void)
{
    enum { MANY = 1000 };
    struct place place;
    struct asked turn, *many = calloc(MANY, sizeof *many);
    place_make(&place);
    for (uint64_t i = 0; i < MANY; i++)
        CHECK_EQ(ask(&place, &many[i], SMB_AWAIT_VERSION, i + 1, 1, 0, 1, FOREVER, 0),
                 SMB_DEFERRED);
    CHECK_EQ(ask(&place, &turn, SMB_LOCK, 1, 2, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK);
    CHECK_EQ(quick(&place, SMB_PUBLISH, 0, turn.answer.a, 1), SMB_OK);
    for (int i = 0; i < MANY; i++)
        CHECK(many[i].answers == 1 && many[i].answer.status == SMB_OK);
    place_end(&place);
    free(many);
}

static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

/* Processor time of 500 rounds of all searches among `many` waiting requests in the worst order:
 * each asks before all others, awaits a version that never comes, and has its own deadline; or has
 * a pin that publishers wait for. */
static uint64_t time_among(uint64_t many, bool pinned)
{
    enum { TURNS = 500 };
    struct place place;
    struct asked holder, turn, again, late, pin, *locks = calloc(many, sizeof *locks),
                                                 *versions = calloc(many, sizeof *versions);
    place_make(&place);
    place.now += 1000000 * SECOND;
    CHECK_EQ(ask(&place, &holder, SMB_LOCK, 1, 1, SYNC_USER, SYNC_TTL_MS_MAX, 0, 0), SMB_OK);
    for (uint64_t i = 0; i < many; i++) {
        CHECK_EQ(lock(&place, &locks[i], 2 + i % 7, i, 1000000 + i, i), SMB_DEFERRED);
        CHECK_EQ(
            ask(&place, &versions[i], SMB_AWAIT_VERSION, 2, i, 0, UINT64_MAX - i, 1000000 + i, 0),
            SMB_DEFERRED);
        if (pinned)
            CHECK_EQ(ask(&place, &pin, SMB_PIN, 20 + i / 1000, i + 1, 0, 0, 0, 0), SMB_OK);
    }
    uint64_t begun_ns = cpu_ns();
    for (uint64_t i = 1; i <= TURNS; i++) {
        CHECK_EQ(lock(&place, &again, 2, many + i, 2, many + i), SMB_DEFERRED);
        CHECK_EQ(lock(&place, &late, 2, many + i, 3, many + i), SMB_DEFERRED); /* takes its place */
        CHECK_EQ(again.answer.status, SMB_DISCONNECTED);
        CHECK_EQ(ask(&place, &pin, SMB_PIN, 9, i, 0, 0, 0, 0), SMB_OK);
        CHECK_EQ(ask(&place, &turn, SMB_UNPIN, 9, 0, 0, i, 0, 0), SMB_OK);
        if (!pinned)
            publish(&place, i);
        pass(&place, 4 * MS);
        CHECK_EQ(late.answer.status, SMB_TIMEOUT);
        sync_end_session(place.sync, 10, place.now);
        struct sync_status seen;
        sync_status(place.sync, place.now, &seen);
        CHECK_EQ(seen.versions_waiting, many);
    }
    uint64_t took_ns = cpu_ns() - begun_ns;
    place_end(&place);
    free(locks);
    free(versions);
    return took_ns;
}

/* Waiting requests do not slow down the answers to others: a hundred times as many cost a few times
 * as much, because of caches. */
static void many_wait_in_vain(void)
{
    for (int pinned = 0; pinned < 2; pinned++) {
        uint64_t few_ns = UINT64_MAX, many_ns = UINT64_MAX;
        for (int i = 0; i < 3; i++) {
            uint64_t few = time_among(300, pinned),
                     many = time_among(30000 / check_thinned(), pinned);
            few_ns = few < few_ns ? few : few_ns;
            many_ns = many < many_ns ? many : many_ns;
        }
        printf("among 300: %.3f ms, among %d: %.3f ms\n", (double)few_ns / 1e6,
               30000 / check_thinned(), (double)many_ns / 1e6);
        CHECK(many_ns < 12 * few_ns);
    }
}

/* The status shows who holds each lock and for how much longer, how many requests wait for what,
 * and how many parties have arrived at a barrier. */
static void seen_by_people(void)
{
    struct place place;
    struct asked a, b, c, d;
    struct sync_status now;
    place_make(&place);
    sync_status(place.sync, place.now, &now);
    CHECK(now.locks[SYNC_USER].session == 0 && now.locks[SYNC_USER].waiting == 0 &&
          now.parties == 0);
    CHECK_EQ(lock(&place, &a, 7, 1, 0, 0), SMB_OK);
    CHECK_EQ(lock(&place, &b, 8, 1, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(ask(&place, &c, SMB_AWAIT_VERSION, 9, 1, 0, 1, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(ask(&place, &d, SMB_ARRIVE, 9, 2, 0, 3, 0, 0), SMB_OK);
    CHECK_EQ(ask(&place, &d, SMB_AWAIT_BARRIER, 9, 3, 0, 0, FOREVER, 0), SMB_DEFERRED);
    place.now += SECOND / 4;
    sync_status(place.sync, place.now, &now);
    CHECK(now.locks[SYNC_USER].session == 7 && now.locks[SYNC_USER].token == a.answer.a);
    CHECK(now.locks[SYNC_USER].left_ms == 750 && now.locks[SYNC_USER].waiting == 1);
    CHECK(now.locks[SYNC_PUBLISHER].session == 0 && now.versions_waiting == 1);
    CHECK(now.barrier_waiting == 1 && now.arrived == 1 && now.parties == 3);
    place.now += SECOND; /* the lease has run out, whether or not the ticker has noticed */
    sync_status(place.sync, place.now, &now);
    CHECK_EQ(now.locks[SYNC_USER].session, 0);
    place_end(&place);
}

/* Only a segment that was idle for that long is retired: not one with a held lock, a waiting
 * request, a pin or a round under way. Then no request is answered any more, also after a
 * restart. */
static void retired(void)
{
    static const uint64_t IDLE = 10 * SECOND;
    struct place place;
    struct asked a, b, c;
    uint64_t token = 0;
    place_make(&place);
    CHECK_EQ(sync_retire(place.sync, IDLE, place.now, &token), SMB_BUSY); /* it is new */
    CHECK_EQ(sync_retire(place.sync, 0, place.now - 1, &token), SMB_BUSY);
    CHECK_EQ(sync_raise_token(place.sync, 41), SMB_INVALID);
    CHECK_EQ(sync_raise_token(place.sync, 40), SMB_OK);
    CHECK_EQ(sync_raise_token(place.sync, 20), SMB_OK);
    CHECK_EQ(ask(&place, &a, SMB_LOCK, 1, 1, SYNC_USER, 60000, 0, 0), SMB_OK);
    CHECK_EQ(a.answer.a, 42);
    pass(&place, 2 * IDLE);
    CHECK_EQ(sync_retire(place.sync, IDLE, place.now, &token), SMB_BUSY); /* held */
    CHECK_EQ(lock(&place, &b, 2, 1, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, 40, 0), SMB_LOCK_LOST);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, 42, 0), SMB_OK);
    CHECK_EQ(b.answer.a, 44);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, 44, 0), SMB_OK);
    CHECK_EQ(ask(&place, &b, SMB_ARRIVE, 9, 2, 0, 2, 0, 0), SMB_OK);
    pass(&place, 2 * IDLE);
    /* the party that left broke the round */
    CHECK_EQ(sync_retire(place.sync, IDLE, place.now, &token), SMB_OK);
    CHECK_EQ(token, 44);
    place_end(&place);

    place_make(&place);
    CHECK_EQ(ask(&place, &a, SMB_AWAIT_VERSION, 9, 1, 0, 1, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(ask(&place, &b, SMB_ARRIVE, 9, 2, 0, 2, 0, 0), SMB_OK);
    CHECK_EQ(ask(&place, &c, SMB_AWAIT_BARRIER, 9, 3, 0, 0, FOREVER, 0), SMB_DEFERRED);
    pass(&place, 2 * IDLE);
    CHECK_EQ(sync_retire(place.sync, IDLE, place.now, &token), SMB_BUSY);
    CHECK(sync_forget(&a.waiter, place.now));
    CHECK_EQ(sync_retire(place.sync, IDLE, place.now, &token), SMB_BUSY);
    sync_end_session(place.sync, 9, place.now);
    CHECK_EQ(ask(&place, &a, SMB_LOCK, 1, 1, SYNC_USER, 1000, 0, 0), SMB_OK);
    pass(&place, IDLE - 1); /* the lease has run out */
    CHECK_EQ(sync_retire(place.sync, IDLE, place.now, &token), SMB_BUSY);
    pass(&place, 1);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(sync_retire(place.sync, IDLE, place.now, &token), SMB_OK);
        CHECK_EQ(token, a.answer.a);
        CHECK_EQ(lock(&place, &b, 2, 5, FOREVER, 0), SMB_NOT_FOUND);
        CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, token, 0), SMB_NOT_FOUND);
        place_restart(&place);
    }
    place.words->retired = 1; /* garbage */
    place_restart(&place);
    CHECK_EQ(lock(&place, &b, 2, 5, FOREVER, 0), SMB_DEFERRED); /* during the grace */
    CHECK(sync_forget(&b.waiter, place.now));
    pass(&place, IDLE);
    sync_close(place.sync, SMB_NOT_FOUND); /* deleted, not retired */
    CHECK_EQ(sync_retire(place.sync, 0, place.now, &token), SMB_BUSY);
    place_end(&place);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(locks),
        TEST(locks_over_a_restart),
        TEST(grace),
        TEST(words_at_another_copy),
        TEST(longest_lease),
        TEST(long_queue),
        TEST(fences),
        TEST(fenced_change_under_way),
        TEST(fenced_change_beside_a_deletion),
        TEST(barriers),
        TEST(broken_barriers),
        TEST(presence),
        TEST(old_rounds),
        TEST(versions),
        TEST(numbers_of_a_mirror),
        TEST(many_copies),
        TEST(copies_of_others),
        TEST(pins),
        TEST(pins_run_out),
        TEST(pins_renewed),
        TEST(pins_overtaken),
        TEST(pins_let_go),
        TEST(ends),
        TEST(thousand_waiters),
        TEST(many_wait_in_vain),
        TEST(seen_by_people),
        TEST(retired),
    };
    return RUN_TESTS(tests);
}
