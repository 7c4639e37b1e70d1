/* Which connection speaks for a lane of a session, which loop serves it, and whether sessions with large requests crowd the loops. */
#include "server.h"

/* With the lanes' lock held. */
static void fence(struct connection *connection)
{
    atomic_store_explicit(&connection->fenced, true, memory_order_relaxed); /* the mutex orders it */
    pthread_mutex_lock(&connection->turn);
    pthread_mutex_unlock(&connection->turn);
    atomic_store_explicit(&connection->loop->sweep, true, memory_order_release);
    loop_wake(connection->loop);
}

void lanes_fence_session(struct smb_server *server, uint64_t session)
{
    pthread_mutex_lock(&server->lanes_lock);
    for (struct connection *connection = server->lanes; connection; connection = connection->lane_next)
        if (connection->session == session)
            fence(connection);
    pthread_mutex_unlock(&server->lanes_lock);
}

/* With the lock held: that of its session, or for a session's first connection the one that fewest share. */
static uint32_t choose_crowd_slot(const struct smb_server *server, uint64_t session)
{
    uint32_t sharers[CROWD_SLOTS] = {0}, emptiest = 0;
    for (const struct connection *other = server->lanes; other; other = other->lane_next) {
        if (other->session == session)
            return other->crowd_slot;
        sharers[other->crowd_slot]++;
    }
    for (uint32_t i = 1; i < CROWD_SLOTS; i++)
        if (sharers[i] < sharers[emptiest])
            emptiest = i;
    return emptiest;
}

/* With the lock held. Large calls come over two connections of a session at once: on two loops, they are served by two cores. Where
 * there are many sessions they come over the same one of each: so those of a lane are on all loops, too. */
static struct loop *choose_loop(const struct connection *connection)
{
    struct smb_server *server = connection->loop->server;
    uint32_t counts[LOOPS_MAX] = {0};
    for (const struct connection *other = server->lanes; other; other = other->lane_next) {
        const struct loop *loop = other->destination ? other->destination : other->loop;
        counts[loop->index] += other->session == connection->session ? CONNECTIONS_MAX : other->lane == connection->lane ? 1 : 0;
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
    connection->crowd_slot = choose_crowd_slot(server, connection->session);
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

/* A session with large requests on two connections keeps two loops and two threads of its client's busy. Where that is more than
 * there are, one connection each is faster: clients are told so with their answers. */
void lanes_note_large(struct connection *connection)
{
    struct loop *loop = connection->loop;
    uint64_t now_ns = loop->clock_ns;
    if (now_ns < connection->crowd_noted_ns + CROWD_NOTED_NS)
        return;
    connection->crowd_noted_ns = now_ns;
    _Atomic uint64_t *crowd = loop->server->crowd;
    atomic_store_explicit(&crowd[connection->crowd_slot], now_ns, memory_order_relaxed);
    int sessions = 0;
    for (int i = 0; i < CROWD_SLOTS; i++)
        sessions += atomic_load_explicit(&crowd[i], memory_order_relaxed) + CROWD_NS > now_ns;
    loop->crowded_until_ns = sessions > 1 && 2 * sessions > loop->server->loop_count ? now_ns + CROWD_NS : 0;
}
