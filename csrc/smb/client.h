/* client.h: the functions of the engine that a client calls: links to servers and calls on buffers.
 * Functions with a timeout_ms, also in their request, block at most so
 * long; other functions do not wait for a server. Conventions: smb/types.h. */
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

/* Creates a client of that session, without a link. SMB_OUT_OF_MEMORY, SMB_SYSTEM (errno). Free
 * with smb_client_destroy. */
int smb_client_create(uint64_t session, struct smb_client **client);
/* Puts a checksum on every frame of every link, in both directions. Call it before the first link
 * is made. */
void smb_client_use_checksums(struct smb_client *client);
/* Requires that servers, too, prove that they know the key of a token's secret. Until its server
 * has proved it, a connection carries only HELLO and AUTHORIZE. Call it before the first link is
 * made. */
void smb_client_want_proof(struct smb_client *client);
/* The number of answers so far whose checksum was wrong. Servers count such requests. */
uint64_t smb_client_spoilt(struct smb_client *client);
/* Counts since smb_client_count was called; before that call nothing is counted, and counting costs
 * nothing. SHM: operations on the client's own mapping. TCP and UNIX: calls over links of that
 * kind; a call counts once, also if it took several frames or servers. Latencies are of whole
 * calls. Of the calls that did not wait at all, one in 64 is timed, and counts as 64. */
struct smb_client_counters {
    uint64_t operations[4][26];
    uint64_t bytes[4][26];
    uint64_t failed[33];     /* failed calls, by status */
    uint64_t repeated_total; /* frames sent again after a connection broke */
    uint64_t spoilt_total;
    struct smb_latencies latencies;
};
void smb_client_count(struct smb_client *client);
void smb_client_counters(struct smb_client *client, struct smb_client_counters *counters);
/* Connects and exchanges HELLO; blocks at most timeout_ms. *instance is the server's. A link is one
 * lane of the session: at any time a lane number may have at most one link to each server. */
int smb_client_connect_tcp(struct smb_client *client, const char *address, uint16_t port,
                           uint16_t lane, uint32_t timeout_ms, struct smb_link **link,
                           uint64_t *instance);
int smb_client_connect_unix(struct smb_client *client, const char *path, uint16_t lane,
                            uint32_t timeout_ms, struct smb_link **link, uint64_t *instance);
/* A memory server reached over TCP inside TLS. Only the server whose certificate is for the name
 * `expected` is accepted. The caller owns all memory, and keeps it for the length of the call. */
struct smb_tls_peer {
    const char *address;
    uint16_t port;
    struct smb_tls *tls;
    const char *expected;
};
/* SMB_UNTRUSTED: a server with another name answers, or the server refuses this client; why[] says
 * which. */
int smb_client_connect_tls(struct smb_client *client, const struct smb_tls_peer *peer,
                           uint16_t lane, uint32_t timeout_ms, struct smb_link **link,
                           uint64_t *instance, char why[400]);
/* Asks, over a separate connection, who serves the control plane at a numeric address; blocks at
 * most timeout_ms. SMB_OK: the peer has that role and name, and certificate[] has its certificate
 * as PEM. On failure, or if the peer refuses our certificate, why[] is the end of a sentence about
 * the peer; an empty why[] means that the network is to blame. SMB_UNTRUSTED, SMB_DISCONNECTED,
 * SMB_TIMEOUT. */
int smb_tls_meet(struct smb_tls *tls, const char *address, uint16_t port, uint32_t role,
                 const char *host, uint32_t timeout_ms, char certificate[32768], char why[400]);
/* Makes another link to the same server, with its own lane and not yet connected. It is connected
 * in the same way as a link whose connection broke, once a call needs it. If the server proved
 * itself on `link`, it must do so on *beside, too. `follows`: an earlier link of this lane was
 * closed while some of its requests may still arrive; calls then wait until the new link is
 * connected. */
int smb_link_beside(struct smb_link *link, uint16_t lane, int follows, struct smb_link **beside);
/* The shortest round trip that the kernel had measured when the link was first connected, in
 * microseconds; 0 if the link does not use TCP. */
uint32_t smb_link_round_trip_us(struct smb_link *link);
/* Asks for a segment's descriptor over a Unix link and maps the segment. Only one thread may call
 * this for a link at a time, and no buffer may use the link. SMB_UNTRUSTED as smb_buffer_set_link.
 * Release with smb_segment_release. */
int smb_link_attach(struct smb_link *link, uint64_t segment_id, uint32_t epoch, uint32_t timeout_ms,
                    struct smb_segment **segment);
/* Shows a token on the link's connection, blocking at most timeout_ms, and on every later
 * connection of the link. It replaces an older token for the same segment. SMB_DENIED: the server
 * refuses the token; *why is of enum smb_denied. SMB_UNTRUSTED: the server accepts the token but
 * did not prove that it is the segment's server; the link is closed. Must not run at the same time
 * as smb_link_attach. */
int smb_link_authorize(struct smb_link *link, const struct smb_token *token, uint32_t timeout_ms,
                       uint64_t *why);
/* As smb_link_authorize, but shows the token only from the link's next connection on, for a link
 * that is about to be connected. SMB_OUT_OF_MEMORY. */
int smb_link_keep_token(struct smb_link *link, const struct smb_token *token);
/* 1 unless the link was closed, by its user or by the engine. A link whose connection broke is
 * alive: it waits for another connection. */
int smb_link_alive(struct smb_link *link);
/* 1 while the link has a connection, as far as this process knows. */
int smb_link_connected(struct smb_link *link);
/* The number by which smb_client_wait_down names the link. */
uint64_t smb_link_id(struct smb_link *link);
/* Closes the link, without waiting for that, and drops the caller's reference. Its calls end as
 * lost. Buffers keep their own references. In a child of fork it does nothing: the parent uses the
 * connection. */
void smb_link_close(struct smb_link *link);
/* Blocks until a link has calls but no connection, and gives the caller charge of that link: the
 * caller must resume the link (smb_link_resume_*) or let it go (smb_link_let_go). SMB_TIMEOUT.
 * SMB_DISCONNECTED once the client is closed. */
int smb_client_wait_down(struct smb_client *client, uint32_t timeout_ms, uint64_t *link_id);
/* Reconnects a link that smb_client_wait_down named; blocks at most timeout_ms. SMB_NOT_FOUND:
 * another server answers, or the server has lost its memory; *instance is the answering server's.
 * Pass that number as accept_instance to accept this server. SMB_SESSION_ENDED closes the link. The
 * caller keeps charge of the link unless SMB_OK. */
int smb_link_resume_tcp(struct smb_link *link, const char *address, uint16_t port,
                        uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance);
int smb_link_resume_unix(struct smb_link *link, const char *path, uint64_t accept_instance,
                         uint32_t timeout_ms, uint64_t *instance);
int smb_link_resume_tls(struct smb_link *link, const struct smb_tls_peer *peer,
                        uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance,
                        char why[400]);
/* Connects over a stream socket that is already connected: fd is one end of a socketpair, and is
 * closed with the link, or at once unless SMB_OK. Requests are sent as records. The holder of the
 * other end moves payloads and answers' data by the addresses in the records. To take the
 * connection back the engine shuts down its direction of the socket and waits until the holder has
 * closed the other end. The holder must not close it while it may still touch memory that a record
 * names. SMB_INVALID for a client with checksums. */
int smb_client_connect_reference(struct smb_client *client, int fd, uint16_t lane,
                                 uint32_t timeout_ms, struct smb_link **link, uint64_t *instance);
int smb_link_resume_reference(struct smb_link *link, int fd, uint64_t accept_instance,
                              uint32_t timeout_ms, uint64_t *instance);
/* Forbids reconnecting: once the present connection breaks, the link is closed and its calls
 * end. */
void smb_link_once(struct smb_link *link);
/* Gives up charge of a link without a connection. Returns 1 if the link still wants a
 * connection. */
int smb_link_let_go(struct smb_link *link);
/* For a link to one segment with two copies: from its next connection on its frames carry this
 * epoch. If the server does not serve the segment in that epoch, the link loses its connection. */
void smb_link_set_epoch(struct smb_link *link, uint32_t epoch);
/* Ends every call on the link with `status`, and every later call. */
void smb_link_fail(struct smb_link *link, int status);
/* 1 while the link has something to send but no connection. */
int smb_link_wanted(struct smb_link *link);
/* Wakes and fails every call in progress, with SMB_LINK_LOST if it had in-flight requests, and
 * every later call with SMB_DISCONNECTED. Connection attempts end in the same way, within 0.1 s.
 * Operations on mapped segments go on working. Does not free the client. */
void smb_client_close(struct smb_client *client);
/* Frees the client. No call may be in progress, and none of its buffers and links may be used
 * again. */
void smb_client_destroy(struct smb_client *client);

/* One request that may wait (locks, barriers, versions, pins). sync/sync.h explains the words. */
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
/* Sends the request; then call smb_ask_wait until it returns something other than SMB_BUSY, which
 * means that the answer has not come yet. The link's lane must not be used for anything else. Free
 * *pending with smb_ask_end. SMB_UNTRUSTED as smb_buffer_set_link, except for AUTHORIZE. */
int smb_ask_start(struct smb_link *link, const struct smb_ask *ask, struct smb_pending **pending);
int smb_ask_wait(struct smb_pending *pending, uint32_t timeout_ms, struct smb_reply *reply);
/* Frees the request, unless it is NULL, and sets it to NULL. If it is not answered yet it is given
 * up, and a lock that its answer brings is released at once. In a child of fork it does nothing:
 * the request is the parent's. */
void smb_ask_end(struct smb_pending **pending);

/* The outcomes of the parts of a failed call. Reference counted. */
struct smb_unknown;
enum smb_outcome_state {
    SMB_OUTCOME_PENDING = 0,
    SMB_OUTCOME_APPLIED = 1,
    SMB_OUTCOME_NOT_APPLIED = 2,
    SMB_OUTCOME_UNKNOWN = 3
};
/* Blocks until the outcome of every part is known, at most timeout_ms (SMB_TIMEOUT). A part that is
 * SMB_OUTCOME_NOT_APPLIED by then will never be applied. */
int smb_unknown_resolve(struct smb_client *client, struct smb_unknown *unknown,
                        uint32_t timeout_ms);
/* Reads part `index`, after smb_unknown_resolve. Returns false past the last part. */
bool smb_unknown_part(const struct smb_unknown *unknown, uint32_t index, uint64_t *offset,
                      uint32_t *bytes, int *state);
void smb_unknown_release(struct smb_unknown *unknown);

/* ---- transfer -------------------------------------------------------------------------------- */

struct smb_buffer;

/* Creates a buffer whose segments are not reachable yet. SMB_INVALID: the layout or the dtype is
 * invalid, or they do not fit each other. SMB_OUT_OF_MEMORY. Free with smb_buffer_destroy. */
int smb_buffer_create(struct smb_client *client, const struct smb_layout *layout, int dtype,
                      struct smb_buffer **buffer);
/* Sets how segment `index` is reached: over a link, or through a local mapping (which takes a
 * reference). Call it before the buffer's first call. After a reconnect create a new smb_buffer,
 * and destroy the old one when no call uses it. SMB_UNTRUSTED: the client requires proof and the
 * link's server has not given it (smb_link_authorize), so nothing may be sent there. */
int smb_buffer_set_link(struct smb_buffer *buffer, uint32_t index, uint64_t segment_id,
                        uint32_t epoch, struct smb_link *link);
/* Adds a lane to the server of a segment whose first link is set. The chunks of a call use
 * whichever lanes have room. While a request that its caller gave up may still arrive on one of the
 * lanes, nothing is sent on any of them, because that request must not arrive later than a newer
 * one. SMB_INVALID past 1 + SMB_LANES_FURTHER_MAX links; SMB_UNTRUSTED as smb_buffer_set_link. */
int smb_buffer_add_lane(struct smb_buffer *buffer, uint32_t index, struct smb_link *link);
int smb_buffer_set_local(struct smb_buffer *buffer, uint32_t index, struct smb_segment *segment);
/* Frees the buffer and drops its references. No call may use it. */
void smb_buffer_destroy(struct smb_buffer *buffer);

/* One call. The caller owns it and fills it in once; the engine reads it until the call is over,
 * and async operations copy it. Python fills the fields from `opcode` to `token` in one step, in
 * this order (smb/engine/calls.py). The range is in bytes of the buffer; offset and length are
 * multiples of the element size.
 *   READ            sink
 *   WRITE           source
 *   ACCUMULATE      source, op, scale; sink too if the new values are wanted
 *   FILL            argument: the element's bits in its low bytes
 *   ACCUMULATE_FROM other: a buffer with equal layout on the same servers. Or op SMB_REPLACE, scale
 *                   1 and several sources: the sum of each source times its scale, added in order
 *   FETCH_ADD       one element of a dtype of smb_dtype_is_atomic; argument: the addend's bits, in
 *                   the low bytes; outcome.result: the old value's
 *   COMPARE_SWAP    likewise; argument: new, expected: expected; outcome.result: the old value's.
 *                   Bits are compared
 *   APPLY           op: the rule; hyper; other: the gradient, or source: its elements; states: as
 *                   many as the rule has. All buffers have equal layout, lie on the same servers
 *                   and are different; every segment of each is reached over a link */
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
    /* enum smb_wire, for READ, WRITE, ACCUMULATE and the source of ACCUMULATE_FROM, of float32.
     * Each piece is rounded to this format, also if its segment is local. The new values that an
     * ACCUMULATE fetches are exact */
    int wire;
    /* the token of a lock of this buffer (or of `warden`), or 0: the call is applied only while the
     * lock has this token, and all segments must be reached over links */
    uint64_t token;
    uint32_t timeout_ms;
    struct smb_buffer *other;
    /* for ACCUMULATE_FROM with source_count > 0, in place of `other` and `wire` */
    struct smb_buffer *sources[SMB_SOURCES_MAX];
    double scales[SMB_SOURCES_MAX];
    int wires[SMB_SOURCES_MAX];
    uint32_t source_count;
    struct smb_buffer *states[2];
    struct smb_hyper hyper;
    /* for SMB_WIRE_SPARSE, of ACCUMULATE and READ: the ascending indices in the buffer of the
     * `count` elements whose values are in source, or go to sink. offset and bytes span the first
     * to the last of them. A READ asks for each run of neighbours within a chunk by a request of
     * its own, without waiting for the answers before; the wire has no sparse READ */
    const int64_t *indices;
    uint64_t count;
    /* the buffer whose lock has the token, or NULL: this one. Each of its segments lies on the
     * server of this buffer's segment of the same index, and is reached over a link. Not for async
     * operations */
    struct smb_buffer *warden;
};
struct smb_outcome {
    int status;             /* SMB_OK, or the first failure */
    uint32_t segment;       /* index of the segment where it happened */
    uint64_t result;        /* FETCH_ADD, COMPARE_SWAP */
    uint64_t bytes_applied; /* acknowledged or done locally */
    /* 1 if a frame of this call may have reached a server, or a local segment was changed */
    int sent;
    /* the parts of a change whose outcome is not known, or NULL; the caller must release it */
    struct smb_unknown *unknown;
};
/* Releases the unknown parts, if there are any, and sets them to NULL. */
void smb_outcome_release(struct smb_outcome *outcome);

/* Sets, for the whole process, a function that says whether the blocking call of the thread it runs
 * on shall end, for example after a signal. Calls that move data, settle or connect ask it about
 * every 100 ms, while they hold no lock. Nonzero: the call ends as if its timeout had passed; the
 * function must then return nonzero until the call has returned. Set it once, before the first
 * call. The function may call the engine. */
void smb_set_look(int (*look)(void));

/* Executes one call; blocks until every piece is answered or failed, or timeout_ms has passed. All
 * servers of the range work at once: frames are sent to all of them before the first answer is
 * awaited, and local pieces are done in between. The caller owns all memory in `request`. Returns
 * outcome->status. */
int smb_transfer(struct smb_buffer *buffer, const struct smb_request *request,
                 struct smb_outcome *outcome);
/* Executes a call if that needs no waiting, not even spinning: a call within one chunk that this
 * process has mapped and whose lock is free. It takes the time of its copy. Returns 1 if the call
 * was done, 0 if nothing was done. */
int smb_transfer_at_once(struct smb_buffer *buffer, const struct smb_request *request,
                         struct smb_outcome *outcome);

/* Maps a contiguous view of a buffer whose segments are all local: stripes mapped side by side.
 * *bytes is the layout's size, rounded up to pages. SMB_INVALID: a segment is not local. SMB_BUSY:
 * a segment may move to another server, and a view could not follow. Unmap with
 * smb_buffer_unmap. */
int smb_buffer_map(struct smb_buffer *buffer, void **address, uint64_t *bytes);
void smb_buffer_unmap(void *address, uint64_t bytes);

/* cffi: end */

#endif
