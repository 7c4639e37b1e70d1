#include "pair.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "memory/segment.h"

/* ---- servers --------------------------------------------------------------------------------- */

static const char *path_of(int server, int member)
{
    static const char *const names[2][MEMBERS_MAX] = {
        {"a", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9", "aA", "aB", "aC", "aD", "aE",
         "aF"},
        {"b", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8", "b9", "bA", "bB", "bC", "bD", "bE",
         "bF"},
    };
    return scratch_path(names[server][member]);
}

void make_members(struct pair *pair, int server)
{
    for (int i = 0; i < pair->members; i++)
        CHECK_EQ(smb_server_create_replica(pair->servers[server], path_of(server, i),
                                           ID + (uint64_t)i, pair->members > 1 ? ID : 0, 1,
                                           pair->dtype, SEGMENT_BYTES, CHUNK),
                 SMB_OK);
}

void pair_start(struct pair *pair, int dtype, int members)
{
    CHECK(members <= MEMBERS_MAX);
    *pair = (struct pair){.dtype = dtype, .members = members};
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(smb_server_create(1000 + (uint64_t)i, 2, (uint64_t)1 << 30, &pair->servers[i]),
                 SMB_OK);
        CHECK_EQ(smb_server_listen_tcp(pair->servers[i], "127.0.0.1", 0, &pair->ports[i]), SMB_OK);
        make_members(pair, i);
        smb_server_serve_until(pair->servers[i], UINT64_MAX);
    }
    set_role(pair, 1, 1, SMB_REPLICA_BACKUP, true);
    set_role(pair, 0, 1, SMB_REPLICA_PRIMARY, true);
}

void stop(struct pair *pair)
{
    for (int i = 0; i < 2; i++)
        smb_server_destroy(pair->servers[i]);
}

int give_role(struct pair *pair, int server, uint32_t epoch, int role, bool paired, bool copying)
{
    int status = SMB_OK;
    for (int i = 0; i < pair->members && status == SMB_OK; i++)
        status = smb_server_set_replica(pair->servers[server], ID + (uint64_t)i, epoch, role,
                                        paired, copying, "peer");
    return status;
}

void set_role(struct pair *pair, int server, uint32_t epoch, int role, bool paired)
{
    CHECK_EQ(give_role(pair, server, epoch, role, paired, false), SMB_OK);
}

static int connect_from(struct pair *pair, int from, uint32_t epoch)
{
    int fd = raw_connect(pair->ports[1 - from]);
    CHECK_EQ(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK), 0);
    return smb_server_feed(pair->servers[from], ID, epoch, fd, 1001 - (uint64_t)from, pair->inside,
                           "server-0.server.smb");
}

int feed(struct pair *pair, uint32_t epoch)
{
    return connect_from(pair, 0, epoch);
}

void connect_copy(struct pair *pair, int from, uint32_t epoch)
{
    CHECK_EQ(connect_from(pair, from, epoch), SMB_OK);
}

struct smb_replica_status status_of(struct pair *pair, int server)
{
    struct smb_replica_status found[MEMBERS_MAX];
    CHECK_EQ(smb_server_replicas(pair->servers[server], found, MEMBERS_MAX), pair->members);
    return found[0];
}

bool copies_are_equal(struct pair *pair)
{
    bool equal = true;
    for (int member = 0; member < pair->members; member++) {
        struct smb_segment *segments[2];
        for (int i = 0; i < 2; i++)
            CHECK_EQ(smb_server_hold_segment(pair->servers[i], ID + (uint64_t)member, &segments[i]),
                     SMB_OK);
        equal = equal && memcmp(smb_segment_data(segments[0]), smb_segment_data(segments[1]),
                                SEGMENT_BYTES) == 0;
        for (int i = 0; i < 2; i++)
            smb_segment_release(segments[i]);
    }
    return equal;
}

void lose(struct pair *pair, int lost)
{
    for (int i = 0; i < pair->members; i++)
        CHECK_EQ(smb_server_delete_segment(pair->servers[lost], ID + (uint64_t)i), SMB_OK);
    make_members(pair, lost);
}

void make_copy(struct pair *pair, int from, uint32_t epoch)
{
    uint64_t copied = 0, total = 0;
    int whole = 0;
    set_role(pair, 1 - from, epoch, SMB_REPLICA_BACKUP, true);
    CHECK_EQ(give_role(pair, from, epoch, SMB_REPLICA_PRIMARY, true, true), SMB_OK);
    /* refused until the copy is complete */
    CHECK_EQ(give_role(pair, from, epoch + 1, SMB_REPLICA_PRIMARY, true, false), SMB_INVALID);
    for (int part = 0; whole < pair->members; part++) {
        if (part % 3 == 0)
            connect_copy(pair, from, epoch);
        whole = 0;
        for (int i = 0; i < pair->members; i++) {
            int status = smb_server_copy(pair->servers[from], ID + (uint64_t)i, epoch, CHUNK,
                                         &copied, &total);
            CHECK(status == SMB_OK || status == SMB_BUSY || status == SMB_EXISTS);
            whole += status == SMB_EXISTS;
        }
    }
    CHECK_EQ(copied, SEGMENT_BYTES);
    CHECK_EQ(total, copied);
    CHECK_EQ(smb_server_abandon_copy(pair->servers[from], ID, epoch), SMB_STALE_EPOCH);
    CHECK_EQ(give_role(pair, from, epoch + 1, SMB_REPLICA_PRIMARY, true, false), SMB_OK);
    set_role(pair, 1 - from, epoch + 1, SMB_REPLICA_BACKUP, true);
    connect_copy(pair, from, epoch + 1);
}

/* ---- clients --------------------------------------------------------------------------------- */

struct smb_buffer *buffer_over(const struct user *user, const struct pair *pair, uint64_t id)
{
    static const struct smb_layout layout = {SEGMENT_BYTES, CHUNKS * CHUNK, CHUNK, 1};
    struct smb_buffer *buffer;
    CHECK_EQ(smb_buffer_create(user->client, &layout, pair->dtype, &buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(buffer, 0, id, 1, user->link), SMB_OK);
    return buffer;
}

struct user use_of(struct pair *pair, uint64_t session, uint64_t id)
{
    struct user user;
    uint64_t instance;
    CHECK_EQ(smb_client_create(session, &user.client), SMB_OK);
    CHECK_EQ(smb_client_connect_tcp(user.client, "127.0.0.1", pair->ports[0],
                                    SMB_LANE_OF_SEGMENTS + 1, RIG_TIMEOUT_MS, &user.link,
                                    &instance),
             SMB_OK);
    smb_link_set_epoch(user.link, 1);
    user.buffer = buffer_over(&user, pair, id);
    return user;
}

struct user use(struct pair *pair, uint64_t session)
{
    return use_of(pair, session, ID);
}

void leave(struct user *user)
{
    smb_buffer_destroy(user->buffer);
    smb_link_close(user->link);
    smb_client_destroy(user->client);
}

struct smb_frame raw_receive(struct raw *raw)
{
    uint8_t bytes[SMB_FRAME_BYTES];
    struct smb_frame reply;
    CHECK_EQ(recv(raw->fd, bytes, sizeof bytes, MSG_WAITALL), sizeof bytes);
    CHECK_EQ(smb_frame_parse(bytes, &reply), SMB_OK);
    return reply;
}

void raw_send(struct raw *raw, struct smb_frame frame)
{
    static const uint8_t zeros[CHUNK];
    uint8_t bytes[SMB_FRAME_BYTES];
    frame.session = raw->session;
    frame.lane = SMB_LANE_OF_SEGMENTS + 1;
    smb_frame_encode(&frame, bytes);
    CHECK_EQ(write(raw->fd, bytes, sizeof bytes), sizeof bytes);
    if (frame.payload > 0)
        CHECK_EQ(write(raw->fd, zeros, frame.payload), frame.payload);
}

void raw_send_words(struct raw *raw, struct smb_frame frame, uint64_t a, uint64_t b)
{
    uint8_t bytes[SMB_FRAME_BYTES + SMB_SYNC_BYTES] = {0};
    frame.session = raw->session;
    frame.lane = SMB_LANE_OF_SEGMENTS + 1;
    frame.sequence = ++raw->sequence;
    smb_frame_encode(&frame, bytes);
    smb_store64(bytes + SMB_FRAME_BYTES, a);
    smb_store64(bytes + SMB_FRAME_BYTES + 8, b);
    CHECK_EQ(write(raw->fd, bytes, SMB_FRAME_BYTES + frame.payload),
             SMB_FRAME_BYTES + frame.payload);
}

struct raw raw_begin(struct pair *pair, int server, uint64_t session)
{
    struct raw raw = {.fd = raw_connect(pair->ports[server]), .session = session};
    raw_send(&raw, (struct smb_frame){.opcode = SMB_HELLO});
    CHECK_EQ(raw_receive(&raw).status, SMB_OK);
    return raw;
}

bool heard(const struct raw *raw)
{
    uint8_t byte;
    return recv(raw->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
}

void *follow(void *argument)
{
    struct follower *follower = argument;
    struct place *place = follower->place;
    while (!atomic_load(&place->over)) {
        uint64_t id, instance;
        if (smb_client_wait_down(follower->user.client, 20, &id) != SMB_OK)
            continue;
        int server = atomic_load(&place->server);
        smb_link_set_epoch(follower->user.link, atomic_load(&place->epoch));
        while (!atomic_load(&place->over) &&
               smb_link_resume_tcp(follower->user.link, "127.0.0.1", place->pair->ports[server],
                                   1000 + (uint64_t)server, RIG_TIMEOUT_MS, &instance) != SMB_OK)
            server = atomic_load(&place->server);
    }
    return NULL;
}

/* ---- losses ---------------------------------------------------------------------------------- */

enum { MOVERS = 4, LOSSES = 6, SWITCHES = 24 };

/* What the movers are told: the server that has the primary, and the epoch of its role. */
struct turn {
    struct pair *pair;
    struct place places[MOVERS];
    int number, server;
    uint32_t epoch;
};

static void tell_movers(struct turn *turn, uint32_t epoch)
{
    for (int i = 0; i < MOVERS; i++) {
        atomic_store(&turn->places[i].server, turn->server);
        atomic_store(&turn->places[i].epoch, epoch);
    }
}

static void lose_one(struct turn *turn)
{
    int lost = turn->number % 2; /* alternates between primary and backup */
    turn->epoch++;
    lose(turn->pair, lost);
    turn->server = 1 - lost;
    set_role(turn->pair, turn->server, turn->epoch, SMB_REPLICA_PRIMARY, false);
    tell_movers(turn, turn->epoch + 1);
    make_copy(turn->pair, turn->server, turn->epoch + 1);
    turn->epoch += 2;
    tell_movers(turn, turn->epoch);
}

static void switch_two(struct turn *turn)
{
    WAIT_UNTIL(status_of(turn->pair, turn->server).broken_ms == 0);
    turn->server = 1 - turn->server;
    switch_roles(turn->pair, turn->server, ++turn->epoch);
    tell_movers(turn, turn->epoch);
}

void switch_roles(struct pair *pair, int to, uint32_t epoch)
{
    WAIT_UNTIL(smb_server_hand_over(pair->servers[1 - to], ID, epoch - 1) == SMB_OK);
    set_role(pair, 1 - to, epoch, SMB_REPLICA_BACKUP, true);
    set_role(pair, to, epoch, SMB_REPLICA_PRIMARY, true);
    connect_copy(pair, to, epoch);
}

static int64_t in_turn(struct pair *pair, void *(*move)(void *), const void *ones, int *server,
                       void (*change)(struct turn *), int turns)
{
    struct mover movers[MOVERS];
    pthread_t threads[MOVERS];
    struct turn turn = {.pair = pair, .epoch = 1};
    CHECK_EQ(feed(pair, 1), SMB_OK);
    for (int i = 0; i < MOVERS; i++) {
        turn.places[i] = (struct place){.pair = pair, .epoch = 1};
        movers[i] = (struct mover){
            .place = &turn.places[i], .ones = ones, .session = 10 + (uint64_t)i};
        CHECK_EQ(pthread_create(&threads[i], NULL, move, &movers[i]), 0);
    }
    for (; turn.number < turns; turn.number++) {
        int before[MOVERS];
        for (int i = 0; i < MOVERS; i++)
            before[i] = atomic_load(&movers[i].done);
        for (int i = 0; i < MOVERS; i++)
            WAIT_UNTIL(atomic_load(&movers[i].done) >= before[i] + 5);
        change(&turn);
    }
    int64_t done = 0;
    for (int i = 0; i < MOVERS; i++)
        atomic_store(&movers[i].stop, true);
    for (int i = 0; i < MOVERS; i++) {
        pthread_join(threads[i], NULL);
        done += atomic_load(&movers[i].done);
    }
    *server = turn.server;
    return done;
}

int64_t lose_in_turn(struct pair *pair, void *(*move)(void *), const void *ones, int *server)
{
    return in_turn(pair, move, ones, server, lose_one, LOSSES);
}

int64_t switch_in_turn(struct pair *pair, void *(*move)(void *), const void *ones, int *server)
{
    return in_turn(pair, move, ones, server, switch_two, SWITCHES);
}
