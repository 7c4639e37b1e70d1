/* Connections that somebody else made, handed to server and client as descriptors. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>

#include "rig.h"

enum { ELEMENTS = 3 * 1024 };
static const struct smb_layout LAYOUT = {ELEMENTS * 8, 8192, 4096, 1};

static void make_pair(int ends[2])
{
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
}

static struct smb_buffer *buffer_over(struct smb_client *client, struct smb_link *link)
{
    struct smb_buffer *buffer;
    CHECK_EQ(smb_buffer_create(client, &LAYOUT, SMB_INT64, &buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(buffer, 0, rig_segment_id(0, 0), RIG_EPOCH, link), SMB_OK);
    return buffer;
}

static void add_one(struct smb_buffer *buffer, int64_t expected)
{
    static int64_t ones[ELEMENTS], found[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++)
        ones[i] = 1;
    must(buffer, (struct smb_request){.opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = 1, .bytes = sizeof ones, .source = ones,
                                      .sink = found});
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ(found[i], expected);
}

/* Looks after the one link of a client, as Python does: whenever it has lost its connection, another pair of ends. */
struct tender {
    struct rig *rig;
    struct smb_client *client;
    struct smb_link *link;
    int resumed;
};

static void *tend(void *argument)
{
    struct tender *tender = argument;
    uint64_t id, instance;
    while (smb_client_wait_down(tender->client, RIG_TIMEOUT_MS, &id) == SMB_OK) {
        int ends[2];
        make_pair(ends);
        CHECK_EQ(smb_server_adopt(tender->rig->servers[0], ends[0], SMB_TRANSPORT_TCP), SMB_OK);
        CHECK_EQ(smb_link_resume_fd(tender->link, ends[1], 0, RIG_TIMEOUT_MS, &instance), SMB_OK);
        CHECK_EQ(instance, 1000);
        tender->resumed++;
    }
    return NULL;
}

/* An adopted connection carries calls as any other, is counted as what it was said to be, and one that breaks is followed by another. */
static void descriptors_are_connections(void)
{
    struct rig rig;
    struct smb_client *client;
    struct smb_link *link;
    struct smb_server_counters counters;
    uint64_t instance;
    int ends[2];
    rig_start(&rig, LAYOUT, SMB_INT64);
    CHECK_EQ(smb_client_create(7, &client), SMB_OK);
    make_pair(ends);
    CHECK_EQ(smb_server_adopt(rig.servers[0], ends[0], SMB_TRANSPORT_VERBS), SMB_OK);
    CHECK_EQ(smb_client_connect_fd(client, ends[1], 1, RIG_TIMEOUT_MS, &link, &instance), SMB_OK);
    CHECK_EQ(instance, 1000);
    struct smb_buffer *buffer = buffer_over(client, link);
    struct tender tender = {&rig, client, link, 0};
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, tend, &tender), 0);
    for (int64_t i = 1; i <= 3; i++) {
        add_one(buffer, i);
        if (i == 2)
            shutdown(ends[1], SHUT_RDWR); /* the connection breaks: the link's own descriptor, as nobody else has it */
    }
    CHECK(tender.resumed >= 1);
    smb_server_counters(rig.servers[0], &counters);
    CHECK(counters.operations[SMB_TRANSPORT_VERBS][SMB_ACCUMULATE] > 0);
    CHECK_EQ(counters.connections_opened[SMB_TRANSPORT_VERBS], 1);
    smb_buffer_destroy(buffer);
    smb_client_close(client);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    smb_link_close(link);
    smb_client_destroy(client);
    rig_stop(&rig);
}

/* What can't be served is closed at once, and says why: no transport of ours, no descriptor, nobody at the other end. */
static void refused_descriptors_are_closed(void)
{
    struct rig rig;
    struct smb_client *client;
    struct smb_link *link;
    uint64_t instance;
    int ends[2];
    uint8_t byte;
    rig_start(&rig, LAYOUT, SMB_INT64);
    CHECK_EQ(smb_client_create(8, &client), SMB_OK);
    make_pair(ends);
    CHECK_EQ(smb_server_adopt(rig.servers[0], ends[0], SMB_TRANSPORT_COUNT), SMB_INVALID);
    CHECK_EQ(read(ends[1], &byte, 1), 0);
    CHECK_EQ(smb_client_connect_fd(client, ends[1], 1, RIG_TIMEOUT_MS, &link, &instance), SMB_DISCONNECTED);
    CHECK(fcntl(ends[1], F_GETFD) < 0 && errno == EBADF);
    CHECK_EQ(smb_server_adopt(rig.servers[0], -1, SMB_TRANSPORT_TCP), SMB_SYSTEM);
    CHECK_EQ(smb_client_connect_fd(client, -1, 1, RIG_TIMEOUT_MS, &link, &instance), SMB_SYSTEM);
    make_pair(ends); /* beside them, one that works */
    CHECK_EQ(smb_server_adopt(rig.servers[0], ends[0], SMB_TRANSPORT_TCP), SMB_OK);
    CHECK_EQ(smb_client_connect_fd(client, ends[1], 1, RIG_TIMEOUT_MS, &link, &instance), SMB_OK);
    smb_link_close(link);
    smb_client_destroy(client);
    rig_stop(&rig);
}

int main(void)
{
    static const struct test tests[] = {TEST(descriptors_are_connections), TEST(refused_descriptors_are_closed)};
    return RUN_TESTS(tests);
}
