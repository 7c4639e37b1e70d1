#include "memory/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/failpoint.h"
#include "memory/mapping.h"
#include "memory/owned.h"
#include "memory/pages.h"

/* Takes over fd on success. `trusted` is a private, checked copy of the header. */
static int map_file(int fd, const struct header *trusted, struct smb_segment **segment)
{
    struct smb_segment *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    void *base = pages_map(fd, trusted->file_bytes);
    if (base == MAP_FAILED) {
        free(made);
        return errno == ENOMEM ? SMB_OUT_OF_MEMORY : SMB_SYSTEM;
    }
    made->references = 1;
    made->fd = fd;
    made->header = base;
    made->chunks = (struct chunk_state *)((uint8_t *)base + trusted->chunks_offset);
    made->records = (struct record *)((uint8_t *)base + trusted->records_offset);
    made->record_count = trusted->record_count;
    made->data = (uint8_t *)base + trusted->data_offset;
    made->id = trusted->id;
    made->data_bytes = trusted->data_bytes;
    made->data_offset = trusted->data_offset;
    made->file_bytes = trusted->file_bytes;
    made->epoch = trusted->epoch;
    made->dtype = trusted->dtype;
    made->chunk_bytes = trusted->chunk_bytes;
    made->pid_namespace = atomic_load_explicit(&trusted->pid_namespace, memory_order_relaxed);
    *segment = made;
    return SMB_OK;
}

static int initialise_locks(struct smb_segment *segment)
{
    pthread_mutexattr_t attributes;
    if (pthread_mutexattr_init(&attributes) != 0)
        return SMB_SYSTEM;
    bool failed = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) != 0 ||
                  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) != 0;
    uint64_t chunks = format_chunk_count(segment->data_bytes, segment->chunk_bytes);
    for (uint64_t i = 0; i < chunks && !failed; i++)
        failed = pthread_mutex_init(&segment->chunks[i].lock, &attributes) != 0;
    pthread_mutexattr_destroy(&attributes);
    return failed ? SMB_SYSTEM : SMB_OK;
}

int smb_segment_create(const char *path, uint64_t id, uint32_t epoch, int dtype,
                       uint64_t data_bytes, uint32_t chunk_bytes, struct smb_segment **segment)
{
    uint64_t file_bytes = smb_segment_file_bytes(data_bytes, chunk_bytes);
    if (file_bytes == 0 || id == 0 || smb_dtype_bytes(dtype) == 0)
        return SMB_INVALID;
    /* Created under another name, so that a file under its final name is always complete. */
    char new_path[4096];
    if ((size_t)snprintf(new_path, sizeof new_path, "%s.new", path) >= sizeof new_path)
        return SMB_INVALID;
    int fd = open(new_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return errno == EEXIST ? SMB_EXISTS : errno == ENOSPC ? SMB_OUT_OF_MEMORY : SMB_SYSTEM;
    struct header header = {
        .magic = FORMAT_MAGIC,
        .format_version = FORMAT_VERSION,
        .lock_abi = LOCK_ABI,
        .id = id,
        .epoch = epoch,
        .dtype = (uint32_t)dtype,
        .data_bytes = data_bytes,
        .file_bytes = file_bytes,
        .chunks_offset = PAGE,
        .records_offset = format_records_offset(data_bytes, chunk_bytes),
        .data_offset = format_data_offset(data_bytes, chunk_bytes, records_count_for(data_bytes)),
        .chunk_bytes = chunk_bytes,
        .record_count = records_count_for(data_bytes),
        .pid_namespace = format_own_pid_namespace(),
    };
    struct smb_segment *made = NULL;
    int status = pages_allocate(fd, file_bytes);
    if (status == SMB_OK)
        status = map_file(fd, &header, &made);
    if (status == SMB_OK)
        status = initialise_locks(made);
    if (status == SMB_OK) {
        memcpy(made->header, &header, sizeof header);
        if (renameat2(AT_FDCWD, new_path, AT_FDCWD, path, RENAME_NOREPLACE) != 0)
            status = errno == EEXIST ? SMB_EXISTS : SMB_SYSTEM;
    }
    if (status != SMB_OK) {
        int saved = errno;
        unlink(new_path);
        if (made)
            smb_segment_release(made);
        else
            close(fd);
        errno = saved;
        return status;
    }
    *segment = made;
    return SMB_OK;
}

/* Reads the header into a private copy and checks it. */
static int read_header(int fd, uid_t owner, bool take_over, struct header *header)
{
    struct stat file;
    int status = owned_check(fd, owner);
    if (status != SMB_OK)
        return status;
    if (pread(fd, header, sizeof *header, 0) != (ssize_t)sizeof *header ||
        header->magic != FORMAT_MAGIC)
        return SMB_INVALID;
    status = take_over ? format_check_taking_over(header) : format_check_sharing(header);
    if (status == SMB_OK && fstat(fd, &file) != 0)
        return SMB_SYSTEM;
    if (status == SMB_OK && !format_is_sound(header, (uint64_t)file.st_size))
        return SMB_INVALID;
    return status;
}

/* Takes over fd, also on failure. */
static int open_owned(int fd, uid_t owner, bool take_over, struct smb_segment **segment)
{
    struct header header;
    int status = read_header(fd, owner, take_over, &header);
    if (status == SMB_OK)
        status = map_file(fd, &header, segment);
    if (status != SMB_OK) {
        int saved = errno;
        close(fd);
        errno = saved;
    }
    return status;
}

static int open_path(const char *path, bool take_over, struct smb_segment **segment)
{
    int fd, status = owned_open(path, &fd);
    return status != SMB_OK ? status : open_owned(fd, geteuid(), take_over, segment);
}

int smb_segment_open(const char *path, struct smb_segment **segment)
{
    return open_path(path, false, segment);
}

int smb_segment_take_over(const char *path, struct smb_segment **segment)
{
    struct smb_segment *taken;
    int status = open_path(path, true, &taken);
    if (status != SMB_OK)
        return status;
    /* Release: pairs with the acquire in smb_segment_is_shared. */
    atomic_store_explicit(&taken->header->pid_namespace, taken->pid_namespace,
                          memory_order_release);
    atomic_thread_fence(memory_order_release);
    /* stored last: a reader that sees this version sees the namespace, too */
    if (!format_is_replicated(taken->header))
        taken->header->format_version = FORMAT_VERSION;
    *segment = taken;
    return SMB_OK;
}

int smb_segment_open_fd(int fd, uint32_t owner, struct smb_segment **segment)
{
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return own < 0 ? SMB_SYSTEM : open_owned(own, owner, false, segment);
}

struct smb_segment *smb_segment_retain(struct smb_segment *segment)
{
    SMB_ASSERT(atomic_load_explicit(&segment->references, memory_order_relaxed) > 0);
    atomic_fetch_add_explicit(&segment->references, 1, memory_order_relaxed);
    return segment;
}

void smb_segment_release(struct smb_segment *segment)
{
    SMB_ASSERT(atomic_load_explicit(&segment->references, memory_order_relaxed) > 0);
    /* acq_rel: the thread that drops the last reference sees all writes of the others before it
     * unmaps. */
    if (atomic_fetch_sub_explicit(&segment->references, 1, memory_order_acq_rel) != 1)
        return;
    if (segment->companion)
        segment->free_companion(segment->companion);
    /* The memory of a deleted segment is given back now, although other processes may still have it
     * mapped: they read zeros from here on, and smb_segment_apply tells them so. In the daemon the
     * last reference is dropped when no request uses the segment. If this fails, the memory is
     * freed when they unmap. */
    if (smb_segment_deleted(segment))
        fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  (off_t)((uint8_t *)segment->records - (uint8_t *)segment->header),
                  (off_t)(segment->data_offset + format_round_up_to_page(segment->data_bytes)));
    munmap(segment->header, segment->file_bytes);
    close(segment->fd);
    free(segment);
}

void smb_segment_mark_deleted(struct smb_segment *segment)
{
    /* Pairs with the acquire in smb_segment_deleted. The state must be visible before the zeros of
     * memory that was given back. Here the system call that gives it back orders the two, and in a
     * reader the fence in smb_segment_still_there. */
    atomic_store_explicit(&segment->header->state, STATE_DELETED, memory_order_release);
}

void smb_segment_mark_replicated(struct smb_segment *segment, uint64_t bundle)
{
    bool alone = bundle == 0 || bundle == segment->id;
    segment->header->bundle = bundle;
    segment->header->format_version = alone ? FORMAT_REPLICATED : FORMAT_BUNDLED;
}

bool smb_segment_replicated(const struct smb_segment *segment)
{
    return format_is_replicated(segment->header) || mapping_state(segment) == STATE_GATED;
}

void smb_segment_note_copy(struct smb_segment *segment, uint32_t epoch, bool whole)
{
    atomic_store_explicit(&segment->header->copy, (uint64_t)epoch << 1 | (whole ? 1U : 0U),
                          memory_order_relaxed);
}

enum smb_copy smb_segment_copy(const struct smb_segment *segment, uint32_t *epoch)
{
    uint64_t copy = atomic_load_explicit(&segment->header->copy, memory_order_relaxed);
    *epoch = copy ? (uint32_t)(copy >> 1) : segment->epoch;
    if (copy)
        return copy & 1 ? SMB_COPY_WHOLE : SMB_COPY_BEGUN;
    return smb_segment_replicated(segment) ? SMB_COPY_UNKNOWN : SMB_COPY_WHOLE;
}

uint64_t smb_segment_bundle(const struct smb_segment *segment)
{
    return segment->header->bundle ? segment->header->bundle : segment->id;
}

bool smb_segment_gate(struct smb_segment *segment)
{
    SMB_ASSERT(segment->companion);
    uint32_t before = STATE_SHARED;
    /* Done first: if the daemon is killed in between, the next one finds the segment gated.
     * Release: pairs with the acquire in mapping_state. */
    if (!atomic_compare_exchange_strong_explicit(&segment->header->state, &before, STATE_GATED,
                                                 memory_order_release, memory_order_relaxed))
        return before == STATE_GATED;
    FAILPOINT("segment.gated");
    smb_segment_mark_replicated(segment, 0);
    return true;
}

/* Relaxed: neither of the two processes that compete for this word has changed anything else
 * before. */
static int bind(struct smb_segment *segment, uint32_t wanted)
{
    uint32_t before = BINDING_NONE;
    if (atomic_load_explicit(&segment->header->binding, memory_order_relaxed) == wanted ||
        atomic_compare_exchange_strong_explicit(&segment->header->binding, &before, wanted,
                                                memory_order_relaxed, memory_order_relaxed) ||
        before == wanted)
        return SMB_OK;
    return SMB_BUSY;
}

int smb_segment_bind(struct smb_segment *segment)
{
    return bind(segment, BINDING_STAYS);
}

int smb_segment_let_move(struct smb_segment *segment)
{
    return bind(segment, BINDING_MOVES);
}

bool smb_segment_moves(const struct smb_segment *segment)
{
    return atomic_load_explicit(&segment->header->binding, memory_order_relaxed) == BINDING_MOVES;
}

bool smb_segment_deleted(const struct smb_segment *segment)
{
    return mapping_is_deleted(segment);
}

int smb_segment_is_shared(const struct smb_segment *segment)
{
    return mapping_is_shared(segment) && mapping_state(segment) == STATE_SHARED;
}

uint64_t smb_segment_id(const struct smb_segment *segment)
{
    return segment->id;
}

uint32_t smb_segment_epoch(const struct smb_segment *segment)
{
    return segment->epoch;
}

int smb_segment_dtype(const struct smb_segment *segment)
{
    return (int)segment->dtype;
}

void smb_segment_info(const struct smb_segment *segment, struct smb_segment_info *info)
{
    *info = (struct smb_segment_info){
        .id = segment->id,
        .epoch = segment->epoch,
        .dtype = segment->dtype,
        .chunk_bytes = segment->chunk_bytes,
        .data_bytes = segment->data_bytes,
        .file_bytes = segment->file_bytes,
        .deleted = smb_segment_deleted(segment),
        .recovered_locks = atomic_load_explicit(&segment->header->recovered_locks,
                                                memory_order_relaxed),
    };
}

const void *smb_segment_states(const struct smb_segment *segment, uint64_t *bytes,
                               uint32_t *sequence_at)
{
    *bytes = format_chunk_count(segment->data_bytes, segment->chunk_bytes) * CHUNK_STATE_BYTES;
    *sequence_at = offsetof(struct chunk_state, sequence);
    return segment->chunks;
}

void *smb_segment_data(struct smb_segment *segment)
{
    return segment->data;
}

int smb_segment_fd(const struct smb_segment *segment)
{
    return segment->fd;
}

uint64_t smb_segment_data_offset(const struct smb_segment *segment)
{
    return segment->data_offset;
}

void smb_segment_count(struct smb_segment *segment, int opcode, uint64_t bytes)
{
    SMB_ASSERT(opcode >= 0 && opcode < SMB_OPCODE_COUNT);
    atomic_fetch_add_explicit(&segment->header->operations[opcode], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&segment->header->bytes[opcode], bytes, memory_order_relaxed);
}

void smb_segment_counters(const struct smb_segment *segment, uint64_t *operations, uint64_t *bytes)
{
    for (int i = 0; i < SMB_OPCODE_COUNT; i++) {
        operations[i] += atomic_load_explicit(&segment->header->operations[i],
                                              memory_order_relaxed);
        bytes[i] += atomic_load_explicit(&segment->header->bytes[i], memory_order_relaxed);
    }
}

bool smb_segment_holds(const struct smb_segment *segment, uint64_t offset, uint64_t bytes)
{
    return mapping_holds(segment, offset, bytes);
}

struct record_table smb_segment_records(struct smb_segment *segment)
{
    return (struct record_table){.records = segment->records,
                                 .count = segment->record_count,
                                 .evictions = &segment->header->evictions,
                                 .ended_evictions = &segment->header->ended_evictions};
}

struct sync_words *smb_segment_sync_words(struct smb_segment *segment)
{
    return (struct sync_words *)((uint8_t *)segment->header + SYNC_OFFSET);
}

int smb_segment_find_version(const struct smb_segment *segment, uint64_t sought,
                             uint64_t *published)
{
    const struct sync_words *words = (const struct sync_words *)((const uint8_t *)segment->header +
                                                                 SYNC_OFFSET);
    /* The fence orders a caller's second look after all its reads of the slot, and the acquire load
     * orders the first look before them. Both pair with the release in sync_state.h (word_put):
     * `version` is stored after the slot's last byte and its number; `slots` is stored before the
     * publisher is answered and overwrites the slot's first byte. */
    atomic_thread_fence(memory_order_acquire);
    *published = atomic_load_explicit(&words->version, memory_order_acquire);
    return sync_find_slot(words, sought == UINT64_MAX ? *published : sought);
}

uint64_t smb_segment_data_bytes(const struct smb_segment *segment)
{
    return segment->data_bytes;
}

void smb_segment_keep(struct smb_segment *segment, void *companion, void (*free_companion)(void *))
{
    SMB_ASSERT(!segment->companion);
    segment->companion = companion;
    segment->free_companion = free_companion;
}

void *smb_segment_companion(const struct smb_segment *segment)
{
    return segment->companion;
}
