/* Connections that somebody else made, given to server and client as descriptors. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>

#include "base/frame.h"
#include "pump.h"
#include "smb/segment.h"
#include "smb/server.h"

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

/* Descriptors that are not usable connections are refused with the reason: a closed descriptor, or
 * no peer. A client closes what it refuses. */
static void refused_descriptors_are_closed(void)
{
    struct rig rig;
    struct smb_client *client;
    struct smb_link *link;
    struct smb_slots *slots;
    uint64_t instance;
    int ends[2];
    rig_start(&rig, LAYOUT, SMB_INT64);
    CHECK_EQ(smb_client_create(8, &client), SMB_OK);
    CHECK_EQ(smb_server_take_slots(rig.servers[0], 1, &slots), SMB_OK);
    CHECK_EQ(smb_server_adopt_reference(rig.servers[0], -1, slots), SMB_SYSTEM);
    CHECK_EQ(smb_client_connect_reference(client, -1, 1, RIG_TIMEOUT_MS, &link, &instance),
             SMB_SYSTEM);
    make_pair(ends);
    close(ends[0]);
    CHECK_EQ(smb_client_connect_reference(client, ends[1], 1, RIG_TIMEOUT_MS, &link, &instance),
             SMB_DISCONNECTED);
    CHECK(fcntl(ends[1], F_GETFD) < 0 && errno == EBADF);
    make_pair(ends); /* besides them, a usable one */
    CHECK_EQ(smb_server_adopt_reference(rig.servers[0], ends[0], slots), SMB_OK);
    CHECK_EQ(smb_client_connect_reference(client, ends[1], 1, RIG_TIMEOUT_MS, &link, &instance),
             SMB_OK);
    CHECK_EQ(instance, 1000);
    smb_slots_release(slots);
    smb_link_close(link);
    smb_client_destroy(client);
    rig_stop(&rig);
}

enum { BREAKS = 40 };

struct reference_tender {
    struct rig *rig;
    struct smb_client *client;
    struct smb_link *link;
    struct pump pumps[2 * BREAKS + 4];
    int made;
    bool fall_back;
};

static void *tend_by_reference(void *argument)
{
    struct reference_tender *tender = argument;
    uint64_t id, instance;
    while (smb_client_wait_down(tender->client, RIG_TIMEOUT_MS, &id) == SMB_OK) {
        if (tender->fall_back) {
            CHECK_EQ(smb_link_resume_tcp(tender->link, "127.0.0.1", tender->rig->ports[0], 0,
                                         RIG_TIMEOUT_MS, &instance),
                     SMB_OK);
            continue;
        }
        struct pump *pump = &tender->pumps[tender->made++];
        pump->break_after = tender->made < BREAKS ? 2 + (uint64_t)tender->made % 9 : 0;
        pump_start(pump, tender->rig->servers[0]);
        int status = smb_link_resume_reference(tender->link, pump->client_end, 0, RIG_TIMEOUT_MS,
                                               &instance);
        CHECK(status == SMB_OK || status == SMB_DISCONNECTED);
        if (status != SMB_OK)
            smb_link_let_go(tender->link);
    }
    return NULL;
}

/* However often the connection breaks, each addition counts once, and at the end the same link
 * continues over TCP. */
static void broken_references_count_once(void)
{
    struct rig rig;
    uint64_t instance;
    static struct reference_tender tender;
    rig_start(&rig, LAYOUT, SMB_INT64);
    struct smb_recovery recovery;
    CHECK_EQ(smb_server_open_journal(rig.servers[0], scratch_path("journal"), &recovery), SMB_OK);
    tender = (struct reference_tender){.rig = &rig};
    CHECK_EQ(smb_client_create(9, &tender.client), SMB_OK);
    struct pump *first = &tender.pumps[tender.made++];
    first->break_after = 5;
    pump_start(first, rig.servers[0]);
    CHECK_EQ(smb_client_connect_reference(tender.client, first->client_end, 1, RIG_TIMEOUT_MS,
                                          &tender.link, &instance),
             SMB_OK);
    struct smb_buffer *buffer = buffer_over(tender.client, tender.link);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, tend_by_reference, &tender), 0);
    static int64_t ones[ELEMENTS], found[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++)
        ones[i] = 1 + i;
    for (int64_t round = 1; round <= 60; round++) {
        if (round == 50) {
            tender.fall_back = true;
            atomic_store(&tender.pumps[tender.made - 1].broken, true);
        }
        must(buffer, (struct smb_request){.opcode = SMB_ACCUMULATE,
                                          .op = SMB_SUM,
                                          .scale = 1,
                                          .bytes = sizeof ones,
                                          .source = ones});
        must(buffer,
             (struct smb_request){.opcode = SMB_READ, .bytes = sizeof found, .sink = found});
        for (int i = 0; i < ELEMENTS; i++)
            CHECK_EQ(found[i], round * ones[i]);
        must(buffer,
             (struct smb_request){.opcode = SMB_WRITE, .bytes = sizeof found, .source = found});
    }
    CHECK(tender.made >= BREAKS / 2);
    struct smb_server_counters counters;
    smb_server_counters(rig.servers[0], &counters);
    CHECK(counters.operations[SMB_TRANSPORT_TCP][SMB_ACCUMULATE] > 0);
    smb_buffer_destroy(buffer);
    smb_client_close(tender.client);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    smb_link_close(tender.link);
    smb_client_destroy(tender.client);
    for (int i = 0; i < tender.made; i++)
        pump_join(&tender.pumps[i]);
    rig_stop(&rig);
}

/* A peer that uses its caller's memory for a while, and then gives it back. */
static void *keep_a_while(void *argument)
{
    int *end = argument;
    uint8_t bytes[SMB_RECORD_BYTES], *memory = NULL;
    struct smb_frame frame;
    CHECK_EQ(recv(*end, bytes, SMB_FRAME_BYTES, MSG_WAITALL), SMB_FRAME_BYTES);
    CHECK_EQ(smb_frame_parse(bytes, &frame), SMB_OK);
    struct smb_frame reply = smb_frame_reply(&frame, SMB_OK);
    reply.segment = 1000;
    smb_frame_encode(&reply, bytes);
    CHECK_EQ(send(*end, bytes, SMB_FRAME_BYTES, MSG_NOSIGNAL), SMB_FRAME_BYTES);
    CHECK_EQ(recv(*end, bytes, SMB_RECORD_BYTES, MSG_WAITALL), SMB_RECORD_BYTES);
    memory = (uint8_t *)(uintptr_t)smb_load64(bytes + SMB_RECORD_ENDS_AT + 8);
    CHECK_EQ(smb_load64(bytes + SMB_RECORD_ENDS_AT + 16) >> 32, 4096);
    while (recv(*end, bytes, sizeof bytes, 0) > 0) {
    }
    /* the memory is still the peer's: the request is open, and so is the socket */
    for (int i = 0; i < 4096; i++) {
        memory[i] = (uint8_t)i;
        if (i % 512 == 0)
            usleep(10000);
    }
    close(*end);
    return NULL;
}

/* A caller whose time is over gets its memory back before its call returns. */
static void memory_is_taken_back(void)
{
    struct rig rig;
    struct smb_client *client;
    struct smb_link *link;
    struct smb_outcome outcome;
    uint64_t instance;
    int ends[2];
    rig_start(&rig, LAYOUT, SMB_INT64);
    CHECK_EQ(smb_client_create(11, &client), SMB_OK);
    make_pair(ends);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, keep_a_while, &ends[0]), 0);
    CHECK_EQ(smb_client_connect_reference(client, ends[1], 1, RIG_TIMEOUT_MS, &link, &instance),
             SMB_OK);
    struct smb_buffer *buffer = buffer_over(client, link);
    uint8_t *sink = malloc(4096);
    struct smb_request request = {
        .opcode = SMB_READ, .bytes = 4096, .sink = sink, .timeout_ms = 50};
    CHECK_EQ(smb_transfer(buffer, &request, &outcome), SMB_TIMEOUT);
    for (int i = 0; i < 4096; i++)
        CHECK_EQ(sink[i], (uint8_t)i);
    free(sink);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    smb_buffer_destroy(buffer);
    smb_link_close(link);
    smb_client_destroy(client);
    rig_stop(&rig);
}

static void send_record(int fd, struct smb_frame frame, uint64_t slot)
{
    uint8_t record[SMB_RECORD_BYTES] = {0};
    smb_frame_encode(&frame, record);
    smb_store64(record + SMB_RECORD_ENDS_AT, slot);
    CHECK_EQ(send(fd, record, sizeof record, MSG_NOSIGNAL), sizeof record);
}

/* A record that names a foreign slot, or none although it needs one, closes the connection; a
 * record that names its own slot is answered. Bytes of another frame, or of a stream with payloads,
 * are not records either. */
static void wrong_slots_are_refused(void)
{
    struct rig rig;
    rig_start(&rig, LAYOUT, SMB_INT64);
    const struct smb_frame write = {.opcode = SMB_WRITE,
                                    .dtype = SMB_INT64,
                                    .lane = 1,
                                    .epoch = RIG_EPOCH,
                                    .session = 77,
                                    .sequence = 1,
                                    .segment = rig_segment_id(0, 0),
                                    .length = 64,
                                    .payload = 64};
    struct smb_frame read = write, wrong = write;
    read.opcode = SMB_READ, read.payload = 0;
    wrong.payload = 65;
    const struct {
        struct smb_frame frame;
        uint64_t slot;
        bool answered;
    } cases[] = {
        {write, 1, true},
        {write, 2, false},
        {write, SMB_NO_SLOT, false},
        {write, (uint64_t)1 << 32, false},
        {read, 0, true},
        {read, 2, false},
        {read, SMB_NO_SLOT, false},
        {wrong, 1, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct smb_slots *slots;
        uint8_t bytes[SMB_FRAME_BYTES];
        struct smb_frame reply, hello = {.opcode = SMB_HELLO, .lane = 1, .session = 77};
        int ends[2];
        make_pair(ends);
        CHECK_EQ(smb_server_take_slots(rig.servers[0], 2, &slots), SMB_OK);
        CHECK(smb_slots_payload(slots, 1) && !smb_slots_payload(slots, 2));
        memset(smb_slots_payload(slots, 1), 5, 64);
        CHECK_EQ(smb_server_adopt_reference(rig.servers[0], ends[0], slots), SMB_OK);
        smb_frame_encode(&hello, bytes);
        CHECK_EQ(send(ends[1], bytes, sizeof bytes, MSG_NOSIGNAL), sizeof bytes);
        CHECK_EQ(recv(ends[1], bytes, sizeof bytes, MSG_WAITALL), sizeof bytes);
        send_record(ends[1], cases[i].frame, cases[i].slot);
        CHECK_EQ(recv(ends[1], bytes, sizeof bytes, MSG_WAITALL),
                 cases[i].answered ? (long long)sizeof bytes : 0);
        if (cases[i].answered) {
            CHECK_EQ(smb_frame_parse(bytes, &reply), SMB_OK);
            CHECK_EQ(reply.status, SMB_OK);
            if (cases[i].frame.opcode == SMB_READ)
                CHECK_EQ(*(uint8_t *)smb_slots_payload(slots, 0), 5);
        }
        close(ends[1]);
        smb_slots_release(slots);
    }
    struct smb_slots *slots;
    CHECK_EQ(smb_server_take_slots(rig.servers[0], 0, &slots), SMB_INVALID);
    CHECK_EQ(smb_server_take_slots(rig.servers[0], 65, &slots), SMB_INVALID);
    rig_stop(&rig);
}

/* Memory of a deleted segment, and slots of a closed connection, stay unchanged as long as somebody
 * holds them. */
static void held_memory_stays(void)
{
    struct rig rig;
    struct smb_segment *segment;
    uint64_t bytes;
    uint32_t sequence_at;
    rig_start(&rig, LAYOUT, SMB_INT64);
    CHECK_EQ(smb_server_hold_segment(rig.servers[0], 12345, &segment), SMB_NOT_FOUND);
    CHECK_EQ(smb_server_hold_segment(rig.servers[0], rig_segment_id(0, 0), &segment), SMB_OK);
    const uint8_t *states = smb_segment_states(segment, &bytes, &sequence_at);
    CHECK_EQ(bytes, (ELEMENTS * 8 + 4095) / 4096 * 64);
    CHECK(sequence_at % 4 == 0 && sequence_at <= 60);
    CHECK_EQ(*(const uint32_t *)(const void *)(states + sequence_at), 0);
    memset(smb_segment_data(segment), 7, 4096);
    CHECK_EQ(smb_server_delete_segment(rig.servers[0], rig_segment_id(0, 0)), SMB_OK);
    CHECK_EQ(smb_server_hold_segment(rig.servers[0], rig_segment_id(0, 0), &segment),
             SMB_NOT_FOUND);
    CHECK_EQ(*(uint8_t *)smb_segment_data(segment), 7);
    smb_segment_release(segment);
    rig_stop(&rig);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(refused_descriptors_are_closed), TEST(broken_references_count_once),
        TEST(memory_is_taken_back), TEST(wrong_slots_are_refused), TEST(held_memory_stays)};
    return RUN_TESTS(tests);
}
