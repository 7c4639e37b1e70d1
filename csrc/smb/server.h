/* server.h: the functions of the engine that a memory server's daemon calls, from its control
 * threads. A function does not wait for clients or other servers unless its comment says so.
 * Conventions: smb/types.h. */
#ifndef SMB_PUBLIC_SERVER_H
#define SMB_PUBLIC_SERVER_H

#include <stdbool.h>
#include <stdint.h>

#include "smb/types.h"

struct smb_recovery;
struct smb_segment_info;
struct smb_segment;
struct smb_tls;

/* cffi: begin */

struct smb_server;
struct smb_server_counters {
    /* [transport][opcode]; SHM is the sum over the segments, deleted ones included */
    uint64_t operations[4][26];
    uint64_t bytes[4][26];
    uint64_t errors[33]; /* by the status that was answered, or for which a connection was closed */
    uint64_t connections_opened[4];
    uint64_t connections_now[4];
    /* connections closed at once because the process had no file descriptor left */
    uint64_t turned_away_total;
    uint64_t strangers_now; /* TCP connections that have not shown yet who they are */
    /* such connections closed early because too many others came */
    uint64_t strangers_evicted_total;
    uint64_t deferred_now; /* requests that wait for a chunk lock */
    uint64_t deferred_total;
    uint64_t waits_now;      /* requests deferred at locks, barriers and versions */
    uint64_t repeated_total; /* requests sent again after a connection broke */
    /* repeated changes that had been applied already, and were answered without being applied
     * again */
    uint64_t replayed_total;
    uint64_t backlog_bytes; /* in answers that their peers have not read yet */
    uint64_t backlog_total; /* how often a connection had to wait until its peer read */
    uint64_t journal_slots; /* in use: each connection that has changed something holds one */
    uint64_t journal_slots_most;
    uint64_t locks_granted; /* the users' and the publishers' locks */
    uint64_t locks_waited;  /* lock requests that had to wait */
    uint64_t locks_timed_out;
    uint64_t locks_expired; /* locks whose holder did not renew them */
    uint64_t locks_revoked; /* locks whose holder's session ended */
    uint64_t barriers_broken;
    uint64_t recovered_locks; /* chunk locks that a dead process had held */
    uint64_t segments;
    uint64_t segment_bytes; /* file bytes, as counted against the capacity */
};

/* Creates a server and starts loops >= 1 event-loop threads. `instance` identifies this run of the
 * daemon in answers to HELLO. SMB_INVALID: the number of loops. SMB_OUT_OF_MEMORY, SMB_SYSTEM. Free
 * with smb_server_destroy. */
int smb_server_create(uint64_t instance, int loops, uint64_t capacity_bytes,
                      struct smb_server **server);
/* Listens on a numeric IPv4 or IPv6 address. Port 0 picks a free port; *bound_port becomes the
 * port. SMB_INVALID: not such an address. SMB_SYSTEM (errno). */
int smb_server_listen_tcp(struct smb_server *server, const char *address, uint16_t port,
                          uint16_t *bound_port);
/* Requires TLS on TCP connections from here on. A peer must show a certificate of that authority,
 * for a role that uses data (smb/tls.h). A later call replaces the certificates for new
 * connections, and has the loops close those whose peer's certificate has expired or is not
 * accepted any more. For these alone, call it again with the same. Takes a reference to `tls`. */
void smb_server_use_tls(struct smb_server *server, struct smb_tls *tls);
/* Listens on a Unix socket, which accepts only peers of the same uid and of root. The new socket
 * file replaces an older one in one step, so the path always exists. The file stays when the server
 * is destroyed: by the file a client sees that the server's memory is on this host, and whether
 * that is still so the caller knows. */
int smb_server_listen_unix(struct smb_server *server, const char *path);
/* Memory for requests by reference: `count` slots of SMB_CHUNK_BYTES_MAX, page aligned, into which
 * payloads are written, and from which answers' data is fetched, by somebody outside the engine.
 * They are slots of the journal if there is a journal. All pages are allocated. SMB_OUT_OF_MEMORY.
 * Reference counted. The last reference must be released before the server is destroyed, and only
 * once nothing outside this process can reach the slots any more. */
struct smb_slots;
int smb_server_take_slots(struct smb_server *server, uint32_t count, struct smb_slots **slots);
void *smb_slots_payload(const struct smb_slots *slots, uint32_t index);
void smb_slots_release(struct smb_slots *slots);
/* Serves a peer that sends requests as records, with payloads in these slots. Takes a reference to
 * the slots. fd is one end of a socketpair. It is closed with the connection, or at once unless
 * SMB_OK. The holder of the other end carries the bytes to and from a client whose identity it has
 * checked. SMB_OUT_OF_MEMORY: the limit of connections is reached. */
int smb_server_adopt_reference(struct smb_server *server, int fd, struct smb_slots *slots);
/* Takes a reference to a served segment; drop it with smb_segment_release. Until then the segment's
 * memory stays allocated, even if the segment is deleted. SMB_NOT_FOUND. */
int smb_server_hold_segment(struct smb_server *server, uint64_t id, struct smb_segment **segment);
/* Requires tokens: from here on a connection may use a segment only after it has shown a token for
 * that segment. Call it before the server listens. */
void smb_server_guard(struct smb_server *server);
/* Replaces all keys of tokens. `count`, 1 to SMB_KEYS_MAX, is the number of generations; the
 * coordinator has the same keys. now_ms is the coordinator's clock, in milliseconds since 1970.
 * That clock may have been put back, so a lower generation number does not mean an older
 * generation. SMB_INVALID for another count. */
struct smb_key {
    uint32_t generation;
    uint8_t bytes[32];
};
int smb_server_set_keys(struct smb_server *server, uint32_t count, const struct smb_key *set,
                        uint64_t now_ms);
/* Checks a client's proof on the control plane, where keys for RDMA are given out. `shown->secret`
 * is the proof (channel/access.h), and `bond` identifies the client's certificate on that
 * connection (smb/security/bond.py). SMB_OK: the coordinator gave the session that token, and the
 * token is valid for *left_ns from now. SMB_DENIED. SMB_BUSY: this server has no key yet. */
int smb_server_check_proof(struct smb_server *server, uint64_t session,
                           const struct smb_token *shown, const uint8_t bond[32],
                           uint64_t *left_ns);
/* Creates the segment's file at path and serves it. SMB_OUT_OF_MEMORY: the capacity would be
 * exceeded; no file is left behind. */
int smb_server_create_segment(struct smb_server *server, const char *path, uint64_t id,
                              uint32_t epoch, int dtype, uint64_t data_bytes, uint32_t chunk_bytes);
/* Serves a file left by an earlier run. SMB_NOT_FOUND: the segment was deleted. SMB_EXISTS,
 * SMB_OUT_OF_MEMORY (capacity), and the errors of smb_segment_open. */
int smb_server_adopt_segment(struct smb_server *server, const char *path,
                             struct smb_segment_info *info);
/* Journals additions from here on in the file at path (created if missing), so that a kill does not
 * tear them. First completes the changes that the earlier run left unfinished. Call it after every
 * segment of the earlier run was adopted, and before the server listens. */
int smb_server_open_journal(struct smb_server *server, const char *path,
                            struct smb_recovery *recovery);
/* Ends a session on this server: its connections, locks, barrier seats, pins and waiting requests.
 * The session is refused from here on. */
void smb_server_end_session(struct smb_server *server, uint64_t session);
/* `all` true: every session that ended before now, also during earlier runs of the daemon, was
 * ended on this server. From then until this server forgets an ended session, a session that it
 * accepts cannot have lost a completion record by having ended. */
void smb_server_know_ended(struct smb_server *server, bool all);
/* Segments with two copies: docs/decisions/0025-second-copy.md. */
enum smb_replica_role { SMB_REPLICA_NONE = 0, SMB_REPLICA_PRIMARY = 1, SMB_REPLICA_BACKUP = 2 };
struct smb_replica_status {
    uint64_t segment;
    uint64_t group; /* id of the segment's bundle; all fields below are the bundle's */
    uint32_t epoch;
    int role;
    bool paired;
    bool dialled; /* primary: a connection to the backup was handed over and is open */
    /* for how long the two copies have had no working connection; 0: they are connected */
    uint32_t broken_ms;
    uint64_t unconfirmed; /* changes that the backup has not confirmed */
    uint64_t queued_bytes;
    /* primary: the status with which the backup ended the last connection; SMB_OK: one works */
    int refused;
};
/* Like smb_server_create_segment, for a copy of a segment with two. Until the copy gets a role,
 * requests for it are refused. `bundle`: the segment shares its role with all segments created with
 * this number, and moves with them; 0: its own id is used. SMB_INVALID: the bundle's segments have
 * another chunk size or length, or the bundle has 16 segments already. */
int smb_server_create_replica(struct smb_server *server, const char *path, uint64_t id,
                              uint64_t bundle, uint32_t epoch, int dtype, uint64_t data_bytes,
                              uint32_t chunk_bytes);
/* Sets the role of a segment and of its bundle, from `epoch` on. An epoch older than the present
 * one changes nothing, unless all segments that were given a role in that one were deleted, and
 * this one's last role is older. `paired`: the segment has a backup, or, with `copying`, is about
 * to get one (smb_server_copy). `peer`: the name of the other copy's server; a guarded backup
 * accepts changes only from that server. A segment that was created with one copy is gated: clients
 * that have mapped it get SMB_STALE_EPOCH and must go through this server. SMB_INVALID: the segment
 * needs a copy before it can have a backup, or is bound to its server (smb_server_bind), or the
 * name is too long. */
int smb_server_set_replica(struct smb_server *server, uint64_t id, uint32_t epoch, int role,
                           bool paired, bool copying, const char *peer);
/* Has each bundle without a role take the next one that is newer than what its segments had, even
 * if its role was ended in a later epoch: the records that the coordinator has now may be older.
 * The caller takes no roles any more from the coordinator that ended it. SMB_OUT_OF_MEMORY. */
int smb_server_forget_ends(struct smb_server *server);
/* Sends about `bytes` more bytes of a bundle to its new backup. Call it for any one member; for the
 * other members it only reports their progress. SMB_OK: *copied of *total bytes of this segment
 * were sent so far. SMB_BUSY: nothing can be sent now; the call has waited a little before it
 * returns. SMB_EXISTS: everything is sent and confirmed. SMB_STALE_EPOCH: this copy is not wanted
 * any more, or was abandoned. */
int smb_server_copy(struct smb_server *server, uint64_t id, uint32_t epoch, uint64_t bytes,
                    uint64_t *copied, uint64_t *total);
/* Gives up the copy under way. SMB_STALE_EPOCH: no copy is under way, or it is complete. */
int smb_server_abandon_copy(struct smb_server *server, uint64_t id, uint32_t epoch);
/* Tells the primary of that epoch to give way: from here on it asks the backup before each read,
 * regardless of its lease, until the segment's roles change. As soon as this returns the backup may
 * be promoted. SMB_STALE_EPOCH: this server is not the primary of a pair in that epoch. */
int smb_server_yield(struct smb_server *server, uint64_t id, uint32_t epoch);
/* Notes whether the coordinator's records have this role of the segment's bundle. While they do
 * not, a primary asks the backup before each read, regardless of its lease: the coordinator gave
 * the lease without knowing of the role, and another server may have taken over since. The next
 * role ends that. SMB_NOT_FOUND: the segment has no role. */
int smb_server_note_unrecorded(struct smb_server *server, uint64_t id, bool unrecorded);
/* Like smb_server_yield, for two copies that are about to switch their roles. For a second, or
 * until it gets another role, this primary also begins no change: requests for changes wait.
 * SMB_OK: the backup has everything. SMB_BUSY: not yet; call again. From an epoch in which it was
 * the primary, a server becomes the backup without a copy only if the new primary has everything
 * at that moment; otherwise smb_server_set_replica ends its role and returns SMB_INVALID. */
int smb_server_hand_over(struct smb_server *server, uint64_t id, uint32_t epoch);
/* Allows a segment with one copy to be gated and moved. From here on nobody can map a view of it.
 * SMB_BUSY: the segment is bound to this server. */
int smb_server_let_move(struct smb_server *server, uint64_t id);
/* Binds a segment to this server, for a user that could not follow a move. SMB_BUSY: the segment
 * may move already. */
int smb_server_bind(struct smb_server *server, uint64_t id);
/* Until this time, of CLOCK_BOOTTIME, this server may act as a primary without asking the
 * backup. */
void smb_server_serve_until(struct smb_server *server, uint64_t boot_ns);
/* Hands the primary a connected stream socket to the backup's data address, and the backup's
 * instance. The engine owns fd from here on, also if this fails. With `tls` the connection uses TLS
 * and accepts only the server whose certificate is for the name `expected`. SMB_DENIED: a guarded
 * server replicates only inside TLS. */
int smb_server_feed(struct smb_server *server, uint64_t id, uint32_t epoch, int fd,
                    uint64_t instance, struct smb_tls *tls, const char *expected);
/* Why TLS refused the last connection of a segment's primary to its backup, as the end of a
 * sentence about the backup; empty if TLS did not refuse it. SMB_NOT_FOUND. */
int smb_server_feed_why(struct smb_server *server, uint64_t id, char why[400]);
/* Answers requests that wait for the backup so that their clients try elsewhere. */
int smb_server_suspend(struct smb_server *server, uint64_t id);
/* Blocks until roles or connections have changed since the number `seen`, at most timeout_ms (0:
 * without limit). Returns the present number. */
uint64_t smb_server_await_replicas(struct smb_server *server, uint64_t seen, uint32_t timeout_ms);
/* Ends the wait of smb_server_await_replicas. */
void smb_server_wake_replicas(struct smb_server *server);
/* A segment on this server, as its file describes it. */
struct smb_held {
    uint64_t id;
    uint64_t file_bytes;
    /* the epoch of its last role; without a role, the epoch in which it was created */
    uint32_t epoch;
    uint32_t copy; /* enum smb_copy */
    int role;      /* enum smb_replica_role, as given in this run, in that epoch */
    int untouched; /* 1: nothing was ever written to it */
};
/* Describes at most `most` segments; returns how many the server has. */
uint64_t smb_server_held(struct smb_server *server, struct smb_held *held, uint64_t most);
/* Describes one segment. SMB_NOT_FOUND if this server does not have it. */
int smb_server_holds(struct smb_server *server, uint64_t id, struct smb_held *held);
/* Describes at most `most` segments; returns how many there are. */
uint64_t smb_server_replicas(struct smb_server *server, struct smb_replica_status *replicas,
                             uint64_t most);
/* Marks the segment deleted, stops serving it and unlinks its file. If the segment has a backup,
 * blocks, at most a second, until the backup has every change that may name it. SMB_NOT_FOUND. */
int smb_server_delete_segment(struct smb_server *server, uint64_t id);
/* Ends the segment's service as a home of locks, barriers and versions, also after a restart:
 * requests that may wait then get SMB_NOT_FOUND. SMB_BUSY unless the segment is idle
 * (sync/sync.h, sync_retire). *token is the last token of its lock. Repeating the call is
 * harmless. SMB_NOT_FOUND if this server does not have the segment. */
int smb_server_retire_segment(struct smb_server *server, uint64_t id, uint64_t idle_ms,
                              uint64_t *token);
/* Makes the next token of the segment's lock higher than `token`, which must be even (SMB_INVALID).
 * SMB_NOT_FOUND. */
int smb_server_raise_token(struct smb_server *server, uint64_t id, uint64_t token);
void smb_server_counters(struct smb_server *server, struct smb_server_counters *counters);
/* segment_bytes alone, without a look at each segment. */
uint64_t smb_server_used_bytes(struct smb_server *server);
/* How long requests took: from when a request was taken up until its answer was ready, or, for
 * requests that waited, until they were answered. */
void smb_server_latencies(struct smb_server *server, struct smb_latencies *latencies);
/* Counts of one segment or of one session. */
struct smb_share {
    uint64_t id;
    uint64_t operations[4][26];
    uint64_t bytes[4][26];
    uint64_t connections; /* of a session: open now */
};
/* The counts of each segment (SHM: by local clients on their own mapping), and those of each
 * session that has not ended, over its connections. Writes at most `most` entries in no particular
 * order; returns how many it wrote. */
uint64_t smb_server_segment_shares(struct smb_server *server, struct smb_share *shares,
                                   uint64_t most);
uint64_t smb_server_session_shares(struct smb_server *server, struct smb_share *shares,
                                   uint64_t most);
/* Requests of one kind that were answered SMB_DENIED. `proven`: a token of that session was shown
 * on the connection; otherwise anybody may have named the session. */
struct smb_denial {
    uint64_t session;
    uint64_t segment;
    uint64_t count;
    uint32_t opcode;
    uint32_t proven;
};
/* Writes the denials since the last call, at most `most`, oldest kind first, and forgets all of
 * them. The first 64 kinds are kept; *left_out counts the requests of all other kinds. Returns how
 * many were written. */
uint64_t smb_server_take_denials(struct smb_server *server, struct smb_denial *denials,
                                 uint64_t most, uint64_t *left_out);
/* The locks that are held and the requests that wait at one segment, now. */
enum smb_wait_kind {
    SMB_WAIT_LOCK = 0,
    SMB_WAIT_PUBLISHER = 1,
    SMB_WAIT_BARRIER = 2,
    SMB_WAIT_VERSION = 3,
    SMB_WAIT_SHARED = 4 /* one of several holders of a lock that is held shared */
};
struct smb_wait {
    uint64_t segment;
    uint64_t session; /* the holder's, for LOCK, SHARED and PUBLISHER; 0: the lock is free */
    uint64_t token;   /* the holder's token */
    uint64_t left_ms; /* time until the lock expires, unless it is renewed */
    uint32_t kind;    /* enum smb_wait_kind */
    uint32_t waiting; /* number of waiting requests */
    uint32_t arrived; /* parties that have arrived in the barrier's present round */
    uint32_t parties;
};
/* Describes the waits of all segments, at most `most` of them, in no particular order. Returns how
 * many there are, written or not. */
uint64_t smb_server_waits(struct smb_server *server, struct smb_wait *waits, uint64_t most);
/* Stops the loops, closes every connection and unmaps the segments. Their files stay, for the next
 * run. */
void smb_server_destroy(struct smb_server *server);

/* cffi: end */

#endif
