/* segment.h: segments in memory that is mapped, at the server and at clients of its host.
 * Conventions: smb/types.h. */
#ifndef SMB_PUBLIC_SEGMENT_H
#define SMB_PUBLIC_SEGMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "smb/types.h"

/* cffi: begin */

struct smb_segment;
struct smb_segment_info {
    uint64_t id;
    uint32_t epoch;
    uint32_t dtype;
    uint32_t chunk_bytes;
    uint64_t data_bytes;
    uint64_t file_bytes;
    uint32_t deleted;
    uint64_t recovered_locks;
};

/* File size of a segment that holds data_bytes, header and chunk table included; 0 on overflow or
 * bad arguments. This is what counts against a server's capacity. */
uint64_t smb_segment_file_bytes(uint64_t data_bytes, uint32_t chunk_bytes);
/* Creates the file (all pages allocated, zeroed), maps it. SMB_EXISTS, SMB_OUT_OF_MEMORY,
 * SMB_INVALID, SMB_SYSTEM. */
int smb_segment_create(const char *path, uint64_t id, uint32_t epoch, int dtype,
                       uint64_t data_bytes, uint32_t chunk_bytes, struct smb_segment **segment);
/* Maps an existing file; every field of its header is checked against the file's real size before
 * it is used. SMB_UNTRUSTED if it is not a file that this user alone can change. */
int smb_segment_open(const char *path, struct smb_segment **segment);
/* The same from a descriptor, which is duplicated, of a file that `owner` alone can change.
 * SMB_VERSION if another build's locks make sharing impossible, SMB_NAMESPACE if another PID
 * namespace than the server's does. */
int smb_segment_open_fd(int fd, uint32_t owner, struct smb_segment **segment);
/* Whether a client believes the listener of a Unix socket, which is of that user: its own user and
 * root. Not others as root either: it would take locks in memory that they can write to, and what
 * they put there in place of a lock's list is written through. */
bool smb_believes(uint32_t uid);
/* 0 once its server has been started in another PID namespace, or the segment may move to another
 * server, or was deleted: every operation gets SMB_NAMESPACE, SMB_STALE_EPOCH or SMB_NOT_FOUND. */
int smb_segment_is_shared(const struct smb_segment *segment);
/* It stays on its server for good: somebody uses it who could not follow. SMB_BUSY: it may move. */
int smb_segment_bind(struct smb_segment *segment);
/* Drops one reference; the last one unmaps. */
void smb_segment_release(struct smb_segment *segment);
void smb_segment_info(const struct smb_segment *segment, struct smb_segment_info *info);
void *smb_segment_data(struct smb_segment *segment);
/* The descriptor, owned by the segment; and where in the file the data starts (page aligned). */
int smb_segment_fd(const struct smb_segment *segment);
uint64_t smb_segment_data_offset(const struct smb_segment *segment);
/* The chunks' states, 64 bytes each: a reader from outside (RDMA) looks at the chunk's sequence
 * count before and after. It is a uint32_t at *sequence_at of each state, odd while the chunk
 * changes. */
const void *smb_segment_states(const struct smb_segment *segment, uint64_t *bytes,
                               uint32_t *sequence_at);
/* Of the buffer whose first segment this is: the slot in which a version lies (UINT64_MAX: the one
 * published last), -1 once it is being overwritten; and which was published last. */
int smb_segment_find_version(const struct smb_segment *segment, uint64_t sought,
                             uint64_t *published);
/* Marks it deleted: every later operation, from any process that maps it, gets SMB_NOT_FOUND. */
void smb_segment_mark_deleted(struct smb_segment *segment);
/* Adds what local clients have done on their own mapping to operations[opcode] and
 * bytes[opcode]. */
void smb_segment_counters(const struct smb_segment *segment, uint64_t *operations, uint64_t *bytes);
/* Whether a segment has all that its copies have. */
enum smb_copy {
    SMB_COPY_BEGUN = 0, /* it is being made from another one, or was to be */
    SMB_COPY_WHOLE = 1,
    SMB_COPY_UNKNOWN =
        2 /* the file is of an earlier version, or its daemon was killed right after making it */
};
/* What a server found left half done by its earlier run. */
struct smb_recovery {
    uint64_t finished;     /* changes that were under way, and are made now */
    uint64_t torn_chunks;  /* whose journal is gone: element by element old or new */
    uint32_t journal_lost; /* what lay at path was no journal of ours */
};

/* cffi: end */

#endif
