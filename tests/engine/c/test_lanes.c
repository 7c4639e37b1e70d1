/* Data connections are distributed over the loops. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "rig.h"
#include "server/connection.h"
#include "server/loop.h"
#include "server/server.h"

enum { CHUNK = 262144, CHUNKS = 8, BYTES = CHUNKS * CHUNK };
/* two segments, of two chunks each, on each of the servers */
static const struct smb_layout LAYOUT = {BYTES, CHUNK, CHUNK, 4};

static int loop_of(struct smb_server *server, uint64_t session, uint16_t lane)
{
    int index = -1;
    pthread_mutex_lock(&server->lanes_lock);
    for (const struct connection *connection = server->lanes; connection;
         connection = connection->lane_next)
        if (connection->session == session && connection->lane == lane)
            index = connection->loop->index;
    pthread_mutex_unlock(&server->lanes_lock);
    return index;
}

/* Without this, the connections of two clients would be on one loop half of the time. */
static void connections_of_a_lane_are_on_different_loops(void)
{
    struct rig rig;
    struct reach reaches[4];
    rig_start(&rig, LAYOUT, SMB_UINT8);
    for (int i = 0; i < 4; i += 2) {
        raw_connect(rig.ports[1]); /* the next connection is accepted on the other loop */
        reach_make(&reaches[i], &rig, BY_TCP, 34);
        reach_make(&reaches[i + 1], &rig, BY_TCP, 35);
        uint64_t one = reaches[i].client->session, other = reaches[i + 1].client->session;
        WAIT_UNTIL(loop_of(rig.servers[1], one, 1) + loop_of(rig.servers[1], other, 1) == 1);
    }
    for (int i = 0; i < 4; i++)
        reach_end(&reaches[i]);
    rig_stop(&rig);
}

/* So that one distant client can use more than one loop. */
static void further_lanes_count_with_the_first(void)
{
    struct rig rig;
    struct smb_client *client;
    struct smb_link *links[2];
    static const uint16_t lanes[2] = {0, SMB_LANE_FURTHER};
    uint64_t instance;
    rig_start(&rig, LAYOUT, SMB_UINT8);
    CHECK_EQ(smb_client_create(36, &client), SMB_OK);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(smb_client_connect_tcp(client, "127.0.0.1", rig.ports[1], lanes[i], RIG_TIMEOUT_MS,
                                        &links[i], &instance),
                 SMB_OK);
        raw_connect(rig.ports[1]); /* the next connection is accepted on the same loop */
    }
    WAIT_UNTIL(loop_of(rig.servers[1], 36, lanes[0]) + loop_of(rig.servers[1], 36, lanes[1]) == 1);
    for (int i = 0; i < 2; i++)
        smb_link_close(links[i]);
    smb_client_destroy(client);
    rig_stop(&rig);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(connections_of_a_lane_are_on_different_loops),
        TEST(further_lanes_count_with_the_first),
    };
    return RUN_TESTS(tests);
}
