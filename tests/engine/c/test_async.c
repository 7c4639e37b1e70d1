/* Async operations: order, urgency, windows, cancelling, failing, beside blocking calls, over every
 * path. */
#include <pthread.h>
#include <string.h>

#include "async/async.h"
#include "fake_server.h"
#include "random.h"
#include "rig.h"

enum {
    CHUNK = 65536,
    BYTES = 48 * CHUNK,
    ELEMENTS = BYTES / 8,
    PART = CHUNK / 8,
    NOTED_MAX = 1024
};
/* two segments on each of the servers; the last chunk is shorter */
static const struct smb_layout LAYOUT = {BYTES - 512, CHUNK, CHUNK, 4};
enum { KEY = 7, SEED = 27 };

static const char *const WAY_NAMES[] = {"tcp", "unix", "mapping", "both", "reference"};

/* One client's operations, and their events. */
struct bench {
    struct rig rig;
    struct reach reach;
    struct smb_async *async;
    struct smb_window *window;
    struct smb_async_event events[NOTED_MAX];
    uint32_t count;
    uint64_t tags; /* tags in use */
};

static void bench_start(struct bench *bench, enum way way, uint64_t credit)
{
    static bool started; /* once for each test, because each has its own process */
    struct rig rig = bench->rig;
    memset(bench, 0, sizeof *bench);
    bench->rig = rig;
    if (!started)
        rig_start(&bench->rig, LAYOUT, SMB_INT64);
    started = true;
    reach_make(&bench->reach, &bench->rig, way, 5);
    CHECK_EQ(smb_async_create(bench->reach.client, &bench->async), SMB_OK);
    CHECK_EQ(smb_window_create(bench->async, credit, false, &bench->window), SMB_OK);
}

static void bench_end(struct bench *bench)
{
    smb_window_destroy(bench->window);
    smb_async_destroy(bench->async);
    reach_end(&bench->reach);
}

static uint64_t submit_to(struct bench *bench, struct smb_window *window, int opcode,
                          uint64_t offset, uint64_t bytes, const void *source, void *sink,
                          int priority)
{
    uint64_t tag = ++bench->tags;
    struct smb_request request = {.opcode = opcode,
                                  .offset = offset,
                                  .bytes = bytes,
                                  .source = source,
                                  .sink = sink,
                                  .op = SMB_SUM,
                                  .scale = 1.0,
                                  .timeout_ms = RIG_TIMEOUT_MS};
    CHECK_EQ(
        smb_async_submit(bench->async, window, bench->reach.buffer, &request, KEY, priority, tag),
        SMB_OK);
    return tag;
}

static uint64_t submit(struct bench *bench, int opcode, uint64_t offset, uint64_t bytes,
                       const void *source, void *sink, int priority)
{
    return submit_to(bench, bench->window, opcode, offset, bytes, source, sink, priority);
}

/* Submits a call that the test makes itself on that range, which it changes. */
static uint64_t hold(struct bench *bench, uint64_t offset, uint64_t bytes)
{
    uint64_t tag = ++bench->tags;
    struct smb_request range = {.opcode = SMB_WRITE, .offset = offset, .bytes = bytes};
    CHECK_EQ(smb_async_submit(bench->async, bench->window, NULL, &range, KEY, 0, tag), SMB_OK);
    return tag;
}

/* Takes events until there were at least so many in all. */
static void take_until(struct bench *bench, uint32_t count)
{
    uint64_t end_ns = check_now_ns() + 60000000000U;
    while (bench->count < count) {
        CHECK(check_now_ns() < end_ns);
        smb_async_await_event(bench->async, 1000);
        bench->count += smb_async_take(bench->async, bench->events + bench->count,
                                       NOTED_MAX - bench->count);
    }
}

static uint32_t index_of(const struct bench *bench, uint64_t tag)
{
    uint32_t index = 0;
    while (index < bench->count && bench->events[index].tag != tag)
        index++;
    CHECK(index < bench->count);
    return index;
}

/* Random reads, writes and additions of random urgency, by two windows: every read, and the final
 * content, are as if they were made one after the other. */
static void all_is_in_the_order_of_the_calls(enum way way)
{
    enum { OPERATIONS = 300, RANGE_MAX = 12 * PART };
    static int64_t expected[ELEMENTS], now[ELEMENTS];
    static struct bench bench;
    static struct {
        int64_t *memory, *expected;
        uint64_t count;
    } reads[OPERATIONS];
    uint32_t operations = OPERATIONS / (uint32_t)check_thinned();
    struct random random = random_make(SEED + (uint64_t)way);
    printf("  %s, seed %d\n", WAY_NAMES[way], SEED + way);
    memset(expected, 0, sizeof expected);
    memset(reads, 0, sizeof reads);
    bench_start(&bench, way, 4 * CHUNK);
    struct smb_window *measured;
    CHECK_EQ(smb_window_create(bench.async, 0, false, &measured), SMB_OK);
    CHECK_EQ(smb_window_credit(measured), CREDIT_FIRST);
    for (uint32_t i = 0; i < operations; i++) {
        uint64_t count = 1 + random_below(&random, RANGE_MAX);
        uint64_t begin = random_below(&random, LAYOUT.bytes / 8 - count);
        struct smb_window *window = random_below(&random, 2) ? bench.window : measured;
        int opcode = (int[]){SMB_READ, SMB_WRITE, SMB_ACCUMULATE}[random_below(&random, 3)];
        int priority = (int)random_below(&random, 5);
        reads[i].count = count;
        reads[i].memory = malloc(8 * count);
        for (uint64_t e = 0; e < count && opcode != SMB_READ; e++) {
            reads[i].memory[e] = (int64_t)(random_next(&random) >> 1);
            int64_t *element = &expected[begin + e];
            *element = opcode == SMB_WRITE
                           ? reads[i].memory[e]
                           : (int64_t)((uint64_t)*element + (uint64_t)reads[i].memory[e]);
        }
        if (opcode == SMB_READ) {
            reads[i].expected = malloc(8 * count);
            memcpy(reads[i].expected, expected + begin, 8 * count);
        }
        submit_to(&bench, window, opcode, 8 * begin, 8 * count,
                  opcode == SMB_READ ? NULL : reads[i].memory,
                  opcode == SMB_READ ? reads[i].memory : NULL, priority);
    }
    take_until(&bench, operations);
    for (uint32_t i = 0; i < operations; i++) {
        CHECK_EQ(bench.events[i].what, SMB_ASYNC_DONE);
        CHECK_EQ(bench.events[i].outcome.status, SMB_OK);
        if (reads[i].expected)
            CHECK(memcmp(reads[i].memory, reads[i].expected, 8 * reads[i].count) == 0);
        free(reads[i].memory);
        free(reads[i].expected);
    }
    must(bench.reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = LAYOUT.bytes, .sink = now});
    CHECK(memcmp(now, expected, LAYOUT.bytes) == 0);
    smb_window_destroy(measured);
    bench_end(&bench);
    rig_stop(&bench.rig);
}

static void order_by_tcp(void)
{
    all_is_in_the_order_of_the_calls(BY_TCP);
}

static void order_by_unix(void)
{
    all_is_in_the_order_of_the_calls(BY_UNIX);
}

static void order_by_mapping(void)
{
    all_is_in_the_order_of_the_calls(BY_MAPPING);
}

static void order_by_both(void)
{
    all_is_in_the_order_of_the_calls(BY_BOTH);
}

static void order_by_reference(void)
{
    all_is_in_the_order_of_the_calls(BY_REFERENCE);
}

/* Behind a call that holds all elements: the most urgent operation ends first, equal ones in their
 * order. An operation that an urgent one waits for is as urgent, and so is what that operation
 * waits for. */
static void the_most_urgent_goes_first(void)
{
    static struct bench bench;
    static int64_t memory[2 * PART];
    for (int way = 0; way < WAYS; way++) {
        bench_start(&bench, (enum way)way, CHUNK);
        uint64_t holding = hold(&bench, 0, LAYOUT.bytes);
        take_until(&bench, 1);
        CHECK_EQ(bench.events[0].what, SMB_ASYNC_BEGIN);
        static const int priorities[] = {0, 0, 5, -1, 5};
        uint64_t made[8];
        for (int i = 0; i < 5; i++)
            made[i] = submit(&bench, SMB_WRITE, (uint64_t)(4 * i) * CHUNK, CHUNK, memory, NULL,
                             priorities[i]);
        made[5] = submit(&bench, SMB_WRITE, 20U * CHUNK, 2U * CHUNK, memory, NULL, -9);
        made[6] = submit(&bench, SMB_WRITE, 21U * CHUNK, 2U * CHUNK, memory, NULL, -9);
        made[7] = submit(&bench, SMB_READ, 22U * CHUNK, CHUNK, NULL, memory, 7);
        CHECK_EQ(smb_async_take(bench.async, bench.events + 1, NOTED_MAX - 1), 0);
        smb_async_end(bench.async, bench.events[index_of(&bench, holding)].operation);
        take_until(&bench, 9);
        static const int order[] = {5, 6, 7, 2, 4, 0, 1, 3};
        for (int i = 0; i < 8; i++)
            CHECK_EQ(index_of(&bench, made[order[i]]), 1 + i);
        bench_end(&bench);
    }
    rig_stop(&bench.rig);
}

/* A read of high urgency ends before all but one window of 64 writes that are queued for the same
 * server. */
static void an_urgent_one_waits_for_one_window(void)
{
    enum { WINDOW = 4 };
    static struct bench bench;
    static int64_t memory[ELEMENTS], part[PART];
    for (int way = 0; way < WAYS; way++) {
        bench_start(&bench, (enum way)way, WINDOW * CHUNK);
        uint64_t holding = hold(&bench, 0, LAYOUT.bytes);
        take_until(&bench, 1);
        for (uint64_t i = 0; i < 64; i++)
            submit(&bench, SMB_WRITE, i / 4 * (2 * CHUNK) + i % 4 * (CHUNK / 4), CHUNK / 4, memory,
                   NULL, 0);
        uint64_t read = submit(&bench, SMB_READ, 40U * CHUNK, CHUNK, NULL, part, 9);
        smb_async_end(bench.async, bench.events[index_of(&bench, holding)].operation);
        take_until(&bench, 66);
        CHECK(index_of(&bench, read) <= 1 + 4 * WINDOW);
        bench_end(&bench);
    }
    rig_stop(&bench.rig);
}

/* An operation that has not begun can be cancelled, and is not done; one that has begun cannot. */
static void cancelling(void)
{
    static struct bench bench;
    static int64_t ones[PART], now[ELEMENTS];
    for (int i = 0; i < PART; i++)
        ones[i] = 1;
    bench_start(&bench, BY_TCP, 0);
    uint64_t holding = hold(&bench, 0, CHUNK);
    uint64_t waits = submit(&bench, SMB_WRITE, 0, CHUNK, ones, NULL, 0);
    uint64_t after = submit(&bench, SMB_ACCUMULATE, 0, CHUNK, ones, NULL, 0);
    take_until(&bench, 1);
    CHECK_EQ(smb_async_cancel(bench.async, holding), 0);
    CHECK_EQ(smb_async_cancel(bench.async, waits), 1);
    smb_async_end(bench.async, bench.events[index_of(&bench, holding)].operation);
    take_until(&bench, 2);
    CHECK_EQ(index_of(&bench, after), 1);
    holding = hold(&bench, 0, CHUNK);
    take_until(&bench, 3);
    uint64_t left = submit(&bench, SMB_ACCUMULATE, 0, CHUNK, ones, NULL, 0);
    smb_async_stop(bench.async);
    take_until(&bench, 4);
    CHECK_EQ(bench.events[3].what, SMB_ASYNC_CANCELLED);
    struct smb_request late = {
        .opcode = SMB_READ, .bytes = CHUNK, .sink = now, .timeout_ms = RIG_TIMEOUT_MS};
    CHECK_EQ(smb_async_submit(bench.async, bench.window, bench.reach.buffer, &late, KEY, 0, 0),
             SMB_DISCONNECTED);
    smb_async_end(bench.async, bench.events[index_of(&bench, left)].operation);
    smb_async_end(bench.async, bench.events[index_of(&bench, holding)].operation);
    must(bench.reach.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = CHUNK, .sink = now});
    CHECK(memcmp(now, ones, CHUNK) == 0);
    bench_end(&bench);
    rig_stop(&bench.rig);
}

static int wait_for(struct bench *bench, uint64_t key, uint64_t offset, bool changes,
                    uint32_t timeout_ms)
{
    uint64_t last = 0;
    return smb_async_wait(bench->async, key, offset, 8, changes, timeout_ms, &last);
}

static void *wait_for_turn(void *argument)
{
    struct bench *bench = argument;
    CHECK_EQ(wait_for(bench, KEY, 0, false, RIG_TIMEOUT_MS), SMB_OK);
    return NULL;
}

/* A thread waits for earlier operations on its elements, and for no others. */
static void waiting_for_a_turn(void)
{
    static struct bench bench;
    pthread_t thread;
    bench_start(&bench, BY_MAPPING, 0);
    uint64_t holding = hold(&bench, 0, CHUNK);
    take_until(&bench, 1);
    CHECK_EQ(wait_for(&bench, KEY, CHUNK, true, 0), SMB_OK);
    /* another buffer, whose list is the same */
    CHECK_EQ(wait_for(&bench, KEY + ORDERS, 0, true, 0), SMB_OK);
    CHECK_EQ(wait_for(&bench, KEY, CHUNK - 8, false, 1), SMB_TIMEOUT);
    pthread_create(&thread, NULL, wait_for_turn, &bench);
    WAIT_UNTIL(({
        pthread_mutex_lock(&bench.async->mutex);
        bool waits = bench.async->waiting > 0;
        pthread_mutex_unlock(&bench.async->mutex);
        waits;
    }));
    smb_async_end(bench.async, bench.events[index_of(&bench, holding)].operation);
    pthread_join(thread, NULL);
    bench_end(&bench);
    rig_stop(&bench.rig);
}

/* Links that are closed in the middle: each part of each operation is accounted for, and later
 * operations still have their turn. */
static void failing_in_the_middle(void)
{
    enum { OPERATIONS = 32 };
    static struct bench bench;
    static int64_t ones[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++)
        ones[i] = 1;
    for (int way = 0; way < WAYS; way++) {
        bench_start(&bench, (enum way)way, 8 * CHUNK);
        for (int i = 0; i < OPERATIONS; i++)
            submit(&bench, SMB_ACCUMULATE, 0, LAYOUT.bytes, ones, NULL, 0);
        take_until(&bench, 2);
        smb_client_close(bench.reach.client);
        uint32_t failed = 0;
        for (uint32_t i = 0; i < OPERATIONS; i++) {
            if (bench.count <= i)
                take_until(&bench, i + 1);
            struct smb_outcome *outcome = &bench.events[i].outcome;
            if (bench.events[i].what == SMB_ASYNC_DONE) {
                CHECK_EQ(outcome->bytes_applied, LAYOUT.bytes);
                continue;
            }
            CHECK_EQ(bench.events[i].what, SMB_ASYNC_FAILED);
            CHECK(outcome->status == SMB_LINK_LOST || outcome->status == SMB_DISCONNECTED);
            uint64_t offset, bytes = outcome->bytes_applied;
            uint32_t length;
            int state;
            for (uint32_t p = 0; outcome->unknown &&
                                 smb_unknown_part(outcome->unknown, p, &offset, &length, &state);
                 p++)
                bytes += state == SMB_OUTCOME_APPLIED ? 0 : length;
            CHECK_EQ(bytes, LAYOUT.bytes);
            if (outcome->unknown)
                smb_unknown_release(outcome->unknown);
            smb_async_end(bench.async, bench.events[i].operation);
            failed++;
        }
        CHECK((way == BY_MAPPING) == (failed == 0)); /* mapped segments go on working */
        bench_end(&bench);
    }
    rig_stop(&bench.rig);
}

/* Two servers that never answer, with much in flight to one of them: an operation on the other has
 * its event when its time is over, although nothing else happens then. */
static void late_ones_are_noticed(void)
{
    enum { MUCH = 2 << 20, LATE_MS = 200, LEEWAY_MS = 20000, LONG_MS = 60000 };
    static uint8_t memory[2 * MUCH];
    const struct smb_layout layout = {2 * MUCH, MUCH, CHUNK, 2};
    struct fake_server fakes[2];
    struct smb_client *client;
    struct smb_link *links[2];
    struct smb_buffer *buffer;
    struct smb_async *async;
    struct smb_window *window;
    struct smb_async_event events;
    uint64_t instance;
    CHECK_EQ(smb_client_create(1, &client), SMB_OK);
    CHECK_EQ(smb_buffer_create(client, &layout, SMB_INT64, &buffer), SMB_OK);
    for (uint32_t i = 0; i < 2; i++) {
        fakes[i] = (struct fake_server){.silent = true, .answer_bytes_max = -1};
        fake_server_start(&fakes[i]);
        CHECK_EQ(smb_client_connect_tcp(client, "127.0.0.1", fakes[i].port, 0, RIG_TIMEOUT_MS,
                                        &links[i], &instance),
                 SMB_OK);
        CHECK_EQ(smb_buffer_set_link(buffer, i, 1 + i, 1, links[i]), SMB_OK);
    }
    CHECK_EQ(smb_async_create(client, &async), SMB_OK);
    CHECK_EQ(smb_window_create(async, 4 * (uint64_t)MUCH, false, &window), SMB_OK);
    for (uint64_t i = 0; i < 2; i++) {
        struct smb_request read = {.opcode = SMB_READ,
                                   .offset = i ? 0 : MUCH,
                                   .bytes = i ? CHUNK : MUCH,
                                   .sink = memory,
                                   .timeout_ms = i ? LATE_MS : LONG_MS};
        CHECK_EQ(smb_async_submit(async, window, buffer, &read, KEY, 0, i), SMB_OK);
    }
    CHECK_EQ(smb_async_await_event(async, LEEWAY_MS), 1);
    CHECK_EQ(smb_async_take(async, &events, 1), 1);
    CHECK_EQ(events.tag, 1);
    CHECK_EQ(events.what, SMB_ASYNC_FAILED);
    CHECK_EQ(events.outcome.status, SMB_TIMEOUT);
    smb_async_end(async, events.operation);
    smb_client_close(client);
    CHECK_EQ(smb_async_await_event(async, LEEWAY_MS), 1);
    CHECK_EQ(smb_async_take(async, &events, 1), 1);
    smb_async_end(async, events.operation);
    smb_window_destroy(window);
    smb_async_destroy(async);
    smb_buffer_destroy(buffer);
    for (int i = 0; i < 2; i++)
        smb_link_close(links[i]);
    smb_client_destroy(client);
    for (int i = 0; i < 2; i++)
        fake_server_join(&fakes[i]);
}

struct beside {
    struct bench *bench;
    int index;
};

static void *blocking_calls(void *argument)
{
    const struct beside *beside = argument;
    int64_t memory[PART / 4];
    for (int i = 0; i < 100; i++) {
        for (int e = 0; e < PART / 4; e++)
            memory[e] = 1;
        must(beside->bench->reach.buffer,
             (struct smb_request){.opcode = SMB_ACCUMULATE,
                                  .op = SMB_SUM,
                                  .scale = 1,
                                  .offset = (uint64_t)(40 + beside->index) * CHUNK,
                                  .bytes = sizeof memory,
                                  .source = memory});
    }
    return NULL;
}

/* Async operations and blocking calls of four threads share the links: the thread of either kind
 * may be the progress thread. */
static void beside_blocking_calls(void)
{
    enum { THREADS = 4, OPERATIONS = 200 };
    static struct bench bench;
    static int64_t ones[ELEMENTS], now[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++)
        ones[i] = 1;
    for (int way = 0; way < WAYS; way++) {
        bench_start(&bench, (enum way)way, 4 * CHUNK);
        must(bench.reach.buffer, (struct smb_request){.opcode = SMB_FILL, .bytes = LAYOUT.bytes});
        pthread_t threads[THREADS];
        struct beside besides[THREADS];
        for (int i = 0; i < THREADS; i++) {
            besides[i] = (struct beside){&bench, i};
            pthread_create(&threads[i], NULL, blocking_calls, &besides[i]);
        }
        for (uint64_t i = 0; i < OPERATIONS; i++)
            submit(&bench, SMB_ACCUMULATE, i % 40 * CHUNK, CHUNK, ones, NULL, (int)(i % 3));
        take_until(&bench, OPERATIONS);
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        must(bench.reach.buffer,
             (struct smb_request){.opcode = SMB_READ, .bytes = LAYOUT.bytes, .sink = now});
        for (int e = 0; e < 40 * PART; e++)
            CHECK_EQ(now[e], OPERATIONS / 40);
        for (int i = 0; i < THREADS; i++)
            for (int e = 0; e < PART / 4; e++)
                CHECK_EQ(now[(40 + i) * PART + e], 100);
        bench_end(&bench);
    }
    rig_stop(&bench.rig);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(order_by_tcp),
        TEST(order_by_unix),
        TEST(order_by_mapping),
        TEST(order_by_both),
        TEST(order_by_reference),
        TEST(the_most_urgent_goes_first),
        TEST(an_urgent_one_waits_for_one_window),
        TEST(cancelling),
        TEST(waiting_for_a_turn),
        TEST(failing_in_the_middle),
        TEST(late_ones_are_noticed),
        TEST(beside_blocking_calls),
    };
    return RUN_TESTS(tests);
}
