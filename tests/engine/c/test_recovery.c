/* A server is killed at every named point of a change, and of the recovery after it. After the
 * restart every change counts exactly once. Deltas depend on the position, so a block that is put
 * back in the wrong place is noticed. */
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/failpoint.h"
#include "base/frame.h"
#include "check.h"
#include "memory/journal.h"
#include "memory/segment.h"
#include "random.h"
#include "smb/server.h"
#include "smb/client.h"

enum {
    CHUNK = 16384,
    BYTES = 5 * CHUNK,
    ELEMENTS = BYTES / 8,
    OP_BYTES = 40960,
    TIMEOUT_MS = 20000
};
enum {
    TARGET = 1,
    SOURCE = 2,
    FLOATS = 3,
    GRADIENT = 4,
    STATES = 5 /* and 6 */,
    EPOCH = 7,
    FLOAT_COUNT = BYTES / 4
};
/* offsets in the journal's file; the second is slot 0's */
enum { VERSION_AT = 8, SLOT_WORDS_AT = 4096 + 4 * JOURNAL_SLOTS_MAX + 4096 };
static const struct smb_layout LAYOUT = {BYTES, BYTES, CHUNK, 1};

/* ---- the host: a process without threads that starts servers and reports how each ended ------ */

struct command {
    char point[40];
    long count;
    bool before_recovery; /* armed from the start; otherwise once the server serves */
    bool no_journal;
};

struct reply {
    pid_t pid;
    uint16_t port;
    uint64_t finished, torn;
};

struct host {
    pid_t pid;
    int commands, answers;
    uint16_t port;
};

static void adopt_or_create(struct smb_server *server, const char *name, uint64_t id, int dtype)
{
    struct smb_segment_info info;
    if (smb_server_adopt_segment(server, scratch_path(name), &info) == SMB_OK)
        return;
    CHECK_EQ(smb_server_create_segment(server, scratch_path(name), id, EPOCH, dtype, BYTES, CHUNK),
             SMB_OK);
}

static void serve(const struct command *command, uint16_t port, int ready)
{
    struct smb_server *server;
    struct smb_recovery recovery = {0};
    struct reply reply = {.pid = getpid()};
    if (command->before_recovery)
        failpoint_arm(command->point, command->count);
    CHECK_EQ(smb_server_create((uint64_t)getpid(), 2, 1 << 26, &server), SMB_OK);
    adopt_or_create(server, "target", TARGET, SMB_INT64);
    adopt_or_create(server, "source", SOURCE, SMB_INT64);
    adopt_or_create(server, "floats", FLOATS, SMB_FLOAT32);
    adopt_or_create(server, "gradient", GRADIENT, SMB_FLOAT32);
    adopt_or_create(server, "state-0", STATES, SMB_FLOAT32);
    adopt_or_create(server, "state-1", STATES + 1, SMB_FLOAT32);
    if (!command->no_journal)
        CHECK_EQ(smb_server_open_journal(server, scratch_path("journal"), &recovery), SMB_OK);
    reply.finished = recovery.finished;
    reply.torn = recovery.torn_chunks;
    if (!command->before_recovery)
        failpoint_arm(command->point, command->count);
    CHECK_EQ(smb_server_listen_tcp(server, "127.0.0.1", port, &reply.port), SMB_OK);
    CHECK_EQ(write(ready, &reply, sizeof reply), sizeof reply);
    for (;;)
        pause();
}

static void run_host(int commands, int answers)
{
    struct command command;
    uint16_t port = 0;
    while (read(commands, &command, sizeof command) == (ssize_t)sizeof command) {
        int ready[2], status;
        CHECK_EQ(pipe(ready), 0);
        pid_t child = check_fork();
        if (child == 0) {
            close(ready[0]);
            serve(&command, port, ready[1]);
        }
        close(ready[1]);
        struct reply reply = {0}; /* pid 0: the server died before it served */
        if (read(ready[0], &reply, sizeof reply) == (ssize_t)sizeof reply)
            port = reply.port;
        close(ready[0]);
        CHECK_EQ(write(answers, &reply, sizeof reply), sizeof reply);
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(write(answers, &status, sizeof status), sizeof status);
    }
    exit(0);
}

static void host_start(struct host *host)
{
    int commands[2], answers[2];
    CHECK_EQ(pipe(commands), 0);
    CHECK_EQ(pipe(answers), 0);
    host->pid = check_fork();
    if (host->pid == 0) {
        close(commands[1]);
        close(answers[0]);
        run_host(commands[0], answers[1]);
    }
    close(commands[0]);
    close(answers[1]);
    host->commands = commands[1];
    host->answers = answers[0];
}

/* Starts the next server; returns its report when it serves, pid 0 if it died before. */
static struct reply host_serve(struct host *host, struct command command)
{
    struct reply reply;
    CHECK_EQ(write(host->commands, &command, sizeof command), sizeof command);
    CHECK_EQ(read(host->answers, &reply, sizeof reply), sizeof reply);
    return reply;
}

static void host_await_kill(struct host *host)
{
    int status;
    CHECK_EQ(read(host->answers, &status, sizeof status), sizeof status);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void host_kill(struct host *host, struct reply reply)
{
    CHECK_EQ(kill(reply.pid, SIGKILL), 0);
    host_await_kill(host);
}

static void host_end(struct host *host)
{
    int status;
    close(host->commands);
    close(host->answers);
    CHECK_EQ(waitpid(host->pid, &status, 0), host->pid);
}

/* ---- the client ------------------------------------------------------------------------------ */

struct reach {
    struct smb_client *client;
    struct smb_link *link;
    struct smb_buffer *target, *source, *floats, *gradient, *states[2];
};

static struct smb_buffer *make_buffer(struct reach *reach, uint64_t id, int dtype)
{
    struct smb_buffer *buffer;
    CHECK_EQ(smb_buffer_create(reach->client, &LAYOUT, dtype, &buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(buffer, 0, id, EPOCH, reach->link), SMB_OK);
    return buffer;
}

static void reach_make(struct reach *reach, uint16_t port, uint64_t session)
{
    uint64_t instance;
    CHECK_EQ(smb_client_create(session, &reach->client), SMB_OK);
    CHECK_EQ(smb_client_connect_tcp(reach->client, "127.0.0.1", port, 0, TIMEOUT_MS, &reach->link,
                                    &instance),
             SMB_OK);
    reach->target = make_buffer(reach, TARGET, SMB_INT64);
    reach->source = make_buffer(reach, SOURCE, SMB_INT64);
    reach->floats = make_buffer(reach, FLOATS, SMB_FLOAT32);
    reach->gradient = make_buffer(reach, GRADIENT, SMB_FLOAT32);
    for (int i = 0; i < 2; i++)
        reach->states[i] = make_buffer(reach, STATES + (uint64_t)i, SMB_FLOAT32);
}

static void reach_end(struct reach *reach)
{
    smb_buffer_destroy(reach->target);
    smb_buffer_destroy(reach->source);
    smb_buffer_destroy(reach->floats);
    smb_buffer_destroy(reach->gradient);
    smb_buffer_destroy(reach->states[0]);
    smb_buffer_destroy(reach->states[1]);
    smb_link_close(reach->link);
    smb_client_destroy(reach->client);
}

static void reach_resume(struct reach *reach, uint16_t port)
{
    uint64_t id, instance;
    CHECK_EQ(smb_client_wait_down(reach->client, TIMEOUT_MS, &id), SMB_OK);
    CHECK_EQ(id, smb_link_id(reach->link));
    CHECK_EQ(smb_link_resume_tcp(reach->link, "127.0.0.1", port, 0, TIMEOUT_MS, &instance), SMB_OK);
}

struct calling {
    pthread_t thread;
    struct smb_buffer *buffer;
    struct smb_request request;
    struct smb_outcome outcome;
};

static void *call(void *argument)
{
    struct calling *calling = argument;
    calling->request.timeout_ms = TIMEOUT_MS;
    smb_transfer(calling->buffer, &calling->request, &calling->outcome);
    return NULL;
}

static void must(struct smb_buffer *buffer, struct smb_request request, uint64_t *result)
{
    struct calling calling = {.buffer = buffer, .request = request};
    call(&calling);
    CHECK_EQ(calling.outcome.status, SMB_OK);
    if (result)
        *result = calling.outcome.result;
}

/* ---- operations and their results ------------------------------------------------------------ */

static int64_t content[ELEMENTS], source[ELEMENTS], delta[ELEMENTS], sink[ELEMENTS];
/* For wire formats: whole numbers, so that every block of int8 contains 127 and nothing is
 * rounded. */
/* for sparse: every third element, from the first to the last of the range */
static int64_t indices[FLOAT_COUNT];
enum { SPARSE_STEP = 3, SPARSE_COUNT = (OP_BYTES / 4 + SPARSE_STEP - 1) / SPARSE_STEP };
static float float_content[FLOAT_COUNT], float_delta[FLOAT_COUNT], float_sink[FLOAT_COUNT];
static float small_delta[FLOAT_COUNT]; /* int4 sends these without rounding */
/* For optimizers' steps. */
static float gradient[FLOAT_COUNT], states[2][FLOAT_COUNT];
static const struct smb_hyper HYPER = {.lr = 0.25,
                                       .scale = 1.5,
                                       .weight_decay = 0.0625,
                                       .mu = 0.875,
                                       .beta1 = 0.75,
                                       .beta2 = 0.9375,
                                       .eps = 1e-6,
                                       .step = 3,
                                       .alpha = 0.125};

static void model_make(void)
{
    for (int64_t i = 0; i < ELEMENTS; i++) {
        content[i] = i * 1000;
        source[i] = 7 * i + 3;
        delta[i] = i % 251 + 1;
    }
    for (int i = 0; i < FLOAT_COUNT; i++) {
        float_content[i] = (float)(16 * i);
        float_delta[i] = (float)(i % 127 + 1);
        small_delta[i] = (float)(i % 7 + 1);
        indices[i] = (int64_t)SPARSE_STEP * i;
        gradient[i] = (float)(i % 113) - 50.5F;
        states[0][i] = (float)(i % 97) - 33;
        states[1][i] = (float)(i % 89 + 1);
    }
}

struct operation {
    int opcode;
    bool fetch;
    bool journalled, additive;
    int wire;
    int rule; /* for SMB_APPLY */
};
static const struct operation OPERATIONS[] = {
    {SMB_ACCUMULATE, false, true, true, 0, 0},
    {SMB_ACCUMULATE, true, true, true, 0, 0},
    {SMB_ACCUMULATE_FROM, false, true, true, 0, 0},
    {SMB_FETCH_ADD, false, true, false, 0, 0},
    {SMB_COMPARE_SWAP, false, true, false, 0, 0},
    {SMB_FILL, false, false, false, 0, 0},
    {SMB_WRITE, false, false, false, 0, 0},
    {SMB_ACCUMULATE, false, true, true, SMB_WIRE_INT8, 0},
    {SMB_ACCUMULATE, false, true, true, SMB_WIRE_INT4, 0},
    {SMB_ACCUMULATE, true, true, true, SMB_WIRE_BFLOAT16, 0},
    {SMB_WRITE, false, false, false, SMB_WIRE_FLOAT16, 0},
    {SMB_ACCUMULATE, false, true, true, SMB_WIRE_SPARSE, 0},
    {SMB_APPLY, false, true, true, 0, SMB_RULE_SGD},
    {SMB_APPLY, false, true, true, 0, SMB_RULE_NESTEROV},
    {SMB_APPLY, false, true, true, 0, SMB_RULE_ADAMW},
};
static const struct operation ADAM = {SMB_APPLY, false, true, true, 0, SMB_RULE_ADAM};
enum { OPERATION_COUNT = sizeof OPERATIONS / sizeof *OPERATIONS, COUNTER = 3000 };

static const float *floats_of(const struct operation *operation)
{
    return operation->wire == SMB_WIRE_INT4 ? small_delta : float_delta;
}

static struct smb_request request_of(const struct operation *operation, struct reach *reach)
{
    struct smb_request request = {.opcode = operation->opcode,
                                  .op = SMB_SUM,
                                  .scale = 3.0,
                                  .bytes = OP_BYTES,
                                  .source = delta};
    switch (operation->opcode) {
    case SMB_ACCUMULATE: request.sink = operation->fetch ? sink : NULL; break;
    case SMB_ACCUMULATE_FROM: request.other = reach->source; break;
    case SMB_APPLY:
        request.op = operation->rule, request.hyper = HYPER, request.other = reach->gradient;
        for (int i = 0; i < smb_rule_states(operation->rule); i++)
            request.states[i] = reach->states[i];
        break;
    case SMB_FETCH_ADD:
        request.argument = 11, request.bytes = 8, request.offset = COUNTER * 8;
        break;
    case SMB_COMPARE_SWAP:
        request.expected = (uint64_t)content[COUNTER], request.argument = request.expected + 13;
        request.bytes = 8, request.offset = COUNTER * 8;
        break;
    case SMB_FILL: request.argument = 99; break;
    }
    if (operation->wire != SMB_WIRE_EXACT) {
        request.wire = operation->wire;
        request.source = floats_of(operation);
        request.sink = operation->fetch ? float_sink : NULL;
        request.indices = operation->wire == SMB_WIRE_SPARSE ? indices : NULL;
        request.count = operation->wire == SMB_WIRE_SPARSE ? SPARSE_COUNT : 0;
        if (request.indices)
            request.bytes = 4 * (uint64_t)(indices[SPARSE_COUNT - 1] + 1);
    }
    return request;
}

static void model_apply(const struct operation *operation, uint64_t result)
{
    for (int64_t i = 0; i < OP_BYTES / 4 && operation->wire != SMB_WIRE_EXACT; i++) {
        if (operation->wire == SMB_WIRE_SPARSE) {
            float_content[i] += i % SPARSE_STEP == 0 ? 3 * float_delta[i / SPARSE_STEP] : 0;
            continue;
        }
        float value = floats_of(operation)[i];
        float_content[i] = operation->opcode == SMB_WRITE ? value : float_content[i] + 3 * value;
        CHECK(!operation->fetch || float_sink[i] == float_content[i]);
    }
    if (operation->opcode == SMB_APPLY)
        smb_kernel_step(operation->rule, float_content, gradient, states[0], states[1],
                        OP_BYTES / 4, &HYPER);
    for (int64_t i = 0; i < OP_BYTES / 8 && operation->wire == SMB_WIRE_EXACT; i++) {
        switch (operation->opcode) {
        case SMB_ACCUMULATE: content[i] += 3 * delta[i]; break;
        case SMB_ACCUMULATE_FROM: content[i] += 3 * source[i]; break;
        case SMB_FILL: content[i] = 99; break;
        case SMB_WRITE: content[i] = delta[i]; break;
        }
        if (operation->fetch)
            CHECK_EQ(sink[i], content[i]);
    }
    if (operation->opcode == SMB_FETCH_ADD || operation->opcode == SMB_COMPARE_SWAP) {
        CHECK_EQ(result, content[COUNTER]);
        content[COUNTER] += operation->opcode == SMB_FETCH_ADD ? 11 : 13;
    }
}

static void check_content(struct reach *reach)
{
    must(reach->target, (struct smb_request){.opcode = SMB_READ, .bytes = BYTES, .sink = sink},
         NULL);
    for (int64_t i = 0; i < ELEMENTS; i++)
        CHECK_EQ(sink[i], content[i]);
    struct smb_buffer *const buffers[] = {reach->floats, reach->gradient, reach->states[0],
                                          reach->states[1]};
    const float *const contents[] = {float_content, gradient, states[0], states[1]};
    for (int b = 0; b < 4; b++) {
        must(buffers[b],
             (struct smb_request){.opcode = SMB_READ, .bytes = BYTES, .sink = float_sink}, NULL);
        CHECK(memcmp(float_sink, contents[b], BYTES) == 0);
    }
}

static void begin(struct host *host, struct reach *reach, struct reply *reply)
{
    host_start(host);
    *reply = host_serve(host, (struct command){.count = 0});
    reach_make(reach, reply->port, 50);
    model_make();
    must(reach->target,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = BYTES, .source = content}, NULL);
    must(reach->source, (struct smb_request){.opcode = SMB_WRITE, .bytes = BYTES, .source = source},
         NULL);
    must(reach->floats,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = BYTES, .source = float_content}, NULL);
    must(reach->gradient,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = BYTES, .source = gradient}, NULL);
    for (int i = 0; i < 2; i++)
        must(reach->states[i],
             (struct smb_request){.opcode = SMB_WRITE, .bytes = BYTES, .source = states[i]}, NULL);
}

static void end(struct host *host, struct reach *reach, struct reply reply)
{
    host_kill(host, reply);
    host_end(host);
    reach_end(reach);
}

/* Removes segments and journal, so that the next server starts empty. */
static void remove_files(void)
{
    static const char *const names[] = {"journal",  "target",  "source", "floats",
                                        "gradient", "state-0", "state-1"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK_EQ(unlink(scratch_path(names[i])), 0);
}

static struct command at(const char *point, long count, bool before_recovery)
{
    struct command command = {.count = count, .before_recovery = before_recovery};
    snprintf(command.point, sizeof command.point, "%s", point);
    return command;
}

/* The server serves, the operation begins, and the server dies. The operation must not be answered
 * yet: live_again waits until the link is found broken. */
static void die_in(struct host *host, struct reach *reach, struct reply *reply,
                   const struct operation *operation, const char *point, long count,
                   struct calling *calling)
{
    host_kill(host, *reply);
    *reply = host_serve(host, at(point, count, false));
    bool of_floats = operation->wire != SMB_WIRE_EXACT || operation->opcode == SMB_APPLY;
    *calling = (struct calling){.buffer = of_floats ? reach->floats : reach->target,
                                .request = request_of(operation, reach)};
    CHECK_EQ(pthread_create(&calling->thread, NULL, call, calling), 0);
    reach_resume(reach, reply->port);
    host_await_kill(host);
}

static void live_again(struct host *host, struct reach *reach, struct reply *reply,
                       const struct operation *operation, struct calling *calling)
{
    *reply = host_serve(host, (struct command){.count = 0});
    CHECK_EQ(reply->torn, 0);
    reach_resume(reach, reply->port);
    pthread_join(calling->thread, NULL);
    CHECK_EQ(calling->outcome.status, SMB_OK);
    model_apply(operation, calling->outcome.result);
    check_content(reach);
}

struct point {
    const char *name;
    bool per_block; /* reached for every block: the first, middle and last are tried */
    bool additive_only;
    bool any_change; /* also for operations that are not journalled */
    bool per_target; /* reached for every segment that changes: the first time in each is tried */
};
static const struct point POINTS[] = {
    {.name = "journal.described"},
    {.name = "journal.active"},
    {.name = "journal.marked", .per_target = true},
    {.name = "journal.odd", .per_target = true},
    {.name = "journal.undo_copied", .per_block = true, .per_target = true},
    {.name = "journal.dirty", .per_block = true},
    {.name = "journal.block_half", .per_block = true, .additive_only = true},
    {.name = "journal.block_changed", .per_block = true},
    {.name = "journal.block_done", .per_block = true},
    {.name = "gate.changed", .any_change = true},
    {.name = "journal.noted"},
    {.name = "journal.even", .per_target = true},
    {.name = "journal.unmarked", .per_target = true},
    {.name = "journal.unlocked"},
    {.name = "journal.rested"},
    {.name = "connection.changed", .any_change = true},
};
enum { BLOCKS = OP_BYTES / JOURNAL_BLOCK_BYTES, OP_CHUNKS = (OP_BYTES + CHUNK - 1) / CHUNK };

/* How many segments the operation changes: with more segments the blocks are smaller (with three, a
 * quarter). */
static long targets_of(const struct operation *operation)
{
    return operation->opcode == SMB_APPLY ? 1 + smb_rule_states(operation->rule) : 1;
}

/* How often an operation reaches a point. */
static long times_reached(const struct operation *operation, const struct point *point)
{
    static const long blocks_in_page[] = {0, 1, 2, 4};
    if (operation->opcode == SMB_FETCH_ADD || operation->opcode == SMB_COMPARE_SWAP)
        return 1;
    return (point->per_block ? BLOCKS * blocks_in_page[targets_of(operation)] : OP_CHUNKS) *
           (point->per_target ? targets_of(operation) : 1);
}

/* The first time for each target, then about the middle, then the last; 0 after that. */
static long next_count(const struct operation *operation, const struct point *point, long count)
{
    long last = times_reached(operation, point),
         targets = point->per_target ? targets_of(operation) : 1;
    if (count >= last)
        return 0;
    if (count < targets)
        return count + 1;
    return count < (last + 1) / 2 ? (last + 1) / 2 : last;
}

/* Every point x operation x first, middle, last block (or chunk): the change counts once, with the
 * right result. */
static void killed_at_every_point(void)
{
    struct host host;
    struct reach reach;
    struct reply reply;
    struct calling calling;
    int deaths = 0;
    begin(&host, &reach, &reply);
    for (int o = 0; o < OPERATION_COUNT; o++) {
        const struct operation *operation = &OPERATIONS[o];
        for (size_t p = 0; p < sizeof POINTS / sizeof *POINTS; p++) {
            const struct point *point = &POINTS[p];
            if ((!operation->journalled && !point->any_change) ||
                (!operation->additive && point->additive_only) ||
                ((size_t)o + p) % (size_t)check_thinned() != 0)
                continue;
            for (long count = 1; count > 0; count = next_count(operation, point, count)) {
                die_in(&host, &reach, &reply, operation, point->name, count, &calling);
                live_again(&host, &reach, &reply, operation, &calling);
                deaths++;
            }
        }
    }
    printf("  %d kills\n", deaths);
    CHECK(deaths > 400 / check_thinned());
    end(&host, &reach, reply);
}

/* The recovery itself is killed, at every point of its own and of the blocks that it completes. */
static void killed_in_recovery(void)
{
    static const char *const points[] = {
        "recovery.odd",       "recovery.restored",     "journal.undo_copied", "journal.dirty",
        "journal.block_half", "journal.block_changed", "journal.block_done",  "recovery.finished",
        "recovery.noted",     "recovery.unmarked",     "recovery.slots_done"};
    struct host host;
    struct reach reach;
    struct reply reply;
    struct calling calling;
    int deaths = 0;
    begin(&host, &reach, &reply);
    for (int o = 0; o < OPERATION_COUNT; o++) {
        const struct operation *operation = &OPERATIONS[o];
        for (size_t p = 0; p < sizeof points / sizeof *points && operation->journalled; p++) {
            if ((!operation->additive && strcmp(points[p], "journal.block_half") == 0) ||
                ((size_t)o + p) % (size_t)check_thinned() != 0)
                continue;
            bool once = strcmp(points[p], "recovery.finished") == 0 ||
                        strcmp(points[p], "recovery.noted") == 0 ||
                        strcmp(points[p], "recovery.slots_done") == 0;
            for (long count = 1; count <= (once ? 1 : targets_of(operation)); count++, deaths++) {
                die_in(&host, &reach, &reply, operation, "journal.block_changed",
                       operation->additive ? 6 : 1, &calling);
                CHECK_EQ(host_serve(&host, at(points[p], count, true)).pid, 0);
                host_await_kill(&host);
                live_again(&host, &reach, &reply, operation, &calling);
            }
        }
    }
    printf("  %d double kills\n", deaths);
    CHECK(deaths > 100 / check_thinned());
    end(&host, &reach, reply);
}

static int local_add(const char *name, uint64_t chunk, float *model)
{
    static float ones[CHUNK / 4];
    struct smb_segment *segment;
    for (int i = 0; i < CHUNK / 4; i++)
        ones[i] = (float)(i % 7 + 1);
    CHECK_EQ(smb_segment_open(scratch_path(name), &segment), SMB_OK);
    struct smb_change add = {.opcode = SMB_ACCUMULATE,
                             .op = SMB_SUM,
                             .scale = 1.0,
                             .offset = chunk * CHUNK,
                             .bytes = CHUNK,
                             .source = ones};
    int status = smb_segment_apply(segment, &add, smb_now_ns() + 20000000U);
    smb_segment_release(segment);
    for (uint64_t i = 0; status == SMB_OK && i < CHUNK / 4; i++)
        model[chunk * CHUNK / 4 + i] += ones[i];
    return status;
}

/* Of the chunks that a step changes together some are marked and some are not. A local client may
 * change the unmarked ones, and its change is neither lost nor overwritten, before the step (which
 * had not begun) and after it (which was complete). */
static void local_client_between_marks(void)
{
    struct host host;
    struct reach reach;
    struct reply reply;
    struct calling calling;
    begin(&host, &reach, &reply);
    for (long marked = 1; marked <= 2; marked++) {
        die_in(&host, &reach, &reply, &ADAM, "journal.marked", marked, &calling);
        CHECK_EQ(local_add("floats", 0, float_content), SMB_TIMEOUT);
        CHECK_EQ(local_add("state-0", 0, states[0]), marked == 1 ? SMB_OK : SMB_TIMEOUT);
        CHECK_EQ(local_add("state-1", 0, states[1]), SMB_OK);
        live_again(&host, &reach, &reply, &ADAM, &calling);
        CHECK_EQ(reply.finished, 0);

        die_in(&host, &reach, &reply, &ADAM, "journal.unmarked", marked, &calling);
        CHECK_EQ(local_add("state-1", 0, states[1]), SMB_TIMEOUT);
        /* chunk 0 is complete */
        smb_kernel_step(ADAM.rule, float_content, gradient, states[0], states[1], CHUNK / 4,
                        &HYPER);
        CHECK_EQ(local_add("floats", 0, float_content), SMB_OK);
        CHECK_EQ(local_add("state-0", 0, states[0]), marked == 2 ? SMB_OK : SMB_TIMEOUT);
        reply = host_serve(&host, (struct command){.count = 0});
        CHECK(reply.torn == 0 && reply.finished == 1);
        reach_resume(&reach, reply.port);
        pthread_join(calling.thread, NULL);
        CHECK_EQ(calling.outcome.status, SMB_OK);
        smb_kernel_step(ADAM.rule, float_content + CHUNK / 4, gradient + CHUNK / 4,
                        states[0] + CHUNK / 4, states[1] + CHUNK / 4, (OP_BYTES - CHUNK) / 4,
                        &HYPER);
        check_content(&reach);
    }
    end(&host, &reach, reply);
}

/* A state is gone when the daemon restarts: the other chunks are released and counted, up to the
 * last block that was complete. */
static void state_is_gone(void)
{
    enum { BLOCK = JOURNAL_BLOCK_BYTES / 4 / 4 };
    struct host host;
    struct reach reach;
    struct reply reply;
    struct calling calling;
    struct smb_segment *segment;
    begin(&host, &reach, &reply);
    die_in(&host, &reach, &reply, &ADAM, "journal.block_half", 3, &calling);
    CHECK_EQ(unlink(scratch_path("state-0")), 0);
    /* with an empty journal in its place */
    reply = host_serve(&host, (struct command){.count = 0});
    CHECK(reply.torn == 2 && reply.finished == 0);
    smb_kernel_step(ADAM.rule, float_content, gradient, states[0], states[1], 2 * BLOCK, &HYPER);
    CHECK_EQ(smb_segment_open(scratch_path("floats"), &segment), SMB_OK);
    CHECK(memcmp(smb_segment_data(segment), float_content, BYTES) == 0);
    smb_segment_release(segment);
    CHECK_EQ(smb_segment_open(scratch_path("state-1"), &segment), SMB_OK);
    CHECK(memcmp(smb_segment_data(segment), states[1], BYTES) == 0);
    smb_segment_release(segment);
    reach_resume(&reach, reply.port);
    pthread_join(calling.thread, NULL);
    CHECK_EQ(calling.outcome.status, SMB_OK);
    end(&host, &reach, reply);
}

/* A local client that comes upon the chunk of a killed daemon waits for the next one, and adds to
 * the completed change. */
static void local_client_waits_for_recovery(void)
{
    struct host host;
    struct reach reach;
    struct reply reply;
    struct calling calling;
    struct smb_segment *segment;
    begin(&host, &reach, &reply);
    CHECK_EQ(smb_segment_open(scratch_path("target"), &segment), SMB_OK);
    die_in(&host, &reach, &reply, &OPERATIONS[0], "journal.block_half", 2, &calling);
    struct smb_change add = {
        .opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = 1.0, .bytes = CHUNK, .source = delta};
    struct smb_change read = {.opcode = SMB_READ, .bytes = CHUNK, .sink = sink};
    CHECK_EQ(smb_segment_apply(segment, &add, smb_now_ns() + 20000000U), SMB_TIMEOUT);
    /* nor is half of the change read */
    CHECK_EQ(smb_segment_apply(segment, &read, smb_now_ns() + 20000000U), SMB_TIMEOUT);
    add.offset = 4 * CHUNK; /* other chunks can be used */
    CHECK_EQ(smb_segment_apply(segment, &add, smb_now_ns() + 20000000U), SMB_OK);
    for (int64_t i = 0; i < CHUNK / 8; i++)
        content[4 * CHUNK / 8 + i] += delta[i];
    live_again(&host, &reach, &reply, &OPERATIONS[0], &calling);
    add.offset = 0;
    CHECK_EQ(smb_segment_apply(segment, &add, smb_now_ns() + 1000000000U), SMB_OK);
    for (int64_t i = 0; i < CHUNK / 8; i++)
        content[i] += delta[i];
    check_content(&reach);
    smb_segment_release(segment);
    end(&host, &reach, reply);
}

/* A journal that is lost, or was replaced by garbage: the chunk is released and counted, and has
 * only old or new values. */
static void lost_journal(void)
{
    for (int garbage = 0; garbage < 2; garbage++) {
        struct host host;
        struct reach reach;
        struct reply reply;
        struct calling calling;
        begin(&host, &reach, &reply);
        die_in(&host, &reach, &reply, &OPERATIONS[0], "journal.block_changed", 2, &calling);
        CHECK_EQ(unlink(scratch_path("journal")), 0);
        if (garbage) {
            FILE *file = fopen(scratch_path("journal"), "w");
            CHECK(file != NULL);
            fputs("no journal", file);
            fclose(file);
        }
        reply = host_serve(&host, (struct command){.count = 0});
        CHECK_EQ(reply.torn, 1);
        uint64_t id, instance;
        CHECK_EQ(smb_client_wait_down(reach.client, TIMEOUT_MS, &id), SMB_OK);
        /* Another identity is accepted only if the caller says so. */
        CHECK_EQ(smb_link_resume_tcp(reach.link, "127.0.0.1", reply.port, 0, TIMEOUT_MS, &instance),
                 SMB_NOT_FOUND);
        CHECK_EQ(smb_link_resume_tcp(reach.link, "127.0.0.1", reply.port, instance, TIMEOUT_MS,
                                     &instance),
                 SMB_OK);
        pthread_join(calling.thread, NULL);
        CHECK_EQ(calling.outcome.status, SMB_OK);
        must(reach.target, (struct smb_request){.opcode = SMB_READ, .bytes = BYTES, .sink = sink},
             NULL);
        for (int64_t i = 0; i < ELEMENTS; i++)
            CHECK(sink[i] == content[i] + (i < OP_BYTES / 8 ? 3 * delta[i] : 0) ||
                  (i < CHUNK / 8 && sink[i] == content[i] + 6 * delta[i]));
        end(&host, &reach, reply);
        remove_files();
    }
}

static void patch_journal(long at, uint32_t word)
{
    FILE *file = fopen(scratch_path("journal"), "r+");
    CHECK(file != NULL && fseek(file, at, SEEK_SET) == 0 &&
          fwrite(&word, sizeof word, 1, file) == 1);
    fclose(file);
}

/* A change that an older daemon left unfinished, also one that knew no steps or no wire formats, is
 * completed, and the file then has the new version. */
static void journals_of_versions_before(void)
{
    for (uint32_t before = 1; before <= 4; before++) {
        struct host host;
        struct reach reach;
        struct reply reply;
        struct calling calling;
        uint32_t version;
        begin(&host, &reach, &reply);
        die_in(&host, &reach, &reply, &OPERATIONS[0], "journal.block_half", 2, &calling);
        patch_journal(VERSION_AT, before);
        live_again(&host, &reach, &reply, &OPERATIONS[0], &calling);
        CHECK_EQ(reply.finished, 1);
        FILE *file = fopen(scratch_path("journal"), "r");
        CHECK(file != NULL && fseek(file, VERSION_AT, SEEK_SET) == 0 &&
              fread(&version, sizeof version, 1, file) == 1);
        fclose(file);
        CHECK_EQ(version, 5);
        end(&host, &reach, reply);
        remove_files();
    }
}

/* A write in a journal of version 4 is not completed: its chunk is released as it is, and
 * counted. */
static void write_of_version_4(void)
{
    struct host host;
    struct reach reach;
    struct reply reply;
    struct calling calling;
    begin(&host, &reach, &reply);
    die_in(&host, &reach, &reply, &OPERATIONS[0], "journal.odd", 1, &calling);
    patch_journal(VERSION_AT, 4);
    patch_journal(SLOT_WORDS_AT + 80, SMB_WRITE); /* the opcode */
    reply = host_serve(&host, (struct command){.count = 0});
    CHECK(reply.torn == 1 && reply.finished == 0);
    reach_resume(&reach, reply.port);
    pthread_join(calling.thread, NULL);
    CHECK_EQ(calling.outcome.status, SMB_OK);
    model_apply(&OPERATIONS[0], 0);
    check_content(&reach);
    end(&host, &reach, reply);
    remove_files();
}

/* Content of a file is checked before it is used: slots of garbage change nothing, and the next
 * journal works. */
static void garbage_in_slots(void)
{
    struct random random = random_make(20261121);
    struct host host;
    struct reach reach;
    struct reply reply;
    begin(&host, &reach, &reply);
    for (int round = 0; round < 40; round++) {
        struct calling calling;
        const struct operation *operation = round % 2 ? &ADAM : &OPERATIONS[0];
        die_in(&host, &reach, &reply, operation, "journal.described", 1, &calling);
        FILE *file = fopen(scratch_path("journal"), "r+");
        CHECK(file != NULL);
        for (int i = 0; i < 1 + round / 4; i++) {
            /* the words of slot 0, past its undo block; never its mark on the chunk */
            CHECK_EQ(fseek(file, SLOT_WORDS_AT + (long)random_below(&random, 184), SEEK_SET), 0);
            fputc((int)(random_next(&random) & 255), file);
        }
        fclose(file);
        live_again(&host, &reach, &reply, operation, &calling);
    }
    end(&host, &reach, reply);
}

int main(void)
{
    static const struct test tests[] = {TEST(killed_at_every_point),
                                        TEST(killed_in_recovery),
                                        TEST(local_client_between_marks),
                                        TEST(state_is_gone),
                                        TEST(local_client_waits_for_recovery),
                                        TEST(lost_journal),
                                        TEST(journals_of_versions_before),
                                        TEST(write_of_version_4),
                                        TEST(garbage_in_slots)};
    return RUN_TESTS(tests);
}
