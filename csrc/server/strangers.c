/* TCP connections that have not shown yet who they are: how many there may be, and which one is
 * closed when there are more.
 *
 * Loop 0 accepts and serves all of them, so nothing here is shared. A connection that has proved
 * itself is no longer a stranger.
 *
 * No address owns an entry of the table. If the table is full, the address with the most
 * connections loses its oldest. So a peer at another address is never the one that is closed, and
 * among the connections of one address the newest has the longest time left. */
#include "server/strangers.h"

#include <string.h>

#include "base/address.h"
#include "base/assert.h"
#include "server/connection.h"
#include "server/loop.h"
#include "server/server.h"

/* The source that limits count: an IPv4 address, or an IPv6 network, because one host has all of
 * the network's addresses. */
static struct stranger_source source_of(int fd)
{
    struct address peer;
    struct stranger_source source = {0};
    peer.length = sizeof peer.name;
    if (getpeername(fd, &peer.name.any, &peer.length) != 0)
        return source;
    if (peer.name.any.sa_family == AF_INET)
        memcpy(source.bytes, &peer.name.v4.sin_addr, sizeof peer.name.v4.sin_addr);
    else if (IN6_IS_ADDR_V4MAPPED(&peer.name.v6.sin6_addr))
        memcpy(source.bytes, peer.name.v6.sin6_addr.s6_addr + 12, 4);
    else
        memcpy(source.bytes, &peer.name.v6.sin6_addr, sizeof source.bytes);
    return source;
}

static bool same_source(const struct stranger_source *one, const struct stranger_source *other)
{
    return memcmp(one->bytes, other->bytes, sizeof one->bytes) == 0;
}

void strangers_enter(struct connection *connection)
{
    SMB_ASSERT(!strangers_are_many(connection->loop->server) && !connection->counted_at);
    struct strangers *strangers = &connection->loop->server->strangers;
    struct stranger_source source = source_of(connection->channel.fd);
    struct stranger_count *free_entry = NULL, *mine = NULL;
    for (int i = 0; i < STRANGERS_MAX && !mine; i++) {
        struct stranger_count *count = &strangers->counts[i];
        if (count->now == 0)
            free_entry = free_entry ? free_entry : count;
        else if (same_source(&count->source, &source))
            mine = count;
    }
    /* an entry must be free, as no more connections are counted than there are entries */
    if (!mine) {
        mine = free_entry;
        mine->source = source;
    }
    mine->now++;
    connection->counted_at = mine;
    connection->newer = NULL;
    connection->older = strangers->newest;
    if (strangers->newest)
        strangers->newest->newer = connection;
    else
        strangers->oldest = connection;
    strangers->newest = connection;
    atomic_fetch_add_explicit(&strangers->now, 1, memory_order_relaxed);
}

void strangers_leave(struct connection *connection)
{
    struct strangers *strangers = &connection->loop->server->strangers;
    if (!connection->counted_at)
        return;
    SMB_ASSERT(connection->counted_at->now > 0);
    connection->counted_at->now--;
    connection->counted_at = NULL;
    if (connection->older)
        connection->older->newer = connection->newer;
    else
        strangers->oldest = connection->newer;
    if (connection->newer)
        connection->newer->older = connection->older;
    else
        strangers->newest = connection->older;
    atomic_fetch_sub_explicit(&strangers->now, 1, memory_order_relaxed);
}

bool strangers_are_many(const struct smb_server *server)
{
    return atomic_load_explicit(&server->strangers.now, memory_order_relaxed) >= STRANGERS_MAX;
}

struct connection *strangers_least(struct smb_server *server)
{
    const struct strangers *strangers = &server->strangers;
    const struct stranger_count *most = &strangers->counts[0];
    for (int i = 1; i < STRANGERS_MAX; i++)
        if (strangers->counts[i].now > most->now)
            most = &strangers->counts[i];
    struct connection *found = strangers->oldest;
    while (found && found->counted_at != most)
        found = found->newer;
    return found;
}
