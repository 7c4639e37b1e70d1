/* format.h: the file of a segment, in tmpfs. Checked and computed here; mapped by segment.c.
 *
 * The file (tmpfs):
 *   [0, 4096)             header: its identity; written once, except the words marked _Atomic
 *   [2048, 2560) of it    what waits: sync.h
 *   [chunks_offset, ..)   one 64-byte state per chunk: robust process-shared lock, sequence count,
 *                         mark
 *   [records_offset, ..)  completion records: records.h
 *   [data_offset, ..)     the bytes, page aligned
 */
#ifndef SMB_FORMAT_H
#define SMB_FORMAT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "memory/records.h"
#include "memory/sync_words.h"
#include "smb/types.h"

enum {
    PAGE = 4096,
    CHUNK_STATE_BYTES = 64,
    FORMAT_VERSION = 3, /* clients map this one alone */
    /* As 3, of a segment with two copies or one that has moved. A daemon that does not know copies
     * leaves it alone. */
    FORMAT_REPLICATED = 4,
    FORMAT_BUNDLED = 5, /* as 4, of a bundle's segment; for daemons that do not know bundles */
    /* Has fewer records, and 0 or 1 in place of the namespace. A daemon converts its own to 3. */
    FORMAT_WITHOUT_NAMESPACE = 2,
    SYNC_OFFSET = 2048
};

/* Of a segment, in its header. */
enum segment_state {
    STATE_SHARED = 0, /* local clients change it, too */
    STATE_DELETED = 1,
    STATE_GATED = 2 /* all changes and reads pass its daemon, as it may move to another one */
};
/* Likewise. It is decided once, by the first to store one. A process that maps bytes for longer
 * than an operation changes 0 to BINDING_STAYS first, and does not map them if it is
 * BINDING_MOVES. */
enum segment_binding {
    BINDING_NONE = 0,
    BINDING_STAYS = 1, /* somebody uses it who could not follow */
    BINDING_MOVES = 2  /* nobody may use it so any more */
};

static const uint64_t FORMAT_MAGIC = 0x544E454D4745534DU; /* "MSEGMENT" */

/* Locks of another C library, or of another word size, lie differently in memory: such a process
 * must not share them. */
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
    _Atomic uint64_t evictions; /* of completion records whose session had not ended */
    /* enum segment_state; release by the daemon, acquire by everyone before each operation */
    _Atomic uint32_t state;
    /* in which the locks hold; release by the daemon, acquire by everyone before each operation */
    _Atomic uint32_t pid_namespace;
    _Atomic uint64_t recovered_locks; /* relaxed, as all counters */
    _Atomic uint64_t operations[32];  /* by local clients, per opcode */
    _Atomic uint64_t bytes[32];
    _Atomic uint64_t ended_evictions; /* of completion records whose session had ended */
    _Atomic uint32_t binding;         /* enum segment_binding; 0 in older files */
    uint64_t bundle; /* of two copies: those that it moves with; 0, as in older files: none */
    /* The last role that its daemon was given: its epoch << 1 | whether it is whole. 0: none,
     * or an older file. Relaxed: its daemon alone writes and reads it. */
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
    /* 0, or 1 + the journal slot from which the daemon changes it now; release, acquire by the
     * lock's holder */
    _Atomic uint32_t mark;
    uint8_t padding[CHUNK_STATE_BYTES - sizeof(pthread_mutex_t) - 8];
};
_Static_assert(sizeof(struct chunk_state) == CHUNK_STATE_BYTES, "one cache line per chunk");

static inline uint64_t format_round_up_to_page(uint64_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* The kernel's number of this process's PID namespace, 0 where /proc does not tell. A robust lock
 * holds its owner's thread id inside the namespace. If two namespaces shared a segment, each with a
 * thread 1, the kernel would take one's death for the other's. */
uint32_t format_own_pid_namespace(void);
uint64_t format_chunk_count(uint64_t data_bytes, uint32_t chunk_bytes);
/* A segment of two copies, or one that was gated. */
static inline bool format_is_replicated(const struct header *header)
{
    return header->format_version == FORMAT_REPLICATED || header->format_version == FORMAT_BUNDLED;
}
/* Of a file with so many records. */
uint64_t format_records_offset(uint64_t data_bytes, uint32_t chunk_bytes);
uint64_t format_data_offset(uint64_t data_bytes, uint32_t chunk_bytes, uint32_t record_count);
/* Made in this format or the one before, and of one piece. `real_bytes`: of the file. */
bool format_is_sound(const struct header *header, uint64_t real_bytes);
/* Whether this process may take the locks. */
int format_check_sharing(const struct header *header);
/* The same of a daemon that finds the segments of its earlier run. That one may have lived in
 * another namespace, or have had the format before: `header` becomes what it will be. */
int format_check_taking_over(struct header *header);

#endif
