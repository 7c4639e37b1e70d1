/* pair.h: a primary and a backup in this process, clients of the first, and frames by hand. */
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
    struct smb_tls *inside; /* what the primary shows the backup; NULL: it speaks no TLS */
    int dtype;
    int members; /* of one bundle, with the ids from ID on */
};

void pair_start(struct pair *pair, int dtype, int members);
void stop(struct pair *pair);
/* Empty segments, without a role. */
void make_members(struct pair *pair, int server);
/* Tells it for each member, as a coordinator does. */
int give_role(struct pair *pair, int server, uint32_t epoch, int role, bool paired, bool copying);
void set_role(struct pair *pair, int server, uint32_t epoch, int role, bool paired);
/* A connection from the primary to the backup, in place of the one before. */
int feed(struct pair *pair, uint32_t epoch);
/* The same from the one or the other server. */
void connect_copy(struct pair *pair, int from, uint32_t epoch);
struct smb_replica_status status_of(struct pair *pair, int server);
bool copies_are_equal(struct pair *pair);
/* That server's copies are gone, and it gets empty segments. */
void lose(struct pair *pair, int lost);
/* As the coordinator and Python do it: epoch, roles, parts, over connections that break, and the
 * next epoch once the copy has all. */
void make_copy(struct pair *pair, int from, uint32_t epoch);

struct user {
    struct smb_client *client;
    struct smb_link *link;
    struct smb_buffer *buffer;
};

struct smb_buffer *buffer_over(const struct user *user, const struct pair *pair, uint64_t id);
struct user use_of(struct pair *pair, uint64_t session, uint64_t id);
struct user use(struct pair *pair, uint64_t session);
void leave(struct user *user);

/* Frames of one lane by hand, so that many are on their way at once. */
struct raw {
    int fd;
    uint64_t session, sequence;
};

struct raw raw_begin(struct pair *pair, int server, uint64_t session);
struct smb_frame raw_receive(struct raw *raw);
/* With zeros for its payload. */
void raw_send(struct raw *raw, struct smb_frame frame);
/* The lane's next request, with words for its payload. */
void raw_send_words(struct raw *raw, struct smb_frame frame, uint64_t a, uint64_t b);
bool heard(const struct raw *raw);

/* Clients that follow the segment, as Python's would: where it is, in which epoch. */
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

/* A thread's function, of a follower, until its place is over. */
void *follow(void *argument);

/* A client that works until it is stopped. */
struct mover {
    struct place *place;
    const void *ones; /* what it works with */
    uint64_t session;
    _Atomic int done;
    _Atomic bool stop;
};

/* Four of them, each a thread of `move`, work while a server is lost in each round, by turns, and
 * what it had is copied to it anew. Returns how much they did; *server: the primary at the end. */
int64_t lose_in_turn(struct pair *pair, void *(*move)(void *), const void *ones, int *server);

#endif
