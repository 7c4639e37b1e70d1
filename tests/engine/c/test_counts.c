/* The engine's counts: buckets of latencies, and shares of segments and sessions. */
#include <string.h>
#include <sys/socket.h>

#include "base/frame.h"
#include "base/stats.h"
#include "rig.h"
#include "smb/server.h"

static const struct smb_layout LAYOUT = {8192, 8192, 4096, 1};

/* An exact limit belongs to the bucket whose limit it is, as the label le of a histogram says. */
static void buckets_end_where_they_say(void)
{
    CHECK_EQ(latency_bucket(0), 0);
    CHECK_EQ(latency_bucket(1), 0);
    for (int i = 0; i < SMB_LATENCY_BUCKETS - 1; i++) {
        uint64_t edge_ns = (uint64_t)1 << (10 + i);
        CHECK_EQ(latency_bucket(edge_ns), i);
        CHECK_EQ(latency_bucket(edge_ns + 1), i + 1);
    }
    CHECK_EQ(latency_bucket(UINT64_MAX), SMB_LATENCY_BUCKETS - 1);
}

/* The writes of all sessions that were derived from this one; reach_make numbers them in higher
 * bits. */
static uint64_t writes_of_sessions(struct rig *rig, uint64_t session, bool end)
{
    struct smb_share shares[8];
    uint64_t writes = 0, count = smb_server_session_shares(rig->servers[0], shares, 8);
    for (uint64_t i = 0; i < count; i++) {
        if ((shares[i].id & 0xFFFFF) != session)
            continue;
        writes += shares[i].operations[SMB_TRANSPORT_TCP][SMB_WRITE];
        CHECK_EQ(shares[i].bytes[SMB_TRANSPORT_TCP][SMB_WRITE],
                 64 * shares[i].operations[SMB_TRANSPORT_TCP][SMB_WRITE]);
        if (end)
            smb_server_end_session(rig->servers[0], shares[i].id);
    }
    return writes;
}

static uint64_t timed(struct rig *rig, int transport, int opcode)
{
    struct smb_latencies latencies;
    uint64_t count = 0;
    smb_server_latencies(rig->servers[0], &latencies);
    for (int i = 0; i < SMB_LATENCY_BUCKETS; i++)
        count += latencies.of[transport][opcode].buckets[i];
    CHECK((count > 0) == (latencies.of[transport][opcode].sum_ns > 0));
    return count;
}

/* Every operation is in the share of its segment and of its session, and timed once. A session's
 * counts outlive its connections, until it ends. */
static void shares_are_true(void)
{
    struct rig rig;
    struct smb_share share;
    uint8_t values[64] = {1};
    rig_start(&rig, LAYOUT, SMB_UINT8);
    for (int round = 1; round <= 2; round++) {
        struct reach reach;
        reach_make(&reach, &rig, BY_TCP, 70);
        for (int i = 0; i < 3; i++)
            must(reach.buffer, (struct smb_request){
                                   .opcode = SMB_WRITE, .bytes = sizeof values, .source = values});
        must(reach.buffer,
             (struct smb_request){.opcode = SMB_READ, .bytes = sizeof values, .sink = values});
        CHECK_EQ(writes_of_sessions(&rig, 70, false), 3U * (unsigned)round);
        reach_end(&reach);
        struct smb_server_counters counters;
        WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters),
                    counters.connections_now[SMB_TRANSPORT_TCP] == 0));
        CHECK_EQ(writes_of_sessions(&rig, 70, false), 3U * (unsigned)round);
        CHECK_EQ(smb_server_segment_shares(rig.servers[0], &share, 1), 1);
        CHECK_EQ(share.id, rig_segment_id(0, 0));
        CHECK_EQ(share.operations[SMB_TRANSPORT_TCP][SMB_WRITE], 3U * (unsigned)round);
        CHECK_EQ(share.bytes[SMB_TRANSPORT_TCP][SMB_READ], (unsigned)round * sizeof values);
        CHECK_EQ(timed(&rig, SMB_TRANSPORT_TCP, SMB_WRITE), 3U * (unsigned)round);
    }
    CHECK_EQ(timed(&rig, SMB_TRANSPORT_UNIX, SMB_WRITE), 0);
    writes_of_sessions(&rig, 70, true);
    CHECK_EQ(writes_of_sessions(&rig, 70, false), 0);
    rig_stop(&rig);
}

/* A client counts only if it is asked to, and then each call once, also a call that takes several
 * frames. */
static void clients_count_when_asked(void)
{
    struct rig rig;
    struct reach tcp, mapped;
    struct smb_client_counters counters;
    static uint8_t values[8192];
    rig_start(&rig, LAYOUT, SMB_UINT8);
    reach_make(&tcp, &rig, BY_TCP, 71);
    reach_make(&mapped, &rig, BY_MAPPING, 72);
    struct smb_request write = {.opcode = SMB_WRITE,
                                .bytes = sizeof values,
                                .source = values,
                                .timeout_ms = RIG_TIMEOUT_MS};
    must(tcp.buffer, write);
    smb_client_counters(tcp.client, &counters);
    CHECK_EQ(counters.operations[SMB_TRANSPORT_TCP][SMB_WRITE], 0);
    smb_client_count(tcp.client);
    smb_client_count(mapped.client);
    must(tcp.buffer, write);
    must(mapped.buffer, write);
    struct smb_outcome outcome;
    for (int i = 0; i < 65; i++) {
        write.bytes = 8;
        CHECK_EQ(smb_transfer_at_once(mapped.buffer, &write, &outcome), 1);
    }
    CHECK_EQ(reach_try(tcp.buffer,
                       (struct smb_request){
                           .opcode = SMB_WRITE, .offset = 8192, .bytes = 1, .source = values}),
             SMB_INVALID);
    smb_client_counters(tcp.client, &counters);
    CHECK_EQ(counters.operations[SMB_TRANSPORT_TCP][SMB_WRITE], 1);
    CHECK_EQ(counters.bytes[SMB_TRANSPORT_TCP][SMB_WRITE], sizeof values);
    CHECK_EQ(counters.failed[SMB_INVALID], 1);
    smb_client_counters(mapped.client, &counters);
    CHECK_EQ(counters.operations[SMB_TRANSPORT_SHM][SMB_WRITE], 66);
    CHECK_EQ(counters.bytes[SMB_TRANSPORT_SHM][SMB_WRITE], sizeof values + 65 * 8);
    uint64_t count = 0;
    for (int i = 0; i < SMB_LATENCY_BUCKETS; i++)
        count += counters.latencies.of[SMB_TRANSPORT_SHM][SMB_WRITE].buckets[i];
    /* two of the calls that completed at once were timed */
    CHECK_EQ(count, 1 + 2 * CALLS_PER_TIMED);
    reach_end(&tcp);
    reach_end(&mapped);
    rig_stop(&rig);
}

/* A peer that does not read is visible: its answers are a backlog until it is gone. */
static void backlog_is_seen(void)
{
    enum { FRAMES = 200 };
    static const struct smb_layout large = {1048576, 1048576, 1048576, 1};
    struct rig rig;
    struct smb_server_counters counters;
    rig_start(&rig, large, SMB_UINT8);
    struct smb_frame hello = {.opcode = SMB_HELLO, .session = 73};
    struct smb_frame read = {.opcode = SMB_READ,
                             .dtype = SMB_UINT8,
                             .session = 73,
                             .epoch = RIG_EPOCH,
                             .segment = rig_segment_id(0, 0),
                             .length = large.chunk_bytes};
    uint8_t bytes[SMB_FRAME_BYTES];
    int fd = raw_connect(rig.ports[0]);
    smb_frame_encode(&hello, bytes);
    CHECK_EQ(send(fd, bytes, sizeof bytes, 0), sizeof bytes);
    for (int i = 0; i < FRAMES; i++) {
        smb_frame_encode(&read, bytes);
        CHECK_EQ(send(fd, bytes, sizeof bytes, 0), sizeof bytes);
    }
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters), counters.backlog_bytes > 0));
    CHECK(counters.backlog_total > 0);
    close(fd);
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters), counters.backlog_bytes == 0));
    rig_stop(&rig);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(buckets_end_where_they_say),
        TEST(shares_are_true),
        TEST(clients_count_when_asked),
        TEST(backlog_is_seen),
    };
    return RUN_TESTS(tests);
}
