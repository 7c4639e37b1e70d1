/* Completion records: to which lane each belongs, which one is evicted when there is no room, and
 * what a returning client is then told. */
#include <string.h>

#include "check.h"
#include "memory/records.h"
#include "random.h"
#include "smb/types.h"

enum { COUNT = 128, LANES = 3 };

static struct record table[COUNT];
static _Atomic uint64_t evictions, ended_evictions;
static _Atomic bool known;

static struct records *make(void)
{
    struct records *records = NULL;
    struct record_table place = {.records = table,
                                 .count = COUNT,
                                 .evictions = &evictions,
                                 .ended_evictions = &ended_evictions};
    CHECK_EQ(records_create(place, &known, &records), SMB_OK);
    return records;
}

/* Makes one change of the lane, with that sequence number. */
static int change(struct records *records, uint64_t session, uint16_t lane, uint64_t sequence,
                  bool retry)
{
    struct record *record;
    uint32_t hint = 0;
    int status = records_take(records, session, lane, sequence, retry, &hint, &record);
    if (status != SMB_OK)
        return status;
    status = record_judge(record, sequence);
    if (status == SMB_OK)
        record_note(record, sequence, false, 0);
    records_release(records, record);
    return status;
}

static uint64_t watermark(struct records *records, uint64_t session, uint16_t lane)
{
    uint64_t found, refused;
    return records_watermark(records, session, lane, &found, &refused) == SMB_OK ? found
                                                                                 : UINT64_MAX;
}

/* However many sessions came and ended: a new session that is cut off at its first change is told
 * that the change was not made. */
static void ended_sessions_cost_nothing(void)
{
    struct records *records = make();
    known = true;
    for (uint64_t session = 1; session <= 20 * COUNT; session++) {
        CHECK_EQ(change(records, session, 0, 1, false), SMB_OK);
        records_end_session(records, session);
    }
    CHECK(ended_evictions > 0 && evictions == 0);
    CHECK_EQ(watermark(records, 99999, 0), 0);
    CHECK_EQ(change(records, 99999, 0, 5, true), SMB_OK);
    CHECK_EQ(change(records, 99999, 0, 5, true), SMB_EXISTS);
    /* The next run's daemon does not know yet which sessions have ended, so any of them may be an
     * ended one. */
    records_destroy(records);
    known = false;
    records = make();
    CHECK_EQ(change(records, 99999, 0, 5, true), SMB_EXISTS);
    CHECK_EQ(change(records, 10 * COUNT, 0, 1, true), SMB_EVICTED);
    CHECK_EQ(watermark(records, 10 * COUNT, 0), UINT64_MAX);
    known = true;
    CHECK_EQ(change(records, 99998, 0, 1, true), SMB_OK);
    records_destroy(records);
}

/* The record of a session that may come back is never lost without notice, and records of ended
 * sessions are evicted first. */
static void living_sessions_count(void)
{
    struct records *records = make();
    known = true;
    for (uint64_t session = 1; session <= COUNT; session++)
        CHECK_EQ(change(records, session, 0, 1, false), SMB_OK);
    for (uint64_t session = 1; session <= COUNT; session += 2)
        records_end_session(records, session);
    for (uint64_t session = 1001; session <= 1000 + COUNT / 2; session++)
        CHECK_EQ(change(records, session, 0, 1, true), SMB_OK);
    CHECK_EQ(evictions, 0);
    for (uint64_t session = 2; session <= COUNT; session += 2)
        CHECK_EQ(change(records, session, 0, 1, true), SMB_EXISTS);
    CHECK_EQ(change(records, 5000, 0, 7, false), SMB_OK);
    CHECK_EQ(evictions, 1);
    CHECK_EQ(change(records, 1001, 0, 1, true), SMB_EVICTED); /* it was unused for longest */
    CHECK_EQ(change(records, 1002, 0, 1, true), SMB_EXISTS);
    /* before this record the lane may have had another */
    CHECK_EQ(change(records, 5000, 0, 6, true), SMB_EVICTED);
    records_destroy(records);
}

/* A record that a request holds is not evicted, and if all are held no other lane gets one. */
static void held_records_stay(void)
{
    struct records *records = make();
    struct record *held[COUNT], *one_more;
    uint32_t hint = 0;
    for (uint64_t session = 1; session <= COUNT; session++)
        CHECK_EQ(records_take(records, session, 0, 1, false, &hint, &held[session - 1]), SMB_OK);
    CHECK_EQ(records_take(records, 500, 0, 1, false, &hint, &one_more), SMB_BUSY);
    records_release(records, held[70]);
    CHECK_EQ(records_take(records, 500, 0, 1, false, &hint, &one_more), SMB_OK);
    CHECK(one_more == held[70]);
    for (int i = 0; i < COUNT; i++)
        CHECK(atomic_load(&held[i]->session) == (i == 70 ? 500U : (uint64_t)i + 1));
    records_destroy(records);
}

/* Local clients can write to the table. A client that overwrites records loses their information;
 * the daemon goes on. */
static void scribbled_over(void)
{
    uint64_t seed = 20261124;
    printf("scribbled_over: seed %llu\n", (unsigned long long)seed);
    struct random random = random_make(seed);
    memset(table, 0, sizeof table);
    struct records *records = make();
    known = true;
    for (uint64_t session = 1; session <= COUNT / 2; session++) /* half of the records are empty */
        CHECK_EQ(change(records, session, 0, 1, false), SMB_OK);
    for (int i = 0; i < COUNT; i++)
        atomic_store(&table[i].session, 7000);
    records_end_session(records, 7000);
    for (uint64_t step = 1; step <= 20000; step++) {
        struct record *record;
        uint32_t hint = (uint32_t)random_below(&random, COUNT);
        struct record *scribbled = &table[random_below(&random, COUNT)];
        atomic_store(&scribbled->session, random_below(&random, 300));
        atomic_store(&scribbled->lane, random_below(&random, LANES));
        atomic_store(&scribbled->used_ns, random_below(&random, 2));
        uint64_t session = 1 + random_below(&random, 300);
        if (records_take(records, session, (uint16_t)random_below(&random, LANES), step, false,
                         &hint, &record) == SMB_OK)
            records_release(records, record);
        if (random_below(&random, 20) == 0)
            records_end_session(records, session);
    }
    uint64_t seen = 0; /* all records are still usable: as many as there are can be held at once */
    for (uint64_t session = 10000; session < 10000 + COUNT; session++) {
        struct record *held;
        uint32_t hint = COUNT;
        CHECK_EQ(records_take(records, session, 0, 1, false, &hint, &held), SMB_OK);
        seen++;
    }
    CHECK_EQ(seen, COUNT);
    records_destroy(records);
    memset(table, 0, sizeof table);
    evictions = ended_evictions = 0;
}

struct known_lane {
    /* session 0: none; `used` orders the lanes; `made`: the last change */
    uint64_t session, used, made;
    uint16_t lane;
    bool ended;
};

static int lane_in(const struct known_lane *lanes, uint64_t session, uint16_t lane)
{
    int at = COUNT;
    for (int i = 0; i < COUNT; i++)
        if (lanes[i].session == session && lanes[i].lane == lane)
            at = i;
    return at;
}

static int victim_in(const struct known_lane *lanes)
{
    int at = 0;
    for (int i = 1; i < COUNT; i++) {
        const struct known_lane *best = &lanes[at], *other = &lanes[i];
        if (best->session == 0)
            break;
        if (other->session == 0 || other->ended > best->ended ||
            (other->ended == best->ended && !other->ended && other->used < best->used))
            at = i;
    }
    return at;
}

/* Random operations, compared with a table that is searched from end to end: which lanes have
 * records, how far they have come, and how many were evicted. */
static void as_a_plain_table(void)
{
    enum { STEPS = 20000, SESSIONS = 120 };
    uint64_t seed = 20261123;
    printf("as_a_plain_table: seed %llu\n", (unsigned long long)seed);
    struct random random = random_make(seed);
    struct records *records = make();
    known = true;
    static struct known_lane lanes[COUNT];
    uint64_t lost = 0;
    for (uint64_t step = 1; step <= STEPS; step++) {
        uint64_t session = 1 + random_below(&random, SESSIONS);
        uint16_t lane = (uint16_t)random_below(&random, LANES);
        int at = lane_in(lanes, session, lane);
        CHECK_EQ(watermark(records, session, lane), at < COUNT ? lanes[at].made
                                                    : lost > 0 ? UINT64_MAX
                                                               : 0);
        if (random_below(&random, 20) == 0) {
            /* its number is used again, which never happens with real sessions */
            records_end_session(records, session);
            for (int i = 0; i < COUNT; i++)
                lanes[i].ended |= lanes[i].session == session;
            continue;
        }
        CHECK_EQ(change(records, session, lane, step, false), SMB_OK);
        if (at == COUNT) {
            at = victim_in(lanes);
            if (lanes[at].session != 0 && lanes[at].ended) {
                /* any of these: the model follows the record that is missing now */
                for (int i = 0; i < COUNT; i++)
                    if (lanes[i].ended && atomic_load(&table[i].session) == session &&
                        atomic_load(&table[i].lane) == lane)
                        at = i;
            }
            lost += lanes[at].session != 0 && !lanes[at].ended;
            int where = COUNT;
            for (int i = 0; i < COUNT; i++)
                if (atomic_load(&table[i].session) == session &&
                    atomic_load(&table[i].lane) == lane)
                    where = i;
            CHECK_EQ(where, at);
        }
        lanes[at] = (struct known_lane){
            .session = session, .lane = lane, .used = step, .made = step};
        CHECK_EQ(evictions, lost);
        if (random_below(&random, 500) == 0) { /* the daemon restarts */
            records_destroy(records);
            records = make();
        }
    }
    CHECK(lost > 0 && ended_evictions > 0);
    records_destroy(records);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void refuse(struct records *records, uint64_t sequence)
{
    struct record *record;
    uint32_t hint = 0;
    CHECK_EQ(records_take(records, 1, 0, sequence, false, &hint, &record), SMB_OK);
    record_refuse(record, sequence);
    records_release(records, record);
}

static int judge(struct records *records, uint64_t sequence)
{
    struct record *record;
    uint32_t hint = 0;
    CHECK_EQ(records_take(records, 1, 0, sequence, true, &hint, &record), SMB_OK);
    int status = record_judge(record, sequence);
    records_release(records, record);
    return status;
}

static struct records *make_anew(void)
{
    memset(table, 0, sizeof table);
    evictions = ended_evictions = 0;
    return make();
}

/* However many changes are refused after it, a change that was made stays known. */
static void refusals_forget_no_change(void)
{
    struct records *records = make_anew();
    CHECK_EQ(change(records, 1, 0, 1, false), SMB_OK);
    for (uint64_t sequence = 2; sequence <= 5000; sequence++) {
        refuse(records, sequence);
        CHECK_EQ(judge(records, 1), SMB_EXISTS);
        CHECK_EQ(judge(records, sequence), SMB_OK);
    }
    /* After a further change the oldest refusals are forgotten, further back than any client
     * repeats. */
    CHECK_EQ(change(records, 1, 0, 5001, false), SMB_OK);
    CHECK_EQ(judge(records, 5000), SMB_OK);
    CHECK_EQ(judge(records, 4950), SMB_OK);
    CHECK_EQ(judge(records, 4800), SMB_EVICTED);
    CHECK_EQ(judge(records, 5001), SMB_EXISTS);
    records_destroy(records);
}

/* Changes are made and refused at random, and refused ones repeated and made, over restarts of the
 * daemon. Everything about the last hundred is known, and nothing wrong is said about older
 * ones. */
static void refusals_against_a_model(void)
{
    enum { STEPS = 20000, NEAR = 100 };
    static uint8_t made[STEPS + 1];
    struct random random = random_make(20261129);
    for (uint64_t percent = 5; percent <= 95; percent += 30) {
        struct records *records = make_anew();
        uint64_t last = 0; /* the highest that was made */
        memset(made, 0, sizeof made);
        for (uint64_t sequence = 1; sequence <= STEPS; sequence += 1 + random_below(&random, 3)) {
            if (random_below(&random, 100) < percent) {
                refuse(records, sequence);
                made[sequence] = 1;
            } else {
                CHECK_EQ(change(records, 1, 0, sequence, false), SMB_OK);
                made[sequence] = 2;
                last = sequence;
            }
            uint64_t back = random_below(&random, random_below(&random, 2) ? NEAR : STEPS);
            uint64_t old = back < sequence ? sequence - back : sequence;
            int status = made[old] == 0 ? 0 : judge(records, old);
            if (made[old] && (status != SMB_EVICTED || sequence - old < NEAR))
                CHECK_EQ(status, made[old] == 2 ? SMB_EXISTS : SMB_OK);
            if (made[old] == 1 && status == SMB_OK && random_below(&random, 2) == 0) {
                CHECK_EQ(change(records, 1, 0, old, true), SMB_OK);
                made[old] = 2;
                last = old > last ? old : last;
            }
            if (random_below(&random, 500) == 0) {
                records_destroy(records);
                records = make();
            }
        }
        CHECK_EQ(watermark(records, 1, 0), last);
        records_destroy(records);
    }
}

/* A record of an earlier release's daemon: three numbers and a floor. */
static void refusals_of_an_earlier_release(void)
{
    struct records *records = make_anew();
    CHECK_EQ(change(records, 1, 0, 40, false), SMB_OK);
    records_destroy(records);
    struct record *record = table;
    while (atomic_load(&record->session) != 1)
        record++;
    record->refused[0] = 39, record->refused[1] = 0, record->refused_top = 30;
    record->refused_floor = 7;
    records = make();
    CHECK_EQ(judge(records, 39), SMB_OK);
    CHECK_EQ(judge(records, 30), SMB_OK);
    CHECK_EQ(judge(records, 38), SMB_EXISTS);
    CHECK_EQ(judge(records, 8), SMB_EXISTS);
    CHECK_EQ(judge(records, 7), SMB_EVICTED);
    CHECK_EQ(change(records, 1, 0, 39, true), SMB_OK);
    CHECK_EQ(judge(records, 39), SMB_EXISTS);
    records_destroy(records);
}

int main(void)
{
    static const struct test tests[] = {TEST(ended_sessions_cost_nothing),
                                        TEST(living_sessions_count),
                                        TEST(held_records_stay),
                                        TEST(scribbled_over),
                                        TEST(as_a_plain_table),
                                        TEST(refusals_forget_no_change),
                                        TEST(refusals_against_a_model),
                                        TEST(refusals_of_an_earlier_release)};
    return RUN_TESTS(tests);
}
