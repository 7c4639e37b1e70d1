#include "server/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/address.h"
#include "server/connection.h"
#include "server/counters.h"
#include "server/inbox.h"
#include "server/loop.h"
#include "server/server.h"

/* Then the loop's connections have their turn. When thousands of strangers reconnect, accepting
 * this many at a time about doubles the p99 of a small request. With a smaller number the
 * listener's queue would grow before a busy loop, and a client would wait in it for seconds. */
enum { ACCEPTS_PER_TURN = 4 };

/* The last letter of a Unix socket's name while it does not listen yet. */
static const char BESIDE = '~';

static bool peer_is_ours(int fd)
{
    struct ucred peer;
    socklen_t length = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
           (peer.uid == geteuid() || peer.uid == 0);
}

/* Out of descriptors: a listener that stays ready would keep the loop spinning, so the peer is
 * accepted and closed at once. */
static bool turn_away(struct listener *listener)
{
    struct smb_server *server = listener->server;
    server_count(&server->errors[SMB_SYSTEM], 1);
    server_count(&server->turned_away, 1);
    if (server->spare_fd >= 0)
        close(server->spare_fd);
    int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        close(fd);
    server->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return fd >= 0;
}

static uint64_t connections_now(const struct smb_server *server)
{
    uint64_t now = 0;
    for (int t = 0; t < SMB_TRANSPORT_COUNT; t++)
        now += atomic_load_explicit(&server->now[t], memory_order_relaxed);
    return now;
}

/* Gives a connected descriptor to one of the loops, which closes it with the connection. */
static int let_in(struct smb_server *server, int fd, int transport, struct smb_slots *slots)
{
    struct loop *loop =
        &server->loops[atomic_fetch_add(&server->next_loop, 1) % (uint32_t)server->loop_count];
    struct connection *connection = connections_now(server) < CONNECTIONS_MAX
                                        ? connection_create(loop, fd, transport)
                                        : NULL;
    if (!connection)
        return SMB_OUT_OF_MEMORY;
    connection->slots = slots;
    if (slots)
        slots_retain(slots);
    loop_give(loop, connection);
    return SMB_OK;
}

/* Accepts a stranger over TCP. Loop 0 serves it until it has shown who it is, and evicts another
 * stranger if there are too many. */
static int let_stranger_in(struct smb_server *server, int fd)
{
    struct loop *loop = &server->loops[0];
    struct connection *least = strangers_are_many(server) ||
                                       connections_now(server) >= CONNECTIONS_MAX
                                   ? strangers_least(server)
                                   : NULL;
    if (least) {
        server_count(&server->strangers_evicted, 1);
        loop_drop(loop, least);
    }
    struct connection *connection = connections_now(server) < CONNECTIONS_MAX
                                        ? connection_create(loop, fd, SMB_TRANSPORT_TCP)
                                        : NULL;
    if (!connection)
        return SMB_OUT_OF_MEMORY;
    pthread_mutex_lock(&server->tls_lock);
    struct smb_tls *tls = server->tls ? tls_retain(server->tls) : NULL;
    pthread_mutex_unlock(&server->tls_lock);
    connection_be_stranger(connection, tls);
    loop_take_over(loop, connection);
    return SMB_OK;
}

void listener_accept(struct listener *listener)
{
    struct smb_server *server = listener->server;
    for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if ((errno == EMFILE || errno == ENFILE) && turn_away(listener))
                continue;
            return;
        }
        int status = listener->transport == SMB_TRANSPORT_TCP ? let_stranger_in(server, fd)
                     : peer_is_ours(fd) ? let_in(server, fd, listener->transport, NULL)
                                        : SMB_DENIED;
        if (status != SMB_OK) {
            server_count(&server->errors[status], 1);
            close(fd);
        }
    }
}

int smb_server_adopt_reference(struct smb_server *server, int fd, struct smb_slots *slots)
{
    int flags = fcntl(fd, F_GETFL);
    int status = flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0
                     ? SMB_SYSTEM
                     : let_in(server, fd, SMB_TRANSPORT_VERBS, slots);
    if (status != SMB_OK) {
        int saved = errno;
        close(fd);
        errno = saved;
    }
    return status;
}

/* Takes over fd. Loop 0 accepts for all loops. */
static int add_listener(struct smb_server *server, int fd, int transport)
{
    int index = 0;
    while (index < LISTENERS_MAX && server->listeners[index])
        index++;
    struct listener *listener = index < LISTENERS_MAX ? malloc(sizeof *listener) : NULL;
    if (!listener) {
        close(fd);
        return SMB_OUT_OF_MEMORY;
    }
    *listener = (struct listener){.fd = fd, .transport = transport, .server = server};
    server->listeners[index] = listener;
    /* The lowest bit marks a listener. That bit is zero in pointers to listeners and to
     * connections. */
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = (void *)((uintptr_t)listener + 1U)};
    return epoll_ctl(server->loops[0].epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? SMB_OK : SMB_SYSTEM;
}

static int close_failed(int fd)
{
    int saved = errno;
    close(fd);
    errno = saved;
    return SMB_SYSTEM;
}

int smb_server_listen_tcp(struct smb_server *server, const char *address, uint16_t port,
                          uint16_t *bound_port)
{
    struct address here;
    if (!address_parse(address, port, &here))
        return SMB_INVALID;
    int fd = socket(here.name.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return SMB_SYSTEM;
    int on = 1; /* a restarted daemon gets its old port although old connections linger */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, &here.name.any, here.length) != 0 || listen(fd, SOMAXCONN) != 0 ||
        getsockname(fd, &here.name.any, &here.length) != 0)
        return close_failed(fd);
    int status = add_listener(server, fd, SMB_TRANSPORT_TCP);
    if (status == SMB_OK)
        *bound_port = address_port(&here);
    return status;
}

int smb_server_listen_unix(struct smb_server *server, const char *path)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    size_t length = strlen(path);
    if (length == 0 || length >= sizeof name.sun_path || server->listens_unix)
        return SMB_INVALID;
    memcpy(name.sun_path, path, length);
    name.sun_path[length - 1] = BESIDE; /* as long as the path, so it fits wherever the path does */
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return SMB_SYSTEM;
    unlink(name.sun_path); /* left by an earlier run; the caller holds the lock that proves this */
    if (bind(fd, (struct sockaddr *)&name, sizeof name) != 0)
        return close_failed(fd);
    if (listen(fd, SOMAXCONN) != 0 || rename(name.sun_path, path) != 0) {
        int reason = errno;
        unlink(name.sun_path);
        errno = reason;
        return close_failed(fd);
    }
    server->listens_unix = true;
    return add_listener(server, fd, SMB_TRANSPORT_UNIX);
}
