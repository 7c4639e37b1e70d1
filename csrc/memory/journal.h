/* journal.h: additions that a kill in the middle does not tear. docs/decisions/0008.
 *
 * One file of tmpfs beside the daemon's segments: a header page, then slots, each
 *   [0, 4096)      undo: the old bytes of the block that is being changed; for several segments, a
 *                  smaller block of each, side by side
 *   [4096, 8192)   which change this is, and how far it has come (struct slot_words); its last 104
 *                  bytes may hold a token, and words
 *   [8192, ..)     the payload, received there straight from the socket
 * The file is sparse: a slot takes memory from its first use on, all of it allocated before it is
 * touched.
 *
 * Invariant: either no block of the change is half made, or the progress word names it and the undo
 * block has its old bytes. This holds at every instruction. One 64-bit word: block, dirty and
 * sequence in separate words were seen to fail.
 *
 * A change from a slot: slot_describe; lock the chunk; slot_begin (marks it); slot_run;
 * record_note; slot_end (unmarks it); unlock; slot_rest. One of several segments (APPLY) has the
 * chunk of each locked, marked and unmarked. Marks are set before the first block is begun and
 * taken away after the last: where some are missing, nothing was changed yet, or everything was.
 * Recovery does from slot_run on what was left to do, under no lock: the mark keeps all others
 * away.
 *
 * Only program order counts here, not the order in which other processors see the stores: they are
 * read after our death. A thread dies between two instructions: what it stored before has happened,
 * what comes after has not, on ARM as on x86. Such stores may still be on their way to other
 * processors, in any order. They have arrived when the next daemon looks. It has the lock on the
 * daemon's directory (flock, memserver/memory_dir.py). The kernel frees that lock when the last
 * thread has left, and each thread passes full barriers on its way out. So the progress word is
 * relaxed, with compiler fences around it: the compiler's order must hold.
 *
 * Not so towards local clients, which live on: they take a chunk from a recovery by its mark
 * (release and acquire, chunk.c).
 *
 * Threads: taking and giving slots under the journal's mutex; a slot belongs to one connection.
 */
#ifndef SMB_JOURNAL_H
#define SMB_JOURNAL_H

#include "memory/change.h"
#include "memory/segment.h"

enum { JOURNAL_SLOTS_MAX = 4096, JOURNAL_BLOCK_BYTES = 4096, SLOT_PREFIX_BYTES = 104 };

struct journal;

/* A connection's. `payload` is page aligned; the SLOT_PREFIX_BYTES before it are the connection's
 * too. */
struct slot {
    uint32_t number;
    uint32_t ready_bytes; /* of payload, allocated */
    uint8_t *payload;
};

/* The names under which a change is known for ever. */
struct change_name {
    uint64_t session;
    uint64_t sequence;
    uint16_t lane;
};

/* Looks up what a slot names; called during recovery. NULL: not here (any more). */
typedef struct smb_segment *(*journal_find)(void *argument, uint64_t segment_id);

/* Opens the journal at path, or makes it; first finishes what an earlier run left in it, on the
 * segments that `find` knows. A file that is none is replaced. SMB_SYSTEM, SMB_OUT_OF_MEMORY. */
int journal_open(const char *path, journal_find find, void *argument, struct smb_recovery *recovery,
                 struct journal **journal);
void journal_close(struct journal *journal);
/* Stays the same as long as the file lives: names this server's memory. */
uint64_t journal_identity(const struct journal *journal);

/* SMB_OUT_OF_MEMORY: every slot is taken, or the file system is full. */
int journal_take_slot(struct journal *journal, struct slot *slot);
void journal_give_slot(struct journal *journal, struct slot *slot);
/* How many are taken, of how many. */
void journal_slots(struct journal *journal, uint64_t *taken, uint64_t *most);
/* Makes room for so many bytes of payload. */
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
