/* connection.h: one peer of the daemon: a state machine that never blocks.
 *
 * Its loop calls connection_turn when the socket has input or room, or to try a deferred request
 * again. One request is in hand at a time. The peer may send many more meanwhile; they wait in the
 * socket. Answers leave in the order of the requests.
 *
 * A turn consists of handshake.c (who it is), input.c (requests and payloads), staging.c (where
 * payloads go), answer.c and read.c (requests carried out), reply.c (how each ends), output.c
 * (bytes out).
 *
 * Threads. The loop owns it. Other threads use `loop`, `destination`, `fenced` and `lane_next`
 * under the lanes' lock, and `turn`.
 */
#ifndef SMB_CONNECTION_H
#define SMB_CONNECTION_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/bond.h"
#include "base/channel.h"
#include "base/stats.h"
#include "memory/journal.h"
#include "server/request.h"
#include "server/grants.h"
#include "server/slots.h"
#include "server/waits.h"

struct loop;
struct stranger_count;

enum {
    HELLO_DEADLINE_MS = 5000, /* a silent stranger is closed */
    IN_BYTES = 4096,          /* headers arrive in bursts of up to 64 */
    OUT_BYTES = 4096,         /* as do small replies, each of up to: */
    SMALL_REPLY_BYTES = SMB_FRAME_BYTES + SMB_CHECKSUM_BYTES,
    FRAMES_PER_TURN = 32, /* then the next connection of the loop has its turn */
    BULK_BYTES = 32768,   /* a request of this size is worth a system call for its answer: */
    REPLIES_HELD_MAX = 4  /* at least every so many of them answers are sent */
};

enum connection_wait { WAIT_INPUT, WAIT_OUTPUT, WAIT_TURN, WAIT_DEFERRED };

/* The result of one part of a turn: the next part follows, or a wait (`wait` says for what), or the
 * end of the connection. */
enum step { STEP_ON, STEP_WAIT, STEP_CLOSE };

struct connection {
    struct connection *next, *previous; /* all of the loop */
    struct connection *link;            /* inbox, again or deferred list */
    struct loop *loop;                  /* changed, by it, with the lanes' lock held */
    /* so too. Set by HELLO: it is to be served there, where its lane has fewer connections */
    struct loop *destination;
    struct channel channel;
    /* a reference: a TLS handshake is to be done, or under way. Else NULL */
    struct smb_tls *secures;
    struct stranger_count *counted_at; /* NULL: no stranger */
    struct connection *older, *newer;  /* of the strangers */
    int transport;
    enum connection_wait wait;
    uint32_t armed;        /* epoll events asked for now */
    bool in_list;          /* linked in `again` or `deferred` */
    bool counted_deferred; /* since the request in hand was deferred for the first time */
    bool from_kept;        /* its payload is in `from`: staging_is_from_segments */
    bool greeted;
    /* it speaks for its session: greeted, and a token of it shown where tokens are asked for */
    bool proven;
    /* the request in hand was carried out, and its data is in `tail`: it waits for this order */
    uint64_t awaits;
    bool copied;    /* so, of a read */
    bool checksums; /* its HELLO had one: so has every frame */
    uint64_t session;
    uint16_t lane;
    uint64_t nonce;        /* what it was given to prove tokens with */
    uint64_t client_nonce; /* what we are to prove with that we know their secret */
    struct bond bond;
    struct gate_peer peer;
    /* a newer connection speaks for this lane: nothing of this one may be done any more */
    _Atomic bool fenced;
    /* held while a request is carried out; a thread that fences takes it to wait for the end */
    pthread_mutex_t turn;
    struct connection *lane_next; /* of the server's greeted connections */
    uint64_t opened_ns;
    struct smb_tally done;
    uint64_t backlog_bytes; /* as counted in its loop */

    /* the request in hand */
    bool have_request;
    int admitted; /* status of gate_admit: not OK means drain the payload, then answer that */
    struct gate_request request;
    uint32_t payload_have;
    uint32_t crc; /* of what has arrived of it, if it has a checksum */
    uint8_t checksum[SMB_CHECKSUM_BYTES];

    uint32_t in_start, in_end;   /* received, not yet parsed */
    bool drained;                /* the last look at the socket took all that was there */
    uint32_t out_start, out_end; /* small replies to be sent */
    uint32_t replies_held;
    uint32_t tail_start, tail_end; /* what is left of a chunk being sent, in `tail` */
    /* one chunk: payload on its way in; the 104 bytes before it are for a token, and words */
    uint8_t *staging;
    struct slot slot;     /* where staging lies, if there is a journal */
    uint8_t *own_staging; /* else */
    /* by reference: requests are records, whose payloads are in these. Else NULL */
    struct smb_slots *slots;
    const struct slot *named; /* the one of them that the request in hand named, or NULL */
    /* payload of a change from segments: staging is for the source's bytes then */
    uint8_t from[SMB_TOKEN_BYTES + SMB_APPLY_BYTES];
    uint8_t *tail;                    /* one chunk and a checksum: data on its way out */
    int pass_fd;                      /* goes with the one answer in `out`; -1: none */
    struct smb_segment *pass_segment; /* keeps pass_fd open */
    struct wait *waits;               /* deferred, of this connection */
    uint32_t waits_now;               /* how many */
    struct wait *answered; /* of which the answer is here, oldest first, and still to be sent */
    struct wait **answered_end;       /* where the next one goes, if there are any */
    struct connection *next_answered; /* of those with new answers */
    bool has_new_answers;
    uint8_t in[IN_BYTES];
    uint8_t out[OUT_BYTES];
};

struct connection *connection_create(struct loop *loop, int fd, int transport);
/* Reads, executes, answers until nothing more can be done now. false: close it. */
bool connection_turn(struct connection *connection);
void connection_destroy(struct connection *connection);
/* TCP's: it is a stranger until it has proved itself, in loop 0. With `tls`, which it keeps a
 * reference to, inside TLS. */
void connection_be_stranger(struct connection *connection, struct smb_tls *tls);
/* It has nothing in hand: another loop may take it over. */
bool connection_is_empty(const struct connection *connection);
/* It has sent no proof of its session for too long. `now_ns` may be from before it came: others let
 * it in. */
bool connection_is_silent(const struct connection *connection, uint64_t now_ns);
/* One of its waits is answered: the answer goes out at its next turn. */
void connection_take_answer(struct connection *connection, struct wait *wait);

#endif
