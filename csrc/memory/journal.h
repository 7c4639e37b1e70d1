/* journal.h: the journal, by which a kill in the middle of an addition does not tear the addition.
 * docs/decisions/0008-exactly-once.md.
 *
 * One file of tmpfs beside the daemon's segments: a header page, then slots, each
 *   [0, 4096)     undo: the old bytes of the block that is being changed; for several segments, a
 *                 smaller block of each, side by side
 *   [4096, 8192)  which change this is, and how far it has come (struct slot_words); its last 104
 *                 bytes may hold a token, and words
 *   [8192, ..)    the payload, received there directly from the socket
 * The file is sparse: a slot takes memory from its first use on, all of it allocated before it is
 * touched.
 *
 * Invariant: either no block of the change is half made, or the progress word names it and the undo
 * block has its old bytes. This holds at every instruction. The progress is one 64-bit word,
 * because separate words for block, dirty and sequence were seen to fail.
 *
 * A change from a slot: slot_describe; lock the chunk; slot_begin (marks it); slot_run;
 * record_note; slot_end (unmarks it); unlock; slot_rest. A change of several segments (APPLY) has
 * the chunk of each locked, marked and unmarked. Marks are set before the first block is begun and
 * removed after the last: if some marks are missing, either nothing was changed yet or everything
 * was. Recovery executes the remaining steps from slot_run on without a lock: the mark keeps
 * everybody else away.
 *
 * Only program order matters here, not the order in which other processors see the stores, because
 * the stores are read after the daemon's death. A thread dies between two instructions: what it
 * stored before has happened, what comes after has not, on ARM as on x86. Such stores may still be
 * on their way to other processors, in any order, but they have arrived when the next daemon reads.
 * It has the lock on the daemon's directory (flock, memserver/memory_dir.py). The kernel frees that
 * lock when the last thread has left, and each thread passes full barriers on its way out. So the
 * progress word is relaxed, with compiler fences around it: the compiler's order must hold. This is
 * not so for local clients, which live on: they take a chunk over from recovery by its mark
 * (release and acquire, chunk.c).
 *
 * Threads: slots are taken and given back under the journal's mutex; a slot belongs to one
 * connection. */
#ifndef SMB_JOURNAL_H
#define SMB_JOURNAL_H

#include "memory/change.h"
#include "memory/segment.h"

enum { JOURNAL_SLOTS_MAX = 4096, JOURNAL_BLOCK_BYTES = 4096, SLOT_PREFIX_BYTES = 104 };

struct journal;

/* A connection's slot. `payload` is page aligned. The connection may also use the SLOT_PREFIX_BYTES
 * before it. */
struct slot {
    uint32_t number;
    uint32_t ready_bytes; /* allocated bytes of payload */
    uint8_t *payload;
};

/* The identifiers of a change, which stay the same forever. */
struct change_name {
    uint64_t session;
    uint64_t sequence;
    uint16_t lane;
};

/* Looks up a segment that a slot names; called during recovery. NULL: the server has no such
 * segment (any more). */
typedef struct smb_segment *(*journal_find)(void *argument, uint64_t segment_id);

/* Opens the journal at path, or creates it. First completes the changes that an earlier run left in
 * it, on the segments that `find` knows. A file that is not a journal is replaced. SMB_SYSTEM,
 * SMB_OUT_OF_MEMORY. */
int journal_open(const char *path, journal_find find, void *argument, struct smb_recovery *recovery,
                 struct journal **journal);
void journal_close(struct journal *journal);
/* A number that identifies this server's memory: constant as long as the file lives. */
uint64_t journal_identity(const struct journal *journal);

/* SMB_OUT_OF_MEMORY: every slot is taken, or the file system is full. */
int journal_take_slot(struct journal *journal, struct slot *slot);
void journal_give_slot(struct journal *journal, struct slot *slot);
/* How many slots are taken, and how many there are. */
void journal_slots(struct journal *journal, uint64_t *taken, uint64_t *most);
/* Makes room for payload_bytes of payload in the slot. */
int journal_reserve(struct journal *journal, struct slot *slot, uint32_t payload_bytes);

void slot_describe(struct journal *journal, const struct slot *slot,
                   const struct smb_segment *segment, const struct smb_change *change,
                   const struct change_name *name);
void slot_begin(struct journal *journal, const struct slot *slot, struct smb_segment *segment,
                const struct smb_change *change);
void slot_run(struct journal *journal, const struct slot *slot, struct smb_segment *segment,
              struct smb_change *change);
void slot_end(struct journal *journal, const struct slot *slot, struct smb_segment *segment,
              const struct smb_change *change);
void slot_rest(struct journal *journal, const struct slot *slot);

#endif
