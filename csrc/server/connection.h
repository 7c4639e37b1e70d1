/* connection.h: one peer of the daemon: a state machine that never blocks. Its loop calls
 * connection_turn when the socket has input or room, or to try a deferred request again.
 *
 * One request is in hand at a time. The peer may send many more meanwhile; they wait in the socket.
 * Answers are sent in the order of the requests.
 *
 * A turn consists of handshake.c (who the peer is), input.c (requests and payloads), staging.c
 * (where payloads go), answer.c and read.c (execution), reply.c (how each request ends), output.c
 * (sending).
 *
 * Threads. The loop owns the connection. Other threads use `loop`, `destination`, `fenced` and
 * `lane_next` under the lanes' lock, and `turn`. */
#ifndef SMB_CONNECTION_H
#define SMB_CONNECTION_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/stats.h"
#include "channel/bond.h"
#include "channel/channel.h"
#include "memory/journal.h"
#include "server/grants.h"
#include "server/request.h"
#include "server/slots.h"
#include "server/waits.h"

struct use;
struct loop;
struct stranger_count;

enum {
    HELLO_DEADLINE_MS = 5000, /* a peer that has not proved who it is by then is closed */
    IN_BYTES = 4096,          /* headers arrive in bursts of up to 64 */
    OUT_BYTES = 4096,         /* small replies are collected as well, each of at most this size: */
    SMALL_REPLY_BYTES = SMB_FRAME_BYTES + SMB_CHECKSUM_BYTES,
    FRAMES_PER_TURN = 32, /* after this many the loop's next connection has its turn */
    BULK_BYTES = 32768,   /* from this size on a request is worth a system call for its answer */
    REPLIES_HELD_MAX = 4  /* answers of such requests are sent at the latest when this many wait */
};

enum connection_wait { WAIT_INPUT, WAIT_OUTPUT, WAIT_TURN, WAIT_DEFERRED };

/* The result of one part of a turn: go on with the next part, wait (`wait` says for what), or close
 * the connection. */
enum step { STEP_ON, STEP_WAIT, STEP_CLOSE };

struct connection {
    struct connection *next, *previous; /* in the loop's list of all its connections */
    struct connection *link;            /* in the loop's inbox, or its again or deferred list */
    struct loop *loop;                  /* changed by the loop itself, with the lanes' lock held */
    /* also changed with the lanes' lock held. Set by HELLO: the loop that shall serve the
     * connection, because it has fewer connections of this lane */
    struct loop *destination;
    struct channel channel;
    /* a reference while a TLS handshake is due or under way, else NULL */
    struct smb_tls *secures;
    struct stranger_count *counted_at; /* NULL: not a stranger */
    struct use *use;                   /* NULL: not counted, or not proven yet */
    struct connection *older, *newer;  /* in the list of strangers */
    int transport;
    enum connection_wait wait;
    uint32_t armed;        /* the events that epoll watches now */
    bool in_list;          /* linked in `again` or `deferred` */
    bool counted_deferred; /* the request in hand was counted as deferred */
    bool from_kept;        /* the request's payload was moved to `from`: staging_is_from_segments */
    bool greeted;
    /* the connection speaks for its session: HELLO came, and, where tokens are required, a token of
     * that session was shown */
    bool proven;
    /* the request in hand was executed and its answer's data is in `tail`; the answer waits until
     * this order is confirmed */
    uint64_t awaits;
    bool copied;    /* the request in hand is such a read */
    bool checksums; /* HELLO had a checksum, so every frame must have one */
    uint64_t session;
    uint16_t lane;
    uint64_t nonce;        /* the peer's proofs of tokens must contain this */
    uint64_t client_nonce; /* our proofs that we know the tokens' secrets must contain this */
    struct bond bond;
    struct gate_peer peer;
    /* a newer connection speaks for this lane: no request of this one may be executed any more */
    _Atomic bool fenced;
    /* held while a request is executed; a thread that fences the connection takes it, to wait for
     * the end */
    pthread_mutex_t turn;
    struct connection *lane_next; /* in the server's list of connections that have said HELLO */
    uint64_t opened_ns;
    struct smb_tally done;
    uint64_t backlog_bytes; /* this connection's part of the loop's backlog_bytes */

    /* the request in hand */
    bool have_request;
    /* status of gate_admit: if it is not SMB_OK, the payload is read, thrown away and answered with
     * this */
    int admitted;
    struct gate_request request;
    uint32_t payload_have;
    uint32_t crc; /* covers the received part of the request, if it has a checksum */
    uint8_t checksum[SMB_CHECKSUM_BYTES];

    uint32_t in_start, in_end;   /* received, not yet parsed */
    bool drained;                /* the last read emptied the socket */
    uint32_t out_start, out_end; /* small replies to send */
    uint32_t replies_held;
    uint32_t tail_start, tail_end; /* the unsent part of the data in `tail` */
    /* one chunk: incoming payload; the 104 bytes before it are for a token, and words */
    uint8_t *staging;
    struct slot slot;     /* where staging lies, if the server has a journal */
    uint8_t *own_staging; /* where staging lies without a journal */
    /* by reference: requests are records, whose payloads are in these slots; else NULL */
    struct smb_slots *slots;
    const struct slot *named; /* the slot that the request in hand named, or NULL */
    /* payload of a change whose operand is another segment: staging then holds the operand's
     * bytes */
    uint8_t from[SMB_TOKEN_BYTES + SMB_APPLY_BYTES];
    uint8_t *tail;                    /* one chunk and a checksum: outgoing data */
    int pass_fd;                      /* sent along with the only answer in `out`; -1: none */
    struct smb_segment *pass_segment; /* keeps pass_fd open */
    struct wait *waits;               /* deferred requests of this connection */
    uint32_t waits_now;               /* number of deferred requests */
    struct wait *answered; /* answered waits whose answers are still to be sent, oldest first */
    /* where the next answered wait is linked, if the list is not empty */
    struct wait **answered_end;
    struct connection *next_answered; /* in the loop's list of connections with new answers */
    bool has_new_answers;
    uint8_t in[IN_BYTES];
    uint8_t out[OUT_BYTES];
};

struct connection *connection_create(struct loop *loop, int fd, int transport);
/* Reads, executes and answers requests until nothing more can be done now. Returns false if the
 * connection must be closed. */
bool connection_turn(struct connection *connection);
void connection_destroy(struct connection *connection);
/* For TCP connections: counts the connection as a stranger, served by loop 0, until it has proved
 * itself. With `tls`, to which it takes a reference, the connection uses TLS. */
void connection_be_stranger(struct connection *connection, struct smb_tls *tls);
/* Whether no request is in hand, so that another loop may take the connection over. */
bool connection_is_empty(const struct connection *connection);
/* Whether the peer has not proved its session for too long. `now_ns` may be from before the
 * connection was accepted, because another thread accepts. */
bool connection_is_silent(const struct connection *connection, uint64_t now_ns);
/* Notes that a wait was answered: the answer is sent in the connection's next turn. */
void connection_take_answer(struct connection *connection, struct wait *wait);

#endif
