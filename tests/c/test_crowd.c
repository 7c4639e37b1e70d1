/* Several clients with large calls, each of which has a pair of connections: the server says so, and each uses one of them. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "rig.h"
#include "server.h"

enum { CHUNK = 262144, CHUNKS = 8, BYTES = CHUNKS * CHUNK };
static const struct smb_layout LAYOUT = {BYTES, CHUNK, CHUNK, 4}; /* two segments, of two chunks each, on each of the servers */

static void write_all(struct reach *reach, uint8_t value)
{
    uint8_t *source = malloc(BYTES);
    memset(source, value, BYTES);
    must(reach->buffer, (struct smb_request){.opcode = SMB_WRITE, .bytes = BYTES, .source = source});
    free(source);
}

static void must_be(struct reach *reach, uint8_t value)
{
    uint8_t *sink = malloc(BYTES);
    must(reach->buffer, (struct smb_request){.opcode = SMB_READ, .bytes = BYTES, .sink = sink});
    for (int i = 0; i < BYTES; i++)
        CHECK(sink[i] == value);
    free(sink);
}

/* How many frames were made for the odd links. */
static uint64_t over_odd_links(const struct reach *reach)
{
    return reach->odd_links[0]->made + reach->odd_links[1]->made;
}

static void two_clients_use_one_connection_each_and_one_uses_two(void)
{
    struct rig rig;
    struct reach one, other;
    rig_start(&rig, LAYOUT, SMB_UINT8);
    reach_make(&one, &rig, BY_TCP, 31);
    reach_make(&other, &rig, BY_TCP, 32);
    uint64_t before = over_odd_links(&one);
    for (uint8_t round = 1; round < 10; round++)
        write_all(&one, round);
    CHECK(over_odd_links(&one) == before + 9 * CHUNKS / 2);
    uint64_t deadline_ns = smb_now_ns() + (uint64_t)RIG_TIMEOUT_MS * 1000000;
    for (uint64_t made = before = 0; before == 0 || made != before; made = over_odd_links(&one) + over_odd_links(&other)) {
        before = over_odd_links(&one) + over_odd_links(&other);
        write_all(&one, 100);
        write_all(&other, 101);
        CHECK(smb_now_ns() < deadline_ns);
    }
    must_be(&one, 101);
    do { /* the other one is done: some calls later, there is no crowd */
        before = over_odd_links(&one);
        write_all(&one, 102);
        CHECK(smb_now_ns() < deadline_ns);
    } while (over_odd_links(&one) == before);
    must_be(&other, 102);
    reach_end(&one);
    reach_end(&other);
    rig_stop(&rig);
}

/* As if the last answers had said so. */
static void say_crowded(struct reach *reach)
{
    reach->links[0]->crowded = reach->odd_links[0]->crowded = true;
    reach->links[0]->heard_ns = reach->odd_links[0]->heard_ns = smb_now_ns();
}

/* A change that its caller gave up is still under way on the odd link: a later one of that chunk does not go the other way. */
static void what_is_under_way_is_not_overtaken(void)
{
    struct rig rig;
    struct reach one;
    struct smb_segment *mapped;
    static uint8_t source[CHUNK], sink[CHUNK];
    uint64_t instance;
    rig_start(&rig, LAYOUT, SMB_UINT8);
    reach_make(&one, &rig, BY_TCP, 33);
    CHECK_EQ(smb_segment_open(rig_segment_path(0, 0), &mapped), SMB_OK);
    CHECK_EQ(smb_segment_lock(mapped, CHUNK, SMB_TRY), SMB_OK);
    struct smb_request change = {.opcode = SMB_WRITE, .offset = 4 * CHUNK, .bytes = CHUNK, .source = source, .timeout_ms = 60};
    CHECK_EQ(reach_try(one.buffer, change), SMB_TIMEOUT);
    smb_segment_unlock(mapped, CHUNK);
    say_crowded(&one);
    source[0] = 1;
    CHECK_EQ(reach_try(one.buffer, change), SMB_DISCONNECTED); /* its link has no connection: nor did it take the other */
    CHECK(!one.links[0]->alone);
    CHECK_EQ(smb_link_resume_tcp(one.odd_links[0], "127.0.0.1", rig.ports[0], 0, RIG_TIMEOUT_MS, &instance), SMB_OK);
    WAIT_UNTIL(reach_try(one.buffer, change) == SMB_OK);
    say_crowded(&one);
    uint64_t over_odd_link = one.odd_links[0]->made;
    source[0] = 2;
    must(one.buffer, change);
    CHECK(one.links[0]->alone);
    CHECK_EQ(one.odd_links[0]->made, over_odd_link);
    must(one.buffer, (struct smb_request){.opcode = SMB_READ, .offset = 4 * CHUNK, .bytes = CHUNK, .sink = sink});
    CHECK_EQ(sink[0], 2);
    smb_segment_release(mapped);
    reach_end(&one);
    rig_stop(&rig);
}

static int loop_of(struct smb_server *server, uint64_t session, uint16_t lane)
{
    int index = -1;
    pthread_mutex_lock(&server->lanes_lock);
    for (const struct connection *connection = server->lanes; connection; connection = connection->lane_next)
        if (connection->session == session && connection->lane == lane)
            index = connection->loop->index;
    pthread_mutex_unlock(&server->lanes_lock);
    return index;
}

/* One connection of each of two clients would otherwise be on one loop, half of the time. */
static void connections_of_a_lane_are_on_different_loops(void)
{
    struct rig rig;
    struct reach reaches[4];
    rig_start(&rig, LAYOUT, SMB_UINT8);
    for (int i = 0; i < 4; i += 2) {
        raw_connect(rig.ports[1]); /* the next one is accepted on the other loop */
        reach_make(&reaches[i], &rig, BY_TCP, 34);
        reach_make(&reaches[i + 1], &rig, BY_TCP, 35);
        uint64_t one = reaches[i].client->session, other = reaches[i + 1].client->session;
        for (int link = 0; link < 2; link++) {
            uint16_t lane = link ? reaches[i].odd_links[1]->lane : reaches[i].links[1]->lane;
            WAIT_UNTIL(loop_of(rig.servers[1], one, lane) + loop_of(rig.servers[1], other, lane) == 1);
        }
        WAIT_UNTIL(loop_of(rig.servers[1], one, 1) + loop_of(rig.servers[1], one, 11) == 1);
    }
    for (int i = 0; i < 4; i++)
        reach_end(&reaches[i]);
    rig_stop(&rig);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(two_clients_use_one_connection_each_and_one_uses_two),
        TEST(what_is_under_way_is_not_overtaken),
        TEST(connections_of_a_lane_are_on_different_loops),
    };
    return RUN_TESTS(tests);
}
