/* client.h: what a client asks of the engine: links to servers, calls on buffers, async operations.
 * Conventions: smb/types.h. */
#ifndef SMB_PUBLIC_CLIENT_H
#define SMB_PUBLIC_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

#include "smb/types.h"

struct smb_segment;
struct smb_tls;

/* cffi: begin */

struct smb_client;
struct smb_link;

int smb_client_create(uint64_t session, struct smb_client **client);
/* Before its first link is made: every frame of every link carries a checksum, in both
 * directions. */
void smb_client_use_checksums(struct smb_client *client);
/* Before its first link is made: servers are to prove, too, that they know what a token's secret is
 * made with. A connection carries nothing but HELLO and AUTHORIZE until its server has. */
void smb_client_want_proof(struct smb_client *client);
/* Answers that arrived spoilt, so far. Servers count requests that did. */
uint64_t smb_client_spoilt(struct smb_client *client);
/* Counts of this client since smb_client_count (before that nothing is counted, and nothing is lost
 * to counting). SHM: on its own mapping; TCP and UNIX: calls over links of that kind, counted once,
 * also if they took several frames or several servers. Latencies are of whole calls; of those
 * that took no wait at all one in 64 is timed, and stands for 64. */
struct smb_client_counters {
    uint64_t operations[4][26];
    uint64_t bytes[4][26];
    uint64_t failed[33];     /* calls, by status */
    uint64_t repeated_total; /* frames sent again after a connection broke */
    uint64_t spoilt_total;
    struct smb_latencies latencies;
};
void smb_client_count(struct smb_client *client);
void smb_client_counters(struct smb_client *client, struct smb_client_counters *counters);
/* Connects and shakes hands, blocking up to timeout_ms. The server answers with its instance. A
 * link is one lane of the session: to each server at most one link of a lane number at any time. */
int smb_client_connect_tcp(struct smb_client *client, const char *address, uint16_t port,
                           uint16_t lane, uint32_t timeout_ms, struct smb_link **link,
                           uint64_t *instance);
int smb_client_connect_unix(struct smb_client *client, const char *path, uint16_t lane,
                            uint32_t timeout_ms, struct smb_link **link, uint64_t *instance);
/* A memory server that is reached over TCP inside TLS: the one whose certificate is for the name
 * `expected`. The caller's memory, for the length of a call. */
struct smb_tls_peer {
    const char *address;
    uint16_t port;
    struct smb_tls *tls;
    const char *expected;
};
/* SMB_UNTRUSTED: another name answers (why[] has it), or the server refuses us. */
int smb_client_connect_tls(struct smb_client *client, const struct smb_tls_peer *peer,
                           uint16_t lane, uint32_t timeout_ms, struct smb_link **link,
                           uint64_t *instance, char why[400]);
/* Looks who serves the control plane at a numeric address, by a connection of its own, blocking up
 * to timeout_ms. SMB_OK: it is of that role and name; its certificate is in certificate[], as PEM.
 * Else, or if why[] is not empty (it does not take our certificate), why[] is the end of a sentence
 * about it, empty where the network is to blame. SMB_UNTRUSTED, SMB_DISCONNECTED, SMB_TIMEOUT. */
int smb_tls_meet(struct smb_tls *tls, const char *address, uint16_t port, uint32_t role,
                 const char *host, uint32_t timeout_ms, char certificate[32768], char why[400]);
/* Makes another link to the same server: a lane of its own, still without a connection. It gets one
 * as a link does whose connection broke, once a call needs one. The server must prove on it, if
 * ever, what it proved on the first. `follows`: an earlier link of the lane was closed, of which
 * something may still be on its way. Then calls wait until this one has a connection. */
int smb_link_beside(struct smb_link *link, uint16_t lane, int follows, struct smb_link **beside);
/* The shortest round trip that the kernel saw as the link got its first connection; 0: no TCP. */
uint32_t smb_link_round_trip_us(struct smb_link *link);
/* Asks a Unix link for a segment's descriptor and maps it. One thread at a time, and no buffer uses
 * the link for calls. SMB_UNTRUSTED as smb_buffer_set_link. */
int smb_link_attach(struct smb_link *link, uint64_t segment_id, uint32_t epoch, uint32_t timeout_ms,
                    struct smb_segment **segment);
/* Shows a token on the link's connection, blocking up to timeout_ms, and on every later one; in the
 * place of an older one of the same segment. SMB_DENIED: the server does not take it, and *why is
 * of enum smb_denied. SMB_UNTRUSTED: it does, but could not prove that it is the segment's server;
 * the link is closed. Not at the same time as smb_link_attach. */
int smb_link_authorize(struct smb_link *link, const struct smb_token *token, uint32_t timeout_ms,
                       uint64_t *why);
/* As smb_link_authorize, but shows it from the next connection on. For a link that is about to get
 * one. SMB_OUT_OF_MEMORY. */
int smb_link_keep_token(struct smb_link *link, const struct smb_token *token);
/* 1 unless it was closed, by either side of the library. One whose connection broke is alive: it is
 * waiting for another. */
int smb_link_alive(struct smb_link *link);
/* 1 while it has a connection, as far as is known. */
int smb_link_connected(struct smb_link *link);
uint64_t smb_link_id(struct smb_link *link);
void smb_link_close(struct smb_link *link);
/* Waits until some link has calls but no connection, and puts it into the caller's hands: resume
 * it, or let it go. SMB_TIMEOUT; SMB_DISCONNECTED once the client is closed. */
int smb_client_wait_down(struct smb_client *client, uint32_t timeout_ms, uint64_t *link_id);
/* Connects again, for a link that smb_client_wait_down named, blocking up to timeout_ms.
 * SMB_NOT_FOUND: another server, or one that lost its memory, answers there (`instance` is its;
 * with accept_instance equal to it, it is taken). SMB_SESSION_ENDED closes the link. The link stays
 * in the caller's hands unless SMB_OK. */
int smb_link_resume_tcp(struct smb_link *link, const char *address, uint16_t port,
                        uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance);
int smb_link_resume_unix(struct smb_link *link, const char *path, uint64_t accept_instance,
                         uint32_t timeout_ms, uint64_t *instance);
int smb_link_resume_tls(struct smb_link *link, const struct smb_tls_peer *peer,
                        uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance,
                        char why[400]);
/* On a stream socket that is connected already, an end of a socketpair: fd is closed with the link,
 * or at once unless SMB_OK. Requests travel as records. The holder of the other end moves payloads
 * and answers' data by the addresses in them. The engine takes the connection back by shutting down
 * its direction of the socket. It then waits until the other end is closed, which must not be
 * before all memory named in records is left alone. SMB_INVALID for a client with checksums. */
int smb_client_connect_reference(struct smb_client *client, int fd, uint16_t lane,
                                 uint32_t timeout_ms, struct smb_link **link, uint64_t *instance);
int smb_link_resume_reference(struct smb_link *link, int fd, uint64_t accept_instance,
                              uint32_t timeout_ms, uint64_t *instance);
/* It gets no other connection: once this one breaks, the link is closed, and its calls end. */
void smb_link_once(struct smb_link *link);
/* Out of the caller's hands, without a connection; 1 if it still wants one. */
int smb_link_let_go(struct smb_link *link);
/* Of a link for one segment that has two copies: its frames carry this epoch from its next
 * connection on. A server that does not serve the segment then costs the link its connection. */
void smb_link_set_epoch(struct smb_link *link, uint32_t epoch);
/* Ends every call on it with that status, and every later one. */
void smb_link_fail(struct smb_link *link, int status);
int smb_link_wanted(struct smb_link *link);
/* Wakes and fails every call in progress, with SMB_LINK_LOST if it had in-flight requests, and
 * every later one, with SMB_DISCONNECTED; connecting ends so, too, within 0.1 s. Local segments go
 * on working. */
void smb_client_close(struct smb_client *client);
/* Frees it. No call is in progress, no buffer or link of it will be used again. */
void smb_client_destroy(struct smb_client *client);

/* One request of those that wait, see sync.h for what the words mean. */
struct smb_ask {
    int opcode;
    uint64_t segment;
    uint32_t epoch;
    uint64_t argument;
    uint64_t words[6];
};
struct smb_reply {
    int status;
    int sent;
    uint64_t a;
    uint64_t b;
};
struct smb_pending;
/* Sends it; wait as often as you like: SMB_BUSY means not yet. The link's lane is one that is used
 * for nothing else. SMB_UNTRUSTED as smb_buffer_set_link, but for AUTHORIZE. */
int smb_ask_start(struct smb_link *link, const struct smb_ask *ask, struct smb_pending **pending);
int smb_ask_wait(struct smb_pending *pending, uint32_t timeout_ms, struct smb_reply *reply);
/* Frees it; one that is not answered yet is given up. */
void smb_ask_end(struct smb_pending *pending);

/* The outcomes of the parts of a failed call. */
struct smb_unknown;
enum smb_outcome_state {
    SMB_OUTCOME_PENDING = 0,
    SMB_OUTCOME_APPLIED = 1,
    SMB_OUTCOME_NOT_APPLIED = 2,
    SMB_OUTCOME_UNKNOWN = 3
};
/* Blocks until every part's outcome is known, at most timeout_ms: SMB_TIMEOUT. A part that is not
 * applied by then never will be. */
int smb_unknown_resolve(struct smb_client *client, struct smb_unknown *unknown,
                        uint32_t timeout_ms);
/* Once resolved. Part `index`, false past the last. */
bool smb_unknown_part(const struct smb_unknown *unknown, uint32_t index, uint64_t *offset,
                      uint32_t *bytes, int *state);
void smb_unknown_release(struct smb_unknown *unknown);

/* ---- transfer -------------------------------------------------------------------------------- */

struct smb_buffer;

int smb_buffer_create(struct smb_client *client, const struct smb_layout *layout, int dtype,
                      struct smb_buffer **buffer);
/* Sets how segment `index` is reached: over a link, or through a local mapping (a reference is
 * taken). Set before the first call; after a reconnect make another smb_buffer, and destroy this
 * one when no call uses it any more. SMB_UNTRUSTED: the client wants proof and the link's server
 * has given none (smb_link_authorize), so nothing may be sent there. */
int smb_buffer_set_link(struct smb_buffer *buffer, uint32_t index, uint64_t segment_id,
                        uint32_t epoch, struct smb_link *link);
/* One more lane to the server of a segment whose first link is set. A call's chunks take the lanes
 * that have room. While something is on its way that a caller gave up, on one of them, nothing is
 * sent over any: that may not come later. SMB_INVALID past 1 + SMB_LANES_FURTHER_MAX; SMB_UNTRUSTED
 * as smb_buffer_set_link. */
int smb_buffer_add_lane(struct smb_buffer *buffer, uint32_t index, struct smb_link *link);
int smb_buffer_set_local(struct smb_buffer *buffer, uint32_t index, struct smb_segment *segment);
void smb_buffer_destroy(struct smb_buffer *buffer);

/* One call, filled in once by whoever asks: the engine reads it until the call is over, and async
 * operations copy it. Python fills the fields from `opcode` to `token` in one step, in this order
 * (smb/engine/calls.py). Range in bytes of the buffer, both multiples of the element size.
 *   READ            sink
 *   WRITE           source
 *   ACCUMULATE      source, op, scale; sink too if the new values are wanted
 *   FILL            argument: the element's bits in its low bytes
 *   ACCUMULATE_FROM other: a buffer with equal layout on the same servers. Or op SMB_REPLACE, scale
 *                   1 and several sources: the sum of each times its scale, added from the first on
 *   FETCH_ADD       8 bytes; argument: what to add; outcome.result: the old value
 *   COMPARE_SWAP    8 bytes; argument: new, expected: expected; outcome.result: the old value
 *   APPLY           op: the rule; hyper; other: the gradient, or source: its elements; states: as
 *                   many as the rule has; all of equal layout on the same servers and no buffer
 *                   twice; every segment of each is reached over a link */
struct smb_request {
    int opcode;
    uint64_t offset;
    uint64_t bytes;
    const void *source;
    void *sink;
    int op;
    double scale;
    uint64_t argument;
    uint64_t expected;
    /* enum smb_wire; READ, WRITE, ACCUMULATE and the source of ACCUMULATE_FROM, of float32: each
     * piece is rounded so, also if it is local. The new values that an ACCUMULATE fetches are
     * exact */
    int wire;
    /* of a lock of this buffer: the call counts only while the lock has it, and all segments are
     * reached over links. 0: none */
    uint64_t token;
    uint32_t timeout_ms;
    struct smb_buffer *other;
    /* of ACCUMULATE_FROM, source_count > 0: in place of `other` and `wire` */
    struct smb_buffer *sources[SMB_SOURCES_MAX];
    double scales[SMB_SOURCES_MAX];
    int wires[SMB_SOURCES_MAX];
    uint32_t source_count;
    struct smb_buffer *states[2];
    struct smb_hyper hyper;
    /* of SMB_WIRE_SPARSE: elements of the buffer, ascending, `count` of them, whose values are in
     * source; */
    const int64_t *indices;
    uint64_t count; /* offset and bytes are from the first to the last. No sink */
};
struct smb_outcome {
    int status;             /* SMB_OK, or the first failure */
    uint32_t segment;       /* index of the segment where it happened */
    uint64_t result;        /* FETCH_ADD, COMPARE_SWAP */
    uint64_t bytes_applied; /* acknowledged or done locally */
    /* 1 if any frame of this call may have reached a server or a local segment was changed */
    int sent;
    /* the caller's to release, or NULL: parts of a change that are not confirmed */
    struct smb_unknown *unknown;
};

/* Whether the caller wants a blocking call of this thread to end: asked every 100 ms or so by calls
 * that move data, settle or connect, while they hold nothing. Nonzero, from then on until the call
 * has returned: it ends as if its time was over. Set once, before the first call; may call the
 * engine. */
void smb_set_look(int (*look)(void));

/* Blocks until every piece is answered, failed, or timeout_ms passed. All servers of the range work
 * at once: frames are sent to all of them before the first answer is awaited, local pieces are done
 * in between. Returns outcome->status. */
int smb_transfer(struct smb_buffer *buffer, const struct smb_request *request,
                 struct smb_outcome *outcome);
/* 1: done, without waiting for anything, not even spinning: a call within one chunk that this
 * process has mapped and whose lock is free, in the time of its copy. 0: nothing was done. */
int smb_transfer_at_once(struct smb_buffer *buffer, const struct smb_request *request,
                         struct smb_outcome *outcome);

/* ---- async operations ------------------------------------------------------------------------ */

/* A client's async operations: see csrc/client/async.h. Operations of all windows that conflict
 * (overlap, and one changes the buffer) take effect in the order of their submission. */
struct smb_async;
/* How many bytes of its operations may be in flight. */
struct smb_window;
struct smb_operation;

int smb_async_create(struct smb_client *client, struct smb_async **async);
/* Once nothing is left of it: waits for its thread. Nothing in a child of fork. */
void smb_async_destroy(struct smb_async *async);
/* Credit in bytes; 0: measured. counts_calls: credit is a number of operations instead. */
int smb_window_create(struct smb_async *async, uint64_t credit, bool counts_calls,
                      struct smb_window **window);
uint64_t smb_window_credit(struct smb_window *window);
/* No operation of it is known any more. */
void smb_window_destroy(struct smb_window *window);
/* READ, WRITE or ACCUMULATE as smb_transfer, whose timeout counts for each part from when it
 * begins; `key` is the buffer's number, the same for all its handles, and a larger priority goes
 * first. Buffer NULL: a call of the caller's, of which the range is known and whether it changes
 * it (opcode). SMB_INVALID: unsound, or of memory that is a view of the buffer; smb_transfer does
 * or refuses it. SMB_DISCONNECTED: stopped. SMB_BUSY: too many. */
int smb_async_submit(struct smb_async *async, struct smb_window *window, struct smb_buffer *buffer,
                     const struct smb_request *request, uint64_t key, int priority, uint64_t tag);
enum smb_async_event_kind {
    SMB_ASYNC_DONE = 0,   /* the operation is no more */
    SMB_ASYNC_FAILED = 1, /* the caller may go on with it; then smb_async_end */
    SMB_ASYNC_BEGIN = 2,  /* the caller's call: it is its turn; then smb_async_end */
    /* by smb_async_stop, before it began; then smb_async_end */
    SMB_ASYNC_CANCELLED = 3
};
struct smb_async_event {
    struct smb_operation *operation;
    uint64_t tag;               /* as submitted */
    int what;                   /* enum smb_async_event_kind */
    struct smb_outcome outcome; /* the caller's, as after smb_transfer */
};
/* Waits until there is something to be taken: 1; 0 after timeout_ms. */
int smb_async_await_event(struct smb_async *async, uint32_t timeout_ms);
/* Takes events, the oldest first; returns how many. Does not block. */
uint32_t smb_async_take(struct smb_async *async, struct smb_async_event *events, uint32_t most);
/* Of an event that was taken, other than DONE: its turn is over. */
void smb_async_end(struct smb_async *async, struct smb_operation *operation);
/* 1: the operation of that tag had not begun, and is no more. 0: it has, or there is none. */
int smb_async_cancel(struct smb_async *async, uint64_t tag);
/* Waits until no earlier operation conflicts with a call on that range: SMB_TIMEOUT. *last: 0, and
 * then the last of the earlier ones: who waits again waits for the same. */
int smb_async_wait(struct smb_async *async, uint64_t key, uint64_t offset, uint64_t bytes,
                   bool changes, uint32_t timeout_ms, uint64_t *last);
/* Cancels what has not begun; nothing is submitted any more. */
void smb_async_stop(struct smb_async *async);

/* A contiguous view of a buffer all of whose segments are local: stripes mapped side by side. bytes
 * = the layout's, rounded up to pages. SMB_INVALID if a segment is not local. SMB_BUSY if one may
 * move to another server: a view could not follow. */
int smb_buffer_map(struct smb_buffer *buffer, void **address, uint64_t *bytes);
void smb_buffer_unmap(void *address, uint64_t bytes);

/* cffi: end */

#endif
