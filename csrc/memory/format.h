/* format.h: the file of a segment, in tmpfs. This module checks and computes it; segment.c maps it.
 *
 * The file (tmpfs):
 *   [0, 4096)            header: the segment's identity; written once, except its _Atomic words
 *   [2048, 2560) of it   the words of locks, barrier and versions: sync.h
 *   [chunks_offset, ..)  one 64-byte state per chunk: robust process-shared lock, sequence count,
 *                        mark
 *   [records_offset, ..) completion records: records.h
 *   [data_offset, ..)    the bytes, page aligned */
#ifndef SMB_FORMAT_H
#define SMB_FORMAT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "memory/records.h"
#include "smb/types.h"
#include "sync/sync_words.h"

enum {
    PAGE = 4096,
    CHUNK_STATE_BYTES = 64,
    FORMAT_VERSION = 3, /* the only version that clients map */
    /* As 3, for a segment with two copies or one that has moved. A daemon that does not know copies
     * refuses the file. */
    FORMAT_REPLICATED = 4,
    /* as 4, for a segment of a bundle; daemons that do not know bundles refuse the file */
    FORMAT_BUNDLED = 5,
    /* Has fewer records, and 0 or 1 in place of the namespace. A daemon converts its own files to
     * 3. */
    FORMAT_WITHOUT_NAMESPACE = 2,
    SYNC_OFFSET = 2048
};

/* The state of a segment, in its header. */
enum segment_state {
    STATE_SHARED = 0, /* local clients may change it, too */
    STATE_DELETED = 1,
    STATE_GATED = 2 /* all changes and reads pass its daemon, because it may move to another one */
};
/* Whether a segment may move, in its header. Decided once, by the first store. A process that maps
 * bytes for longer than an operation first changes 0 to BINDING_STAYS; if it finds BINDING_MOVES,
 * it does not map them. */
enum segment_binding {
    BINDING_NONE = 0,
    BINDING_STAYS = 1, /* the segment has a user that could not follow a move */
    BINDING_MOVES = 2  /* nobody may use it in such a way any more */
};

static const uint64_t FORMAT_MAGIC = 0x544E454D4745534DU; /* "MSEGMENT" */

/* Another C library, or another word size, lays out locks differently in memory. A process that
 * differs in this must not share the locks. */
#if defined(__GLIBC__)
#define LIBC_ID 1U
#else
#define LIBC_ID 2U
#endif
static const uint32_t LOCK_ABI = LIBC_ID << 16 | (uint32_t)sizeof(pthread_mutex_t);

struct header {
    uint64_t magic;
    uint32_t format_version;
    uint32_t lock_abi;
    uint64_t id;
    uint32_t epoch;
    uint32_t dtype;
    uint64_t data_bytes;
    uint64_t file_bytes;
    uint64_t chunks_offset;
    uint64_t records_offset;
    uint64_t data_offset;
    uint32_t chunk_bytes;
    uint32_t record_count;
    _Atomic uint64_t evictions; /* evicted completion records whose session had not ended */
    /* enum segment_state; release by the daemon, acquire by everyone before each operation */
    _Atomic uint32_t state;
    /* the namespace in which the locks are valid; release by the daemon, acquire by everyone before
     * each operation */
    _Atomic uint32_t pid_namespace;
    _Atomic uint64_t recovered_locks; /* relaxed, as all counters */
    _Atomic uint64_t operations[32];  /* operations of local clients, per opcode */
    _Atomic uint64_t bytes[32];
    _Atomic uint64_t ended_evictions; /* evicted completion records whose session had ended */
    _Atomic uint32_t binding;         /* enum segment_binding; 0 in older files */
    uint64_t bundle; /* the bundle with which it moves; 0, as in older files: none */
    /* The last role that the daemon was given: its epoch << 1 | whether the copy is whole. 0: no
     * role, or an older file. Relaxed: only the daemon writes and reads it. */
    _Atomic uint64_t copy;
};
_Static_assert(offsetof(struct header, chunks_offset) == 48 &&
                   offsetof(struct header, state) == 88 &&
                   offsetof(struct header, operations) == 104 &&
                   offsetof(struct header, binding) == 624,
               "other processes have the file mapped, of whatever release");
_Static_assert(sizeof(struct header) <= SYNC_OFFSET &&
                   SYNC_OFFSET + sizeof(struct sync_words) <= PAGE,
               "the header is one page");
_Static_assert((int)SMB_OPCODE_COUNT <= 32, "counters have a place for every opcode");

struct chunk_state {
    pthread_mutex_t lock;
    _Atomic uint32_t sequence; /* odd while the chunk changes */
    /* 0, or 1 + the number of the journal slot from which the daemon is changing it; release,
     * acquire by the lock's holder */
    _Atomic uint32_t mark;
    uint8_t padding[CHUNK_STATE_BYTES - sizeof(pthread_mutex_t) - 8];
};
_Static_assert(sizeof(struct chunk_state) == CHUNK_STATE_BYTES, "one cache line per chunk");

static inline uint64_t format_round_up_to_page(uint64_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* The kernel's number of this process's PID namespace; 0 if /proc does not say. A robust lock holds
 * its owner's thread id inside the namespace. If processes of two namespaces, each with a thread 1,
 * shared a segment, the kernel would take the death of one thread for the other's. */
uint32_t format_own_pid_namespace(void);
uint64_t format_chunk_count(uint64_t data_bytes, uint32_t chunk_bytes);
/* Whether the segment has two copies, or was gated. */
static inline bool format_is_replicated(const struct header *header)
{
    return header->format_version == FORMAT_REPLICATED || header->format_version == FORMAT_BUNDLED;
}
/* The offset of the data in a file with record_count records. */
uint64_t format_records_offset(uint64_t data_bytes, uint32_t chunk_bytes);
uint64_t format_data_offset(uint64_t data_bytes, uint32_t chunk_bytes, uint32_t record_count);
/* Whether the header is valid: of this format or an older one, and consistent. `real_bytes`: the
 * size of the file. */
bool format_is_sound(const struct header *header, uint64_t real_bytes);
/* Whether this process may take the locks: SMB_OK, or SMB_VERSION or SMB_NAMESPACE. */
int format_check_sharing(const struct header *header);
/* The same check for a daemon that finds the segments of its earlier run. That run may have lived
 * in another namespace, or have used the previous format. `header` becomes what the daemon will
 * store. */
int format_check_taking_over(struct header *header);

#endif
