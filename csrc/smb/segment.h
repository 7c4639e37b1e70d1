/* segment.h: segments in mapped memory, used by the server and by clients on its host. Conventions:
 * smb/types.h. */
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

/* File size of a segment that holds data_bytes, with header and chunk table; 0 on overflow or bad
 * arguments. This size counts against a server's capacity. */
uint64_t smb_segment_file_bytes(uint64_t data_bytes, uint32_t chunk_bytes);
/* Creates the file (all pages allocated and zeroed) and maps it. SMB_EXISTS, SMB_OUT_OF_MEMORY,
 * SMB_INVALID, SMB_SYSTEM. Release with smb_segment_release. */
int smb_segment_create(const char *path, uint64_t id, uint32_t epoch, int dtype,
                       uint64_t data_bytes, uint32_t chunk_bytes, struct smb_segment **segment);
/* Maps an existing file. Every field of its header is checked against the file's real size before
 * it is used. SMB_UNTRUSTED if others than this user may change the file. */
int smb_segment_open(const char *path, struct smb_segment **segment);
/* Maps a file by its descriptor, which is duplicated. Only `owner` may be able to change the file:
 * SMB_UNTRUSTED otherwise. SMB_VERSION if another build's locks make sharing impossible,
 * SMB_NAMESPACE if the server is in another PID namespace. */
int smb_segment_open_fd(int fd, uint32_t owner, struct smb_segment **segment);
/* Whether a client trusts the listener of a Unix socket that belongs to user `uid`: true for its
 * own user and for root. A client that runs as root trusts no other user either, because it would
 * take locks in memory that the other user can write, and would write through the pointers in a
 * lock's list. */
bool smb_believes(uint32_t uid);
/* 0 once the segment's server has been started in another PID namespace, or the segment may move to
 * another server, or it was deleted: every operation then gets SMB_NAMESPACE, SMB_STALE_EPOCH or
 * SMB_NOT_FOUND. */
int smb_segment_is_shared(const struct smb_segment *segment);
/* Keeps the segment on its server for good, for a user that could not follow a move. SMB_BUSY: the
 * segment may move already. */
int smb_segment_bind(struct smb_segment *segment);
/* Drops one reference. The last release unmaps the segment. */
void smb_segment_release(struct smb_segment *segment);
void smb_segment_info(const struct smb_segment *segment, struct smb_segment_info *info);
void *smb_segment_data(struct smb_segment *segment);
/* The descriptor, owned by the segment, and the offset in the file at which the data starts (page
 * aligned). */
int smb_segment_fd(const struct smb_segment *segment);
uint64_t smb_segment_data_offset(const struct smb_segment *segment);
/* The chunks' states, 64 bytes each. A reader outside the host (RDMA) compares the chunk's sequence
 * count before and after it reads the chunk. The count is a uint32_t at *sequence_at of each state,
 * and odd while the chunk changes. */
const void *smb_segment_states(const struct smb_segment *segment, uint64_t *bytes,
                               uint32_t *sequence_at);
/* Finds a version of the buffer whose first segment this is (`sought` UINT64_MAX: the version
 * published last). Returns its slot, or -1 once the slot is being overwritten. *published becomes
 * the version published last. */
int smb_segment_find_version(const struct smb_segment *segment, uint64_t sought,
                             uint64_t *published);
/* Marks the segment deleted. Every later operation, from any process that maps it, gets
 * SMB_NOT_FOUND. */
void smb_segment_mark_deleted(struct smb_segment *segment);
/* Adds the operations of local clients on their own mapping to operations[opcode] and
 * bytes[opcode]. */
void smb_segment_counters(const struct smb_segment *segment, uint64_t *operations, uint64_t *bytes);
/* Whether a segment has all data that its other copy has. */
enum smb_copy {
    SMB_COPY_BEGUN = 0, /* the data is being copied from another copy, or was meant to be */
    SMB_COPY_WHOLE = 1,
    SMB_COPY_UNKNOWN =
        2 /* the file has an earlier format, or its daemon was killed right after creating it */
};
/* What a server found unfinished from its earlier run. */
struct smb_recovery {
    uint64_t finished;     /* interrupted changes that are now complete */
    uint64_t torn_chunks;  /* chunks without a journal: each element is either old or new */
    uint32_t journal_lost; /* 1: the file at the journal's path was not a journal of this server */
};

/* cffi: end */

#endif
