#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "address.h"
#include "server.h"

enum {
    EVENTS_PER_WAIT = 64,
    SPIN_NS = 50000 /* after its last event a loop looks again for this long before it sleeps: a wake-up costs more */
};

struct listener {
    int fd;
    int transport;
    struct smb_server *server;
};

/* ---- registry ----------------------------------------------------------------------------------------------------- */

static struct entry **bucket_of(struct smb_server *server, uint64_t id)
{
    return &server->buckets[(id * 0x9E3779B97F4A7C15U) >> 52];
}
_Static_assert(BUCKETS == 1 << 12, "bucket_of takes 12 bits");

static struct entry *find_entry(struct smb_server *server, uint64_t id)
{
    struct entry *entry = *bucket_of(server, id);
    while (entry && smb_segment_id(entry->segment) != id)
        entry = entry->next;
    return entry;
}

struct smb_segment *server_find(struct smb_server *server, uint64_t id)
{
    pthread_rwlock_rdlock(&server->registry_lock);
    struct entry *entry = find_entry(server, id);
    struct smb_segment *segment = entry ? smb_segment_retain(entry->segment) : NULL;
    pthread_rwlock_unlock(&server->registry_lock);
    return segment;
}

/* Capacity is taken before the memory, under the lock, so that two creations can't both fit into the last gap. */
static int reserve(struct smb_server *server, uint64_t id, uint64_t bytes)
{
    int status = SMB_OK;
    pthread_rwlock_wrlock(&server->registry_lock);
    if (find_entry(server, id))
        status = SMB_EXISTS;
    else if (bytes > server->capacity_bytes - server->used_bytes)
        status = SMB_OUT_OF_MEMORY;
    else
        server->used_bytes += bytes;
    pthread_rwlock_unlock(&server->registry_lock);
    return status;
}

static void unreserve(struct smb_server *server, uint64_t bytes)
{
    pthread_rwlock_wrlock(&server->registry_lock);
    server->used_bytes -= bytes;
    pthread_rwlock_unlock(&server->registry_lock);
}

/* Takes the reference over. The bytes are reserved already. */
static int publish(struct smb_server *server, struct smb_segment *segment, const char *path)
{
    struct entry *entry = calloc(1, sizeof *entry);
    char *own_path = strdup(path);
    if (!entry || !own_path) {
        free(entry);
        free(own_path);
        return SMB_OUT_OF_MEMORY;
    }
    entry->segment = segment;
    entry->path = own_path;
    pthread_rwlock_wrlock(&server->registry_lock);
    struct entry **bucket = bucket_of(server, smb_segment_id(segment));
    bool taken = find_entry(server, smb_segment_id(segment)) != NULL;
    if (!taken) {
        entry->next = *bucket;
        *bucket = entry;
        server->segments++;
    }
    pthread_rwlock_unlock(&server->registry_lock);
    if (taken) {
        free(own_path);
        free(entry);
        return SMB_EXISTS;
    }
    return SMB_OK;
}

int smb_server_create_segment(struct smb_server *server, const char *path, uint64_t id, uint32_t epoch, int dtype,
                              uint64_t data_bytes, uint32_t chunk_bytes)
{
    uint64_t file_bytes = smb_segment_file_bytes(data_bytes, chunk_bytes);
    if (file_bytes == 0)
        return SMB_INVALID;
    int status = reserve(server, id, file_bytes);
    if (status != SMB_OK)
        return status;
    struct smb_segment *segment;
    status = smb_segment_create(path, id, epoch, dtype, data_bytes, chunk_bytes, &segment);
    if (status == SMB_OK) {
        status = publish(server, segment, path);
        if (status != SMB_OK) {
            unlink(path);
            smb_segment_release(segment);
        }
    }
    if (status != SMB_OK)
        unreserve(server, file_bytes);
    return status;
}

int smb_server_adopt_segment(struct smb_server *server, const char *path, struct smb_segment_info *info)
{
    struct smb_segment *segment;
    int status = smb_segment_open(path, &segment);
    if (status != SMB_OK)
        return status;
    struct smb_segment_info found;
    smb_segment_info(segment, &found);
    status = found.deleted ? SMB_NOT_FOUND : reserve(server, found.id, found.file_bytes);
    if (status == SMB_OK) {
        status = publish(server, segment, path);
        if (status != SMB_OK)
            unreserve(server, found.file_bytes);
    }
    if (status == SMB_OK)
        *info = found;
    else
        smb_segment_release(segment);
    return status;
}

int smb_server_delete_segment(struct smb_server *server, uint64_t id)
{
    pthread_rwlock_wrlock(&server->registry_lock);
    struct entry **at = bucket_of(server, id);
    while (*at && smb_segment_id((*at)->segment) != id)
        at = &(*at)->next;
    struct entry *entry = *at;
    if (entry) {
        *at = entry->next;
        struct smb_segment_info info;
        uint64_t operations[SMB_OPCODE_COUNT], bytes[SMB_OPCODE_COUNT];
        smb_segment_info(entry->segment, &info);
        smb_segment_counters(entry->segment, operations, bytes);
        for (int i = 0; i < SMB_OPCODE_COUNT; i++) {
            server->retired_operations[i] += operations[i];
            server->retired_bytes[i] += bytes[i];
        }
        server->retired_recovered_locks += info.recovered_locks;
        server->segments--;
        server->used_bytes -= info.file_bytes;
    }
    pthread_rwlock_unlock(&server->registry_lock);
    if (!entry)
        return SMB_NOT_FOUND;
    smb_segment_mark_deleted(entry->segment);
    unlink(entry->path);
    smb_segment_release(entry->segment);
    free(entry->path);
    free(entry);
    return SMB_OK;
}

void smb_server_counters(struct smb_server *server, struct smb_server_counters *counters)
{
    memset(counters, 0, sizeof *counters);
    for (int t = 0; t < SMB_TRANSPORT_COUNT; t++) {
        for (int i = 0; i < SMB_OPCODE_COUNT; i++) {
            counters->operations[t][i] = atomic_load_explicit(&server->operations[t][i], memory_order_relaxed);
            counters->bytes[t][i] = atomic_load_explicit(&server->bytes[t][i], memory_order_relaxed);
        }
        counters->connections_opened[t] = atomic_load_explicit(&server->opened[t], memory_order_relaxed);
        counters->connections_now[t] = atomic_load_explicit(&server->now[t], memory_order_relaxed);
    }
    for (int i = 0; i < SMB_STATUS_COUNT; i++)
        counters->errors[i] = atomic_load_explicit(&server->errors[i], memory_order_relaxed);
    counters->parked_now = atomic_load_explicit(&server->parked_now, memory_order_relaxed);
    counters->parked_total = atomic_load_explicit(&server->parked_total, memory_order_relaxed);

    pthread_rwlock_rdlock(&server->registry_lock);
    counters->segments = server->segments;
    counters->segment_bytes = server->used_bytes;
    counters->recovered_locks = server->retired_recovered_locks;
    memcpy(counters->operations[SMB_TRANSPORT_SHM], server->retired_operations, sizeof server->retired_operations);
    memcpy(counters->bytes[SMB_TRANSPORT_SHM], server->retired_bytes, sizeof server->retired_bytes);
    for (int b = 0; b < BUCKETS; b++) {
        for (struct entry *entry = server->buckets[b]; entry; entry = entry->next) {
            struct smb_segment_info info;
            uint64_t operations[SMB_OPCODE_COUNT], bytes[SMB_OPCODE_COUNT];
            smb_segment_info(entry->segment, &info);
            smb_segment_counters(entry->segment, operations, bytes);
            counters->recovered_locks += info.recovered_locks;
            for (int i = 0; i < SMB_OPCODE_COUNT; i++) {
                counters->operations[SMB_TRANSPORT_SHM][i] += operations[i];
                counters->bytes[SMB_TRANSPORT_SHM][i] += bytes[i];
            }
        }
    }
    pthread_rwlock_unlock(&server->registry_lock);
}

/* ---- loop --------------------------------------------------------------------------------------------------------- */

static void list_remove(struct connection **list, struct connection *connection)
{
    while (*list != connection)
        list = &(*list)->link;
    *list = connection->link;
    connection->in_list = false;
}

/* A parked request is tried again and again, but counted once. */
static void count_parked(struct connection *connection, bool parked)
{
    struct smb_server *server = connection->loop->server;
    if (parked && !connection->counted_parked) {
        server_count(&server->parked_now, 1);
        server_count(&server->parked_total, 1);
    } else if (!parked && connection->counted_parked) {
        atomic_fetch_sub_explicit(&server->parked_now, 1, memory_order_relaxed);
    }
    connection->counted_parked = parked;
}

static void drop_connection(struct loop *loop, struct connection *connection)
{
    if (connection->in_list) {
        list_remove(connection->wait == WAIT_PARKED ? &loop->parked : &loop->again, connection);
    }
    count_parked(connection, false);
    if (!connection->greeted)
        loop->not_greeted--;
    if (connection->previous)
        connection->previous->next = connection->next;
    else
        loop->connections = connection->next;
    if (connection->next)
        connection->next->previous = connection->previous;
    connection_destroy(connection); /* closing the descriptor takes it out of epoll */
}

/* Asks epoll for what the connection waits for, and lists it where the loop itself must come back to it. */
static void arm(struct loop *loop, struct connection *connection)
{
    static const uint32_t wanted[] = {
        [WAIT_INPUT] = EPOLLIN, [WAIT_OUTPUT] = EPOLLOUT, [WAIT_TURN] = EPOLLRDHUP, [WAIT_PARKED] = EPOLLRDHUP};
    uint32_t events = wanted[connection->wait];
    if (events != connection->armed) {
        struct epoll_event event = {.events = events, .data.ptr = connection};
        epoll_ctl(loop->epoll, EPOLL_CTL_MOD, connection->fd, &event);
        connection->armed = events;
    }
    if (connection->wait == WAIT_TURN || connection->wait == WAIT_PARKED) {
        struct connection **list = connection->wait == WAIT_PARKED ? &loop->parked : &loop->again;
        connection->link = *list;
        *list = connection;
        connection->in_list = true;
    }
    count_parked(connection, connection->wait == WAIT_PARKED);
}

static void serve(struct loop *loop, struct connection *connection)
{
    if (connection_turn(connection))
        arm(loop, connection);
    else
        drop_connection(loop, connection);
}

static void take_over(struct loop *loop, struct connection *connection)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    connection->armed = EPOLLIN;
    connection->next = loop->connections;
    if (loop->connections)
        loop->connections->previous = connection;
    loop->connections = connection;
    loop->not_greeted++;
    if (epoll_ctl(loop->epoll, EPOLL_CTL_ADD, connection->fd, &event) != 0)
        drop_connection(loop, connection);
}

static void take_inbox(struct loop *loop)
{
    uint64_t ignored;
    if (read(loop->wake, &ignored, sizeof ignored) < 0 && errno != EAGAIN)
        return;
    pthread_mutex_lock(&loop->inbox_lock);
    struct connection *connection = loop->inbox;
    loop->inbox = NULL;
    pthread_mutex_unlock(&loop->inbox_lock);
    while (connection) {
        struct connection *next = connection->link;
        take_over(loop, connection);
        connection = next;
    }
}

static void wake_loop(struct loop *loop)
{
    uint64_t one = 1;
    /* The counter of an eventfd can't be full here; a failed write would only mean that the loop is awake anyway. */
    if (write(loop->wake, &one, sizeof one) < 0)
        return;
}

static bool peer_is_ours(int fd)
{
    struct ucred peer;
    socklen_t length = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && (peer.uid == geteuid() || peer.uid == 0);
}

/* Out of descriptors: a listener that stays ready would keep the loop spinning, so the peer is let in and closed at once. */
static bool turn_away(struct listener *listener)
{
    struct smb_server *server = listener->server;
    server_count(&server->errors[SMB_SYSTEM], 1);
    if (server->spare_fd >= 0)
        close(server->spare_fd);
    int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        close(fd);
    server->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return fd >= 0;
}

static void accept_all(struct listener *listener)
{
    struct smb_server *server = listener->server;
    for (;;) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if ((errno == EMFILE || errno == ENFILE) && turn_away(listener))
                continue;
            return;
        }
        uint64_t now = 0;
        for (int t = 0; t < SMB_TRANSPORT_COUNT; t++)
            now += atomic_load_explicit(&server->now[t], memory_order_relaxed);
        int why = now >= CONNECTIONS_MAX ? SMB_OUT_OF_MEMORY
                  : listener->transport == SMB_TRANSPORT_UNIX && !peer_is_ours(fd) ? SMB_DENIED : SMB_OK;
        struct loop *loop = &server->loops[atomic_fetch_add(&server->next_loop, 1) % (uint32_t)server->loop_count];
        struct connection *connection = why == SMB_OK ? connection_create(loop, fd, listener->transport) : NULL;
        if (!connection) {
            server_count(&server->errors[why == SMB_OK ? SMB_OUT_OF_MEMORY : why], 1);
            close(fd);
            continue;
        }
        pthread_mutex_lock(&loop->inbox_lock);
        connection->link = loop->inbox;
        loop->inbox = connection;
        pthread_mutex_unlock(&loop->inbox_lock);
        wake_loop(loop);
    }
}

/* Takes each connection off the list and gives it a turn; it may put itself there again, for the next round. */
static void serve_list(struct loop *loop, struct connection **list)
{
    struct connection *connection = *list;
    *list = NULL;
    for (struct connection *c = connection; c; c = c->link)
        c->in_list = false;
    while (connection) {
        struct connection *next = connection->link;
        serve(loop, connection);
        connection = next;
    }
}

static void close_the_silent(struct loop *loop, uint64_t now_ns)
{
    struct connection *connection = loop->connections;
    while (connection) {
        struct connection *next = connection->next;
        if (!connection->greeted && now_ns - connection->opened_ns > (uint64_t)HELLO_DEADLINE_MS * 1000000U) {
            server_count(&loop->server->errors[SMB_TIMEOUT], 1);
            drop_connection(loop, connection);
        }
        connection = next;
    }
}

static int wait_ms(const struct loop *loop)
{
    if (loop->again)
        return 0;
    if (loop->parked)
        return PARKED_RETRY_MS;
    return loop->not_greeted ? 1000 : -1;
}

static int wait_for_events(struct loop *loop, struct epoll_event *events, uint64_t last_event_ns)
{
    int timeout = wait_ms(loop);
    int count = epoll_wait(loop->epoll, events, EVENTS_PER_WAIT, 0);
    while (count == 0 && timeout != 0 && smb_now_ns() - last_event_ns < SPIN_NS) {
        sched_yield(); /* the peer that we wait for may have been put on this very core: measured 6 times the latency */
        count = epoll_wait(loop->epoll, events, EVENTS_PER_WAIT, 0);
    }
    return count == 0 && timeout != 0 ? epoll_wait(loop->epoll, events, EVENTS_PER_WAIT, timeout) : count;
}

static void *run_loop(void *argument)
{
    struct loop *loop = argument;
    struct epoll_event events[EVENTS_PER_WAIT];
    uint64_t last_event_ns = 0, last_retry_ns = 0, last_check_ns = smb_now_ns();
    while (!atomic_load_explicit(&loop->stop, memory_order_acquire)) {
        int count = wait_for_events(loop, events, last_event_ns);
        uint64_t now_ns = smb_now_ns();
        if (count > 0)
            last_event_ns = now_ns;
        for (int i = 0; i < count; i++) {
            void *source = events[i].data.ptr;
            if (source == loop) {
                take_inbox(loop);
            } else if ((uintptr_t)source & 1U) {
                accept_all((struct listener *)((uintptr_t)source - 1U));
            } else {
                struct connection *connection = source;
                if (!connection->in_list)
                    serve(loop, connection);
                else if (events[i].events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP))
                    drop_connection(loop, connection);
            }
        }
        if (loop->again)
            serve_list(loop, &loop->again);
        if (loop->parked && now_ns - last_retry_ns >= PARKED_RETRY_MS * 1000000U) {
            last_retry_ns = now_ns;
            serve_list(loop, &loop->parked);
        }
        if (loop->not_greeted && now_ns - last_check_ns >= 500000000U) {
            last_check_ns = now_ns;
            close_the_silent(loop, now_ns);
        }
    }
    return NULL;
}

static int start_loop(struct smb_server *server, struct loop *loop)
{
    loop->server = server;
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    loop->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&loop->inbox_lock, NULL);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = loop};
    if (loop->epoll < 0 || loop->wake < 0 || epoll_ctl(loop->epoll, EPOLL_CTL_ADD, loop->wake, &event) != 0)
        return SMB_SYSTEM;
    int failure = pthread_create(&loop->thread, NULL, run_loop, loop);
    if (failure != 0) {
        errno = failure;
        return SMB_SYSTEM;
    }
    loop->running = true;
    return SMB_OK;
}

/* ---- server ------------------------------------------------------------------------------------------------------- */

int smb_server_create(uint64_t instance, int loops, uint64_t capacity_bytes, struct smb_server **server)
{
    if (loops < 1 || loops > LOOPS_MAX)
        return SMB_INVALID;
    struct smb_server *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->instance = instance;
    made->capacity_bytes = capacity_bytes;
    made->loops = calloc((size_t)loops, sizeof *made->loops);
    if (!made->loops) {
        free(made);
        return SMB_OUT_OF_MEMORY;
    }
    made->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pthread_rwlock_init(&made->registry_lock, NULL);
    int status = SMB_OK;
    while (made->loop_count < loops && status == SMB_OK)
        status = start_loop(made, &made->loops[made->loop_count++]);
    if (status != SMB_OK) {
        smb_server_destroy(made);
        return status;
    }
    *server = made;
    return SMB_OK;
}

/* Takes fd over. Loop 0 accepts for all. */
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
    /* Told from connections by the lowest bit, which is free in a pointer to either. */
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

int smb_server_listen_tcp(struct smb_server *server, const char *address, uint16_t port, uint16_t *bound_port)
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
    if (strlen(path) >= sizeof name.sun_path || server->unix_path)
        return SMB_INVALID;
    strcpy(name.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return SMB_SYSTEM;
    unlink(path); /* left by an earlier run; the caller holds the lock that says so */
    if (bind(fd, (struct sockaddr *)&name, sizeof name) != 0)
        return close_failed(fd);
    server->unix_path = strdup(path);
    if (!server->unix_path || listen(fd, SOMAXCONN) != 0)
        return close_failed(fd);
    return add_listener(server, fd, SMB_TRANSPORT_UNIX);
}

static void stop_loop(struct loop *loop)
{
    if (loop->running) {
        atomic_store_explicit(&loop->stop, true, memory_order_release);
        wake_loop(loop);
        pthread_join(loop->thread, NULL);
    }
    if (loop->wake >= 0)
        take_inbox(loop);
    while (loop->connections)
        drop_connection(loop, loop->connections);
    if (loop->epoll >= 0)
        close(loop->epoll);
    if (loop->wake >= 0)
        close(loop->wake);
    pthread_mutex_destroy(&loop->inbox_lock);
}

void smb_server_destroy(struct smb_server *server)
{
    for (int i = 0; i < server->loop_count; i++)
        stop_loop(&server->loops[i]);
    for (int i = 0; i < LISTENERS_MAX; i++) {
        if (server->listeners[i])
            close(server->listeners[i]->fd);
        free(server->listeners[i]);
    }
    if (server->unix_path)
        unlink(server->unix_path);
    free(server->unix_path);
    if (server->spare_fd >= 0)
        close(server->spare_fd);
    for (int b = 0; b < BUCKETS; b++) {
        while (server->buckets[b]) {
            struct entry *entry = server->buckets[b];
            server->buckets[b] = entry->next;
            smb_segment_release(entry->segment);
            free(entry->path);
            free(entry);
        }
    }
    pthread_rwlock_destroy(&server->registry_lock);
    free(server->loops);
    free(server);
}
