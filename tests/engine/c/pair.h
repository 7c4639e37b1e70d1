/* pair.h: a primary and a backup in this process, clients of the primary, and frames made by
 * hand. */
#ifndef PAIR_H
#define PAIR_H

#include <stdatomic.h>

#include "base/frame.h"
#include "rig.h"
#include "smb/server.h"

enum { ID = 77, CHUNK = 4096, CHUNKS = 5, SEGMENT_BYTES = CHUNKS * CHUNK, MEMBERS_MAX = 16 };

struct pair {
    struct smb_server *servers[2];
    uint16_t ports[2];
    /* the certificates that the primary uses towards the backup; NULL: no TLS */
    struct smb_tls *inside;
    int dtype;
    int members; /* number of segments in the bundle, with the ids from ID on */
};

void pair_start(struct pair *pair, int dtype, int members);
void stop(struct pair *pair);
/* Creates empty segments, without a role. */
void make_members(struct pair *pair, int server);
/* Gives each member the role, as a coordinator does. */
int give_role(struct pair *pair, int server, uint32_t epoch, int role, bool paired, bool copying);
void set_role(struct pair *pair, int server, uint32_t epoch, int role, bool paired);
/* Connects the primary to the backup, in place of the previous connection. */
int feed(struct pair *pair, uint32_t epoch);
/* The same from either server. */
void connect_copy(struct pair *pair, int from, uint32_t epoch);
struct smb_replica_status status_of(struct pair *pair, int server);
bool copies_are_equal(struct pair *pair);
/* Deletes that server's copies and creates empty segments there. */
void lose(struct pair *pair, int lost);
/* Makes a copy as the coordinator and Python do: epoch, roles, parts, over connections that break,
 * and the next epoch once the copy is complete. */
void make_copy(struct pair *pair, int from, uint32_t epoch);

/* Makes that server the primary from the epoch on, and the other one its backup, without a copy. */
void switch_roles(struct pair *pair, int to, uint32_t epoch);

struct user {
    struct smb_client *client;
    struct smb_link *link;
    struct smb_buffer *buffer;
};

struct smb_buffer *buffer_over(const struct user *user, const struct pair *pair, uint64_t id);
struct user use_of(struct pair *pair, uint64_t session, uint64_t id);
struct user use(struct pair *pair, uint64_t session);
void leave(struct user *user);

/* Frames of one lane, made by hand, so that many can be in flight at once. */
struct raw {
    int fd;
    uint64_t session, sequence;
};

struct raw raw_begin(struct pair *pair, int server, uint64_t session);
struct smb_frame raw_receive(struct raw *raw);
/* Sends a frame whose payload is zeros. */
void raw_send(struct raw *raw, struct smb_frame frame);
/* Sends the lane's next request, with words as its payload. */
void raw_send_words(struct raw *raw, struct smb_frame frame, uint64_t a, uint64_t b);
bool heard(const struct raw *raw);

/* A link that follows a segment, as Python's would: to the server that has it, in its epoch. */
struct place {
    struct pair *pair;
    _Atomic uint32_t epoch;
    _Atomic int server;
    _Atomic bool over;
};

struct follower {
    struct place *place;
    struct user user;
};

/* The function of a thread that keeps the link connected until its place ends. */
void *follow(void *argument);

/* A client that works until it is stopped. */
struct mover {
    struct place *place;
    const void *ones; /* the elements that it adds */
    uint64_t session;
    _Atomic int done;
    _Atomic bool stop;
};

/* Lets four movers, each a thread of `move`, work while in each round one of the servers is lost,
 * in turn, and its content is copied to it again. Returns how much they did; *server: the primary
 * at the end. */
int64_t lose_in_turn(struct pair *pair, void *(*move)(void *), const void *ones, int *server);
/* The same, but in each round the two copies switch their roles. */
int64_t switch_in_turn(struct pair *pair, void *(*move)(void *), const void *ones, int *server);

#endif
