/* Which connection speaks for a lane of a session, and which loop serves it. */
#include "server/lanes.h"

#include "server/connection.h"
#include "server/counters.h"
#include "server/inbox.h"
#include "server/loop.h"
#include "server/server.h"

/* Call with the lanes' lock held. */
static void fence(struct connection *connection)
{
    /* relaxed: the mutex orders it */
    atomic_store_explicit(&connection->fenced, true, memory_order_relaxed);
    pthread_mutex_lock(&connection->turn);
    pthread_mutex_unlock(&connection->turn);
    atomic_store_explicit(&connection->loop->sweep, true, memory_order_release);
    loop_wake(connection->loop);
}

void lanes_fence_session(struct smb_server *server, uint64_t session)
{
    pthread_mutex_lock(&server->lanes_lock);
    for (struct connection *connection = server->lanes; connection;
         connection = connection->lane_next)
        if (connection->session == session)
            fence(connection);
    pthread_mutex_unlock(&server->lanes_lock);
}

/* All lanes of segments with two copies count as one kind. The further lanes of data count with
 * lane 0. */
static uint16_t kind_of(uint16_t lane)
{
    return lane >= SMB_LANE_OF_SEGMENTS ? (uint16_t)SMB_LANE_OF_SEGMENTS
           : lane >= SMB_LANE_FURTHER && lane < SMB_LANE_FURTHER + SMB_LANES_FURTHER_MAX ? 0
                                                                                         : lane;
}

/* Call with the lock held. Chooses the loop with the fewest connections of this kind of lane: data
 * of all sessions comes over the same lanes. */
static struct loop *choose_loop(const struct connection *connection)
{
    struct smb_server *server = connection->loop->server;
    uint32_t counts[LOOPS_MAX] = {0};
    for (const struct connection *other = server->lanes; other; other = other->lane_next) {
        const struct loop *loop = other->destination ? other->destination : other->loop;
        counts[loop->index] += kind_of(other->lane) == kind_of(connection->lane);
    }
    struct loop *best = connection->loop;
    for (int i = 0; i < server->loop_count; i++)
        if (counts[i] < counts[best->index])
            best = &server->loops[i];
    return best;
}

void lanes_enter(struct connection *connection)
{
    struct smb_server *server = connection->loop->server;
    pthread_mutex_lock(&server->lanes_lock);
    for (struct connection *older = server->lanes; older; older = older->lane_next)
        if (older->session == connection->session && older->lane == connection->lane)
            fence(older);
    connection->destination = choose_loop(connection);
    connection->lane_next = server->lanes;
    server->lanes = connection;
    pthread_mutex_unlock(&server->lanes_lock);
}

void lanes_leave(struct connection *connection)
{
    struct smb_server *server = connection->loop->server;
    pthread_mutex_lock(&server->lanes_lock);
    struct connection **at = &server->lanes;
    while (*at && *at != connection)
        at = &(*at)->lane_next;
    if (*at) {
        *at = connection->lane_next;
        count_past(server, connection);
    }
    pthread_mutex_unlock(&server->lanes_lock);
}
