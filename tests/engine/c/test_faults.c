/* Faults on the way: the other side breaks, lies, falls silent or stops, and each call ends with
 * the true outcome. */
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "fake_server.h"
#include "memory/segment.h"
#include "rig.h"
#include "server/connection.h"
#include "smb/server.h"

enum { BYTES = 512, SHORT_MS = 200 };

/* ---- a client, and a faulty server ----------------------------------------------------------- */

struct call {
    struct smb_client *client;
    struct smb_link *link;
    struct smb_buffer *buffer;
};

static int connect_to(struct fake_server *fake, struct call *call, uint32_t timeout_ms)
{
    uint64_t instance;
    fake_server_start(fake);
    CHECK_EQ(smb_client_create(1, &call->client), SMB_OK);
    return smb_client_connect_tcp(call->client, "127.0.0.1", fake->port, 0, timeout_ms, &call->link,
                                  &instance);
}

static void connected(struct fake_server *fake, struct call *call)
{
    struct smb_layout layout = {BYTES, 4096, 4096, 1};
    CHECK_EQ(connect_to(fake, call, RIG_TIMEOUT_MS), SMB_OK);
    CHECK_EQ(smb_buffer_create(call->client, &layout, SMB_INT64, &call->buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(call->buffer, 0, 1, 1, call->link), SMB_OK);
}

static void end(struct fake_server *fake, struct call *call)
{
    smb_buffer_destroy(call->buffer);
    smb_link_close(call->link);
    smb_client_destroy(call->client);
    fake_server_join(fake);
}

static struct smb_outcome read_some(struct call *call, uint32_t timeout_ms)
{
    uint8_t sink[BYTES];
    struct smb_outcome outcome;
    struct smb_request read = {
        .opcode = SMB_READ, .bytes = BYTES, .sink = sink, .timeout_ms = timeout_ms};
    smb_transfer(call->buffer, &read, &outcome);
    for (int i = 0; i < BYTES && outcome.status == SMB_OK; i++)
        CHECK_EQ(sink[i], 7);
    return outcome;
}

static void spoil_version(struct smb_frame *reply)
{
    reply->status = SMB_VERSION;
}

static void spoil_flags(struct smb_frame *reply)
{
    reply->flags = 0;
    reply->payload = reply->length = 0;
}

static void spoil_opcode(struct smb_frame *reply)
{
    reply->opcode = SMB_ATTACH;
    reply->payload = reply->length = 0;
}

/* Each handshake that fails returns the status of its cause. */
static void handshakes_that_fail(void)
{
    struct call call;
    struct fake_server older = {
        .spoil = spoil_version, .spoil_opcode = SMB_HELLO, .answer_bytes_max = -1};
    struct fake_server none = {
        .spoil = spoil_flags, .spoil_opcode = SMB_HELLO, .answer_bytes_max = -1};
    struct fake_server silent = {.silent_at_hello = true, .answer_bytes_max = -1};
    CHECK_EQ(connect_to(&older, &call, RIG_TIMEOUT_MS), SMB_VERSION);
    fake_server_join(&older);
    smb_client_destroy(call.client);
    CHECK_EQ(connect_to(&none, &call, RIG_TIMEOUT_MS), SMB_PROTOCOL);
    fake_server_join(&none);
    smb_client_destroy(call.client);
    uint64_t before_ns = check_now_ns();
    CHECK_EQ(connect_to(&silent, &call, SHORT_MS), SMB_TIMEOUT);
    CHECK(check_now_ns() - before_ns >= SHORT_MS * 1000000U);
    fake_server_join(&silent);
    uint64_t instance;
    CHECK_EQ(smb_client_connect_tcp(call.client, "127.0.0.1", silent.port, 0, 1000, &call.link,
                                    &instance),
             SMB_DISCONNECTED); /* nobody listens any more */
    CHECK_EQ(smb_client_connect_tcp(call.client, "localhost", silent.port, 0, 1000, &call.link,
                                    &instance),
             SMB_INVALID);
    CHECK_EQ(
        smb_client_connect_unix(call.client, scratch_path("none"), 0, 1000, &call.link, &instance),
        SMB_DISCONNECTED);
    smb_client_destroy(call.client);
}

/* An answer cut at each of its bytes: as long as nobody reconnects the outcome is reported as
 * unknown. The complete answer is accepted. */
static void answers_cut_at_each_byte(void)
{
    for (int cut = 0; cut <= (int)SMB_FRAME_BYTES + BYTES;
         cut += cut < (int)SMB_FRAME_BYTES + 4 ? 1 : 37) {
        struct call call;
        struct fake_server fake = {.answer_bytes_max = cut};
        connected(&fake, &call);
        struct smb_outcome outcome = read_some(&call, 20);
        for (uint32_t ms = 100; outcome.status == SMB_TIMEOUT && ms <= 10000; ms *= 10) {
            /* the server's thread may not have run yet */
            end(&fake, &call);
            fake = (struct fake_server){.answer_bytes_max = cut};
            connected(&fake, &call);
            outcome = read_some(&call, ms);
        }
        CHECK_EQ(outcome.status, SMB_LINK_LOST);
        CHECK_EQ(outcome.sent, 1);
        CHECK(smb_link_alive(call.link)); /* the link waits for another connection */
        outcome = read_some(&call, 20);
        CHECK(outcome.status == SMB_DISCONNECTED && outcome.sent == 0);
        end(&fake, &call);
    }
    struct call call;
    struct fake_server whole = {.answer_bytes_max = SMB_FRAME_BYTES + BYTES};
    connected(&whole, &call);
    CHECK_EQ(read_some(&call, RIG_TIMEOUT_MS).status, SMB_OK);
    end(&whole, &call);
}

/* A link that was closed while idle is found closed before anything is sent: not applied. */
static void closed_before_sending(void)
{
    struct call call;
    struct fake_server fake = {.hang_up_after_hello = true, .answer_bytes_max = -1};
    connected(&fake, &call);
    fake_server_join(&fake);
    struct smb_outcome outcome = read_some(&call, SHORT_MS);
    CHECK_EQ(outcome.status, SMB_DISCONNECTED);
    CHECK_EQ(outcome.sent, 0);
    smb_buffer_destroy(call.buffer);
    smb_link_close(call.link);
    smb_client_destroy(call.client);
}

/* A server that never answers costs a call its timeout and no more. */
static void silence_times_out(void)
{
    struct call call;
    struct fake_server fake = {.silent = true, .answer_bytes_max = -1};
    connected(&fake, &call);
    uint64_t before_ns = check_now_ns();
    struct smb_outcome outcome = read_some(&call, SHORT_MS);
    CHECK_EQ(outcome.status, SMB_TIMEOUT);
    CHECK_EQ(outcome.sent, 1);
    CHECK(check_now_ns() - before_ns >= SHORT_MS * 1000000U);
    CHECK(smb_link_alive(call.link));
    end(&fake, &call);
}

static void spoil_sequence(struct smb_frame *reply)
{
    reply->sequence += 1;
}

static void spoil_old_sequence(struct smb_frame *reply)
{
    reply->sequence -= 1;
}

enum { BEFORE = 70 }; /* an answer to a request that was answered long ago */

static void spoil_late_sequence(struct smb_frame *reply)
{
    if ((uint32_t)reply->sequence >= BEFORE)
        reply->sequence -= BEFORE / 2;
}

static void spoil_to_fill(struct smb_frame *reply)
{
    reply->opcode = SMB_FILL;
}

static void spoil_payload(struct smb_frame *reply)
{
    reply->length = reply->payload = BYTES / 2;
}

static void spoil_longer_payload(struct smb_frame *reply)
{
    reply->length = reply->payload = SMB_CHUNK_BYTES_MAX;
}

static void spoil_no_payload(struct smb_frame *reply)
{
    reply->length = reply->payload = 0;
}

static void spoil_status(struct smb_frame *reply)
{
    reply->status = SMB_STATUS_COUNT;
}

static void spoil_with_data(struct smb_frame *reply)
{
    reply->opcode = SMB_READ;
    reply->length = reply->payload = BYTES;
}

/* An answer that cannot belong to the request breaks the link, and writes nothing if no data was
 * asked for. */
static void answers_that_are_none(void)
{
    static void (*const spoils[])(struct smb_frame *) = {
        spoil_sequence,   spoil_old_sequence, spoil_status, spoil_longer_payload,
        spoil_no_payload, spoil_flags,        spoil_opcode, spoil_payload};
    for (size_t i = 0; i < sizeof spoils / sizeof *spoils; i++) {
        struct call call;
        struct fake_server fake = {
            .spoil = spoils[i], .spoil_opcode = SMB_READ, .answer_bytes_max = -1};
        connected(&fake, &call);
        struct smb_outcome outcome = read_some(&call, RIG_TIMEOUT_MS);
        CHECK_EQ(outcome.status, SMB_PROTOCOL);
        CHECK(!smb_link_alive(call.link));
        end(&fake, &call);
    }
    struct call call;
    struct fake_server late = {
        .spoil = spoil_late_sequence, .spoil_opcode = SMB_READ, .answer_bytes_max = -1};
    connected(&late, &call);
    for (int i = 1; i < BEFORE; i++)
        CHECK_EQ(read_some(&call, RIG_TIMEOUT_MS).status, SMB_OK);
    CHECK_EQ(read_some(&call, RIG_TIMEOUT_MS).status, SMB_PROTOCOL);
    end(&late, &call);
}

/* Nor does an answer of another operation, or one with data that was not asked for: nothing is
 * written. */
static void answers_to_something_else(void)
{
    static void (*const spoils[])(struct smb_frame *) = {spoil_with_data, spoil_to_fill};
    for (size_t i = 0; i < sizeof spoils / sizeof *spoils; i++) {
        struct call call;
        struct fake_server fake = {
            .spoil = spoils[i], .spoil_opcode = SMB_WRITE, .answer_bytes_max = -1};
        uint8_t source[BYTES] = {0};
        connected(&fake, &call);
        CHECK_EQ(
            reach_try(call.buffer,
                      (struct smb_request){.opcode = SMB_WRITE, .bytes = BYTES, .source = source}),
            SMB_PROTOCOL);
        for (int b = 0; b < BYTES; b++)
            CHECK_EQ(source[b], 0);
        end(&fake, &call);
    }
}

struct reader {
    pthread_t thread;
    struct call *call;
    int expected;
};

static void *read_in_thread(void *argument)
{
    struct reader *reader = argument;
    CHECK_EQ(read_some(reader->call, RIG_TIMEOUT_MS).status, reader->expected);
    return NULL;
}

static void start_readers(struct reader *readers, int count, struct call *call, int expected)
{
    for (int i = 0; i < count; i++) {
        readers[i] = (struct reader){.call = call, .expected = expected};
        CHECK_EQ(pthread_create(&readers[i].thread, NULL, read_in_thread, &readers[i]), 0);
    }
}

static void join_readers(struct reader *readers, int count)
{
    for (int i = 0; i < count; i++)
        pthread_join(readers[i].thread, NULL);
}

/* The user closes a link under calls in progress: the calls end, as lost. */
static void link_closed_under_calls(void)
{
    enum { READERS = 4 };
    struct call call;
    struct reader readers[READERS];
    struct fake_server fake = {.silent = true, .answer_bytes_max = -1};
    connected(&fake, &call);
    start_readers(readers, READERS, &call, SMB_LINK_LOST);
    WAIT_UNTIL(fake.requests == READERS);
    smb_link_close(call.link); /* the buffer has its own reference */
    join_readers(readers, READERS);
    smb_buffer_destroy(call.buffer);
    smb_client_destroy(call.client);
    fake_server_join(&fake);
}

/* The user closes the client under calls in progress: they end at once, and so does every later
 * call. */
static void client_closed_under_calls(void)
{
    enum { READERS = 8 };
    struct call call;
    struct reader readers[READERS];
    struct fake_server fake = {.silent = true, .answer_bytes_max = -1};
    connected(&fake, &call);
    start_readers(readers, READERS, &call, SMB_LINK_LOST);
    WAIT_UNTIL(fake.requests == READERS);
    smb_client_close(call.client);
    join_readers(readers, READERS);
    CHECK_EQ(read_some(&call, RIG_TIMEOUT_MS).status, SMB_DISCONNECTED);
    end(&fake, &call);
}

/* The timeout of one call passes while others use the same link: it ends, and the others are not
 * affected. */
static void short_and_long_calls(void)
{
    struct call call;
    struct reader reader;
    struct fake_server fake = {.silent = true, .answer_bytes_max = -1};
    connected(&fake, &call);
    /* ended by our close, not by the timeout of the short call */
    start_readers(&reader, 1, &call, SMB_LINK_LOST);
    WAIT_UNTIL(fake.requests == 1);
    CHECK_EQ(read_some(&call, SHORT_MS).status, SMB_TIMEOUT);
    CHECK(smb_link_alive(call.link));
    smb_client_close(call.client);
    join_readers(&reader, 1);
    end(&fake, &call);
}

/* ---- a server, and a faulty peer ------------------------------------------------------------- */

static void send_frame(int fd, struct smb_frame frame)
{
    uint8_t bytes[SMB_FRAME_BYTES];
    smb_frame_encode(&frame, bytes);
    CHECK_EQ(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL), sizeof bytes);
}

static struct smb_frame receive_frame(int fd)
{
    uint8_t bytes[SMB_FRAME_BYTES];
    struct smb_frame frame;
    CHECK_EQ(recv(fd, bytes, sizeof bytes, MSG_WAITALL), sizeof bytes);
    CHECK_EQ(smb_frame_parse(bytes, &frame), SMB_OK);
    return frame;
}

static int greeted(struct rig *rig)
{
    int fd = raw_connect(rig->ports[0]);
    send_frame(fd, (struct smb_frame){.opcode = SMB_HELLO, .session = 1});
    struct smb_frame reply = receive_frame(fd);
    CHECK(reply.opcode == SMB_HELLO && reply.status == SMB_OK && reply.segment == 1000);
    return fd;
}

static const struct smb_layout LAYOUT = {262144, 262144, 262144, 1};

/* A peer that asks for much and reads nothing is not served further, and holds up nobody. When it
 * reads at last, the data is right, also if the socket had taken only a part of an answer. */
static void peer_that_reads_late(void)
{
    enum { FRAMES = 100 };
    struct rig rig;
    struct reach reach;
    struct smb_server_counters counters;
    rig_start(&rig, LAYOUT, SMB_UINT8);
    reach_make(&reach, &rig, BY_TCP, 1);
    uint8_t *content = malloc(LAYOUT.bytes);
    for (uint64_t i = 0; i < LAYOUT.bytes; i++)
        content[i] = (uint8_t)(i % 251);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = LAYOUT.bytes, .source = content});
    int fd = greeted(&rig);
    struct smb_frame read = {.opcode = SMB_READ,
                             .dtype = SMB_UINT8,
                             .session = 1,
                             .epoch = RIG_EPOCH,
                             .segment = rig_segment_id(0, 0),
                             .length = LAYOUT.chunk_bytes};
    for (int i = 0; i < FRAMES; i++)
        send_frame(fd, read);
    uint8_t *sink = malloc(LAYOUT.bytes);
    for (int i = 0; i < 50; i++)
        must(reach.buffer,
             (struct smb_request){.opcode = SMB_READ, .bytes = LAYOUT.bytes, .sink = sink});
    smb_server_counters(rig.servers[0], &counters);
    /* an answer that its socket does not take is not made */
    CHECK(counters.operations[SMB_TRANSPORT_TCP][SMB_READ] < 50 + FRAMES);
    for (int i = 0; i < FRAMES; i++) {
        CHECK_EQ(receive_frame(fd).payload, LAYOUT.bytes);
        CHECK_EQ(recv(fd, sink, LAYOUT.bytes, MSG_WAITALL), LAYOUT.bytes);
        CHECK(memcmp(sink, content, LAYOUT.bytes) == 0);
    }
    for (int i = 0; i < FRAMES; i++)
        send_frame(fd, read);
    CHECK_EQ(counters.connections_now[SMB_TRANSPORT_TCP], 2);
    close(fd); /* with answers unread and in flight */
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters),
                counters.connections_now[SMB_TRANSPORT_TCP] == 1));
    free(sink);
    free(content);
    reach_end(&reach);
    rig_stop(&rig);
}

/* Forks a process that takes a chunk's lock and stops in the middle of a change. */
static pid_t fork_stopped_holder(const char *path)
{
    pid_t child = check_fork();
    if (child == 0) {
        struct smb_segment *segment;
        WAIT_UNTIL(smb_segment_open(path, &segment) == SMB_OK);
        CHECK_EQ(smb_segment_lock(segment, 0, SMB_TRY), SMB_OK);
        smb_segment_change_begin(segment, 0);
        raise(SIGSTOP);
        smb_segment_change_end(segment, 0);
        smb_segment_unlock(segment, 0);
        smb_segment_release(segment);
        exit(0);
    }
    return child;
}

static void wait_for_stop(pid_t child)
{
    int status;
    CHECK_EQ(waitpid(child, &status, WUNTRACED), child);
    CHECK(WIFSTOPPED(status));
}

struct deferred {
    pthread_t thread;
    struct rig *rig;
    enum way way;
    struct smb_request request;
    _Atomic bool done;
};

struct shared {
    pthread_t thread;
    struct smb_buffer *buffer;
    struct smb_request request;
    _Atomic bool done;
};

static void *call_shared(void *argument)
{
    struct shared *shared = argument;
    must(shared->buffer, shared->request);
    shared->done = true;
    return NULL;
}

static void *call_deferred(void *argument)
{
    struct deferred *deferred = argument;
    struct reach reach;
    reach_make(&reach, deferred->rig, deferred->way, 30);
    must(reach.buffer, deferred->request);
    deferred->done = true;
    reach_end(&reach);
    return NULL;
}

/* A stopped holder of a chunk's lock does not stop the server: requests for that chunk are
 * deferred, and other chunks and connections are served. When the holder goes on, the requests are
 * answered, over every path. */
static void stopped_holder_parks_requests(void)
{
    enum { CHUNK = 4096, DEFERRED = 5 };
    struct rig rig;
    struct reach reach;
    struct smb_server_counters counters;
    uint8_t ones[CHUNK], sink[DEFERRED][CHUNK], value;
    memset(ones, 1, sizeof ones);
    pid_t holder = fork_stopped_holder(rig_segment_path(0, 0));
    rig_start(&rig, (struct smb_layout){2 * CHUNK, CHUNK, CHUNK, 1}, SMB_UINT8);
    wait_for_stop(holder);
    reach_make(&reach, &rig, BY_TCP, 31);
    struct smb_request add = {
        .opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = 1.0, .bytes = CHUNK, .source = ones};
    struct smb_request fetch = add, read = {.opcode = SMB_READ, .bytes = CHUNK, .sink = sink[1]};
    fetch.sink = sink[0];
    struct deferred deferred[DEFERRED] = {{.way = BY_TCP, .request = add},
                                          {.way = BY_UNIX, .request = add},
                                          {.way = BY_TCP, .request = fetch},
                                          {.way = BY_UNIX, .request = read},
                                          {.way = BY_MAPPING, .request = add}};
    for (int i = 0; i < DEFERRED; i++) {
        deferred[i].rig = &rig;
        CHECK_EQ(pthread_create(&deferred[i].thread, NULL, call_deferred, &deferred[i]), 0);
    }
    WAIT_UNTIL(
        (smb_server_counters(rig.servers[0], &counters), counters.deferred_now == DEFERRED - 1));
    for (int i = 0; i < 100; i++) {
        struct smb_request other = add;
        other.offset = CHUNK;
        must(reach.buffer, other);
    }
    for (int i = 0; i < DEFERRED; i++)
        CHECK(!deferred[i].done);
    struct smb_request late = {
        .opcode = SMB_READ, .bytes = 1, .sink = &value, .timeout_ms = SHORT_MS};
    CHECK_EQ(reach_try(reach.buffer, late), SMB_TIMEOUT);
    /* one request went with its connection */
    WAIT_UNTIL(
        (smb_server_counters(rig.servers[0], &counters), counters.deferred_now == DEFERRED - 1));
    CHECK_EQ(kill(holder, SIGCONT), 0);
    for (int i = 0; i < DEFERRED; i++)
        pthread_join(deferred[i].thread, NULL);
    CHECK_EQ(waitpid(holder, NULL, 0), holder);
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters), counters.deferred_now == 0));
    CHECK(counters.deferred_total >= DEFERRED);
    reach_end(&reach);
    reach_make(&reach, &rig, BY_TCP, 32);
    must(reach.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = 1, .sink = &value});
    CHECK_EQ(value, 4);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .offset = CHUNK, .bytes = 1, .sink = &value});
    CHECK_EQ(value, 100);
    reach_end(&reach);
    rig_stop(&rig);
}

/* A holder of a chunk's lock that changes nothing, like a reader that is being answered, holds up
 * changes but no other reader. */
static void a_lock_without_a_change_holds_up_no_read(void)
{
    enum { CHUNK = 262144 };
    struct rig rig;
    static float source[3 * CHUNK / 4], sink[3 * CHUNK / 4];
    for (int i = 0; i < 3 * CHUNK / 4; i++)
        source[i] = (float)(i % 251); /* exact in 16 bits, too */
    rig_start(&rig, (struct smb_layout){3 * CHUNK, 3 * CHUNK, CHUNK, 1}, SMB_FLOAT32);
    for (int way = 0; way < WAYS; way++) {
        struct reach reach;
        struct smb_segment *mapped;
        struct smb_server_counters before, after;
        reach_make(&reach, &rig, (enum way)way, 35);
        must(reach.buffer,
             (struct smb_request){.opcode = SMB_WRITE, .bytes = 3 * CHUNK, .source = source});
        CHECK_EQ(smb_segment_open(rig_segment_path(0, 0), &mapped), SMB_OK);
        CHECK_EQ(smb_segment_lock(mapped, CHUNK, SMB_TRY), SMB_OK);
        smb_server_counters(rig.servers[0], &before);
        memset(sink, 0, sizeof sink);
        must(reach.buffer,
             (struct smb_request){.opcode = SMB_READ, .offset = CHUNK, .bytes = 4, .sink = sink});
        CHECK(memcmp(sink, source + CHUNK / 4, 4) == 0);
        for (int wire = SMB_WIRE_EXACT; wire <= SMB_WIRE_BFLOAT16;
             wire += SMB_WIRE_BFLOAT16 - SMB_WIRE_EXACT) {
            memset(sink, 0, sizeof sink);
            must(reach.buffer,
                 (struct smb_request){
                     .opcode = SMB_READ, .bytes = 3 * CHUNK, .sink = sink, .wire = wire});
            CHECK(memcmp(sink, source, sizeof sink) == 0);
        }
        smb_server_counters(rig.servers[0], &after);
        CHECK_EQ(after.deferred_total, before.deferred_total);
        struct smb_request write = {.opcode = SMB_WRITE,
                                    .offset = CHUNK,
                                    .bytes = CHUNK,
                                    .source = source,
                                    .timeout_ms = SHORT_MS};
        CHECK_EQ(reach_try(reach.buffer, write), SMB_TIMEOUT);
        smb_segment_unlock(mapped, CHUNK);
        smb_segment_release(mapped);
        reach_end(&reach);
    }
    rig_stop(&rig);
}

/* A call that waits for a chunk of mapped memory, held by a stopped process, does not hold up the
 * client's other calls. */
static void waiting_for_a_local_chunk_holds_up_nobody(void)
{
    enum { CHUNK = 4096, CALLS = 20 };
    struct rig rig;
    struct reach reach, onlooker;
    uint8_t sink[CHUNK], ones[2 * CHUNK];
    memset(ones, 1, sizeof ones);
    pid_t holder = fork_stopped_holder(rig_segment_path(0, 0));
    rig_start(&rig, (struct smb_layout){2 * CHUNK, CHUNK, CHUNK, 2}, SMB_UINT8);
    wait_for_stop(holder);
    reach_make(&reach, &rig, BY_BOTH, 33); /* segment 0 is mapped, segment 1 is reached over TCP */
    struct shared waiting = {.buffer = reach.buffer,
                             .request = {.opcode = SMB_ACCUMULATE,
                                         .op = SMB_SUM,
                                         .scale = 1.0,
                                         .bytes = sizeof ones,
                                         .source = ones}};
    CHECK_EQ(pthread_create(&waiting.thread, NULL, call_shared, &waiting), 0);
    struct smb_request read = {.opcode = SMB_READ, .offset = CHUNK, .bytes = CHUNK, .sink = sink};
    reach_make(&onlooker, &rig, BY_TCP, 34);
    do
        must(onlooker.buffer, read);
    /* its part over TCP is done: it is the client's progress thread, and still has its local
     * part */
    while (sink[0] == 0);
    uint64_t before_ns = check_now_ns();
    for (int i = 0; i < CALLS; i++)
        must(reach.buffer, read);
    CHECK(check_now_ns() - before_ns < RIG_TIMEOUT_MS / 4 * (uint64_t)1000000U);
    CHECK(!waiting.done);
    CHECK_EQ(kill(holder, SIGCONT), 0);
    pthread_join(waiting.thread, NULL);
    CHECK_EQ(waitpid(holder, NULL, 0), holder);
    must(reach.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = CHUNK, .sink = sink});
    CHECK_EQ(sink[CHUNK - 1], 1);
    reach_end(&onlooker);
    reach_end(&reach);
    rig_stop(&rig);
}

/* A call on mapped memory whose timeout passed: the account names exactly the parts that it did not
 * reach. */
static void account_of_a_local_call(void)
{
    enum { CHUNK = 4096 };
    struct rig rig;
    struct reach reach;
    uint8_t ones[4 * CHUNK];
    memset(ones, 1, sizeof ones);
    pid_t holder = fork_stopped_holder(rig_segment_path(0, 0));
    rig_start(&rig, (struct smb_layout){4 * CHUNK, CHUNK, CHUNK, 2}, SMB_UINT8);
    wait_for_stop(holder);
    reach_make(&reach, &rig, BY_MAPPING, 41);
    struct smb_request add = {.opcode = SMB_ACCUMULATE,
                              .op = SMB_SUM,
                              .scale = 1.0,
                              .bytes = sizeof ones,
                              .source = ones,
                              .timeout_ms = SHORT_MS};
    struct smb_outcome outcome;
    CHECK_EQ(smb_transfer(reach.buffer, &add, &outcome), SMB_TIMEOUT);
    CHECK(outcome.sent && outcome.unknown);
    CHECK_EQ(smb_unknown_resolve(reach.client, outcome.unknown, RIG_TIMEOUT_MS), SMB_OK);
    uint64_t offset;
    uint32_t bytes;
    int state;
    for (uint32_t part = 0; part < 2; part++) {
        /* stripes 0 and 2 lie on the segment whose first chunk is held */
        CHECK(smb_unknown_part(outcome.unknown, part, &offset, &bytes, &state));
        CHECK(offset == 2 * part * CHUNK && bytes == CHUNK && state == SMB_OUTCOME_NOT_APPLIED);
    }
    CHECK(!smb_unknown_part(outcome.unknown, 2, &offset, &bytes, &state));
    smb_unknown_release(outcome.unknown);
    CHECK_EQ(kill(holder, SIGCONT), 0);
    CHECK_EQ(waitpid(holder, NULL, 0), holder);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = sizeof ones, .sink = ones});
    for (int i = 0; i < 4 * CHUNK; i++)
        CHECK_EQ(ones[i], i / CHUNK % 2);
    reach_end(&reach);
    rig_stop(&rig);
}

/* Sums of two segments that are requested together, the first deferred behind a stopped process:
 * each adds its own source. */
static void deferred_sums_keep_their_sources(void)
{
    enum { CHUNK = 4096, CHUNKS = 4 };
    struct rig rig;
    struct reach reach;
    struct smb_server_counters counters;
    uint8_t content[CHUNKS * CHUNK];
    pid_t holder = fork_stopped_holder(rig_segment_path(0, 0));
    rig_start(&rig, (struct smb_layout){CHUNKS * CHUNK, CHUNKS * CHUNK, CHUNK, 1}, SMB_UINT8);
    wait_for_stop(holder);
    rig_add_buffer(&rig, 1);
    reach_make(&reach, &rig, BY_TCP, 40);
    struct smb_buffer *source = reach_buffer(&reach, &rig, BY_TCP, 1);
    for (int i = 0; i < CHUNKS * CHUNK; i++)
        content[i] = (uint8_t)(1 + i / CHUNK);
    must(source,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = sizeof content, .source = content});
    struct shared waiting = {.buffer = reach.buffer,
                             .request = {.opcode = SMB_ACCUMULATE_FROM,
                                         .op = SMB_SUM,
                                         .scale = 1.0,
                                         .bytes = sizeof content,
                                         .other = source}};
    CHECK_EQ(pthread_create(&waiting.thread, NULL, call_shared, &waiting), 0);
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters), counters.deferred_now == 1));
    CHECK_EQ(kill(holder, SIGCONT), 0);
    pthread_join(waiting.thread, NULL);
    CHECK_EQ(waitpid(holder, NULL, 0), holder);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = sizeof content, .sink = content});
    for (int i = 0; i < CHUNKS * CHUNK; i++)
        CHECK_EQ(content[i], 1 + i / CHUNK);
    smb_buffer_destroy(source);
    reach_end(&reach);
    rig_stop(&rig);
}

/* Steps over several chunks, the first deferred behind a process that was stopped in its state's
 * chunk: the weights' chunk is free meanwhile, and each step has its own gradient when it is
 * made. */
static void deferred_steps_hold_nothing(void)
{
    enum { CHUNK = 4096, CHUNKS = 4, FLOATS = CHUNKS * CHUNK / 4 };
    struct rig rig;
    struct reach reach, other;
    struct smb_server_counters counters;
    static float content[FLOATS];
    pid_t holder = fork_stopped_holder(rig_segment_path(2, 0));
    rig_start(&rig, (struct smb_layout){sizeof content, sizeof content, CHUNK, 1}, SMB_FLOAT32);
    rig_add_buffer(&rig, 1);
    rig_add_buffer(&rig, 2);
    wait_for_stop(holder);
    reach_make(&reach, &rig, BY_TCP, 41);
    reach_make(&other, &rig, BY_TCP, 42);
    struct smb_buffer *gradient = reach_buffer(&reach, &rig, BY_TCP, 1),
                      *state = reach_buffer(&reach, &rig, BY_TCP, 2);
    for (int i = 0; i < FLOATS; i++)
        content[i] = (float)(1 + i * 4 / CHUNK);
    must(gradient,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = sizeof content, .source = content});
    struct shared waiting = {.buffer = reach.buffer,
                             .request = {.opcode = SMB_APPLY,
                                         .op = SMB_RULE_MOMENTUM,
                                         .bytes = sizeof content,
                                         .other = gradient,
                                         .states = {state},
                                         .hyper = {.lr = -1, .scale = 1, .mu = 1}}};
    CHECK_EQ(pthread_create(&waiting.thread, NULL, call_shared, &waiting), 0);
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters), counters.deferred_now == 1));
    for (int i = 0; i < 100; i++)
        must(other.buffer, (struct smb_request){.opcode = SMB_ACCUMULATE,
                                                .op = SMB_SUM,
                                                .scale = 1.0,
                                                .bytes = sizeof content,
                                                .source = content});
    CHECK_EQ(kill(holder, SIGCONT), 0);
    pthread_join(waiting.thread, NULL);
    CHECK_EQ(waitpid(holder, NULL, 0), holder);
    static float found[FLOATS];
    must(state, (struct smb_request){.opcode = SMB_READ, .bytes = sizeof found, .sink = found});
    CHECK(memcmp(found, content, sizeof found) == 0);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = sizeof found, .sink = found});
    for (int i = 0; i < FLOATS; i++)
        CHECK(found[i] == 101 * content[i]);
    smb_buffer_destroy(gradient);
    smb_buffer_destroy(state);
    reach_end(&reach);
    reach_end(&other);
    rig_stop(&rig);
}

/* The server stops while requests are deferred and connections are open, and waits for none of
 * them. */
static void server_stops_with_deferred_requests(void)
{
    struct rig rig;
    struct smb_server_counters counters;
    pid_t holder = fork_stopped_holder(rig_segment_path(0, 0));
    rig_start(&rig, (struct smb_layout){4096, 4096, 4096, 1}, SMB_UINT8);
    wait_for_stop(holder);
    int fd = greeted(&rig), silent = raw_connect(rig.ports[0]);
    send_frame(fd, (struct smb_frame){.opcode = SMB_FILL,
                                      .dtype = SMB_UINT8,
                                      .session = 1,
                                      .epoch = RIG_EPOCH,
                                      .segment = rig_segment_id(0, 0),
                                      .length = 16,
                                      .sequence = 1});
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters), counters.deferred_now == 1));
    rig_stop(&rig);
    uint8_t byte;
    CHECK_EQ(recv(fd, &byte, 1, 0), 0);
    close(fd);
    close(silent);
    CHECK_EQ(kill(holder, SIGKILL), 0);
    CHECK_EQ(kill(holder, SIGCONT), 0);
    CHECK_EQ(waitpid(holder, NULL, 0), holder);
}

/* A connection that is accepted after a loop has read its clock, and before the loop looks for
 * silent ones, has only just come. Such a connection was once closed. */
static void who_just_came_is_not_silent(void)
{
    enum { NOW_NS = 1000000000 };
    uint64_t deadline_ns = (uint64_t)HELLO_DEADLINE_MS * 1000000U;
    struct connection connection = {.opened_ns = NOW_NS};
    CHECK(!connection_is_silent(&connection, NOW_NS - 1));
    CHECK(!connection_is_silent(&connection, NOW_NS + deadline_ns));
    CHECK(connection_is_silent(&connection, NOW_NS + deadline_ns + 1));
    connection.proven = true;
    CHECK(!connection_is_silent(&connection, NOW_NS + deadline_ns + 1));
}

int main(void)
{
    static const struct test tests[] = {
        TEST(who_just_came_is_not_silent),
        TEST(handshakes_that_fail),
        TEST(answers_cut_at_each_byte),
        TEST(closed_before_sending),
        TEST(silence_times_out),
        TEST(answers_that_are_none),
        TEST(answers_to_something_else),
        TEST(link_closed_under_calls),
        TEST(client_closed_under_calls),
        TEST(short_and_long_calls),
        TEST(peer_that_reads_late),
        TEST(stopped_holder_parks_requests),
        TEST(deferred_sums_keep_their_sources),
        TEST(deferred_steps_hold_nothing),
        TEST(account_of_a_local_call),
        TEST(a_lock_without_a_change_holds_up_no_read),
        TEST(waiting_for_a_local_chunk_holds_up_nobody),
        TEST(server_stops_with_deferred_requests),
    };
    return RUN_TESTS(tests);
}
