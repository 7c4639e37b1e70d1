/* server.h: what a memory server's daemon asks of the engine. Conventions: smb/types.h. */
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
    /* [transport][opcode]; SHM sums the segments', deleted ones included */
    uint64_t operations[4][26];
    uint64_t bytes[4][26];
    uint64_t errors[33]; /* by status as answered, or as the reason to close a connection */
    uint64_t connections_opened[4];
    uint64_t connections_now[4];
    /* connections closed at once, as there was no descriptor left for them */
    uint64_t turned_away_total;
    uint64_t strangers_now;           /* that came over TCP, and have not shown yet who they are */
    uint64_t strangers_evicted_total; /* of them closed early, as too many others came */
    uint64_t deferred_now;            /* requests that wait for a chunk lock */
    uint64_t deferred_total;
    uint64_t waits_now;      /* requests deferred at locks, barriers and versions */
    uint64_t repeated_total; /* requests that were sent again after a connection broke */
    /* of them changes that had been made, and were answered without being made again */
    uint64_t replayed_total;
    uint64_t backlog_bytes; /* of answers that wait for their peers to read */
    uint64_t backlog_total; /* times that a connection had to wait for that */
    uint64_t journal_slots; /* in use: a connection that ever changed something has one */
    uint64_t journal_slots_most;
    uint64_t locks_granted; /* user's and publishers' alike */
    uint64_t locks_waited;  /* requests for them that had to wait */
    uint64_t locks_timed_out;
    uint64_t locks_expired; /* whose holder did not renew them */
    uint64_t locks_revoked; /* whose holder's session ended */
    uint64_t barriers_broken;
    uint64_t recovered_locks; /* chunk locks found held by a dead process */
    uint64_t segments;
    uint64_t segment_bytes; /* file bytes, as counted against the capacity */
};

/* `instance` identifies this run of the daemon in HELLO replies; loops >= 1 event-loop threads are
 * started. */
int smb_server_create(uint64_t instance, int loops, uint64_t capacity_bytes,
                      struct smb_server **server);
/* Listens; port 0 picks a free one, written to *bound_port. Address is numeric IPv4 or IPv6. */
int smb_server_listen_tcp(struct smb_server *server, const char *address, uint16_t port,
                          uint16_t *bound_port);
/* From here on TCP connections must speak TLS. They show a certificate of that authority, of a role
 * that uses data (tls.h). Again: for those that come from now on. Takes a reference. */
void smb_server_use_tls(struct smb_server *server, struct smb_tls *tls);
/* Only peers of the same uid, and root, are let in. The file takes the place of what was there, so
 * there is always one. It stays when the server is destroyed: clients see by it that a server's
 * memory is on this host, and the caller knows whether it still is. */
int smb_server_listen_unix(struct smb_server *server, const char *path);
/* Memory that a peer's payloads are put into from outside, and answers' data fetched from: `count`
 * places of SMB_CHUNK_BYTES_MAX, each page aligned, slots of the journal if there is one. All of it
 * is allocated. SMB_OUT_OF_MEMORY. Counted references: the last one gives them back, before the
 * server is destroyed, and when nobody outside can reach them any more. */
struct smb_slots;
int smb_server_take_slots(struct smb_server *server, uint32_t count, struct smb_slots **slots);
void *smb_slots_payload(const struct smb_slots *slots, uint32_t index);
void smb_slots_release(struct smb_slots *slots);
/* Serves one more peer, which sends records: its payloads are in these slots. Takes a reference to
 * them. fd is an end of a socketpair. The descriptor is closed with the connection, or at once
 * unless SMB_OK. The holder of the other end carries its bytes to a client, and has checked that
 * client. SMB_OUT_OF_MEMORY: there are as many connections as may be. */
int smb_server_adopt_reference(struct smb_server *server, int fd, struct smb_slots *slots);
/* A reference to a segment that is served, for smb_segment_release: as long as it is held the
 * segment's memory is not given back, though it be deleted. SMB_NOT_FOUND. */
int smb_server_hold_segment(struct smb_server *server, uint64_t id, struct smb_segment **segment);
/* Before it listens: from here on a connection may use no segment that it has shown no token
 * for. */
void smb_server_guard(struct smb_server *server);
/* The keys of so many generations of tokens, 1 to SMB_KEYS_MAX, in the place of all known before.
 * The coordinator has the same. now_ms: what its clock says, in milliseconds since 1970. That clock
 * may have been put back: no generation is older by its number. SMB_INVALID for another count. */
struct smb_key {
    uint32_t generation;
    uint8_t bytes[32];
};
int smb_server_set_keys(struct smb_server *server, uint32_t count, const struct smb_key *set,
                        uint64_t now_ms);
/* A client's proof on the control plane, for keys of RDMA: `shown->secret` is its proof (access.h),
 * and `bond` says whose certificate was shown there (smb/security/bond.py).
 * SMB_OK: the coordinator gave the session that token, and it is good for *left_ns from now.
 * SMB_DENIED; SMB_BUSY before a key is known. */
int smb_server_check_proof(struct smb_server *server, uint64_t session,
                           const struct smb_token *shown, const uint8_t bond[32],
                           uint64_t *left_ns);
/* Creates the segment's file at path and serves it. SMB_OUT_OF_MEMORY past the capacity, nothing is
 * left then. */
int smb_server_create_segment(struct smb_server *server, const char *path, uint64_t id,
                              uint32_t epoch, int dtype, uint64_t data_bytes, uint32_t chunk_bytes);
/* Serves a file left by an earlier run. */
int smb_server_adopt_segment(struct smb_server *server, const char *path,
                             struct smb_segment_info *info);
/* From here on additions are journalled in the file at path (made if it is not there), so that a
 * kill does not tear them. Call it when every segment of an earlier run is adopted and before the
 * server listens: it finishes what that run left half done. */
int smb_server_open_journal(struct smb_server *server, const char *path,
                            struct smb_recovery *recovery);
/* Everything that the session holds here is given up: connections, locks, seats, pins, waits. It is
 * not let in again. */
void smb_server_end_session(struct smb_server *server, uint64_t session);
/* `all`: every session that ended before now, also during earlier runs, has been ended here. Until
 * this server forgets one of them, a session that is let in never lost a record because it had
 * ended. */
void smb_server_know_ended(struct smb_server *server, bool all);
/* Segments with two copies: docs/decisions/0025. */
enum smb_replica_role { SMB_REPLICA_NONE = 0, SMB_REPLICA_PRIMARY = 1, SMB_REPLICA_BACKUP = 2 };
struct smb_replica_status {
    uint64_t segment;
    uint64_t group; /* the bundle that it moves with; all that follows is of the bundle */
    uint32_t epoch;
    int role;
    bool paired;
    bool dialled;         /* primary: a connection to the backup was handed over, and is open */
    uint32_t broken_ms;   /* for how long the two have had no connection that works; 0: they have */
    uint64_t unconfirmed; /* changes */
    uint64_t queued_bytes;
    int refused; /* primary: the status with which the last connection ended; SMB_OK: none such */
};
/* As smb_server_create_segment, of one of them: nobody is let in until it has a role. `bundle`: it
 * moves with the segments that were made with this number, and has their role; 0: its own id.
 * SMB_INVALID: those are cut in another way, or are 16 already. */
int smb_server_create_replica(struct smb_server *server, const char *path, uint64_t id,
                              uint64_t bundle, uint32_t epoch, int dtype, uint64_t data_bytes,
                              uint32_t chunk_bytes);
/* Its role, and that of its bundle, from an epoch on; an older one than is known is left.
 * `paired`: the primary of a segment that has a backup, or (`copying`) one that gets it:
 * smb_server_copy. `peer`: the name of the server of the other copy; a guarded backup takes
 * changes from that server alone. A segment that has been made with one copy is gated: clients
 * that have it mapped get SMB_STALE_EPOCH, and all they do passes this server. SMB_INVALID: it
 * cannot have a backup without being copied, or stays (smb_server_bind), or the name is too
 * long. */
int smb_server_set_replica(struct smb_server *server, uint64_t id, uint32_t epoch, int role,
                           bool paired, bool copying, const char *peer);
/* Sends about so many bytes more to the new backup, for one of a bundle's members; of the others
 * it says how far they are. SMB_OK: *copied of *total bytes of this one went there so far.
 * SMB_BUSY: nothing can be sent now; waits a little before it says so. SMB_EXISTS: all is there
 * and confirmed. SMB_STALE_EPOCH: that copy is not wanted any more, or was given up. */
int smb_server_copy(struct smb_server *server, uint64_t id, uint32_t epoch, uint64_t bytes,
                    uint64_t *copied, uint64_t *total);
/* Goes on without the copy. SMB_STALE_EPOCH: there is none under way, or it is whole. */
int smb_server_abandon_copy(struct smb_server *server, uint64_t id, uint32_t epoch);
/* To the primary of that epoch: each read asks the backup from here on, whatever the lease says,
 * until the segment gets other roles. Once this has returned the backup may be promoted at any
 * moment. SMB_STALE_EPOCH: it is not the primary of a pair in that epoch. */
int smb_server_yield(struct smb_server *server, uint64_t id, uint32_t epoch);
/* A segment with one copy may be gated, and move, from here on: nobody gets a view of it any more.
 * SMB_BUSY: it stays. */
int smb_server_let_move(struct smb_server *server, uint64_t id);
/* The other way round: somebody uses it who could not follow. SMB_BUSY: it may move. */
int smb_server_bind(struct smb_server *server, uint64_t id);
/* Until when this server may take itself for the primary unasked: of CLOCK_BOOTTIME. */
void smb_server_serve_until(struct smb_server *server, uint64_t boot_ns);
/* To the primary: a connected stream socket to the backup's data address, which is the engine's
 * from here on, also if this fails; and that server's instance. With `tls` it goes inside TLS, to
 * the server whose certificate is for the name `expected`, and to no other. SMB_DENIED: a guarded
 * server feeds nobody without TLS. */
int smb_server_feed(struct smb_server *server, uint64_t id, uint32_t epoch, int fd,
                    uint64_t instance, struct smb_tls *tls, const char *expected);
/* What TLS had against the last connection of a segment's primary to its backup, as the end of a
 * sentence about the backup; empty: nothing. SMB_NOT_FOUND. */
int smb_server_feed_why(struct smb_server *server, uint64_t id, char why[400]);
/* Requests that wait for the backup are sent elsewhere. */
int smb_server_suspend(struct smb_server *server, uint64_t id);
/* Waits until roles or connections have changed since they were at `seen`; returns where they are
 * now. timeout_ms 0: for ever. */
uint64_t smb_server_await_replicas(struct smb_server *server, uint64_t seen, uint32_t timeout_ms);
/* Ends such a wait. */
void smb_server_wake_replicas(struct smb_server *server);
/* A segment that is here, as its file says it. */
struct smb_held {
    uint64_t id;
    uint64_t file_bytes;
    uint32_t epoch; /* of its last role; of one without a role, in which it was made */
    uint32_t copy;  /* enum smb_copy */
    int role;       /* enum smb_replica_role, which this run was given */
};
/* Fills in at most `most`; returns how many there are. */
uint64_t smb_server_held(struct smb_server *server, struct smb_held *held, uint64_t most);
/* One of them. SMB_NOT_FOUND if it is not here. */
int smb_server_holds(struct smb_server *server, uint64_t id, struct smb_held *held);
/* Fills in at most `most`; returns how many there are. */
uint64_t smb_server_replicas(struct smb_server *server, struct smb_replica_status *replicas,
                             uint64_t most);
/* Marks it deleted, unlinks its file, stops serving it. SMB_NOT_FOUND if it is not here. */
int smb_server_delete_segment(struct smb_server *server, uint64_t id);
/* Nothing that waits is asked of it any more, also after a restart: such requests get
 * SMB_NOT_FOUND. Only if it is idle (sync.h's sync_retire); else SMB_BUSY. *token is the last one
 * of its lock. Repeating it is harmless. SMB_NOT_FOUND if it is not here. */
int smb_server_retire_segment(struct smb_server *server, uint64_t id, uint64_t idle_ms,
                              uint64_t *token);
/* The next token of its lock will be higher than this one, an even number (SMB_INVALID).
 * SMB_NOT_FOUND if it is not here. */
int smb_server_raise_token(struct smb_server *server, uint64_t id, uint64_t token);
void smb_server_counters(struct smb_server *server, struct smb_server_counters *counters);
/* From when a request was taken up until its answer was ready; of what waits until it was
 * answered. */
void smb_server_latencies(struct smb_server *server, struct smb_latencies *latencies);
/* Counts of one segment, or of one session. */
struct smb_share {
    uint64_t id;
    uint64_t operations[4][26];
    uint64_t bytes[4][26];
};
/* Counts for each segment (SHM: by local clients on their own mapping), and over the connections of
 * each session that has not ended. Writes at most `most`, in no order; returns how many. */
uint64_t smb_server_segment_shares(struct smb_server *server, struct smb_share *shares,
                                   uint64_t most);
uint64_t smb_server_session_shares(struct smb_server *server, struct smb_share *shares,
                                   uint64_t most);
/* Requests of one kind that were answered SMB_DENIED. `proven`: a token was shown of that session;
 * else anybody may have named it. */
struct smb_denial {
    uint64_t session;
    uint64_t segment;
    uint64_t count;
    uint32_t opcode;
    uint32_t proven;
};
/* Writes those since the last call, at most `most`, oldest kind first, and forgets all. Of many
 * kinds the first 64 are kept; *left_out counts the requests of all others. Returns how many. */
uint64_t smb_server_take_denials(struct smb_server *server, struct smb_denial *denials,
                                 uint64_t most, uint64_t *left_out);
/* Locks held, and waits, at one segment, now. */
enum smb_wait_kind {
    SMB_WAIT_LOCK = 0,
    SMB_WAIT_PUBLISHER = 1,
    SMB_WAIT_BARRIER = 2,
    SMB_WAIT_VERSION = 3
};
struct smb_wait {
    uint64_t segment;
    uint64_t session; /* of the holder of LOCK and PUBLISHER; 0: nobody holds it */
    uint64_t token;   /* of this holding */
    uint64_t left_ms; /* until it runs out, unless it is renewed */
    uint32_t kind;    /* enum smb_wait_kind */
    uint32_t waiting; /* requests */
    uint32_t arrived; /* at the barrier's round under way */
    uint32_t parties;
};
/* Writes those of all segments, at most `most`, in no order; returns how many there are, written or
 * not. */
uint64_t smb_server_waits(struct smb_server *server, struct smb_wait *waits, uint64_t most);
/* Stops the loops, closes every connection, unmaps (files stay, for the next run). */
void smb_server_destroy(struct smb_server *server);

/* cffi: end */

#endif
