#include "memory/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/failpoint.h"
#include "memory/owned.h"

enum {
    PAGE = 4096,
    WORDS_AT = PAGE,
    PAYLOAD_AT = 2 * PAGE,
    SLOT_BYTES = PAYLOAD_AT + SMB_CHUNK_BYTES_MAX,
    HEADER_BYTES = PAGE + JOURNAL_SLOTS_MAX * (int)sizeof(uint32_t),
    /* free slots below this number keep their memory; higher ones give it back */
    FREE_KEPT = 16,
    /* 4 also journalled SMB_WRITE; an unfinished one is not completed, and its chunk counts as
     * torn. 3 is the same. 2 has no SMB_APPLY */
    JOURNAL_VERSION = 5,
    /* also lacks `source_bytes` and `wire`, and has zeros there: SMB_WIRE_EXACT */
    VERSION_EXACT = 1
};
_Static_assert(HEADER_BYTES % PAGE == 0, "slots begin at a page");
static const uint64_t MAGIC = 0x4C4E524A424D5353U; /* "SSMBJRNL" */
static const uint64_t FILE_BYTES = HEADER_BYTES + (uint64_t)JOURNAL_SLOTS_MAX * SLOT_BYTES;

struct journal_header {
    uint64_t magic;
    uint32_t version;
    uint32_t slot_bytes;
    uint64_t identity;
    /* from the second page on: for each slot, how many bytes of payload are allocated; 0 for a slot
     * that was never used */
};

struct slot_words {
    _Atomic uint64_t progress;
    uint64_t segment;
    uint64_t session;
    uint64_t sequence;
    uint64_t lane;
    uint64_t offset;
    uint64_t bytes;
    uint64_t argument;
    uint64_t expected;
    double scale;
    uint32_t opcode;
    uint32_t op;
    uint32_t source_bytes; /* for SMB_WIRE_SPARSE */
    uint32_t wire;         /* how the payload is encoded; blocks are counted in decoded bytes */
    uint64_t states[SMB_RULE_STATES_MAX]; /* for SMB_APPLY: segment ids, 0 for an absent state */
    struct smb_hyper hyper;
};

_Static_assert(sizeof(struct slot_words) <= PAGE - SLOT_PREFIX_BYTES, "they lie in one page");

struct journal {
    int fd;
    uint8_t *base;
    uint64_t identity;
    pthread_mutex_t mutex;
    uint32_t free_count;
    uint32_t free[JOURNAL_SLOTS_MAX];
    uint32_t *ready_bytes; /* in the file */
};

/* ---- the progress word: 0, or dirty (bit 0), active (1), block (2..17), sequence (18..63) ---- */

enum { DIRTY = 1, ACTIVE = 2, BLOCK_SHIFT = 2, SEQUENCE_SHIFT = 18 };
static const uint64_t BLOCK_MASK = 0xFFFF;

static uint64_t progress_word(uint64_t sequence, uint64_t block, uint64_t dirty)
{
    return sequence << SEQUENCE_SHIFT | block << BLOCK_SHIFT | ACTIVE | dirty;
}

static void store_progress(struct slot_words *words, uint64_t word)
{
    atomic_signal_fence(memory_order_seq_cst);
    atomic_store_explicit(&words->progress, word, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
}

static off_t slot_offset(uint32_t number)
{
    return (off_t)(HEADER_BYTES + (uint64_t)number * SLOT_BYTES);
}

static uint8_t *slot_at(const struct journal *journal, uint32_t number)
{
    return journal->base + slot_offset(number);
}

static struct slot_words *words_of(const struct journal *journal, uint32_t number)
{
    return (struct slot_words *)(slot_at(journal, number) + WORDS_AT);
}

/* ---- one change ------------------------------------------------------------------------------ */

void slot_describe(struct journal *journal, const struct slot *slot,
                   const struct smb_segment *segment, const struct smb_change *change,
                   const struct change_name *name)
{
    SMB_ASSERT(slot->number < JOURNAL_SLOTS_MAX && slot->payload);
    struct slot_words *words = words_of(journal, slot->number);
    words->segment = smb_segment_id(segment);
    words->session = name->session;
    words->sequence = name->sequence;
    words->lane = name->lane;
    words->offset = change->offset;
    words->bytes = change->bytes;
    words->argument = change->argument;
    words->expected = change->expected;
    words->scale = change->scale;
    words->opcode = (uint32_t)change->opcode;
    words->op = (uint32_t)change->op;
    words->wire = (uint32_t)change->wire;
    words->source_bytes = change->source_bytes;
    if (change->opcode == SMB_APPLY) {
        for (int i = 0; i < SMB_RULE_STATES_MAX; i++)
            words->states[i] = change->states[i] ? smb_segment_id(change->states[i]) : 0;
        words->hyper = change->hyper;
    }
    FAILPOINT("journal.described");
}

void slot_begin(struct journal *journal, const struct slot *slot, struct smb_segment *segment,
                const struct smb_change *change)
{
    struct slot_words *words = words_of(journal, slot->number);
    struct smb_segment *targets[SMB_TARGETS_MAX];
    int count = smb_segment_targets(segment, change, targets);
    store_progress(words, progress_word(words->sequence, 0, 0));
    FAILPOINT("journal.active");
    for (int i = 0; i < count; i++) {
        smb_segment_mark(targets[i], change->offset, slot->number + 1);
        atomic_signal_fence(memory_order_seq_cst);
        FAILPOINT("journal.marked");
    }
    for (int i = 0; i < count; i++) {
        smb_segment_change_begin(targets[i], change->offset);
        FAILPOINT("journal.odd");
    }
}

/* A block is large enough that most of the work lies in whole blocks, and its old bytes fit the
 * undo page. */
static uint64_t whole_block_bytes(const struct smb_change *change)
{
    int states = change->opcode == SMB_APPLY ? smb_rule_states(change->op) : 0;
    return states <= 0   ? JOURNAL_BLOCK_BYTES
           : states == 1 ? JOURNAL_BLOCK_BYTES / 2
                         : JOURNAL_BLOCK_BYTES / 4;
}
_Static_assert(SMB_TARGETS_MAX <= 4, "the undo page is cut into quarters");

static uint64_t block_bytes(const struct smb_change *change, uint64_t block)
{
    uint64_t whole = whole_block_bytes(change), left = change->bytes - block * whole;
    return left < whole ? left : whole;
}

static uint64_t block_count(const struct smb_change *change)
{
    uint64_t whole = whole_block_bytes(change);
    return (change->bytes + whole - 1) / whole;
}

static void change_block(struct smb_segment *segment, struct smb_change *change, uint64_t from,
                         uint64_t bytes)
{
#ifdef SMB_FAILPOINTS
    if (change->opcode == SMB_ACCUMULATE || change->opcode == SMB_ACCUMULATE_FROM ||
        change->opcode == SMB_APPLY) {
        /* A kill may land inside a kernel, too; this makes a place where a test can do that. */
        uint64_t half = bytes / 2 / 8 * 8;
        if (half > 0)
            smb_segment_change_range(segment, change, from, half);
        FAILPOINT("journal.block_half");
        smb_segment_change_range(segment, change, from + half, bytes - half);
        return;
    }
#endif
    smb_segment_change_range(segment, change, from, bytes);
}

/* The processor's own prefetching stops at the end of a page, which is a block. */
static void fetch_ahead(const uint8_t *from, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(from + at, 1, 3);
}

/* Runs the blocks from `first` on. */
static void run_blocks(uint8_t *undo, struct slot_words *words, struct smb_segment *segment,
                       struct smb_change *change, uint64_t first)
{
    struct smb_segment *targets[SMB_TARGETS_MAX];
    uint64_t whole = whole_block_bytes(change), blocks = block_count(change);
    int count = smb_segment_targets(segment, change, targets);
    for (uint64_t block = first; block < blocks; block++) {
        uint64_t from = block * whole, bytes = block_bytes(change, block);
        for (int i = 0; i < count; i++) {
            const uint8_t *old = (const uint8_t *)smb_segment_data(targets[i]) + change->offset +
                                 from;
            kernel_copy(undo + (uint64_t)i * whole, old, bytes, false);
            if (block + 1 < blocks)
                fetch_ahead(old + whole, block_bytes(change, block + 1));
            FAILPOINT("journal.undo_copied");
        }
        store_progress(words, progress_word(words->sequence, block, DIRTY));
        FAILPOINT("journal.dirty");
        change_block(segment, change, from, bytes);
        FAILPOINT("journal.block_changed");
        store_progress(words, progress_word(words->sequence, block + 1, 0));
        FAILPOINT("journal.block_done");
    }
}

void slot_run(struct journal *journal, const struct slot *slot, struct smb_segment *segment,
              struct smb_change *change)
{
    run_blocks(slot_at(journal, slot->number), words_of(journal, slot->number), segment, change, 0);
}

void slot_end(struct journal *journal, const struct slot *slot, struct smb_segment *segment,
              const struct smb_change *change)
{
    (void)journal;
    (void)slot;
    struct smb_segment *targets[SMB_TARGETS_MAX];
    int count = smb_segment_targets(segment, change, targets);
    FAILPOINT("journal.noted");
    for (int i = 0; i < count; i++) {
        smb_segment_change_end(targets[i], change->offset);
        FAILPOINT("journal.even");
    }
    for (int i = 0; i < count; i++) {
        smb_segment_mark(targets[i], change->offset, 0);
        atomic_signal_fence(memory_order_seq_cst);
        FAILPOINT("journal.unmarked");
    }
}

void slot_rest(struct journal *journal, const struct slot *slot)
{
    SMB_ASSERT(slot->number < JOURNAL_SLOTS_MAX);
    FAILPOINT("journal.unlocked");
    store_progress(words_of(journal, slot->number), 0);
    FAILPOINT("journal.rested");
}

/* ---- recovery -------------------------------------------------------------------------------- */

/* Reads the slot of a process that died. Everything in it is checked before it is used. */
static bool describe_left(const struct slot_words *words, uint8_t *payload, uint64_t payload_bytes,
                          struct smb_change *change)
{
    *change = (struct smb_change){.opcode = (int)words->opcode,
                                  .op = (int)words->op,
                                  .wire = (int)words->wire,
                                  .source_bytes = words->source_bytes,
                                  .scale = words->scale,
                                  .offset = words->offset,
                                  .bytes = words->bytes,
                                  .source = payload,
                                  .argument = words->argument,
                                  .expected = words->expected};
    uint64_t word = atomic_load_explicit(&words->progress, memory_order_relaxed);
    bool applies = words->opcode == SMB_APPLY && smb_rule_states(change->op) >= 0;
    bool additive = words->opcode == SMB_ACCUMULATE || words->opcode == SMB_ACCUMULATE_FROM ||
                    applies;
    if (applies) {
        change->hyper = words->hyper;
        change->factors = kernel_factors_of(change->op, &change->hyper);
    }
    /* The segment is not known yet, but only float32 is encoded. */
    uint64_t needed = words->wire == SMB_WIRE_EXACT ? words->bytes
                      : words->wire == SMB_WIRE_SPARSE
                          ? words->source_bytes
                          : smb_wire_bytes(change->wire, words->bytes / 4);
    return (word & ACTIVE) &&
           word >> SEQUENCE_SHIFT == (words->sequence << SEQUENCE_SHIFT) >> SEQUENCE_SHIFT &&
           (additive || words->opcode == SMB_FETCH_ADD || words->opcode == SMB_COMPARE_SWAP) &&
           words->bytes > 0 && words->bytes <= (additive ? SMB_CHUNK_BYTES_MAX : 8) &&
           (!additive || (needed > 0 && needed <= payload_bytes)) && words->lane <= UINT16_MAX &&
           words->sequence > 0 && words->session > 0 &&
           (word >> BLOCK_SHIFT & BLOCK_MASK) + (word & DIRTY) <= block_count(change);
}

/* An unfinished change, as its slot describes it. */
struct left {
    uint32_t mark;
    uint8_t *undo;
    struct slot_words *words;
    struct smb_change change;
    /* references; NULL: the server no longer has that segment */
    struct smb_segment *targets[SMB_TARGETS_MAX];
    int count;
    uint64_t block;
    bool dirty;
};

static bool left_marked(const struct left *left, int target)
{
    return left->targets[target] &&
           smb_segment_holds(left->targets[target], left->change.offset, left->change.bytes) &&
           smb_segment_marked(left->targets[target], left->change.offset) == left->mark;
}

/* Finds all segments of the change, else returns false. */
static bool find_targets(struct left *left, journal_find find, void *argument)
{
    bool all = (left->targets[0] = find(argument, left->words->segment)) != NULL;
    left->count = 1;
    for (int i = 0; left->change.opcode == SMB_APPLY && i < smb_rule_states(left->change.op); i++) {
        left->targets[left->count] = left->change.states[i] = find(argument,
                                                                   left->words->states[i]);
        all = left->targets[left->count++] && all;
    }
    return all;
}

static void restore(const struct left *left)
{
    uint64_t whole = whole_block_bytes(&left->change);
    for (int i = 0; left->dirty && i < left->count; i++) {
        if (!left_marked(left, i))
            continue;
        kernel_copy((uint8_t *)smb_segment_data(left->targets[i]) + left->change.offset +
                        left->block * whole,
                    left->undo + (uint64_t)i * whole, block_bytes(&left->change, left->block),
                    false);
        FAILPOINT("recovery.restored");
    }
}

static void let_go(const struct left *left)
{
    for (int i = 0; i < left->count; i++) {
        if (!left_marked(left, i))
            continue;
        if (smb_segment_changing(left->targets[i], left->change.offset))
            smb_segment_change_end(left->targets[i], left->change.offset);
        smb_segment_mark(left->targets[i], left->change.offset, 0);
        FAILPOINT("recovery.unmarked");
    }
}

static struct record *record_of(struct smb_segment *segment, const struct slot_words *words)
{
    struct record_table table = smb_segment_records(segment);
    for (uint32_t i = 0; i < table.count; i++)
        if (atomic_load(&table.records[i].session) == words->session &&
            atomic_load(&table.records[i].lane) == words->lane)
            return &table.records[i];
    return NULL;
}

static void finish_left(struct left *left)
{
    struct smb_change *change = &left->change;
    struct record *record = record_of(left->targets[0], left->words);
    for (int i = 0; i < left->count; i++) {
        if (left_marked(left, i) && !smb_segment_changing(left->targets[i], change->offset))
            smb_segment_change_begin(left->targets[i], change->offset);
        FAILPOINT("recovery.odd");
    }
    bool whole = change->opcode == SMB_FETCH_ADD || change->opcode == SMB_COMPARE_SWAP;
    restore(left);
    if (whole && left->block > 0)
        /* the last block was complete: its old value gives the result */
        memcpy(&change->result, left->undo, change->bytes);
    run_blocks(left->undo, left->words, left->targets[0], change, left->block);
    FAILPOINT("recovery.finished");
    if (record)
        record_note(record, left->words->sequence, whole, change->result);
    FAILPOINT("recovery.noted");
    let_go(left);
}

/* True if there was a change to complete. */
static bool recover_slot(struct journal *journal, uint32_t number, uint64_t payload_bytes,
                         journal_find find, void *argument)
{
    uint8_t *at = slot_at(journal, number);
    struct left left = {.mark = number + 1, .undo = at, .words = words_of(journal, number)};
    bool finished = false;
    if (describe_left(left.words, at + PAYLOAD_AT, payload_bytes, &left.change)) {
        uint64_t word = atomic_load_explicit(&left.words->progress, memory_order_relaxed);
        left.block = word >> BLOCK_SHIFT & BLOCK_MASK;
        left.dirty = word & DIRTY;
        bool here = find_targets(&left, find, argument) &&
                    smb_segment_change_fits(left.targets[0], &left.change);
        int marked = 0;
        for (int i = 0; i < left.count; i++)
            marked += left_marked(&left, i);
        bool untouched = left.block == 0 && !left.dirty,
             all_done = left.block == block_count(&left.change);
        if (here && (marked == left.count || (marked > 0 && all_done))) {
            finish_left(&left);
            finished = true;
        } else if (here && untouched) {
            let_go(&left); /* other chunks may be in use: the change never began */
        } else {
            /* the change cannot be completed; smb_segment_clear_marks counts the chunk as torn */
            restore(&left);
        }
        /* No chunk is marked by this slot: the change never began, or was complete. */
        for (int i = 0; i < left.count; i++)
            if (left.targets[i])
                smb_segment_release(left.targets[i]);
    }
    store_progress(left.words, 0);
    return finished;
}

static int allocate(int fd, uint32_t number, uint32_t payload_bytes)
{
    int failure;
    do
        failure = posix_fallocate(fd, slot_offset(number), PAYLOAD_AT + (off_t)payload_bytes);
    while (failure == EINTR);
    errno = failure;
    return failure == 0 ? SMB_OK : SMB_OUT_OF_MEMORY;
}

/* Only slots that were ever used have memory. Memory that a slot declares is allocated before it is
 * touched. */
static void recover(struct journal *journal, journal_find find, void *argument,
                    struct smb_recovery *recovery)
{
    for (uint32_t number = 0; number < JOURNAL_SLOTS_MAX; number++) {
        uint32_t ready = journal->ready_bytes[number];
        if (ready > 0 && ready <= SMB_CHUNK_BYTES_MAX &&
            allocate(journal->fd, number, ready) == SMB_OK)
            recovery->finished += recover_slot(journal, number, ready, find, argument);
    }
    FAILPOINT("recovery.slots_done");
    /* Frees the memory of all slots: connections of this run begin with empty slots. */
    memset(journal->ready_bytes, 0, HEADER_BYTES - PAGE);
    fallocate(journal->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, HEADER_BYTES,
              (off_t)(FILE_BYTES - HEADER_BYTES));
}

/* ---- the file -------------------------------------------------------------------------------- */

static bool header_is_ours(int fd, struct journal_header *header)
{
    struct stat file;
    return fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && (uint64_t)file.st_size == FILE_BYTES &&
           pread(fd, header, sizeof *header, 0) == (ssize_t)sizeof *header &&
           header->magic == MAGIC && header->version >= VERSION_EXACT &&
           header->version <= JOURNAL_VERSION && header->slot_bytes == SLOT_BYTES &&
           header->identity != 0;
}

/* Created under another name first, so that a file under the final name is always complete. */
static int make_file(const char *path, int *fd)
{
    char new_path[4096];
    size_t length = strlen(path);
    if (length + sizeof ".new" > sizeof new_path)
        return SMB_INVALID;
    memcpy(new_path, path, length);
    memcpy(new_path + length, ".new", sizeof ".new");
    /* a leftover of an earlier run, or a foreign file: neither may be written into */
    unlink(new_path);
    *fd = open(new_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (*fd < 0)
        return errno == ENOSPC ? SMB_OUT_OF_MEMORY : SMB_SYSTEM;
    struct journal_header header = {
        .magic = MAGIC, .version = JOURNAL_VERSION, .slot_bytes = SLOT_BYTES};
    while (header.identity == 0)
        if (getrandom(&header.identity, sizeof header.identity, 0) !=
            (ssize_t)sizeof header.identity)
            header.identity = 0;
    int failure = posix_fallocate(*fd, 0, HEADER_BYTES);
    if (failure == 0 && ftruncate(*fd, (off_t)FILE_BYTES) == 0 &&
        pwrite(*fd, &header, sizeof header, 0) == (ssize_t)sizeof header &&
        rename(new_path, path) == 0)
        return SMB_OK;
    int saved = failure != 0 ? failure : errno;
    unlink(new_path);
    close(*fd);
    errno = saved;
    return saved == ENOSPC ? SMB_OUT_OF_MEMORY : SMB_SYSTEM;
}

static int map_journal(int fd, struct journal **journal)
{
    struct journal_header header;
    struct journal *made = header_is_ours(fd, &header) ? calloc(1, sizeof *made) : NULL;
    void *base = MAP_FAILED;
    if (made)
        base = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) {
        free(made);
        return SMB_OUT_OF_MEMORY;
    }
    made->fd = fd;
    made->base = base;
    made->identity = header.identity;
    made->ready_bytes = (uint32_t *)(made->base + PAGE);
    pthread_mutex_init(&made->mutex, NULL);
    for (uint32_t i = 0; i < JOURNAL_SLOTS_MAX; i++)
        made->free[i] = JOURNAL_SLOTS_MAX - 1 - i;
    made->free_count = JOURNAL_SLOTS_MAX;
    *journal = made;
    return SMB_OK;
}

int journal_open(const char *path, journal_find find, void *argument, struct smb_recovery *recovery,
                 struct journal **journal)
{
    struct journal_header header;
    int fd = -1;
    int status = owned_open(path, &fd);
    bool left = status == SMB_OK && header_is_ours(fd, &header);
    if (!left) {
        /* something else lies at the path: it is replaced */
        recovery->journal_lost = status != SMB_NOT_FOUND;
        if (fd >= 0)
            close(fd);
        status = make_file(path, &fd);
    }
    if (status == SMB_OK) {
        status = map_journal(fd, journal);
        if (status != SMB_OK)
            close(fd);
    }
    if (status == SMB_OK && left)
        recover(*journal, find, argument, recovery);
    if (status == SMB_OK)
        /* from here on slots may contain what an older daemon would not understand */
        ((struct journal_header *)(*journal)->base)->version = JOURNAL_VERSION;
    return status;
}

void journal_close(struct journal *journal)
{
    munmap(journal->base, FILE_BYTES);
    close(journal->fd);
    pthread_mutex_destroy(&journal->mutex);
    free(journal);
}

uint64_t journal_identity(const struct journal *journal)
{
    return journal->identity;
}

/* ---- slots ----------------------------------------------------------------------------------- */

int journal_take_slot(struct journal *journal, struct slot *slot)
{
    pthread_mutex_lock(&journal->mutex);
    bool any = journal->free_count > 0;
    if (any) {
        slot->number = journal->free[--journal->free_count];
        slot->ready_bytes = journal->ready_bytes[slot->number];
    }
    pthread_mutex_unlock(&journal->mutex);
    if (!any)
        return SMB_OUT_OF_MEMORY;
    slot->payload = slot_at(journal, slot->number) + PAYLOAD_AT;
    return SMB_OK;
}

void journal_give_slot(struct journal *journal, struct slot *slot)
{
    SMB_ASSERT(slot->payload);
    if (slot->number >= FREE_KEPT) {
        journal->ready_bytes[slot->number] = 0;
        fallocate(journal->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  slot_offset(slot->number), SLOT_BYTES);
    }
    pthread_mutex_lock(&journal->mutex);
    journal->free[journal->free_count++] = slot->number;
    pthread_mutex_unlock(&journal->mutex);
    slot->payload = NULL;
}

void journal_slots(struct journal *journal, uint64_t *taken, uint64_t *most)
{
    pthread_mutex_lock(&journal->mutex);
    *taken = JOURNAL_SLOTS_MAX - journal->free_count;
    pthread_mutex_unlock(&journal->mutex);
    *most = JOURNAL_SLOTS_MAX;
}

int journal_reserve(struct journal *journal, struct slot *slot, uint32_t payload_bytes)
{
    SMB_ASSERT(slot->payload && payload_bytes <= SMB_CHUNK_BYTES_MAX);
    uint32_t whole = payload_bytes == 0 ? PAGE : (payload_bytes + PAGE - 1) / PAGE * PAGE;
    if (whole <= slot->ready_bytes)
        return SMB_OK;
    int status = allocate(journal->fd, slot->number, whole);
    if (status == SMB_OK)
        journal->ready_bytes[slot->number] = slot->ready_bytes = whole;
    return status;
}
