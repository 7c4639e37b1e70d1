/* Shared holders of the user's lock: many or one, in order, each with its own lease and all with
 * one token, also over restarts and at another copy. */
#include <string.h>

#include "sync/pins.h"
#include "random.h"
#include "sync_place.h"

enum { SHARED = SYNC_USER | SYNC_SHARED << SYNC_LOCK_BITS };

static int share(struct place *place, struct asked *asked, uint64_t session, uint64_t sequence,
                 uint64_t timeout)
{
    return ask(place, asked, SMB_LOCK, session, sequence, SHARED, 1000, timeout, 0);
}

static int let_go(struct place *place, uint64_t session, const struct asked *asked)
{
    struct asked made;
    return ask(place, &made, SMB_UNLOCK, session, 99, SHARED, asked->answer.a, asked->answer.b, 0);
}

static int renew(struct place *place, uint64_t session, const struct asked *asked)
{
    struct asked made;
    return ask(place, &made, SMB_RENEW, session, 99, SHARED, asked->answer.a, 1000,
               asked->answer.b);
}

static bool fence_holds(struct place *place, uint64_t token)
{
    if (sync_fence_enter(place->sync, token, place->now) != SMB_OK)
        return false;
    sync_fence_leave(place->sync);
    return true;
}

/* Three sessions share it under one token, a fourth has it alone after the last of them, and those
 * who ask meanwhile wait behind the fourth. */
static void many_or_one(void)
{
    struct place place;
    struct asked a, b, c, again, alone, late[2];
    place_make(&place);
    CHECK_EQ(share(&place, &a, 1, 1, 0), SMB_OK);
    CHECK_EQ(share(&place, &b, 2, 1, 0), SMB_OK);
    CHECK_EQ(share(&place, &c, 2, 2, 0), SMB_OK); /* the same session, another holding */
    uint64_t token = a.answer.a;
    CHECK(token > 0 && token % 2 == SYNC_USER && b.answer.a == token && c.answer.a == token);
    CHECK(b.answer.b != 0 && b.answer.b != c.answer.b);
    CHECK_EQ(share(&place, &again, 1, 1, 0), SMB_OK); /* repeated */
    CHECK(again.answer.a == token && again.answer.b == a.answer.b);
    CHECK(fence_holds(&place, token));
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, token, 0), SMB_LOCK_LOST); /* not for all */
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, token, 1000), SMB_LOCK_LOST);
    CHECK_EQ(lock(&place, &alone, 4, 1, 0, 0), SMB_TIMEOUT);
    CHECK(alone.answer.a == 1 || alone.answer.a == 2); /* a holder's session */
    CHECK_EQ(lock(&place, &alone, 4, 2, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(share(&place, &late[0], 5, 1, FOREVER), SMB_DEFERRED);
    CHECK_EQ(share(&place, &late[1], 6, 1, FOREVER), SMB_DEFERRED);
    CHECK_EQ(share(&place, &again, 7, 1, 0), SMB_TIMEOUT);
    CHECK_EQ(let_go(&place, 1, &a), SMB_OK);
    CHECK_EQ(let_go(&place, 2, &c), SMB_OK);
    CHECK_EQ(let_go(&place, 2, &c), SMB_OK); /* repeated: b's holding goes on */
    CHECK_EQ(alone.answers, 0);
    CHECK_EQ(let_go(&place, 2, &b), SMB_OK);
    CHECK(alone.answers == 1 && alone.answer.status == SMB_OK && alone.answer.a > token);
    CHECK(alone.answer.b == 0 && late[0].answers == 0);
    CHECK(!fence_holds(&place, token));
    CHECK_EQ(let_go(&place, 2, &b), SMB_OK); /* repeated, and the lock is another's by now */
    CHECK_EQ(renew(&place, 2, &b), SMB_LOCK_LOST);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, alone.answer.a, 0), SMB_OK);
    CHECK(late[0].answers == 1 && late[1].answers == 1); /* both at once */
    CHECK(late[0].answer.a == late[1].answer.a && late[0].answer.a > alone.answer.a);
    place_end(&place);
}

/* A session that shares it does not wait behind one that waits for that session: neither wait would
 * end. Others still wait, and after a restart it is the renewal that tells who shares it. */
static void nobody_waits_for_itself(void)
{
    struct place place;
    struct asked a, nested[2], alone, other;
    place_make(&place);
    CHECK_EQ(share(&place, &a, 1, 1, 0), SMB_OK);
    CHECK_EQ(lock(&place, &alone, 2, 1, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(share(&place, &other, 3, 1, FOREVER), SMB_DEFERRED);
    CHECK_EQ(share(&place, &nested[0], 1, 2, 0), SMB_OK);
    CHECK(nested[0].answer.a == a.answer.a && nested[0].answer.b != a.answer.b);
    CHECK_EQ(ask(&place, &nested[1], SMB_LOCK, 1, 3, SYNC_USER, 1000, 0, 0), SMB_TIMEOUT);
    CHECK_EQ(let_go(&place, 1, &a), SMB_OK);
    CHECK(alone.answers == 0 && other.answers == 0);
    CHECK_EQ(let_go(&place, 1, &nested[0]), SMB_OK);
    CHECK(alone.answers == 1 && other.answers == 0); /* the first ones come next, in order */
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, alone.answer.a, 0), SMB_OK);
    CHECK_EQ(other.answers, 1);
    CHECK_EQ(let_go(&place, 3, &other), SMB_OK);

    CHECK_EQ(ask(&place, &a, SMB_LOCK, 1, 4, SHARED, 60000, 0, 0), SMB_OK);
    place_restart(&place);
    CHECK_EQ(lock(&place, &alone, 2, 2, FOREVER, 0), SMB_DEFERRED);
    CHECK_EQ(share(&place, &nested[0], 1, 5, FOREVER), SMB_DEFERRED);
    CHECK_EQ(share(&place, &other, 3, 2, FOREVER), SMB_DEFERRED);
    CHECK_EQ(share(&place, &nested[1], 1, 6, FOREVER), SMB_DEFERRED);
    CHECK_EQ(renew(&place, 1, &a), SMB_OK);
    CHECK_EQ(nested[0].answers, 0); /* nobody gets it so soon after a restart */
    pass(&place, SYNC_GRACE_MS * MS);
    CHECK_EQ(renew(&place, 1, &a), SMB_OK);
    CHECK(nested[0].answers == 1 && nested[0].answer.status == SMB_OK);
    CHECK(nested[1].answers == 1 && nested[1].answer.a == a.answer.a);
    CHECK(alone.answers == 0 && other.answers == 0);
    place_end(&place);
}

/* What is no holding cannot be released or renewed as one, and a request that makes no sense is
 * refused. */
static void what_is_refused(void)
{
    struct place place;
    struct asked a, b, made;
    place_make(&place);
    enum { OTHER = SYNC_USER | 2 << SYNC_LOCK_BITS, TURN = SYNC_PUBLISHER | 1 << SYNC_LOCK_BITS };
    CHECK_EQ(ask(&place, &a, SMB_LOCK, 1, 1, OTHER, 1000, 0, 0), SMB_INVALID);
    CHECK_EQ(ask(&place, &a, SMB_LOCK, 1, 1, SHARED, SYNC_TTL_MS_MIN - 1, 0, 0), SMB_INVALID);
    CHECK_EQ(share(&place, &a, 1, 1, 0), SMB_OK);
    for (int opcode = SMB_UNLOCK; opcode <= SMB_RENEW; opcode++) {
        CHECK_EQ(ask(&place, &made, opcode, 1, 2, OTHER, a.answer.a, 1000, 1), SMB_INVALID);
        CHECK_EQ(ask(&place, &made, opcode, 1, 2, TURN, 3, 1000, 1), SMB_INVALID);
    }
    CHECK_EQ(renew(&place, 2, &a), SMB_LOCK_LOST); /* another session's */
    CHECK_EQ(let_go(&place, 2, &a), SMB_OK);       /* as if it had been released; nothing is */
    CHECK_EQ(lock(&place, &b, 3, 1, 0, 0), SMB_TIMEOUT);
    CHECK_EQ(let_go(&place, 1, &a), SMB_OK);
    CHECK_EQ(lock(&place, &b, 3, 2, 0, 0), SMB_OK);
    CHECK_EQ(share(&place, &a, 1, 3, 0), SMB_TIMEOUT);
    CHECK_EQ(a.answer.a, 3);
    CHECK_EQ(ask(&place, &made, SMB_UNLOCK, 3, 3, SHARED, b.answer.a, 0, 0), SMB_LOCK_LOST);
    CHECK_EQ(ask(&place, &made, SMB_RENEW, 3, 3, SHARED, b.answer.a, 1000, 2), SMB_LOCK_LOST);
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, b.answer.a, 1000), SMB_OK);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, b.answer.a, 0), SMB_OK);
    for (uint64_t name = 1; name <= SESSION_PINS_MAX; name++)
        CHECK_EQ(share(&place, &a, 1, 100 + name, 0), SMB_OK);
    CHECK_EQ(share(&place, &b, 1, 100, 0), SMB_OUT_OF_MEMORY);
    CHECK_EQ(share(&place, &b, 2, 100, 0), SMB_OK);
    place_end(&place);
}

/* Each lease ends by itself. A renewal is refused from then on, a release once somebody else has had
 * the lock alone. */
static void leases(void)
{
    struct place place;
    struct asked a, b, alone;
    struct sync_counters counters = {0};
    place_make(&place);
    sync_count_into(place.sync, &counters);
    CHECK_EQ(share(&place, &a, 1, 1, 0), SMB_OK);
    CHECK_EQ(share(&place, &b, 2, 1, 0), SMB_OK);
    CHECK_EQ(lock(&place, &alone, 3, 1, FOREVER, 0), SMB_DEFERRED);
    pass(&place, SECOND / 2);
    CHECK_EQ(renew(&place, 1, &a), SMB_OK);
    pass(&place, SECOND / 2); /* b's has run out, a's goes on */
    CHECK(alone.answers == 0 && counters.expired == 1);
    CHECK(renew(&place, 2, &b) == SMB_LOCK_LOST && fence_holds(&place, a.answer.a));
    CHECK_EQ(let_go(&place, 2, &b), SMB_OK); /* nobody has had it alone since */
    CHECK_EQ(let_go(&place, 1, &a), SMB_OK);
    CHECK(alone.answers == 1 && alone.answer.status == SMB_OK);
    CHECK_EQ(let_go(&place, 2, &b), SMB_LOCK_LOST);
    CHECK_EQ(quick(&place, SMB_UNLOCK, SYNC_USER, alone.answer.a, 0), SMB_OK);

    CHECK_EQ(ask(&place, &a, SMB_LOCK, 1, 5, SHARED, 60000, 0, 0), SMB_OK);
    CHECK_EQ(share(&place, &b, 2, 5, 0), SMB_OK);
    CHECK_EQ(let_go(&place, 1, &a), SMB_OK);
    pass(&place, SECOND); /* not after the minute of the one that was released */
    CHECK_EQ(lock(&place, &alone, 3, 2, 0, 0), SMB_OK);
    CHECK_EQ(counters.expired, 2);
    place_end(&place);
}

/* The end of a session ends its holdings, and with the last one the lock is free. */
static void sessions_end(void)
{
    struct place place;
    struct asked a, b, c, alone;
    place_make(&place);
    CHECK_EQ(share(&place, &a, 1, 1, 0), SMB_OK);
    CHECK_EQ(share(&place, &b, 1, 2, 0), SMB_OK);
    CHECK_EQ(share(&place, &c, 2, 1, 0), SMB_OK);
    CHECK_EQ(lock(&place, &alone, 3, 1, FOREVER, 0), SMB_DEFERRED);
    sync_end_session(place.sync, 1, place.now);
    CHECK_EQ(alone.answers, 0);
    sync_end_session(place.sync, 2, place.now);
    CHECK(alone.answers == 1 && alone.answer.status == SMB_OK);
    CHECK_EQ(let_go(&place, 2, &c), SMB_LOCK_LOST);
    sync_end_session(place.sync, 2, place.now); /* the lock is session 3's */
    CHECK_EQ(quick(&place, SMB_RENEW, SYNC_USER, alone.answer.a, 1000), SMB_OK);
    place_end(&place);
}

/* After a restart, or at another copy, holders go on with their next renewal, and nobody has the
 * lock alone before the last lease that was granted has run out or was ended by a known holder. */
static void over_a_restart(struct place *place, struct place *then, void (*change)(struct place *))
{
    struct asked a, b, c, alone;
    CHECK_EQ(share(place, &a, 1, 1, 0), SMB_OK);
    CHECK_EQ(share(place, &b, 2, 1, 0), SMB_OK);
    change(place);
    CHECK_EQ(renew(then, 1, &a), SMB_OK);
    CHECK(fence_holds(then, a.answer.a));
    CHECK_EQ(lock(then, &alone, 3, 1, FOREVER, 0), SMB_DEFERRED);
    pass(then, SECOND * 3 / 4);
    CHECK_EQ(renew(then, 1, &a), SMB_OK);
    pass(then, SECOND / 4); /* b did not come back */
    CHECK(alone.answers == 0 && renew(then, 2, &b) == SMB_LOCK_LOST);
    CHECK_EQ(let_go(then, 1, &a), SMB_OK);
    CHECK(alone.answers == 1 && alone.answer.a > a.answer.a && !fence_holds(then, a.answer.a));
    CHECK_EQ(let_go(then, 2, &b), SMB_LOCK_LOST);
    CHECK_EQ(quick(then, SMB_UNLOCK, SYNC_USER, alone.answer.a, 0), SMB_OK);
    CHECK_EQ(share(then, &c, 1, 2, 0), SMB_OK);
    CHECK_EQ(let_go(then, 1, &c), SMB_OK);
    CHECK_EQ(lock(then, &alone, 3, 2, 0, 0), SMB_OK);
}

static void restarts(void)
{
    struct place place;
    place_make(&place);
    over_a_restart(&place, &place, place_restart);
    place_end(&place);
}

static void carry(void *argument, const uint8_t image[SYNC_IMAGE_BYTES])
{
    struct place *other = argument;
    sync_install(other->sync, image, other->now);
}

/* The other way: it is carried later, since nobody holds both copies' mutexes in this order. */
static uint8_t kept[SYNC_IMAGE_BYTES];

static void keep(void *argument, const uint8_t image[SYNC_IMAGE_BYTES])
{
    (void)argument;
    memcpy(kept, image, sizeof kept);
}

static struct place there;

static void switch_over(struct place *here)
{
    sync_send_away(here->sync, SMB_STALE_EPOCH);
    sync_on_change(here->sync, NULL, NULL);
    sync_take_over(there.sync, there.now);
}

static void at_another_copy(void)
{
    struct place here;
    struct asked a;
    place_make(&here);
    place_make(&there);
    there.now = 7 * SECOND;
    sync_on_change(here.sync, carry, &there);
    over_a_restart(&here, &there, switch_over);
    /* The former primary knows no holder any more, and its clock ends nothing at the other copy. */
    pass(&here, 2 * SECOND);
    CHECK_EQ(quick(&there, SMB_UNLOCK, SYNC_USER, there.words->locks[SYNC_USER].token, 0), SMB_OK);
    CHECK_EQ(share(&there, &a, 1, 9, 0), SMB_OK);
    sync_on_change(there.sync, keep, NULL);
    sync_show(there.sync, there.now);
    sync_send_away(there.sync, SMB_STALE_EPOCH);
    sync_on_change(there.sync, NULL, NULL);
    sync_install(here.sync, kept, here.now);
    sync_take_over(here.sync, here.now);
    CHECK_EQ(renew(&here, 1, &a), SMB_OK); /* back, as it was the first time */
    CHECK_EQ(let_go(&here, 1, &a), SMB_OK);
    place_end(&there);
    place_end(&here);
}

enum { SESSIONS = 5, HOLDINGS = 3, STEPS = 20000 };

struct holding {
    struct asked asked;
    bool waits, shared;
};

/* Whether this holding is valid: it was granted, and no later token was. */
static bool stands(struct place *place, const struct holding *holding, uint64_t ends)
{
    return holding->asked.answers && holding->asked.answer.status == SMB_OK && ends > place->now &&
           place->words->locks[SYNC_USER].token == holding->asked.answer.a;
}

/* Sessions ask, release, renew, forget and end, time passes, and the server restarts. Whoever holds
 * it alone holds it alone, and everybody who waits gets it at last. */
static void at_random(void)
{
    static struct holding all[SESSIONS][HOLDINGS];
    uint64_t ends[SESSIONS][HOLDINGS] = {0}, sequence = 1, seed = 66;
    struct random random = random_make(seed);
    struct place place;
    memset(all, 0, sizeof all);
    place_make(&place);
    uint64_t grants_shared = 0, grants_alone = 0, together = 0;
    for (int step = 0; step < STEPS; step++) {
        uint64_t session = random_below(&random, SESSIONS), at = random_below(&random, HOLDINGS);
        struct holding *holding = &all[session][at];
        bool holds = ends[session][at] != 0;
        switch (random_below(&random, 10)) {
        case 0: pass(&place, random_below(&random, 400 * MS)); break;
        case 1:
            if (random_below(&random, 20) == 0) {
                place_restart(&place); /* answers all who wait */
                pass(&place, SYNC_GRACE_MS * MS);
            }
            break;
        case 2:
            if (random_below(&random, 10) == 0) {
                sync_end_session(place.sync, session + 1, place.now);
                memset(ends[session], 0, sizeof ends[session]);
            }
            break;
        case 3:
        case 4:
            if (holds && holding->shared && renew(&place, session + 1, &holding->asked) == SMB_OK)
                ends[session][at] = place.now + SECOND;
            break;
        default:
            if (holding->waits)
                break;
            if (holds) {
                struct asked made;
                CHECK(holding->shared ||
                      ask(&place, &made, SMB_UNLOCK, session + 1, sequence++, SYNC_USER,
                          holding->asked.answer.a, 0, 0) <= SMB_LOCK_LOST);
                if (holding->shared)
                    let_go(&place, session + 1, &holding->asked);
                ends[session][at] = 0;
                break;
            }
            holding->shared = random_below(&random, 4) != 0;
            int status = ask(&place, &holding->asked, SMB_LOCK, session + 1, sequence++,
                             holding->shared ? SHARED : SYNC_USER, 1000, 100000, 0);
            CHECK(status == SMB_OK || status == SMB_DEFERRED);
            holding->waits = true;
            holding->asked.answers += status == SMB_OK;
        }
        uint64_t shared = 0, alone = 0;
        for (int i = 0; i < SESSIONS; i++)
            for (int k = 0; k < HOLDINGS; k++) {
                struct holding *each = &all[i][k];
                if (each->waits && each->asked.answers) {
                    each->waits = false;
                    if (each->asked.answer.status == SMB_OK) {
                        ends[i][k] = place.now + SECOND;
                        grants_shared += each->shared;
                        grants_alone += !each->shared;
                    }
                }
                if (ends[i][k] && !each->waits && stands(&place, each, ends[i][k])) {
                    shared += each->shared;
                    alone += !each->shared;
                }
            }
        CHECK(alone <= 1 && (alone == 0 || shared == 0));
        together += shared > 1;
    }
    CHECK(grants_shared > 500 && grants_alone > 200 && together > 1000);
    for (int i = 0; i < 100; i++) /* nobody releases any more: all leases run out */
        pass(&place, SECOND);
    for (int i = 0; i < SESSIONS; i++)
        for (int k = 0; k < HOLDINGS; k++)
            CHECK(!all[i][k].waits || all[i][k].asked.answers);
    place_end(&place);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(many_or_one),     TEST(nobody_waits_for_itself),
        TEST(what_is_refused), TEST(leases),
        TEST(sessions_end),    TEST(restarts),
        TEST(at_another_copy), TEST(at_random),
    };
    return RUN_TESTS(tests);
}
