/* Servers and clients in one process: every operation over every path gives the same result as
 * plain arrays. */
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "client/client.h"
#include "memory/change.h"
#include "memory/segment.h"
#include "random.h"
#include "rig.h"
#include "smb/server.h"

/* of 8 bytes; 3 segments with stripes of 8 KiB, the last one shorter */
enum { ELEMENTS = 3 * 5 * 1024 + 77, THREADS = 8 };
static const struct smb_layout LAYOUT = {ELEMENTS * 8, 8192, 4096, 3};

static int64_t delta(uint64_t index)
{
    return (int64_t)(index % 251) + 1;
}

/* ---- one caller against plain arrays --------------------------------------------------------- */

struct model {
    int64_t buffer[ELEMENTS], other[ELEMENTS], source[ELEMENTS], sink[ELEMENTS];
};

static int64_t combined(int op, int64_t old, int64_t array, int64_t scale)
{
    uint64_t scaled = (uint64_t)scale * (uint64_t)array;
    switch (op) {
    case SMB_SUM: return (int64_t)((uint64_t)old + scaled);
    case SMB_MIN: return old < (int64_t)scaled ? old : (int64_t)scaled;
    case SMB_MAX: return old > (int64_t)scaled ? old : (int64_t)scaled;
    case SMB_PROD: return (int64_t)((uint64_t)old * scaled);
    case SMB_REPLACE: return (int64_t)scaled;
    default: return (int64_t)((uint64_t)old + (uint64_t)scale * ((uint64_t)array - (uint64_t)old));
    }
}

/* One random operation on the buffer and on the model. */
static void step(struct model *m, struct smb_buffer *buffer, struct smb_buffer *other,
                 struct random *random, int opcode)
{
    uint64_t at = random_below(random, ELEMENTS), count = 1 + random_below(random, ELEMENTS - at);
    if (opcode == SMB_FETCH_ADD || opcode == SMB_COMPARE_SWAP)
        count = 1;
    struct smb_request request = {.opcode = opcode,
                                  .op = 1 + (int)random_below(random, 6),
                                  .scale = (double)random_below(random, 7) - 3,
                                  .offset = at * 8,
                                  .bytes = count * 8};
    int64_t scale = (int64_t)request.scale;
    const int64_t *array = m->source + at;
    for (uint64_t i = at; i < at + count; i++)
        m->source[i] = (int64_t)random_next(random);
    switch (opcode) {
    case SMB_READ: request.sink = m->sink + at; break;
    case SMB_WRITE:
        request.source = array;
        memcpy(m->buffer + at, array, count * 8);
        break;
    case SMB_ACCUMULATE_FROM:
        request.other = other;
        array = m->other + at;
        /* fall through */
    case SMB_ACCUMULATE:
        if (opcode == SMB_ACCUMULATE) {
            request.source = array;
            request.sink = random_below(random, 2) ? m->sink + at : NULL;
        }
        for (uint64_t i = 0; i < count; i++)
            m->buffer[at + i] = combined(request.op, m->buffer[at + i], array[i], scale);
        break;
    case SMB_FILL:
        request.argument = random_next(random);
        for (uint64_t i = at; i < at + count; i++)
            m->buffer[i] = (int64_t)request.argument;
        break;
    default:
        request.argument = random_next(random);
        request.expected = (uint64_t)m->buffer[at] ^ random_below(random, 2);
    }
    int64_t old = m->buffer[at];
    struct smb_outcome outcome = must(buffer, request);
    if (opcode == SMB_FETCH_ADD || opcode == SMB_COMPARE_SWAP)
        CHECK_EQ(outcome.result, old);
    if (opcode == SMB_FETCH_ADD)
        m->buffer[at] = (int64_t)((uint64_t)old + request.argument);
    if (opcode == SMB_COMPARE_SWAP && (uint64_t)old == request.expected)
        m->buffer[at] = (int64_t)request.argument;
    if (request.sink)
        CHECK(memcmp(m->sink + at, m->buffer + at, count * 8) == 0);
}

static void every_operation(enum way way)
{
    struct rig rig;
    struct reach reach;
    struct random random = random_make(20260303 + (uint64_t)way);
    struct model *m = calloc(1, sizeof *m);
    rig_start(&rig, LAYOUT, SMB_INT64);
    rig_add_buffer(&rig, 1);
    reach_make(&reach, &rig, way, 5);
    struct smb_buffer *other = reach_buffer(&reach, &rig, way, 1);
    for (int i = 0; i < ELEMENTS; i++)
        m->other[i] = (int64_t)random_next(&random);
    must(other,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = sizeof m->other, .source = m->other});
    for (int round = 0; round < 30; round++)
        for (int opcode = SMB_READ; opcode <= SMB_COMPARE_SWAP; opcode++)
            step(m, reach.buffer, other, &random, opcode);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = sizeof m->sink, .sink = m->sink});
    CHECK(memcmp(m->sink, m->buffer, sizeof m->sink) == 0);
    smb_buffer_destroy(other);
    reach_end(&reach);
    rig_stop(&rig);
    free(m);
}

/* Random ranges of every operation over TCP. */
static void every_operation_by_tcp(void)
{
    every_operation(BY_TCP);
}

static void every_operation_by_unix_socket(void)
{
    every_operation(BY_UNIX);
}

static void every_operation_by_mapping(void)
{
    every_operation(BY_MAPPING);
}

/* One call with parts on links and parts in mapped memory. */
static void every_operation_by_both(void)
{
    every_operation(BY_BOTH);
}

/* Payloads stay with the client, and the test's pump moves them. */
static void every_operation_by_reference(void)
{
    every_operation(BY_REFERENCE);
}

/* ---- optimizers' steps ----------------------------------------------------------------------- */

static const struct smb_hyper HYPER = {.lr = 0.1,
                                       .scale = 0.5,
                                       .weight_decay = 0.01,
                                       .mu = 0.9,
                                       .beta1 = 0.9,
                                       .beta2 = 0.999,
                                       .eps = 1e-8,
                                       .step = 5,
                                       .alpha = 0.3};
enum { STEP_ARRAYS = 4, STEP_FLOATS = ELEMENTS * 2 };

/* Random ranges of each rule over the paths to a server give what the kernel gives for whole
 * arrays. If a segment is mapped, the step is refused, and nothing is changed. */
static void steps_pass_the_gate(void)
{
    struct rig rig;
    struct random random = random_make(20261122);
    static float arrays[STEP_ARRAYS][STEP_FLOATS], found[STEP_FLOATS];
    rig_start(&rig, LAYOUT, SMB_FLOAT32);
    for (int number = 1; number < STEP_ARRAYS; number++)
        rig_add_buffer(&rig, number);
    for (int way = 0; way < WAYS; way++) {
        struct reach reach;
        struct smb_buffer *buffers[STEP_ARRAYS];
        reach_make(&reach, &rig, (enum way)way, 20);
        buffers[0] = reach.buffer;
        for (int number = 0; number < STEP_ARRAYS; number++) {
            for (int i = 0; i < STEP_FLOATS; i++)
                arrays[number][i] = (float)random_below(&random, 1000) / 128 - (number < 3 ? 4 : 0);
            if (number > 0)
                buffers[number] = reach_buffer(&reach, &rig, (enum way)way, number);
            must(buffers[number], (struct smb_request){.opcode = SMB_WRITE,
                                                       .bytes = sizeof found,
                                                       .source = arrays[number]});
        }
        for (int round = 0; round < 60; round++) {
            int rule = 1 + round % 6, states = smb_rule_states(rule);
            uint64_t at = random_below(&random, STEP_FLOATS),
                     count = 1 + random_below(&random, STEP_FLOATS - at);
            struct smb_request request = {
                .opcode = SMB_APPLY,
                .op = rule,
                .hyper = HYPER,
                .offset = 4 * at,
                .bytes = 4 * count,
                .other = buffers[1],
                .states = {states > 0 ? buffers[2] : NULL, states > 1 ? buffers[3] : NULL}};
            if (way == BY_MAPPING || way == BY_BOTH) {
                struct smb_outcome outcome;
                CHECK_EQ(smb_transfer(buffers[0], &request, &outcome), SMB_INVALID);
                CHECK(!outcome.sent && outcome.bytes_applied == 0);
                continue;
            }
            must(buffers[0], request);
            smb_kernel_step(rule, arrays[0] + at, arrays[1] + at, arrays[2] + at, arrays[3] + at,
                            count, &HYPER);
        }
        for (int number = 0; number < STEP_ARRAYS; number++) {
            must(buffers[number],
                 (struct smb_request){.opcode = SMB_READ, .bytes = sizeof found, .sink = found});
            CHECK(memcmp(found, arrays[number], sizeof found) == 0);
            if (number > 0)
                smb_buffer_destroy(buffers[number]);
        }
        reach_end(&reach);
    }
    rig_stop(&rig);
}

/* A source that the servers round has the values that a READ of that range returns, over every path
 * and with every wire format. */
static void sources_are_rounded_as_reads(void)
{
    struct rig rig;
    struct random random = random_make(20261126);
    static const int wires[] = {SMB_WIRE_BFLOAT16, SMB_WIRE_FLOAT16, SMB_WIRE_INT8, SMB_WIRE_INT4};
    static float expected[STEP_FLOATS], source[STEP_FLOATS], rounded[STEP_FLOATS];
    rig_start(&rig, LAYOUT, SMB_FLOAT32);
    rig_add_buffer(&rig, 1);
    for (int way = 0; way < WAYS; way++) {
        struct reach reach;
        reach_make(&reach, &rig, (enum way)way, 20);
        struct smb_buffer *other = reach_buffer(&reach, &rig, (enum way)way, 1);
        must(reach.buffer,
             (struct smb_request){.opcode = SMB_READ, .bytes = sizeof expected, .sink = expected});
        for (int i = 0; i < STEP_FLOATS; i++)
            source[i] = (float)random_below(&random, 100000) / 127 - 300;
        must(other,
             (struct smb_request){.opcode = SMB_WRITE, .bytes = sizeof source, .source = source});
        for (int round = 0; round < 40; round++) {
            int wire = wires[round % 4];
            uint64_t at = random_below(&random, STEP_FLOATS - 1),
                     count = 2 + random_below(&random, STEP_FLOATS - at - 1);
            struct smb_request read = {.opcode = SMB_READ,
                                       .offset = 4 * at,
                                       .bytes = 4 * count,
                                       .sink = rounded,
                                       .wire = wire};
            must(other, read);
            CHECK(memcmp(rounded, source + at, read.bytes) != 0);
            must(reach.buffer, (struct smb_request){.opcode = SMB_ACCUMULATE_FROM,
                                                    .op = SMB_SUM,
                                                    .scale = -1.0,
                                                    .offset = read.offset,
                                                    .bytes = read.bytes,
                                                    .other = other,
                                                    .wire = wire});
            for (uint64_t i = 0; i < count; i++)
                expected[at + i] += -rounded[i];
        }
        must(reach.buffer,
             (struct smb_request){.opcode = SMB_READ, .bytes = sizeof rounded, .sink = rounded});
        CHECK(memcmp(rounded, expected, sizeof expected) == 0);
        smb_buffer_destroy(other);
        reach_end(&reach);
    }
    rig_stop(&rig);
}

/* A sum of several sources is what the kernels compute from their arrays, over every path: random
 * ranges, scales and wire formats, with the target among the sources. An invalid sum is not
 * sent. */
static void sums_of_several_sources(void)
{
    struct rig rig;
    struct random random = random_make(20261127);
    static float arrays[SMB_SOURCES_MAX][STEP_FLOATS], total[STEP_FLOATS], one[STEP_FLOATS];
    rig_start(&rig, LAYOUT, SMB_FLOAT32);
    for (int number = 1; number < SMB_SOURCES_MAX; number++)
        rig_add_buffer(&rig, number);
    for (int way = 0; way < WAYS; way++) {
        struct reach reach;
        struct smb_buffer *buffers[SMB_SOURCES_MAX];
        struct smb_outcome outcome;
        reach_make(&reach, &rig, (enum way)way, 20);
        for (int number = 0; number < SMB_SOURCES_MAX; number++) {
            buffers[number] = number ? reach_buffer(&reach, &rig, (enum way)way, number)
                                     : reach.buffer;
            for (int i = 0; i < STEP_FLOATS; i++)
                arrays[number][i] = (float)random_below(&random, 100000) / 127 - 300;
            must(buffers[number], (struct smb_request){.opcode = SMB_WRITE,
                                                       .bytes = sizeof *arrays,
                                                       .source = arrays[number]});
        }
        for (int round = 0; round < 40; round++) {
            uint64_t at = random_below(&random, STEP_FLOATS),
                     count = 1 + random_below(&random, STEP_FLOATS - at);
            struct smb_request sum = {.opcode = SMB_ACCUMULATE_FROM,
                                      .op = SMB_REPLACE,
                                      .scale = 1.0,
                                      .offset = 4 * at,
                                      .bytes = 4 * count,
                                      .source_count = 2 + (uint32_t)random_below(&random, 4)};
            for (uint32_t s = 0; s < sum.source_count; s++) {
                int number = (int)random_below(&random, SMB_SOURCES_MAX);
                sum.sources[s] = buffers[number];
                sum.scales[s] = (double)random_below(&random, 100) / 7 - 7;
                sum.wires[s] = round % 2 ? SMB_WIRE_EXACT : (int)random_below(&random, 4);
                must(buffers[number], (struct smb_request){.opcode = SMB_READ,
                                                           .offset = sum.offset,
                                                           .bytes = sum.bytes,
                                                           .sink = one,
                                                           .wire = sum.wires[s]});
                smb_kernel_apply(SMB_FLOAT32, s == 0 ? SMB_REPLACE : SMB_SUM, total, one, count,
                                 sum.scales[s]);
            }
            must(buffers[0], sum);
            memcpy(arrays[0] + at, total, 4 * count);
            sum.wires[1] = SMB_WIRE_SPARSE;
            CHECK_EQ(smb_transfer(buffers[0], &sum, &outcome), SMB_INVALID);
            sum.wires[1] = SMB_WIRE_EXACT, sum.op = SMB_SUM;
            CHECK_EQ(smb_transfer(buffers[0], &sum, &outcome), SMB_INVALID);
            sum.op = SMB_REPLACE, sum.sources[1] = NULL;
            CHECK_EQ(smb_transfer(buffers[0], &sum, &outcome), SMB_INVALID);
            sum.sources[1] = buffers[0], sum.source_count = SMB_SOURCES_MAX + 1;
            CHECK_EQ(smb_transfer(buffers[0], &sum, &outcome), SMB_INVALID);
            CHECK(!outcome.sent);
        }
        must(buffers[0],
             (struct smb_request){.opcode = SMB_READ, .bytes = sizeof one, .sink = one});
        CHECK(memcmp(one, arrays[0], sizeof one) == 0);
        for (int number = 1; number < SMB_SOURCES_MAX; number++)
            smb_buffer_destroy(buffers[number]);
        reach_end(&reach);
    }
    rig_stop(&rig);
}

/* Invalid steps are not sent: different layouts, types or parameters, a buffer twice, a missing
 * state. A superfluous state is ignored. */
static void wrong_steps_are_not_sent(void)
{
    struct rig rig;
    struct reach reach;
    rig_start(&rig, LAYOUT, SMB_FLOAT32);
    rig_add_buffer(&rig, 1);
    reach_make(&reach, &rig, BY_TCP, 21);
    struct smb_buffer *w = reach.buffer, *g = reach_buffer(&reach, &rig, BY_TCP, 1), *integers,
                      *shorter, *unset;
    struct smb_layout less = LAYOUT;
    less.bytes -= 4;
    CHECK_EQ(smb_buffer_create(reach.client, &LAYOUT, SMB_INT32, &integers), SMB_OK);
    CHECK_EQ(smb_buffer_create(reach.client, &less, SMB_FLOAT32, &shorter), SMB_OK);
    CHECK_EQ(smb_buffer_create(reach.client, &LAYOUT, SMB_FLOAT32, &unset), SMB_OK);
    struct smb_hyper infinite = HYPER, none = HYPER;
    infinite.lr = 1e300, none.step = 0;
    const struct smb_request cases[] = {
        {.op = 0, .other = g, .hyper = HYPER},
        {.op = 7, .other = g, .hyper = HYPER},
        {.op = SMB_RULE_SGD, .hyper = HYPER},
        {.op = SMB_RULE_SGD, .other = w, .hyper = HYPER},
        {.op = SMB_RULE_SGD, .other = integers, .hyper = HYPER},
        {.op = SMB_RULE_SGD, .other = shorter, .hyper = HYPER},
        {.op = SMB_RULE_SGD, .other = unset, .hyper = HYPER},
        {.op = SMB_RULE_SGD, .other = g, .hyper = infinite},
        {.op = SMB_RULE_MOMENTUM, .other = g, .hyper = HYPER},
        {.op = SMB_RULE_MOMENTUM, .other = g, .states = {g}, .hyper = HYPER},
        {.op = SMB_RULE_MOMENTUM, .other = g, .states = {w}, .hyper = HYPER},
        {.op = SMB_RULE_ADAM, .other = g, .states = {unset, unset}, .hyper = HYPER},
        {.op = SMB_RULE_ADAM, .other = g, .states = {unset, shorter}, .hyper = HYPER},
        {.op = SMB_RULE_ADAM, .other = g, .states = {unset, w}, .hyper = none},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct smb_request request = cases[i];
        struct smb_outcome outcome;
        request.opcode = SMB_APPLY, request.bytes = 4, request.timeout_ms = RIG_TIMEOUT_MS;
        CHECK_EQ(smb_transfer(w, &request, &outcome), SMB_INVALID);
        CHECK(outcome.sent == 0 && outcome.bytes_applied == 0);
        request.op = SMB_RULE_SGD, request.hyper = HYPER;
        if (request.other == g)
            /* a valid step, too: states that the rule does not have are ignored */
            must(w, request);
    }
    smb_buffer_destroy(g);
    smb_buffer_destroy(integers);
    smb_buffer_destroy(shorter);
    smb_buffer_destroy(unset);
    reach_end(&reach);
    rig_stop(&rig);
}

/* ---- many callers ---------------------------------------------------------------------------- */

struct caller {
    pthread_t thread;
    struct smb_buffer *buffer;
    int rounds;
};

static void *accumulate_and_check(void *argument)
{
    struct caller *caller = argument;
    int64_t *source = malloc(ELEMENTS * 8), *sink = malloc(ELEMENTS * 8);
    for (uint64_t i = 0; i < ELEMENTS; i++)
        source[i] = delta(i);
    for (int round = 0; round < caller->rounds; round++) {
        bool fetch = round % 2;
        must(caller->buffer, (struct smb_request){.opcode = SMB_ACCUMULATE,
                                                  .op = SMB_SUM,
                                                  .scale = 1.0,
                                                  .bytes = ELEMENTS * 8,
                                                  .source = source,
                                                  .sink = fetch ? sink : NULL});
        for (uint64_t i = 0; fetch && i < ELEMENTS; i++)
            CHECK(sink[i] >= delta(i) * (round + 1) && sink[i] % delta(i) == 0);
        must(caller->buffer,
             (struct smb_request){.opcode = SMB_READ, .offset = 8, .bytes = 8000, .sink = sink});
    }
    free(source);
    free(sink);
    return NULL;
}

static void share_a_client(enum way way, int rounds)
{
    struct rig rig;
    struct reach reach;
    struct caller callers[THREADS];
    rig_start(&rig, LAYOUT, SMB_INT64);
    reach_make(&reach, &rig, way, 6);
    for (int i = 0; i < THREADS; i++) {
        callers[i] = (struct caller){.buffer = reach.buffer, .rounds = rounds};
        CHECK_EQ(pthread_create(&callers[i].thread, NULL, accumulate_and_check, &callers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(callers[i].thread, NULL);
    int64_t *sink = malloc(ELEMENTS * 8);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = ELEMENTS * 8, .sink = sink});
    for (uint64_t i = 0; i < ELEMENTS; i++)
        CHECK_EQ(sink[i], delta(i) * THREADS * rounds);
    free(sink);
    reach_end(&reach);
    rig_stop(&rig);
}

/* Eight threads on one client's links: every sum is exact, and each call accounts for its own
 * bytes. */
static void threads_share_a_client(void)
{
    share_a_client(BY_TCP, 20);
}

/* The same if each call has parts on links and parts in mapped memory. */
static void threads_share_a_client_by_both(void)
{
    share_a_client(BY_BOTH, 40);
}

static uint64_t fastest(struct smb_buffer *buffer, struct smb_segment *segment,
                        const struct smb_request *request, int way)
{
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 100; i++) {
        struct smb_outcome outcome;
        uint64_t started = smb_now_ns();
        if (way == 0)
            CHECK_EQ(smb_transfer_at_once(buffer, request, &outcome), 0);
        else
            CHECK_EQ(smb_segment_lock(segment, request->offset, SMB_TRY), SMB_BUSY);
        uint64_t took = smb_now_ns() - started;
        best = took < best ? took : best;
    }
    return best;
}

/* smb_transfer_at_once is called with Python's lock held: if the chunk's lock is not free it gives
 * up without spinning. */
static void at_once_waits_for_nothing(void)
{
    struct rig rig;
    struct reach reach;
    uint64_t value = 7;
    struct smb_request write = {.opcode = SMB_WRITE, .bytes = sizeof value, .source = &value};
    struct smb_outcome outcome;
    rig_start(&rig, (struct smb_layout){65536, 65536, 65536, 1}, SMB_INT64);
    reach_make(&reach, &rig, BY_MAPPING, 8);
    CHECK_EQ(smb_transfer_at_once(reach.buffer, &write, &outcome), 1);
    CHECK_EQ(smb_segment_lock(reach.segments[0], 0, SMB_TRY), SMB_OK);
    CHECK(4 * fastest(reach.buffer, reach.segments[0], &write, 0) <
          fastest(reach.buffer, reach.segments[0], &write, 1));
    smb_segment_unlock(reach.segments[0], 0);
    CHECK_EQ(smb_transfer_at_once(reach.buffer, &write, &outcome), 1);
    reach_end(&reach);
    rig_stop(&rig);
}

/* Transfers much larger than sockets and buffers hold, so that frames are sent and received in
 * parts: each byte is in its place. */
static void large_transfers(void)
{
    enum { LARGE = 16 * 1024 * 1024 + 72 };
    struct rig rig;
    uint64_t *source = malloc(LARGE), *sink = malloc(LARGE);
    rig_start(&rig, (struct smb_layout){LARGE, 524288, 262144, 3}, SMB_INT64);
    for (int way = 0; way < WAYS; way++) {
        struct reach reach;
        struct random random = random_make((uint64_t)way);
        for (int i = 0; i < LARGE / 8; i++)
            source[i] = random_next(&random);
        reach_make(&reach, &rig, (enum way)way, 8);
        must(reach.buffer,
             (struct smb_request){.opcode = SMB_WRITE, .bytes = LARGE, .source = source});
        must(reach.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = LARGE, .sink = sink});
        CHECK(memcmp(source, sink, LARGE) == 0);
        must(reach.buffer, (struct smb_request){.opcode = SMB_ACCUMULATE,
                                                .op = SMB_SUM,
                                                .scale = -2.0,
                                                .bytes = LARGE,
                                                .source = source,
                                                .sink = sink});
        for (int i = 0; i < LARGE / 8; i++)
            CHECK_EQ(sink[i], -source[i]);
        reach_end(&reach);
    }
    free(source);
    free(sink);
    rig_stop(&rig);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static struct smb_buffer *single(struct reach *reach, struct rig *rig, int dtype, uint64_t bytes,
                                 uint64_t id, uint32_t epoch)
{
    struct smb_buffer *buffer;
    struct smb_layout layout = {bytes, 4096, 4096, 1};
    (void)rig;
    CHECK_EQ(smb_buffer_create(reach->client, &layout, dtype, &buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(buffer, 0, id, epoch, reach->links[0]), SMB_OK);
    return buffer;
}

/* A client with wrong information about a segment gets the reason, over a link that goes on
 * working. */
static void wrong_ideas_are_answered(void)
{
    struct rig rig;
    struct reach reach;
    int64_t value[2] = {1, 2};
    rig_start(&rig, LAYOUT, SMB_INT64);
    reach_make(&reach, &rig, BY_TCP, 7);
    uint64_t id = rig_segment_id(0, 0), bytes = smb_layout_segment_bytes(&LAYOUT, 0);
    const struct {
        int dtype;
        uint64_t bytes, id;
        uint32_t epoch;
        int status;
    } cases[] = {
        {SMB_INT64, bytes, id, RIG_EPOCH, SMB_OK},
        {SMB_INT64, bytes, id, RIG_EPOCH + 1, SMB_STALE_EPOCH},
        {SMB_INT64, bytes, id, RIG_EPOCH - 1, SMB_STALE_EPOCH},
        {SMB_FLOAT64, bytes, id, RIG_EPOCH, SMB_INVALID},
        {SMB_INT64, bytes + 16, id, RIG_EPOCH, SMB_INVALID},
        {SMB_INT64, (uint64_t)1 << 50, id, RIG_EPOCH, SMB_INVALID},
        /* a segment of the other server */
        {SMB_INT64, bytes, rig_segment_id(0, 1), RIG_EPOCH, SMB_NOT_FOUND},
        {SMB_INT64, bytes, UINT64_MAX, RIG_EPOCH, SMB_NOT_FOUND},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct smb_buffer *buffer = single(&reach, &rig, cases[i].dtype, cases[i].bytes,
                                           cases[i].id, cases[i].epoch);
        struct smb_request write = {
            .opcode = SMB_WRITE, .offset = cases[i].bytes - 16, .bytes = 16, .source = value};
        struct smb_request read = {
            .opcode = SMB_READ, .offset = cases[i].bytes - 16, .bytes = 16, .sink = value};
        CHECK_EQ(reach_try(buffer, write), cases[i].status);
        CHECK_EQ(reach_try(buffer, read), cases[i].status);
        smb_buffer_destroy(buffer);
        CHECK(smb_link_alive(reach.links[0]));
    }
    struct smb_segment *segment;
    /* descriptors are not passed over TCP */
    CHECK_EQ(smb_link_attach(reach.links[0], id, RIG_EPOCH, 1000, &segment), SMB_DENIED);
    CHECK(smb_link_alive(reach.links[0]));
    must(reach.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = 16, .sink = value});
    struct smb_server_counters counters;
    smb_server_counters(rig.servers[0], &counters);
    CHECK_EQ(counters.errors[SMB_STALE_EPOCH], 4);
    CHECK_EQ(counters.errors[SMB_INVALID], 6);
    CHECK_EQ(counters.errors[SMB_NOT_FOUND], 4);
    CHECK_EQ(counters.errors[SMB_DENIED], 1);
    struct smb_denial denial;
    uint64_t left_out;
    CHECK_EQ(smb_server_take_denials(rig.servers[0], &denial, 1, &left_out), 1);
    CHECK_EQ(left_out, 0);
    CHECK(denial.session != 0);
    CHECK_EQ(denial.segment, id);
    CHECK_EQ(denial.opcode, SMB_ATTACH);
    CHECK_EQ(denial.count, 1);
    CHECK_EQ(smb_server_take_denials(rig.servers[0], &denial, 1, &left_out), 0);
    reach_end(&reach);
    rig_stop(&rig);
}

/* A client's requests have growing numbers over all its links. Once each link had 2^32 numbers of
 * its own. After as many requests the numbers of its successor were below the server's watermark,
 * and every change was answered as one made long ago. */
static void later_links_go_on_above(void)
{
    enum { CHANGES = 40, LINKS = 3 };
    struct rig rig;
    struct smb_client *client;
    const struct smb_layout layout = {4096, 4096, 4096, 1};
    rig_start(&rig, layout, SMB_INT64);
    CHECK_EQ(smb_client_create(7, &client), SMB_OK);
    /* as if the first link had used 2^32 numbers */
    atomic_store(&client->sequences, ((uint64_t)2 << 32) - CHANGES / 2);
    int64_t one = 1, found = 0;
    for (int i = 0; i < LINKS; i++) {
        struct smb_link *link;
        struct smb_buffer *buffer;
        uint64_t instance;
        CHECK_EQ(smb_client_connect_tcp(client, "127.0.0.1", rig.ports[0], 0, RIG_TIMEOUT_MS, &link,
                                        &instance),
                 SMB_OK);
        CHECK_EQ(smb_buffer_create(client, &layout, SMB_INT64, &buffer), SMB_OK);
        CHECK_EQ(smb_buffer_set_link(buffer, 0, rig_segment_id(0, 0), RIG_EPOCH, link), SMB_OK);
        for (int n = 0; n < CHANGES; n++)
            must(buffer, (struct smb_request){.opcode = SMB_ACCUMULATE,
                                              .op = SMB_SUM,
                                              .scale = 1,
                                              .bytes = 8,
                                              .source = &one});
        must(buffer, (struct smb_request){.opcode = SMB_READ, .bytes = 8, .sink = &found});
        CHECK_EQ(found, (i + 1) * CHANGES);
        smb_buffer_destroy(buffer);
        smb_link_close(link);
    }
    CHECK(atomic_load(&client->sequences) > (uint64_t)2 << 32);
    smb_client_destroy(client);
    rig_stop(&rig);
}

/* Requests that the client itself can recognise as invalid are refused before anything is sent. */
static void wrong_requests_are_not_sent(void)
{
    struct rig rig;
    struct reach reach;
    int64_t value[2] = {1, 2};
    rig_start(&rig, LAYOUT, SMB_INT64);
    reach_make(&reach, &rig, BY_TCP, 7);
    const struct smb_request cases[] = {
        {.opcode = SMB_READ, .bytes = 0, .sink = value},
        {.opcode = SMB_READ, .bytes = 12, .sink = value},
        {.opcode = SMB_READ, .offset = 4, .bytes = 8, .sink = value},
        {.opcode = SMB_READ, .offset = ELEMENTS * 8, .bytes = 8, .sink = value},
        {.opcode = SMB_READ, .offset = UINT64_MAX - 7, .bytes = 16, .sink = value},
        {.opcode = SMB_READ, .bytes = UINT64_MAX - 7, .sink = value},
        {.opcode = SMB_READ, .bytes = 8},
        {.opcode = SMB_WRITE, .bytes = 8},
        {.opcode = SMB_ACCUMULATE, .bytes = 8, .source = value, .op = 0, .scale = 1},
        {.opcode = SMB_ACCUMULATE, .bytes = 8, .source = value, .op = SMB_SUM, .scale = 0.5},
        {.opcode = SMB_ACCUMULATE_FROM, .bytes = 8, .op = SMB_SUM, .scale = 1},
        {.opcode = SMB_FETCH_ADD, .bytes = 16},
        {.opcode = SMB_HELLO, .bytes = 8},
        {.opcode = SMB_ATTACH, .bytes = 8},
        {.opcode = SMB_OPCODE_COUNT, .bytes = 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct smb_request request = cases[i];
        struct smb_outcome outcome;
        request.timeout_ms = RIG_TIMEOUT_MS;
        CHECK_EQ(smb_transfer(reach.buffer, &request, &outcome), SMB_INVALID);
        CHECK(outcome.sent == 0 && outcome.bytes_applied == 0);
    }
    struct smb_server_counters counters;
    smb_server_counters(rig.servers[0], &counters);
    for (int opcode = SMB_ATTACH; opcode <= SMB_COMPARE_SWAP; opcode++)
        CHECK_EQ(counters.operations[SMB_TRANSPORT_TCP][opcode], 0);
    reach_end(&reach);
    rig_stop(&rig);
}

/* A server's memory is limited by its capacity, a refused creation leaves nothing behind, and
 * deletion gives memory back. */
static void capacity(void)
{
    struct smb_server *server;
    uint64_t one = smb_segment_file_bytes(100000, 4096);
    CHECK_EQ(smb_server_create(1, 1, 2 * one, &server), SMB_OK);
    CHECK_EQ(smb_server_create_segment(server, scratch_path("a"), 1, 1, SMB_UINT8, 100000, 4096),
             SMB_OK);
    CHECK_EQ(smb_server_create_segment(server, scratch_path("b"), 1, 1, SMB_UINT8, 100, 4096),
             SMB_EXISTS);
    CHECK_EQ(smb_server_create_segment(server, scratch_path("b"), 2, 1, SMB_UINT8, 200000, 4096),
             SMB_OUT_OF_MEMORY);
    CHECK_EQ(
        smb_server_create_segment(server, scratch_path("b"), 2, 1, SMB_UINT8, UINT64_MAX, 4096),
        SMB_INVALID);
    CHECK_EQ(smb_server_create_segment(server, scratch_path("a"), 2, 1, SMB_UINT8, 100000, 4096),
             SMB_EXISTS);
    CHECK_EQ(scratch_files(), 1);
    struct smb_server_counters counters;
    smb_server_counters(server, &counters);
    CHECK(counters.segments == 1 && counters.segment_bytes == one);
    CHECK_EQ(smb_server_create_segment(server, scratch_path("b"), 2, 1, SMB_UINT8, 100000, 4096),
             SMB_OK);
    CHECK_EQ(smb_server_create_segment(server, scratch_path("c"), 3, 1, SMB_UINT8, 1, 4096),
             SMB_OUT_OF_MEMORY);
    CHECK_EQ(smb_server_delete_segment(server, 1), SMB_OK);
    CHECK_EQ(smb_server_delete_segment(server, 1), SMB_NOT_FOUND);
    CHECK_EQ(smb_server_create_segment(server, scratch_path("c"), 3, 1, SMB_UINT8, 100000, 4096),
             SMB_OK);
    CHECK_EQ(scratch_files(), 2);
    smb_server_destroy(server);
    CHECK_EQ(scratch_files(), 2); /* kept for the next run */
}

/* The next run of a server serves the segments of the last one, with their data, within its
 * capacity. */
static void adoption(void)
{
    struct rig rig;
    struct reach reach;
    int64_t value = 11, back = 0;
    rig_start(&rig, LAYOUT, SMB_INT64);
    reach_make(&reach, &rig, BY_TCP, 8);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_WRITE, .offset = 80, .bytes = 8, .source = &value});
    reach_end(&reach);
    rig_stop(&rig);
    for (int i = 0; i < RIG_SERVERS; i++) {
        CHECK_EQ(smb_server_create(1000 + (uint64_t)i, 1, 1 << 20, &rig.servers[i]), SMB_OK);
        CHECK_EQ(smb_server_listen_tcp(rig.servers[i], "127.0.0.1", 0, &rig.ports[i]), SMB_OK);
    }
    struct smb_segment_info info;
    for (uint32_t i = 0; i < LAYOUT.segment_count; i++) {
        CHECK_EQ(smb_server_adopt_segment(rig.servers[i % 2], rig_segment_path(0, i), &info),
                 SMB_OK);
        CHECK(info.id == rig_segment_id(0, i) && info.epoch == RIG_EPOCH);
    }
    CHECK_EQ(smb_server_adopt_segment(rig.servers[0], rig_segment_path(0, 0), &info), SMB_EXISTS);
    CHECK_EQ(smb_server_adopt_segment(rig.servers[0], scratch_path("none"), &info), SMB_NOT_FOUND);
    struct smb_server *small;
    CHECK_EQ(smb_server_create(1, 1, 4096, &small), SMB_OK);
    CHECK_EQ(smb_server_adopt_segment(small, rig_segment_path(0, 0), &info), SMB_OUT_OF_MEMORY);
    smb_server_destroy(small);
    reach_make(&reach, &rig, BY_TCP, 9);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .offset = 80, .bytes = 8, .sink = &back});
    CHECK_EQ(back, 11);
    reach_end(&reach);
    rig_stop(&rig);
}

static void *work_until_deleted(void *argument)
{
    struct caller *caller = argument;
    int64_t *source = calloc(ELEMENTS, 8);
    int status = SMB_OK;
    for (int round = 0; status == SMB_OK; round++) {
        struct smb_request request = {.opcode = SMB_WRITE,
                                      .bytes = ELEMENTS * 8,
                                      .source = source,
                                      .timeout_ms = RIG_TIMEOUT_MS};
        if (round % 2)
            request = (struct smb_request){.opcode = SMB_READ,
                                           .bytes = ELEMENTS * 8,
                                           .sink = source,
                                           .timeout_ms = RIG_TIMEOUT_MS};
        status = reach_try(caller->buffer, request);
        __atomic_add_fetch(&caller->rounds, 1, __ATOMIC_RELAXED);
    }
    CHECK_EQ(status, SMB_NOT_FOUND);
    free(source);
    return NULL;
}

/* A segment is deleted under traffic: every client is told, over every path, its file and its
 * memory are gone, and the links stay alive. */
static void deletion_under_traffic(void)
{
    struct rig rig;
    struct reach reaches[WAYS];
    struct caller callers[WAYS];
    rig_start(&rig, LAYOUT, SMB_INT64);
    for (int way = 0; way < WAYS; way++) {
        reach_make(&reaches[way], &rig, (enum way)way, 10);
        callers[way] = (struct caller){.buffer = reaches[way].buffer};
        CHECK_EQ(pthread_create(&callers[way].thread, NULL, work_until_deleted, &callers[way]), 0);
    }
    for (int way = 0; way < WAYS; way++)
        WAIT_UNTIL(__atomic_load_n(&callers[way].rounds, __ATOMIC_RELAXED) > 10);
    for (uint32_t i = 0; i < LAYOUT.segment_count; i++)
        CHECK_EQ(smb_server_delete_segment(rig.servers[i % 2], rig_segment_id(0, i)), SMB_OK);
    for (int way = 0; way < WAYS; way++) {
        pthread_join(callers[way].thread, NULL);
        CHECK(smb_link_alive(reaches[way].links[0]) && smb_link_alive(reaches[way].links[1]));
        reach_end(&reaches[way]);
    }
    CHECK_EQ(scratch_files(), 2); /* the sockets' files */
    struct smb_server_counters counters;
    smb_server_counters(rig.servers[0], &counters);
    CHECK(counters.segments == 0 && counters.segment_bytes == 0);
    /* kept although the segment is gone */
    CHECK(counters.operations[SMB_TRANSPORT_SHM][SMB_WRITE] > 0);
    rig_stop(&rig);
    CHECK_EQ(scratch_files(), 2); /* the caller removes them once no memory is left */
}

/* Each transport's operations, bytes and connections are counted where they happened. */
static void counters_are_true(void)
{
    struct rig rig;
    struct smb_server_counters counters;
    static const int transports[] = {[BY_TCP] = SMB_TRANSPORT_TCP,
                                     [BY_UNIX] = SMB_TRANSPORT_UNIX,
                                     [BY_MAPPING] = SMB_TRANSPORT_SHM,
                                     [BY_REFERENCE] = SMB_TRANSPORT_VERBS};
    int64_t values[16] = {0};
    rig_start(&rig, LAYOUT, SMB_INT64);
    for (int way = BY_TCP; way <= BY_MAPPING; way++) {
        struct reach reach;
        reach_make(&reach, &rig, (enum way)way, 11);
        for (int i = 0; i < 5; i++)
            must(reach.buffer, (struct smb_request){
                                   .opcode = SMB_WRITE, .bytes = sizeof values, .source = values});
        smb_server_counters(rig.servers[0], &counters);
        CHECK_EQ(counters.operations[transports[way]][SMB_WRITE], 5);
        CHECK_EQ(counters.bytes[transports[way]][SMB_WRITE], 5 * sizeof values);
        CHECK(counters.connections_now[SMB_TRANSPORT_TCP] +
                  counters.connections_now[SMB_TRANSPORT_UNIX] >=
              1);
        reach_end(&reach);
    }
    for (int t = 0; t < SMB_TRANSPORT_COUNT; t++)
        WAIT_UNTIL(
            (smb_server_counters(rig.servers[0], &counters), counters.connections_now[t] == 0));
    CHECK_EQ(counters.connections_opened[SMB_TRANSPORT_TCP], 2);
    CHECK_EQ(counters.connections_opened[SMB_TRANSPORT_UNIX], 2);
    rig_stop(&rig);
}

/* Stripes of several mapped segments, mapped side by side, form the buffer. */
static void contiguous_view(void)
{
    struct rig rig;
    struct reach reach, remote;
    void *address;
    uint64_t mapped;
    rig_start(&rig, LAYOUT, SMB_INT64);
    reach_make(&reach, &rig, BY_MAPPING, 12);
    reach_make(&remote, &rig, BY_TCP, 13);
    int64_t *values = malloc(ELEMENTS * 8);
    for (int i = 0; i < ELEMENTS; i++)
        values[i] = i * 3 - 7;
    must(remote.buffer,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = ELEMENTS * 8, .source = values});
    CHECK_EQ(smb_buffer_map(reach.buffer, &address, &mapped), SMB_OK);
    CHECK(mapped >= ELEMENTS * 8 && mapped % 4096 == 0);
    CHECK(memcmp(address, values, ELEMENTS * 8) == 0);
    ((int64_t *)address)[ELEMENTS - 1] = 99;
    must(remote.buffer,
         (struct smb_request){
             .opcode = SMB_READ, .offset = (ELEMENTS - 1) * 8, .bytes = 8, .sink = values});
    CHECK_EQ(values[0], 99);
    smb_buffer_unmap(address, mapped);
    CHECK_EQ(smb_buffer_map(remote.buffer, &address, &mapped), SMB_INVALID);
    free(values);
    reach_end(&reach);
    reach_end(&remote);
    rig_stop(&rig);
}

struct holder {
    struct smb_segment *segment;
    int64_t *first; /* what the call reads first */
    pthread_t thread;
};

/* Takes the chunk's lock as soon as the call has begun, notes that in its first element, and keeps
 * the lock longer than several tries of the call. */
static void *hold_the_chunk(void *argument)
{
    struct holder *holder = argument;
    while (__atomic_load_n(holder->first, __ATOMIC_RELAXED) == 0)
        continue;
    CHECK_EQ(smb_segment_lock(holder->segment, 0, smb_now_ns() + 5000000000U), SMB_OK);
    smb_segment_change_begin(holder->segment, 0);
    __atomic_store_n(holder->first, 0, __ATOMIC_RELAXED);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    smb_segment_change_end(holder->segment, 0);
    smb_segment_unlock(holder->segment, 0);
    return NULL;
}

/* A sparse read of a mapped segment that has to wait for a chunk's lock goes on where it waited. If
 * it began the chunk anew each time, others that change the chunk could keep it from its end. */
static void a_sparse_read_goes_on_where_it_waited(void)
{
    enum { BYTES = 1 << 20, COUNT = BYTES / 8 / 2 };
    static int64_t values[BYTES / 8], sink[COUNT], indices[COUNT];
    struct rig rig;
    struct reach reach;
    for (int i = 0; i < BYTES / 8; i++)
        values[i] = i + 1;
    for (int i = 0; i < COUNT; i++)
        indices[i] = 2 * i;
    rig_start(&rig, (struct smb_layout){BYTES, BYTES, BYTES, 1}, SMB_INT64);
    reach_make(&reach, &rig, BY_MAPPING, 14);
    must(reach.buffer, (struct smb_request){.opcode = SMB_WRITE, .bytes = BYTES, .source = values});
    struct holder holder = {.segment = reach.segments[0], .first = &sink[0]};
    CHECK_EQ(pthread_create(&holder.thread, NULL, hold_the_chunk, &holder), 0);
    CHECK_EQ(reach_try(reach.buffer, (struct smb_request){.opcode = SMB_READ,
                                                          .bytes = BYTES - 8,
                                                          .sink = sink,
                                                          .wire = SMB_WIRE_SPARSE,
                                                          .indices = indices,
                                                          .count = COUNT}),
             SMB_OK);
    pthread_join(holder.thread, NULL);
    CHECK_EQ(sink[0], 0);
    for (int i = 1; i < COUNT; i++)
        CHECK_EQ(sink[i], values[2 * i]);
    reach_end(&reach);
    rig_stop(&rig);
}

/* Weights whose step was refused because their state moves must not be bound to their server. */
static void a_refused_step_binds_nothing(void)
{
    struct rig rig;
    struct reach reach;
    rig_start(&rig, LAYOUT, SMB_FLOAT32);
    rig_add_buffer(&rig, 1);
    rig_add_buffer(&rig, 2);
    reach_make(&reach, &rig, BY_TCP, 12);
    struct smb_buffer *gradient = reach_buffer(&reach, &rig, BY_TCP, 1),
                      *state = reach_buffer(&reach, &rig, BY_TCP, 2);
    CHECK_EQ(smb_server_let_move(rig.servers[0], rig_segment_id(2, 0)), SMB_OK);
    struct smb_request step = {.opcode = SMB_APPLY,
                               .op = SMB_RULE_MOMENTUM,
                               .hyper = HYPER,
                               .bytes = 64,
                               .other = gradient,
                               .states = {state}};
    CHECK_EQ(reach_try(reach.buffer, step), SMB_INVALID);
    CHECK_EQ(smb_server_let_move(rig.servers[0], rig_segment_id(0, 0)), SMB_OK);
    smb_buffer_destroy(gradient);
    smb_buffer_destroy(state);
    reach_end(&reach);
    rig_stop(&rig);
}

/* Otherwise no server could be emptied again, because segments with a view do not move. */
static void a_view_that_fails_binds_nothing(void)
{
    struct rig rig;
    struct reach reach;
    void *address;
    uint64_t mapped;
    rig_start(&rig, LAYOUT, SMB_INT64);
    reach_make(&reach, &rig, BY_MAPPING, 12);
    /* The last stripes are of a file that cannot be mapped. */
    int fd = smb_segment_fd(reach.segments[1]), kept = dup(fd), null = open("/dev/null", O_RDWR);
    CHECK(kept >= 0 && null >= 0);
    CHECK_EQ(dup2(null, fd), fd);
    CHECK_EQ(smb_buffer_map(reach.buffer, &address, &mapped), SMB_SYSTEM);
    CHECK_EQ(dup2(kept, fd), fd);
    close(kept);
    close(null);
    /* One of the segments may move. */
    CHECK_EQ(smb_server_let_move(rig.servers[1], rig_segment_id(0, 1)), SMB_OK);
    CHECK_EQ(smb_buffer_map(reach.buffer, &address, &mapped), SMB_BUSY);
    for (uint32_t i = 0; i < rig.layout.segment_count; i++)
        CHECK_EQ(smb_server_let_move(rig.servers[i % 2], rig_segment_id(0, i)), SMB_OK);
    reach_end(&reach);
    rig_stop(&rig);
}

/* A daemon starts relays. Until such a process executes another program it has all descriptors of
 * the daemon, so a descriptor that the daemon closes meanwhile stays open: epoll reported
 * connections that were freed. */
static void a_process_that_was_forked_has_the_descriptors(void)
{
    struct rig rig;
    struct smb_server_counters counters;
    int ends[2];
    rig_start(&rig, LAYOUT, SMB_INT64);
    int peer = raw_connect(rig.ports[0]), witness = raw_connect(rig.ports[0]);
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters),
                counters.connections_now[SMB_TRANSPORT_TCP] == 2));
    CHECK_EQ(pipe(ends), 0);
    pid_t forked = fork();
    if (forked == 0) {
        char byte;
        close(ends[1]);
        _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);
    }
    CHECK(forked > 0);
    static const char no_frame[SMB_FRAME_BYTES] = "it is dropped for this";
    CHECK_EQ(write(peer, no_frame, sizeof no_frame), (ssize_t)sizeof no_frame);
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters),
                counters.connections_now[SMB_TRANSPORT_TCP] == 1));
    /* First the connection that is gone, then one that exists: after that the loop has looked at
     * both. */
    CHECK_EQ(write(peer, no_frame, sizeof no_frame), (ssize_t)sizeof no_frame);
    CHECK_EQ(shutdown(peer, SHUT_WR), 0);
    CHECK_EQ(write(witness, no_frame, sizeof no_frame), (ssize_t)sizeof no_frame);
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters),
                counters.connections_now[SMB_TRANSPORT_TCP] == 0));
    close(ends[1]);
    int status;
    CHECK_EQ(waitpid(forked, &status, 0), forked);
    CHECK_EQ(status, 0);
    close(ends[0]);
    close(peer);
    close(witness);
    rig_stop(&rig);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(every_operation_by_tcp),
        TEST(every_operation_by_unix_socket),
        TEST(every_operation_by_mapping),
        TEST(every_operation_by_both),
        TEST(every_operation_by_reference),
        TEST(steps_pass_the_gate),
        TEST(sources_are_rounded_as_reads),
        TEST(sums_of_several_sources),
        TEST(wrong_steps_are_not_sent),
        TEST(threads_share_a_client),
        TEST(threads_share_a_client_by_both),
        TEST(at_once_waits_for_nothing),
        TEST(large_transfers),
        TEST(wrong_ideas_are_answered),
        TEST(wrong_requests_are_not_sent),
        TEST(later_links_go_on_above),
        TEST(capacity),
        TEST(adoption),
        TEST(deletion_under_traffic),
        TEST(counters_are_true),
        TEST(a_sparse_read_goes_on_where_it_waited),
        TEST(a_refused_step_binds_nothing),
        TEST(contiguous_view),
        TEST(a_view_that_fails_binds_nothing),
        TEST(a_process_that_was_forked_has_the_descriptors),
    };
    return RUN_TESTS(tests);
}
