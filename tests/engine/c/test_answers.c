/* Several answers received in one call: data goes to its destination before its header is parsed.
 * Whatever comes instead, in any order and in any pieces, every byte that was read is right, and
 * the link goes on. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>

#include "base/frame.h"
#include "random.h"
#include "rig.h"

enum {
    CHUNK = 16384,
    CHUNKS = 24 /* more than are received in one call */,
    BYTES = CHUNK * CHUNKS,
    CALLS = 3,
    ROUNDS = 60
};

/* A server that collects a call's requests, then answers all of them. */
struct answering {
    int wire;          /* the wire format that its client requests */
    int order[CHUNKS]; /* the order in which requests are answered */
    bool refused[CHUNKS];
    uint64_t piece_bytes; /* bytes sent at once */
    uint64_t cut_bytes;   /* hangs up after so many bytes */
    uint16_t port;
    int listener;
    pthread_t thread;
};

static uint8_t content(uint64_t at)
{
    return (uint8_t)(at % 251 + at / CHUNK);
}

static bool hear(int fd, struct smb_frame *frame)
{
    uint8_t bytes[SMB_FRAME_BYTES];
    if (recv(fd, bytes, sizeof bytes, MSG_WAITALL) != sizeof bytes)
        return false;
    CHECK_EQ(smb_frame_parse(bytes, frame), SMB_OK);
    return true;
}

static uint64_t put_answer(const struct answering *self, int number,
                           const struct smb_frame *request, uint8_t *to)
{
    struct smb_frame reply = smb_frame_reply(request, self->refused[number] ? SMB_DENIED : SMB_OK);
    if (!self->refused[number]) {
        reply.length = request->length;
        reply.payload = self->wire == SMB_WIRE_EXACT
                            ? request->length
                            : (uint32_t)smb_wire_bytes(self->wire, request->length / 4);
    }
    smb_frame_encode(&reply, to);
    uint64_t from = request->offset * reply.payload / request->length;
    for (uint64_t i = 0; i < reply.payload; i++)
        to[SMB_FRAME_BYTES + i] = content(from + i);
    return SMB_FRAME_BYTES + reply.payload;
}

static void *answer_calls(void *argument)
{
    struct answering *self = argument;
    struct smb_frame requests[CHUNKS], hello;
    uint8_t *stream = malloc((SMB_FRAME_BYTES + CHUNK) * (size_t)CHUNKS);
    int on = 1, fd = accept4(self->listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0 && hear(fd, &hello));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct smb_frame reply = smb_frame_reply(&hello, SMB_OK);
    smb_frame_encode(&reply, stream);
    CHECK_EQ(send(fd, stream, SMB_FRAME_BYTES, MSG_NOSIGNAL), SMB_FRAME_BYTES);
    for (bool on_line = true; on_line;) {
        uint64_t bytes = 0;
        for (int i = 0; i < CHUNKS && on_line; i++)
            on_line = hear(fd, &requests[i]);
        for (int i = 0; i < CHUNKS && on_line; i++)
            bytes += put_answer(self, self->order[i], &requests[self->order[i]], stream + bytes);
        if (bytes > self->cut_bytes) {
            bytes = self->cut_bytes;
            on_line = false;
        }
        for (uint64_t at = 0; at < bytes; at += self->piece_bytes) {
            uint64_t count = bytes - at < self->piece_bytes ? bytes - at : self->piece_bytes;
            CHECK_EQ(send(fd, stream + at, count, MSG_NOSIGNAL), count);
        }
    }
    close(fd);
    free(stream);
    return NULL;
}

struct reached {
    struct smb_client *client;
    struct smb_link *link;
    struct smb_buffer *buffer;
};

static void reach_it(struct answering *self, struct reached *reached, void *(*serve)(void *))
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof name;
    self->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(self->listener, (struct sockaddr *)&name, sizeof name) == 0 &&
          listen(self->listener, 1) == 0);
    CHECK_EQ(getsockname(self->listener, (struct sockaddr *)&name, &length), 0);
    CHECK_EQ(pthread_create(&self->thread, NULL, serve, self), 0);
    struct smb_layout layout = {BYTES, BYTES, CHUNK, 1};
    uint64_t instance;
    CHECK_EQ(smb_client_create(1, &reached->client), SMB_OK);
    CHECK_EQ(smb_client_connect_tcp(reached->client, "127.0.0.1", ntohs(name.sin_port), 0,
                                    RIG_TIMEOUT_MS, &reached->link, &instance),
             SMB_OK);
    CHECK_EQ(smb_buffer_create(reached->client, &layout,
                               self->wire == SMB_WIRE_EXACT ? SMB_UINT8 : SMB_FLOAT32,
                               &reached->buffer),
             SMB_OK);
    CHECK_EQ(smb_buffer_set_link(reached->buffer, 0, 1, 1, reached->link), SMB_OK);
}

static void leave_it(struct answering *self, struct reached *reached)
{
    smb_buffer_destroy(reached->buffer);
    smb_link_close(reached->link);
    smb_client_destroy(reached->client);
    pthread_join(self->thread, NULL);
    close(self->listener);
}

/* bfloat16 is the upper half of a float32. */
static uint8_t expected_at(const struct answering *self, uint64_t at)
{
    return self->wire == SMB_WIRE_EXACT ? content(at)
           : at % 4 < 2                 ? 0
                                        : content(at / 4 * 2 + at % 4 - 2);
}

/* Ends the calls of a client that has lost its connection, because nobody reconnects. */
static void *close_when_down(void *argument)
{
    struct smb_client *client = argument;
    uint64_t link_id;
    CHECK_EQ(smb_client_wait_down(client, RIG_TIMEOUT_MS, &link_id), SMB_OK);
    smb_client_close(client);
    return NULL;
}

/* Makes `calls` reads of the whole buffer: each ends as expected, and all bytes that it reports as
 * read are right. */
static void read_from(struct answering *self, int calls, int expected)
{
    struct reached reached;
    reach_it(self, &reached, answer_calls);
    uint8_t *sink = malloc(BYTES);
    pthread_t closer = 0;
    if (expected == SMB_LINK_LOST)
        CHECK_EQ(pthread_create(&closer, NULL, close_when_down, reached.client), 0);
    for (int call = 0; call < calls; call++) {
        struct smb_outcome outcome;
        struct smb_request read = {.opcode = SMB_READ,
                                   .bytes = BYTES,
                                   .sink = sink,
                                   .wire = self->wire,
                                   .timeout_ms = RIG_TIMEOUT_MS};
        memset(sink, 0, BYTES);
        smb_transfer(reached.buffer, &read, &outcome);
        CHECK_EQ(outcome.status, expected);
        for (uint64_t i = 0; i < BYTES && expected != SMB_LINK_LOST; i++)
            if (!self->refused[i / CHUNK])
                CHECK_EQ(sink[i], expected_at(self, i));
    }
    if (expected == SMB_LINK_LOST)
        pthread_join(closer, NULL);
    free(sink);
    leave_it(self, &reached);
}

static struct answering in_order(uint64_t piece_bytes)
{
    struct answering self = {.piece_bytes = piece_bytes, .cut_bytes = UINT64_MAX};
    for (int i = 0; i < CHUNKS; i++)
        self.order[i] = i;
    return self;
}

static void answers_in_order(void)
{
    static const uint64_t pieces[] = {7001, SMB_FRAME_BYTES / 2, SMB_FRAME_BYTES + CHUNK, 100000,
                                      UINT32_MAX};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        struct answering self = in_order(pieces[i]);
        read_from(&self, CALLS, SMB_OK);
    }
}

static void answers_in_any_order(void)
{
    struct random random = random_make(1);
    for (int round = 0; round < ROUNDS / check_thinned(); round++) {
        /* Pieces of a few bytes would take an emulated machine longer than a call may take. */
        struct answering self = in_order(100 + random_below(&random, 100000));
        for (uint64_t swaps = 1 + random_below(&random, CHUNKS); swaps > 0; swaps--) {
            int a = (int)random_below(&random, CHUNKS), b = (int)random_below(&random, CHUNKS),
                kept = self.order[a];
            self.order[a] = self.order[b];
            self.order[b] = kept;
        }
        self.wire = round % 3 ? SMB_WIRE_EXACT : SMB_WIRE_BFLOAT16;
        read_from(&self, CALLS, SMB_OK);
    }
}

/* A refusal has no data: the bytes after it lie where the refused data was expected. */
static void refusals_among_them(void)
{
    struct random random = random_make(2);
    for (int round = 0; round < ROUNDS / check_thinned(); round++) {
        struct answering self = in_order(round % 2 ? UINT32_MAX
                                                   : 100 + random_below(&random, 100000));
        for (uint64_t refusals = 1 + random_below(&random, 4); refusals > 0; refusals--)
            self.refused[random_below(&random, CHUNKS)] = true;
        /* decoded from memory of the link, which is freed with the refusal */
        self.wire = round % 3 ? SMB_WIRE_EXACT : SMB_WIRE_BFLOAT16;
        read_from(&self, CALLS, SMB_DENIED);
    }
}

/* A connection that ends in the middle of the answers: data that did not come is not reported as
 * read. */
static void answers_that_are_cut(void)
{
    struct random random = random_make(3);
    for (int round = 0; round < 6; round++) {
        struct answering self = in_order(UINT32_MAX);
        self.cut_bytes = random_below(&random, (SMB_FRAME_BYTES + CHUNK) * (uint64_t)CHUNKS);
        read_from(&self, 1, SMB_LINK_LOST);
    }
}

/* Two requests, of which the second is answered first. */
static _Atomic int heard;

static void *answer_two(void *argument)
{
    struct answering *self = argument;
    struct smb_frame requests[2], frame;
    static uint8_t stream[2 * (SMB_FRAME_BYTES + CHUNK)];
    int fd = accept4(self->listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0 && hear(fd, &frame));
    frame = smb_frame_reply(&frame, SMB_OK);
    smb_frame_encode(&frame, stream);
    CHECK_EQ(send(fd, stream, SMB_FRAME_BYTES, MSG_NOSIGNAL), SMB_FRAME_BYTES);
    for (heard = 0; heard < 2; heard++)
        CHECK(hear(fd, &requests[heard]));
    uint64_t bytes = put_answer(self, 1, &requests[1], stream);
    bytes += put_answer(self, 0, &requests[0], stream + bytes);
    CHECK_EQ(send(fd, stream, bytes, MSG_NOSIGNAL), bytes);
    CHECK(!hear(fd, &frame));
    close(fd);
    return NULL;
}

struct reader {
    pthread_t thread;
    struct smb_buffer *buffer;
    struct smb_request request;
};

static void *read_it(void *argument)
{
    struct reader *reader = argument;
    CHECK_EQ(reach_try(reader->buffer, reader->request), SMB_OK);
    return NULL;
}

/* Two threads that read to one place, one a part and one all of it. */
static void answers_to_one_place(void)
{
    for (int i = 0; i < 2; i++) {
        struct answering self = in_order(UINT32_MAX);
        struct reached reached;
        reach_it(&self, &reached, answer_two);
        uint8_t *sink = calloc(1, CHUNK);
        struct reader readers[2];
        for (int r = 0; r < 2; r++) {
            readers[r] = (struct reader){.buffer = reached.buffer,
                                         .request = {.opcode = SMB_READ,
                                                     .bytes = r == i ? CHUNK / 2 : CHUNK,
                                                     .sink = sink,
                                                     .timeout_ms = RIG_TIMEOUT_MS}};
            WAIT_UNTIL(heard == r);
            CHECK_EQ(pthread_create(&readers[r].thread, NULL, read_it, &readers[r]), 0);
        }
        for (int r = 0; r < 2; r++)
            pthread_join(readers[r].thread, NULL);
        for (uint64_t at = 0; at < CHUNK; at++)
            CHECK_EQ(sink[at], content(at));
        free(sink);
        leave_it(&self, &reached);
        heard = 0;
    }
}

/* An older server gets no operation on bits. It would close the connection. */
static void no_bits_without_the_feature(void)
{
    struct answering self = in_order(UINT32_MAX);
    struct reached reached;
    reach_it(&self, &reached, answer_calls);
    uint8_t *elements = calloc(1, BYTES);
    for (int op = SMB_BAND; op <= SMB_BXOR; op++) {
        struct smb_outcome outcome;
        struct smb_request request = {.opcode = SMB_ACCUMULATE,
                                      .op = op,
                                      .scale = 1.0,
                                      .bytes = BYTES,
                                      .source = elements,
                                      .timeout_ms = RIG_TIMEOUT_MS};
        smb_transfer(reached.buffer, &request, &outcome);
        CHECK_EQ(outcome.status, SMB_VERSION);
        CHECK(!outcome.sent);
        request.opcode = SMB_ACCUMULATE_FROM, request.other = reached.buffer;
        request.source = NULL;
        smb_transfer(reached.buffer, &request, &outcome);
        CHECK_EQ(outcome.status, SMB_VERSION);
        CHECK(!outcome.sent);
    }
    struct smb_outcome outcome;
    struct smb_request known = {
        .opcode = SMB_READ, .bytes = BYTES, .sink = elements, .timeout_ms = RIG_TIMEOUT_MS};
    smb_transfer(reached.buffer, &known, &outcome);
    CHECK_EQ(outcome.status, SMB_OK);
    free(elements);
    leave_it(&self, &reached);
}

/* A server whose HELLO has no features gets no int4, no gradient, no rounding, no counter of
 * floats and no warden, because it would close the connection. It gets the operations that it knows. */
static void no_feature_no_use_of_it(void)
{
    struct answering self = in_order(UINT32_MAX);
    self.wire = SMB_WIRE_BFLOAT16;
    struct reached reached;
    reach_it(&self, &reached, answer_calls);
    uint8_t *elements = calloc(1, BYTES);
    for (int opcode = SMB_READ; opcode <= SMB_ACCUMULATE; opcode++) {
        struct smb_outcome outcome;
        struct smb_request request = {.opcode = opcode,
                                      .op = SMB_SUM,
                                      .scale = 1.0,
                                      .bytes = BYTES,
                                      .source = elements,
                                      .sink = opcode == SMB_READ ? elements : NULL,
                                      .wire = SMB_WIRE_INT4,
                                      .timeout_ms = RIG_TIMEOUT_MS};
        smb_transfer(reached.buffer, &request, &outcome);
        CHECK_EQ(outcome.status, SMB_VERSION);
        CHECK(!outcome.sent);
    }
    struct smb_outcome outcome;
    struct smb_request step = {.opcode = SMB_APPLY,
                               .op = SMB_RULE_ELASTIC,
                               .bytes = BYTES,
                               .source = elements,
                               .hyper = {.alpha = 0.5},
                               .timeout_ms = RIG_TIMEOUT_MS};
    smb_transfer(reached.buffer, &step, &outcome);
    CHECK_EQ(outcome.status, SMB_VERSION);
    CHECK(!outcome.sent);
    for (int opcode = SMB_FETCH_ADD; opcode <= SMB_COMPARE_SWAP; opcode++) {
        struct smb_request count = {.opcode = opcode, .bytes = 4, .timeout_ms = RIG_TIMEOUT_MS};
        smb_transfer(reached.buffer, &count, &outcome);
        CHECK_EQ(outcome.status, SMB_VERSION);
        CHECK(!outcome.sent);
    }
    struct smb_request rounded = {.opcode = SMB_ACCUMULATE_FROM,
                                  .op = SMB_SUM,
                                  .scale = 1.0,
                                  .bytes = BYTES,
                                  .other = reached.buffer,
                                  .wire = SMB_WIRE_BFLOAT16,
                                  .timeout_ms = RIG_TIMEOUT_MS};
    smb_transfer(reached.buffer, &rounded, &outcome);
    CHECK_EQ(outcome.status, SMB_VERSION);
    CHECK(!outcome.sent);
    struct smb_request fenced = {.opcode = SMB_FILL,
                                 .bytes = BYTES,
                                 .token = 2,
                                 .warden = reached.buffer,
                                 .timeout_ms = RIG_TIMEOUT_MS};
    smb_transfer(reached.buffer, &fenced, &outcome);
    CHECK_EQ(outcome.status, SMB_VERSION);
    CHECK(!outcome.sent);
    struct smb_request known = {.opcode = SMB_READ,
                                .bytes = BYTES,
                                .sink = elements,
                                .wire = self.wire,
                                .timeout_ms = RIG_TIMEOUT_MS};
    smb_transfer(reached.buffer, &known, &outcome);
    CHECK_EQ(outcome.status, SMB_OK);
    free(elements);
    leave_it(&self, &reached);
}

static void greet(int fd)
{
    struct smb_frame hello;
    uint8_t bytes[SMB_FRAME_BYTES];
    CHECK(fd >= 0 && hear(fd, &hello));
    hello = smb_frame_reply(&hello, SMB_OK);
    smb_frame_encode(&hello, bytes);
    CHECK_EQ(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL), sizeof bytes);
}

/* The connection is lost with a change in flight. Then the server has no room for the repetition,
 * and does not look up its outcome. */
static void *answer_without_room(void *argument)
{
    struct answering *self = argument;
    struct smb_frame frame;
    uint8_t bytes[SMB_FRAME_BYTES];
    int fd = accept4(self->listener, NULL, NULL, SOCK_CLOEXEC);
    greet(fd);
    CHECK(hear(fd, &frame) && frame.opcode == SMB_FILL);
    close(fd);
    fd = accept4(self->listener, NULL, NULL, SOCK_CLOEXEC);
    greet(fd);
    while (hear(fd, &frame)) {
        frame = smb_frame_reply(&frame,
                                frame.opcode == SMB_FILL ? SMB_OUT_OF_MEMORY : SMB_NOT_FOUND);
        smb_frame_encode(&frame, bytes);
        CHECK_EQ(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL), sizeof bytes);
    }
    close(fd);
    return NULL;
}

static void *fill_one(void *argument)
{
    struct smb_request fill = {.opcode = SMB_FILL, .bytes = CHUNK, .timeout_ms = RIG_TIMEOUT_MS};
    struct smb_outcome outcome;
    CHECK_EQ(smb_transfer(argument, &fill, &outcome), SMB_OUT_OF_MEMORY);
    uint64_t offset;
    uint32_t bytes;
    int state;
    CHECK(outcome.unknown && smb_unknown_part(outcome.unknown, 0, &offset, &bytes, &state));
    CHECK_EQ(state, SMB_OUTCOME_UNKNOWN); /* made once more, it could count twice */
    smb_unknown_release(outcome.unknown);
    return NULL;
}

static void no_room_for_a_repetition(void)
{
    struct answering self = {.wire = SMB_WIRE_EXACT};
    struct reached reached;
    struct sockaddr_in name;
    socklen_t length = sizeof name;
    pthread_t caller;
    uint64_t link_id, instance;
    reach_it(&self, &reached, answer_without_room);
    CHECK_EQ(getsockname(self.listener, (struct sockaddr *)&name, &length), 0);
    CHECK_EQ(pthread_create(&caller, NULL, fill_one, reached.buffer), 0);
    CHECK_EQ(smb_client_wait_down(reached.client, RIG_TIMEOUT_MS, &link_id), SMB_OK);
    CHECK_EQ(smb_link_resume_tcp(reached.link, "127.0.0.1", ntohs(name.sin_port), 0, RIG_TIMEOUT_MS,
                                 &instance),
             SMB_OK);
    pthread_join(caller, NULL);
    leave_it(&self, &reached);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(answers_in_order),
        TEST(answers_in_any_order),
        TEST(refusals_among_them),
        TEST(answers_that_are_cut),
        TEST(answers_to_one_place),
        TEST(no_feature_no_use_of_it),
        TEST(no_bits_without_the_feature),
        TEST(no_room_for_a_repetition),
    };
    return RUN_TESTS(tests);
}
