/* Several answers in one look at the socket: data goes to its place before its header is understood. Whatever is answered instead, in
 * whatever order and pieces it comes, every byte that was read is the right one, and the link goes on. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>

#include "random.h"
#include "rig.h"
#include "wire.h"

enum { CHUNK = 16384, CHUNKS = 24 /* more than are taken in one look */, BYTES = CHUNK * CHUNKS, CALLS = 3, ROUNDS = 60, SHORT_MS = 200 };

/* A server that collects a call's requests, then answers all of them. */
struct answering {
    int order[CHUNKS];     /* which request is answered next */
    bool refused[CHUNKS];
    uint64_t piece_bytes;  /* of what is sent at once */
    uint64_t cut_bytes;    /* after so many it hangs up */
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

static uint64_t put_answer(const struct answering *self, int number, const struct smb_frame *request, uint8_t *to)
{
    struct smb_frame reply = smb_frame_reply(request, self->refused[number] ? SMB_DENIED : SMB_OK);
    if (!self->refused[number])
        reply.length = reply.payload = request->length;
    smb_frame_encode(&reply, to);
    for (uint64_t i = 0; i < reply.payload; i++)
        to[SMB_FRAME_BYTES + i] = content(request->offset + i);
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

/* `calls` reads of everything: each ends as it should, and all that it says was read is right. */
static void read_from(struct answering *self, int calls, int expected)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof name;
    self->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(self->listener, (struct sockaddr *)&name, sizeof name) == 0 && listen(self->listener, 1) == 0);
    CHECK_EQ(getsockname(self->listener, (struct sockaddr *)&name, &length), 0);
    CHECK_EQ(pthread_create(&self->thread, NULL, answer_calls, self), 0);

    struct smb_layout layout = {BYTES, BYTES, CHUNK, 1};
    struct smb_client *client;
    struct smb_link *link;
    struct smb_buffer *buffer;
    uint64_t instance;
    CHECK_EQ(smb_client_create(1, &client), SMB_OK);
    CHECK_EQ(smb_client_connect_tcp(client, "127.0.0.1", ntohs(name.sin_port), 0, RIG_TIMEOUT_MS, &link, &instance), SMB_OK);
    CHECK_EQ(smb_buffer_create(client, &layout, SMB_UINT8, &buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(buffer, 0, 1, 1, link), SMB_OK);
    uint8_t *sink = malloc(BYTES);
    for (int call = 0; call < calls; call++) {
        struct smb_outcome outcome;
        struct smb_request read = {.opcode = SMB_READ, .bytes = BYTES, .sink = sink,
                                   .timeout_ms = expected == SMB_LINK_LOST ? SHORT_MS : RIG_TIMEOUT_MS};
        memset(sink, 0, BYTES);
        smb_transfer(buffer, &read, &outcome);
        CHECK_EQ(outcome.status, expected);
        for (uint64_t i = 0; i < BYTES && expected != SMB_LINK_LOST; i++)
            if (!self->refused[i / CHUNK])
                CHECK_EQ(sink[i], content(i));
    }
    free(sink);
    smb_buffer_destroy(buffer);
    smb_link_close(link);
    smb_client_destroy(client);
    pthread_join(self->thread, NULL);
    close(self->listener);
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
    static const uint64_t pieces[] = {7001, SMB_FRAME_BYTES / 2, SMB_FRAME_BYTES + CHUNK, 100000, UINT32_MAX};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        struct answering self = in_order(pieces[i]);
        read_from(&self, CALLS, SMB_OK);
    }
}

static void answers_in_any_order(void)
{
    struct random random = random_make(1);
    for (int round = 0; round < ROUNDS; round++) {
        struct answering self = in_order(1 + random_below(&random, 100000));
        for (uint64_t swaps = 1 + random_below(&random, CHUNKS); swaps > 0; swaps--) {
            int a = (int)random_below(&random, CHUNKS), b = (int)random_below(&random, CHUNKS), kept = self.order[a];
            self.order[a] = self.order[b];
            self.order[b] = kept;
        }
        read_from(&self, CALLS, SMB_OK);
    }
}

/* Behind a refusal is no data: what is, lies where the refused data was awaited. */
static void refusals_among_them(void)
{
    struct random random = random_make(2);
    for (int round = 0; round < ROUNDS; round++) {
        struct answering self = in_order(round % 2 ? UINT32_MAX : 1 + random_below(&random, 100000));
        for (uint64_t refusals = 1 + random_below(&random, 4); refusals > 0; refusals--)
            self.refused[random_below(&random, CHUNKS)] = true;
        read_from(&self, CALLS, SMB_DENIED);
    }
}

/* A connection that ends in the middle of them: nobody says that what did not come was read. */
static void answers_that_are_cut(void)
{
    struct random random = random_make(3);
    for (int round = 0; round < 6; round++) {
        struct answering self = in_order(UINT32_MAX);
        self.cut_bytes = random_below(&random, (SMB_FRAME_BYTES + CHUNK) * (uint64_t)CHUNKS);
        read_from(&self, 1, SMB_LINK_LOST);
    }
}

int main(void)
{
    static const struct test tests[] = {
        TEST(answers_in_order),
        TEST(answers_in_any_order),
        TEST(refusals_among_them),
        TEST(answers_that_are_cut),
    };
    return RUN_TESTS(tests);
}
