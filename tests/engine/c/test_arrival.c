/* Chunks in a row, of which one comes in parts, or its peer leaves, or its peer reads late. */
#include <string.h>
#include <sys/socket.h>

#include "base/frame.h"
#include "rig.h"
#include "smb/server.h"

enum { CHUNK = 262144, PART = 1000 };
static const struct smb_layout LAYOUT = {4 * CHUNK, 4 * CHUNK, CHUNK, 1};

static void put(int fd, const void *bytes, size_t count)
{
    CHECK_EQ(send(fd, bytes, count, MSG_NOSIGNAL), count);
}

static void put_frame(int fd, struct smb_frame frame)
{
    uint8_t bytes[SMB_FRAME_BYTES];
    frame.session = 1;
    frame.dtype = SMB_UINT8;
    frame.epoch = RIG_EPOCH;
    frame.segment = frame.opcode == SMB_HELLO ? 0 : rig_segment_id(0, 0);
    smb_frame_encode(&frame, bytes);
    put(fd, bytes, sizeof bytes);
}

static void must_hear(int fd, int opcode)
{
    uint8_t bytes[SMB_FRAME_BYTES];
    struct smb_frame reply;
    CHECK_EQ(recv(fd, bytes, sizeof bytes, MSG_WAITALL), sizeof bytes);
    CHECK_EQ(smb_frame_parse(bytes, &reply), SMB_OK);
    CHECK(reply.opcode == opcode && reply.status == SMB_OK);
}

static struct smb_frame write_of(uint64_t chunk, uint64_t sequence)
{
    return (struct smb_frame){.opcode = SMB_WRITE,
                              .offset = chunk * CHUNK,
                              .length = CHUNK,
                              .payload = CHUNK,
                              .sequence = sequence};
}

/* Sends one chunk and the first `part` bytes of a second one, whose header came with the first, so
 * that the server waits for the rest. */
static int begin(struct rig *rig, const uint8_t *content, uint32_t part)
{
    int fd = raw_connect(rig->ports[0]);
    put_frame(fd, (struct smb_frame){.opcode = SMB_HELLO});
    must_hear(fd, SMB_HELLO);
    uint8_t *whole = malloc(2 * SMB_FRAME_BYTES + CHUNK + part);
    for (uint64_t i = 0; i < 2; i++) {
        struct smb_frame frame = write_of(i, i + 1);
        frame.session = 1;
        frame.dtype = SMB_UINT8;
        frame.epoch = RIG_EPOCH;
        frame.segment = rig_segment_id(0, 0);
        smb_frame_encode(&frame, whole + i * (SMB_FRAME_BYTES + CHUNK));
        memcpy(whole + i * (SMB_FRAME_BYTES + CHUNK) + SMB_FRAME_BYTES, content + i * CHUNK,
               i == 0 ? CHUNK : part);
    }
    put(fd, whole, 2 * SMB_FRAME_BYTES + CHUNK + part);
    free(whole);
    must_hear(fd, SMB_WRITE);
    return fd;
}

static uint8_t *some_content(void)
{
    uint8_t *content = malloc(LAYOUT.bytes);
    for (uint64_t i = 0; i < LAYOUT.bytes; i++)
        content[i] = (uint8_t)(1 + i % 251);
    return content;
}

/* A chunk that comes in two parts, and whatever follows it, are answered, and the bytes are
 * right. */
static void what_comes_in_parts_is_answered(void)
{
    static struct rig rig;
    static struct reach reach;
    rig_start(&rig, LAYOUT, SMB_UINT8);
    reach_make(&reach, &rig, BY_TCP, 2);
    uint8_t *content = some_content(), *sink = malloc(LAYOUT.bytes);
    int fd = begin(&rig, content, PART);
    put(fd, content + CHUNK + PART, CHUNK - PART);
    must_hear(fd, SMB_WRITE);
    put_frame(fd, (struct smb_frame){.opcode = SMB_WATERMARK});
    must_hear(fd, SMB_WATERMARK);
    for (uint64_t i = 2; i < 4; i++) { /* only these, as the first part of a call */
        put_frame(fd, write_of(i, i + 1));
        put(fd, content + i * CHUNK, CHUNK);
        must_hear(fd, SMB_WRITE);
    }
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = LAYOUT.bytes, .sink = sink});
    CHECK(memcmp(sink, content, LAYOUT.bytes) == 0);
    close(fd);
    free(sink);
    free(content);
    reach_end(&reach);
    rig_stop(&rig);
}

/* A peer that leaves in the middle of a chunk is dropped at once, and has changed nothing of that
 * chunk. A peer that only stops does not hold up others. */
static void who_leaves_half_way_changes_nothing(void)
{
    static struct rig rig;
    static struct reach reach;
    struct smb_server_counters counters;
    rig_start(&rig, LAYOUT, SMB_UINT8);
    reach_make(&reach, &rig, BY_TCP, 2);
    uint8_t *content = some_content(), *sink = malloc(LAYOUT.bytes), *old = malloc(LAYOUT.bytes);
    memset(old, 255, LAYOUT.bytes);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = LAYOUT.bytes, .source = old});
    int fd = begin(&rig, content, CHUNK - 1);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_WRITE, .offset = CHUNK, .bytes = CHUNK, .source = old});
    close(fd);
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters),
                counters.connections_now[SMB_TRANSPORT_TCP] == 1));
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = LAYOUT.bytes, .sink = sink});
    CHECK(memcmp(sink, content, CHUNK) == 0);
    CHECK(memcmp(sink + CHUNK, old, LAYOUT.bytes - CHUNK) == 0);
    free(old);
    free(sink);
    free(content);
    reach_end(&reach);
    rig_stop(&rig);
}

/* A peer that asks for more than both sockets hold and reads late gets everything in the end. If
 * the buffer is deleted meanwhile, the rest is refused. No other client waits. */
static void read_late(bool deleted)
{
    enum { READS = 64 };
    static struct rig rig;
    static struct reach reach;
    rig_start(&rig, LAYOUT, SMB_UINT8);
    rig_add_buffer(&rig, 1);
    reach_make(&reach, &rig, BY_TCP, 2);
    struct smb_buffer *other = reach_buffer(&reach, &rig, BY_TCP, 1);
    uint8_t *content = some_content(), *sink = malloc(LAYOUT.bytes);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = LAYOUT.bytes, .source = content});
    int fd = raw_connect(rig.ports[0]), refused = 0;
    put_frame(fd, (struct smb_frame){.opcode = SMB_HELLO});
    must_hear(fd, SMB_HELLO);
    for (uint64_t i = 0; i < READS; i++)
        put_frame(fd, (struct smb_frame){.opcode = SMB_READ,
                                         .offset = i % 4 * CHUNK,
                                         .length = CHUNK,
                                         .sequence = i + 1});
    /* whole waiting answers, and the rest of a partly sent one, are a backlog */
    struct smb_server_counters counters;
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters), counters.backlog_bytes > 0));
    must(other,
         (struct smb_request){.opcode = SMB_WRITE, .bytes = LAYOUT.bytes, .source = content});
    if (deleted)
        CHECK_EQ(smb_server_delete_segment(rig.servers[0], rig_segment_id(0, 0)), SMB_OK);
    for (uint64_t i = 0; i < READS; i++) {
        uint8_t bytes[SMB_FRAME_BYTES];
        struct smb_frame reply;
        CHECK_EQ(recv(fd, bytes, sizeof bytes, MSG_WAITALL), sizeof bytes);
        CHECK_EQ(smb_frame_parse(bytes, &reply), SMB_OK);
        CHECK(reply.opcode == SMB_READ && reply.sequence == i + 1);
        refused += reply.status == SMB_NOT_FOUND;
        if (reply.status == SMB_NOT_FOUND)
            continue;
        CHECK(reply.status == SMB_OK && reply.payload == CHUNK);
        CHECK_EQ(recv(fd, sink, CHUNK, MSG_WAITALL), CHUNK);
        CHECK(memcmp(sink, content + i % 4 * CHUNK, CHUNK) == 0);
    }
    CHECK_EQ(refused > 0, deleted);
    close(fd);
    free(sink);
    free(content);
    smb_buffer_destroy(other);
    reach_end(&reach);
    rig_stop(&rig);
}

static void who_reads_late_gets_everything(void)
{
    read_late(false);
}

static void who_reads_late_hears_that_it_was_deleted(void)
{
    read_late(true);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(what_comes_in_parts_is_answered),
        TEST(who_leaves_half_way_changes_nothing),
        TEST(who_reads_late_gets_everything),
        TEST(who_reads_late_hears_that_it_was_deleted),
    };
    return RUN_TESTS(tests);
}
