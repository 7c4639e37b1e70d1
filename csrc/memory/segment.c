#include "memory/segment.h"

#include "memory/kernels.h"
#include "memory/pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PAGE = 4096, CHUNK_STATE_BYTES = 64, FORMAT_VERSION = 3, READ_ATTEMPTS = 8, LOCK_SPINS = 2000, SYNC_OFFSET = 2048,
       MARKED_RETRY_NS = 1000000 };
enum { FORMAT_WITHOUT_NAMESPACE = 2 }; /* has fewer records, too, and 0 or 1 where the namespace is */
static const uint64_t MAGIC = 0x544E454D4745534DU; /* "MSEGMENT" */

/* Locks of another C library, or of another word size, lie differently in memory: such a process must not share them. */
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
    _Atomic uint64_t evictions;       /* of completion records whose session had not ended */
    _Atomic uint32_t deleted;         /* release by the daemon; acquire by everyone before each operation */
    _Atomic uint32_t pid_namespace;   /* in which the locks hold; release by the daemon, acquire by everyone before each operation */
    _Atomic uint64_t recovered_locks; /* relaxed, as all counters */
    _Atomic uint64_t operations[32];  /* by local clients, per opcode */
    _Atomic uint64_t bytes[32];
    _Atomic uint64_t ended_evictions; /* of completion records whose session had ended */
};
_Static_assert(sizeof(struct header) <= SYNC_OFFSET && SYNC_OFFSET + sizeof(struct sync_words) <= PAGE, "the header is one page");
_Static_assert((int)SMB_OPCODE_COUNT <= 32, "counters have a place for every opcode");

struct chunk_state {
    pthread_mutex_t lock;
    _Atomic uint32_t sequence; /* odd while the chunk changes */
    _Atomic uint32_t mark;     /* 0, or 1 + the journal slot from which the daemon changes it now; release, acquire by who has the lock */
    uint8_t padding[CHUNK_STATE_BYTES - sizeof(pthread_mutex_t) - 8];
};
_Static_assert(sizeof(struct chunk_state) == CHUNK_STATE_BYTES, "one cache line per chunk");

struct smb_segment {
    _Atomic uint32_t references;
    int fd;
    struct header *header; /* shared; the copies below are what is relied on */
    struct chunk_state *chunks;
    struct record *records;
    uint32_t record_count;
    uint8_t *data;
    void *companion; /* what the daemon keeps beside it */
    void (*free_companion)(void *);
    uint64_t id;
    uint64_t data_bytes;
    uint64_t data_offset;
    uint64_t file_bytes;
    uint32_t epoch;
    uint32_t dtype;
    uint32_t chunk_bytes;
    uint32_t pid_namespace; /* this process's */
};

/* The kernel's number of this process's PID namespace, 0 where /proc does not tell. A robust lock holds its owner's thread id as that
 * is inside the namespace: of two that share a segment, each with a thread 1, the kernel would take one's death for the other's. */
static uint32_t own_pid_namespace(void)
{
    struct stat namespace;
    return stat("/proc/self/ns/pid", &namespace) == 0 ? (uint32_t)namespace.st_ino : 0;
}

static uint64_t round_up_to_page(uint64_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static uint64_t chunk_count(uint64_t data_bytes, uint32_t chunk_bytes)
{
    return data_bytes / chunk_bytes + (data_bytes % chunk_bytes != 0);
}

static uint64_t records_offset_for(uint64_t data_bytes, uint32_t chunk_bytes)
{
    return PAGE + round_up_to_page(chunk_count(data_bytes, chunk_bytes) * CHUNK_STATE_BYTES);
}

static uint64_t data_offset_for(uint64_t data_bytes, uint32_t chunk_bytes, uint32_t record_count)
{
    return records_offset_for(data_bytes, chunk_bytes) + round_up_to_page((uint64_t)record_count * RECORD_BYTES);
}

static uint64_t file_bytes_for(uint64_t data_bytes, uint32_t chunk_bytes, uint32_t record_count)
{
    if (data_bytes == 0 || data_bytes > (uint64_t)1 << 56 || chunk_bytes < SMB_CHUNK_BYTES_MIN ||
        chunk_bytes > SMB_CHUNK_BYTES_MAX || chunk_bytes % SMB_CHUNK_BYTES_MIN != 0)
        return 0;
    return data_offset_for(data_bytes, chunk_bytes, record_count) + round_up_to_page(data_bytes);
}

uint64_t smb_segment_file_bytes(uint64_t data_bytes, uint32_t chunk_bytes)
{
    return file_bytes_for(data_bytes, chunk_bytes, records_count_for(data_bytes));
}

/* ---- life --------------------------------------------------------------------------------------------------------- */

/* Takes fd over on success. `trusted` is a private, checked copy of the header. */
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

static bool header_is_sound(const struct header *header, uint64_t real_bytes)
{
    uint32_t records = header->record_count;
    uint64_t file_bytes = file_bytes_for(header->data_bytes, header->chunk_bytes, records);
    /* One that was made in the format before keeps the records that it has. */
    return (records == records_count_for(header->data_bytes) || records == records_count_before(header->data_bytes)) &&
           file_bytes != 0 && header->file_bytes == file_bytes && real_bytes == file_bytes &&
           header->chunks_offset == PAGE && header->id != 0 &&
           header->records_offset == records_offset_for(header->data_bytes, header->chunk_bytes) &&
           header->data_offset == data_offset_for(header->data_bytes, header->chunk_bytes, records) &&
           smb_dtype_bytes((int)header->dtype) != 0;
}

static int initialise_locks(struct smb_segment *segment)
{
    pthread_mutexattr_t attributes;
    if (pthread_mutexattr_init(&attributes) != 0)
        return SMB_SYSTEM;
    bool failed = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) != 0 ||
                  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) != 0;
    uint64_t chunks = chunk_count(segment->data_bytes, segment->chunk_bytes);
    for (uint64_t i = 0; i < chunks && !failed; i++)
        failed = pthread_mutex_init(&segment->chunks[i].lock, &attributes) != 0;
    pthread_mutexattr_destroy(&attributes);
    return failed ? SMB_SYSTEM : SMB_OK;
}

int smb_segment_create(const char *path, uint64_t id, uint32_t epoch, int dtype, uint64_t data_bytes, uint32_t chunk_bytes,
                       struct smb_segment **segment)
{
    uint64_t file_bytes = smb_segment_file_bytes(data_bytes, chunk_bytes);
    if (file_bytes == 0 || id == 0 || smb_dtype_bytes(dtype) == 0)
        return SMB_INVALID;
    /* Made under another name, so that a file under its own name is always complete. */
    char new_path[4096];
    if ((size_t)snprintf(new_path, sizeof new_path, "%s.new", path) >= sizeof new_path)
        return SMB_INVALID;
    int fd = open(new_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno == EEXIST ? SMB_EXISTS : errno == ENOSPC ? SMB_OUT_OF_MEMORY : SMB_SYSTEM;
    struct header header = {
        .magic = MAGIC,
        .format_version = FORMAT_VERSION,
        .lock_abi = LOCK_ABI,
        .id = id,
        .epoch = epoch,
        .dtype = (uint32_t)dtype,
        .data_bytes = data_bytes,
        .file_bytes = file_bytes,
        .chunks_offset = PAGE,
        .records_offset = records_offset_for(data_bytes, chunk_bytes),
        .data_offset = data_offset_for(data_bytes, chunk_bytes, records_count_for(data_bytes)),
        .chunk_bytes = chunk_bytes,
        .record_count = records_count_for(data_bytes),
        .pid_namespace = own_pid_namespace(),
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

/* Whether this process may take the locks. */
static int check_sharing(const struct header *header)
{
    if (header->format_version != FORMAT_VERSION || header->lock_abi != LOCK_ABI)
        return SMB_VERSION;
    uint32_t own = own_pid_namespace();
    return own != 0 && own == atomic_load_explicit(&header->pid_namespace, memory_order_relaxed) ? SMB_OK : SMB_NAMESPACE;
}

/* The same of a daemon that finds the segments of its earlier run. That one may have lived in another namespace, or have had the
 * format before: `header` becomes what it will be. */
static int check_taking_over(struct header *header)
{
    if ((header->format_version != FORMAT_VERSION && header->format_version != FORMAT_WITHOUT_NAMESPACE) ||
        header->lock_abi != LOCK_ABI)
        return SMB_VERSION;
    header->format_version = FORMAT_VERSION;
    atomic_store_explicit(&header->pid_namespace, own_pid_namespace(), memory_order_relaxed);
    return SMB_OK;
}

/* Takes fd over, also on failure. */
static int open_owned(int fd, bool take_over, struct smb_segment **segment)
{
    struct header header;
    struct stat file;
    int status = SMB_OK;
    if (fstat(fd, &file) != 0)
        status = SMB_SYSTEM;
    else if (!S_ISREG(file.st_mode) || pread(fd, &header, sizeof header, 0) != (ssize_t)sizeof header ||
             header.magic != MAGIC)
        status = SMB_INVALID;
    else
        status = take_over ? check_taking_over(&header) : check_sharing(&header);
    if (status == SMB_OK && !header_is_sound(&header, (uint64_t)file.st_size))
        status = SMB_INVALID;
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
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return errno == ENOENT ? SMB_NOT_FOUND : SMB_SYSTEM;
    return open_owned(fd, take_over, segment);
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
    atomic_store_explicit(&taken->header->pid_namespace, taken->pid_namespace, memory_order_release);
    atomic_thread_fence(memory_order_release);
    taken->header->format_version = FORMAT_VERSION; /* last: whoever finds it finds the namespace */
    *segment = taken;
    return SMB_OK;
}

int smb_segment_open_fd(int fd, struct smb_segment **segment)
{
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return own < 0 ? SMB_SYSTEM : open_owned(own, false, segment);
}

struct smb_segment *smb_segment_retain(struct smb_segment *segment)
{
    atomic_fetch_add_explicit(&segment->references, 1, memory_order_relaxed);
    return segment;
}

void smb_segment_release(struct smb_segment *segment)
{
    /* acq_rel: the last one sees everything the others did before it unmaps. */
    if (atomic_fetch_sub_explicit(&segment->references, 1, memory_order_acq_rel) != 1)
        return;
    if (segment->companion)
        segment->free_companion(segment->companion);
    /* The memory of a deleted segment goes back now, although other processes may still have it mapped: what they read from
     * here on is zeros, and smb_segment_apply tells them so. In the daemon the last reference goes when no request is using
     * the segment. Failure costs memory until they unmap. */
    if (smb_segment_deleted(segment))
        fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  (off_t)((uint8_t *)segment->records - (uint8_t *)segment->header),
                  (off_t)(segment->data_offset + round_up_to_page(segment->data_bytes)));
    munmap(segment->header, segment->file_bytes);
    close(segment->fd);
    free(segment);
}

void smb_segment_mark_deleted(struct smb_segment *segment)
{
    /* Pairs with the acquire in smb_segment_deleted. That it is seen before the zeros of memory given back is the work of the system call
     * that gives it back, on this side, and of the fence in smb_segment_still_there on the other. */
    atomic_store_explicit(&segment->header->deleted, 1, memory_order_release);
}

bool smb_segment_deleted(const struct smb_segment *segment)
{
    return atomic_load_explicit(&segment->header->deleted, memory_order_acquire) != 0;
}

int smb_segment_is_shared(const struct smb_segment *segment)
{
    return atomic_load_explicit(&segment->header->pid_namespace, memory_order_acquire) == segment->pid_namespace;
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
        .recovered_locks = atomic_load_explicit(&segment->header->recovered_locks, memory_order_relaxed),
    };
}

const void *smb_segment_states(const struct smb_segment *segment, uint64_t *bytes, uint32_t *sequence_at)
{
    *bytes = chunk_count(segment->data_bytes, segment->chunk_bytes) * CHUNK_STATE_BYTES;
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
    atomic_fetch_add_explicit(&segment->header->operations[opcode], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&segment->header->bytes[opcode], bytes, memory_order_relaxed);
}

void smb_segment_counters(const struct smb_segment *segment, uint64_t *operations, uint64_t *bytes)
{
    for (int i = 0; i < SMB_OPCODE_COUNT; i++) {
        operations[i] += atomic_load_explicit(&segment->header->operations[i], memory_order_relaxed);
        bytes[i] += atomic_load_explicit(&segment->header->bytes[i], memory_order_relaxed);
    }
}

/* ---- locks -------------------------------------------------------------------------------------------------------- */

bool smb_segment_holds(const struct smb_segment *segment, uint64_t offset, uint64_t bytes)
{
    return bytes > 0 && bytes <= segment->data_bytes && offset <= segment->data_bytes - bytes &&
           offset / segment->chunk_bytes == (offset + bytes - 1) / segment->chunk_bytes;
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

void smb_segment_version(const struct smb_segment *segment, uint64_t *version, uint64_t *writing)
{
    const struct sync_words *words = (const struct sync_words *)((const uint8_t *)segment->header + SYNC_OFFSET);
    /* Seen before whatever is read of the copy; and, for the second look, after all that was read. Pairs with the release of sync.c's put:
     * `version` after the copy's last byte, `writing` before its publisher is answered and stores the first byte over it. */
    atomic_thread_fence(memory_order_acquire);
    *version = atomic_load_explicit(&words->version, memory_order_acquire);
    *writing = atomic_load_explicit(&words->writing, memory_order_acquire);
}

uint64_t smb_segment_data_bytes(const struct smb_segment *segment)
{
    return segment->data_bytes;
}

void smb_segment_keep(struct smb_segment *segment, void *companion, void (*free_companion)(void *))
{
    segment->companion = companion;
    segment->free_companion = free_companion;
}

void *smb_segment_companion(const struct smb_segment *segment)
{
    return segment->companion;
}

static struct chunk_state *chunk_at(const struct smb_segment *segment, uint64_t offset)
{
    return &segment->chunks[offset / segment->chunk_bytes];
}

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whoever died in the lock has left the chunk, element by element, old or new. If it was the daemon in the middle of a
 * journalled change, the chunk stays as it is for its recovery: marked, and with the count odd. */
static int revive(struct smb_segment *segment, struct chunk_state *chunk)
{
    uint32_t sequence = atomic_load_explicit(&chunk->sequence, memory_order_relaxed);
    /* Relaxed: where recovery makes the count even between these two looks, both store the same; smb_segment_lock looks again. */
    if (sequence % 2 == 1 && atomic_load_explicit(&chunk->mark, memory_order_relaxed) == 0)
        atomic_store_explicit(&chunk->sequence, sequence + 1, memory_order_release);
    atomic_fetch_add_explicit(&segment->header->recovered_locks, 1, memory_order_relaxed);
    return pthread_mutex_consistent(&chunk->lock);
}

static int lock_once(struct smb_segment *segment, struct chunk_state *chunk, uint64_t deadline_ns)
{
    /* Held for microseconds as a rule: a short spin is cheaper than sleeping and being woken. */
    int failure = pthread_mutex_trylock(&chunk->lock);
    for (int i = 0; failure == EBUSY && i < LOCK_SPINS && deadline_ns != SMB_TRY_ONCE; i++) {
        pause_cpu();
        if (i % 16 == 15)
            failure = pthread_mutex_trylock(&chunk->lock);
    }
    if (failure == EBUSY) {
        if (deadline_ns <= SMB_TRY_ONCE)
            return SMB_BUSY;
        struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / 1000000000U),
                                    .tv_nsec = (long)(deadline_ns % 1000000000U)};
        failure = pthread_mutex_clocklock(&chunk->lock, CLOCK_MONOTONIC, &deadline);
        if (failure == ETIMEDOUT)
            return SMB_TIMEOUT;
    }
    if (failure == EOWNERDEAD)
        failure = revive(segment, chunk);
    if (failure != 0) {
        errno = failure;
        return SMB_SYSTEM;
    }
    return SMB_OK;
}

int smb_segment_lock(struct smb_segment *segment, uint64_t offset, uint64_t deadline_ns)
{
    struct chunk_state *chunk = chunk_at(segment, offset);
    for (;;) {
        int status = lock_once(segment, chunk, deadline_ns);
        /* Acquire: pairs with the release in smb_segment_mark. Recovery takes no lock, so the lock does not bring its bytes and
         * its even count. */
        if (status != SMB_OK || atomic_load_explicit(&chunk->mark, memory_order_acquire) == 0)
            return status;
        /* The daemon was killed while it changed this chunk. Started again, it finishes what it began. */
        pthread_mutex_unlock(&chunk->lock);
        if (deadline_ns <= SMB_TRY_ONCE)
            return SMB_BUSY;
        if (smb_now_ns() >= deadline_ns)
            return SMB_TIMEOUT;
        nanosleep(&(struct timespec){.tv_nsec = MARKED_RETRY_NS}, NULL);
    }
}

int smb_segment_targets(struct smb_segment *segment, const struct smb_change *change, struct smb_segment *targets[SMB_TARGETS_MAX])
{
    int count = 0;
    targets[count++] = segment;
    for (int i = 0; change->opcode == SMB_APPLY && i < SMB_RULE_STATES_MAX; i++)
        if (change->states[i])
            targets[count++] = change->states[i];
    return count;
}

int smb_segment_lock_each(struct smb_segment *const *targets, int count, uint64_t offset, uint64_t deadline_ns)
{
    int first = 0; /* the one that is waited for, while none is held */
    for (int round = 0; round <= count; round++) {
        int held = 0, status = SMB_OK;
        for (; held < count && status == SMB_OK; held += status == SMB_OK)
            status = smb_segment_lock(targets[(first + held) % count], offset, held == 0 ? deadline_ns : SMB_TRY_ONCE);
        if (status == SMB_OK)
            return SMB_OK;
        for (int i = 0; i < held; i++)
            smb_segment_unlock(targets[(first + i) % count], offset);
        if (status != SMB_BUSY || held == 0)
            return status;
        first = (first + held) % count;
    }
    return SMB_BUSY;
}

void smb_segment_unlock(struct smb_segment *segment, uint64_t offset)
{
    pthread_mutex_unlock(&chunk_at(segment, offset)->lock);
}

/* A network card that reads counts and bytes (RDMA) is no processor: on ARM release orders stores for the inner shareable domain, and
 * devices may lie outside of it. As the kernel's dma_wmb. On x86 devices see stores in order. */
static inline void order_for_devices(void)
{
#if defined(__aarch64__)
    __asm__ volatile("dmb oshst" ::: "memory");
#endif
}

void smb_segment_change_begin(struct smb_segment *segment, uint64_t offset)
{
    struct chunk_state *chunk = chunk_at(segment, offset);
    /* Made odd and not one more, here, and even below: whatever it was found as, it is right from the next change on. */
    uint32_t sequence = atomic_load_explicit(&chunk->sequence, memory_order_relaxed) | 1U;
    atomic_store_explicit(&chunk->sequence, sequence, memory_order_relaxed);
    /* The odd count is seen before any changed byte; pairs with the acquire fence in read_unlocked. */
    atomic_thread_fence(memory_order_release);
    order_for_devices();
}

void smb_segment_change_end(struct smb_segment *segment, uint64_t offset)
{
    struct chunk_state *chunk = chunk_at(segment, offset);
    uint32_t sequence = (atomic_load_explicit(&chunk->sequence, memory_order_relaxed) | 1U) + 1;
    order_for_devices();
    /* Pairs with the acquire load at the start of read_unlocked. */
    atomic_store_explicit(&chunk->sequence, sequence, memory_order_release);
}

void smb_segment_mark(struct smb_segment *segment, uint64_t offset, uint32_t mark)
{
    /* Release: pairs with the acquire in smb_segment_lock. Whoever finds the mark of a recovery gone finds its bytes and the even
     * count. For the daemon's death it also keeps the compiler from moving an unmarking before the count and the record. */
    atomic_store_explicit(&chunk_at(segment, offset)->mark, mark, memory_order_release);
}

uint32_t smb_segment_marked(const struct smb_segment *segment, uint64_t offset)
{
    return atomic_load_explicit(&chunk_at(segment, offset)->mark, memory_order_relaxed);
}

bool smb_segment_changing(const struct smb_segment *segment, uint64_t offset)
{
    return atomic_load_explicit(&chunk_at(segment, offset)->sequence, memory_order_relaxed) % 2 == 1;
}

uint64_t smb_segment_clear_marks(struct smb_segment *segment)
{
    uint64_t cleared = 0;
    uint64_t chunks = chunk_count(segment->data_bytes, segment->chunk_bytes);
    for (uint64_t i = 0; i < chunks; i++) {
        uint64_t offset = i * segment->chunk_bytes;
        if (smb_segment_marked(segment, offset) == 0)
            continue;
        if (smb_segment_changing(segment, offset))
            smb_segment_change_end(segment, offset);
        smb_segment_mark(segment, offset, 0);
        cleared++;
    }
    return cleared;
}

/* ---- operations --------------------------------------------------------------------------------------------------- */

/* The copy of an unlocked reader races with writers by design: what it got is thrown away if the count moved. ThreadSanitizer
 * can't know that, so under it the copy is a loop that it does not look into. */
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize_thread, noinline)) static void racing_copy(const struct smb_change *change, const void *from)
{
    for (uint64_t i = 0; i < change->bytes; i++)
        ((volatile uint8_t *)change->sink)[i] = ((const volatile uint8_t *)from)[i];
}
#else
static void racing_copy(const struct smb_change *change, const void *from)
{
    kernel_copy(change->sink, from, change->bytes, change->streaming);
}
#endif

static bool read_unlocked(struct smb_segment *segment, const struct smb_change *change, int attempts)
{
    struct chunk_state *chunk = chunk_at(segment, change->offset);
    for (int attempt = 0; attempt < attempts; attempt++) {
        uint32_t before = atomic_load_explicit(&chunk->sequence, memory_order_acquire);
        if (before % 2 == 0) {
            racing_copy(change, segment->data + change->offset);
            atomic_thread_fence(memory_order_acquire);
            if (atomic_load_explicit(&chunk->sequence, memory_order_relaxed) == before)
                return true;
        }
        pause_cpu();
    }
    return false;
}

static void fill(uint8_t *target, uint64_t bytes, uint32_t element, uint64_t bits)
{
    switch (element) {
    case 1: memset(target, (int)(uint8_t)bits, bytes); break;
    case 2:
        for (uint64_t i = 0; i < bytes / 2; i++)
            ((uint16_t *)target)[i] = (uint16_t)bits;
        break;
    case 4:
        for (uint64_t i = 0; i < bytes / 4; i++)
            ((uint32_t *)target)[i] = (uint32_t)bits;
        break;
    default:
        for (uint64_t i = 0; i < bytes / 8; i++)
            ((uint64_t *)target)[i] = bits;
    }
}

/* ---- some elements of a range: entries of an index in it and a value, not aligned */

static uint32_t index_of(const uint8_t *entry)
{
    uint32_t index;
    memcpy(&index, entry, sizeof index); /* both ends are little-endian */
    return index;
}

static bool entries_are_sound(const struct smb_change *change, uint32_t element)
{
    uint32_t entry = SMB_WIRE_INDEX_BYTES + element;
    const uint8_t *entries = change->source;
    if (change->source_bytes == 0 || change->source_bytes % entry != 0)
        return false;
    uint64_t next = 0;
    for (uint32_t at = 0; at < change->source_bytes; at += entry) {
        uint64_t index = index_of(entries + at);
        if (index < next)
            return false;
        next = index + 1;
    }
    return next <= change->bytes / element;
}

/* Those of elements [first, end) of the range. */
static void apply_entries(struct smb_segment *segment, const struct smb_change *change, uint64_t first, uint64_t end)
{
    enum { BATCH = 256 };
    uint64_t old[BATCH], values[BATCH]; /* of any dtype */
    uint32_t element = smb_dtype_bytes((int)segment->dtype), entry = SMB_WIRE_INDEX_BYTES + element;
    const uint8_t *entries = change->source;
    uint8_t *target = segment->data + change->offset;
    uint64_t low = 0, count = change->source_bytes / entry;
    for (uint64_t high = count; low < high;) {
        uint64_t middle = low + (high - low) / 2;
        if (index_of(entries + middle * entry) < first)
            low = middle + 1;
        else
            high = middle;
    }
    while (low < count && index_of(entries + low * entry) < end) {
        uint64_t n = 0;
        for (; n < BATCH && low + n < count && index_of(entries + (low + n) * entry) < end; n++) {
            const uint8_t *here = entries + (low + n) * entry;
            memcpy((uint8_t *)old + n * element, target + (uint64_t)index_of(here) * element, element);
            memcpy((uint8_t *)values + n * element, here + SMB_WIRE_INDEX_BYTES, element);
        }
        smb_kernel_apply((int)segment->dtype, change->op, old, values, n, change->scale);
        for (uint64_t i = 0; i < n; i++)
            memcpy(target + (uint64_t)index_of(entries + (low + i) * entry) * element, (uint8_t *)old + i * element, element);
        low += n;
    }
}

void smb_segment_change_range(struct smb_segment *segment, struct smb_change *change, uint64_t from, uint64_t bytes)
{
    uint8_t *target = segment->data + change->offset + from;
    uint32_t element = smb_dtype_bytes((int)segment->dtype);
    if (change->wire == SMB_WIRE_SPARSE) {
        apply_entries(segment, change, from / element, (from + bytes) / element);
        return;
    }
    if (change->wire != SMB_WIRE_EXACT) {
        smb_kernel_apply_encoded(change->wire, change->opcode == SMB_WRITE ? SMB_REPLACE : change->op, target, change->source,
                                 from / element, bytes / element, change->opcode == SMB_WRITE ? 1.0 : change->scale);
        return;
    }
    switch (change->opcode) {
    case SMB_WRITE: kernel_copy(target, (const uint8_t *)change->source + from, bytes, change->streaming); break;
    case SMB_ACCUMULATE:
    case SMB_ACCUMULATE_FROM:
        smb_kernel_apply((int)segment->dtype, change->op, target, (const uint8_t *)change->source + from, bytes / element,
                         change->scale);
        break;
    case SMB_APPLY: {
        float *states[SMB_RULE_STATES_MAX] = {NULL};
        for (int i = 0; i < SMB_RULE_STATES_MAX; i++)
            if (change->states[i])
                states[i] = (float *)(change->states[i]->data + change->offset + from);
        kernel_step(change->op, &change->factors, (float *)target, (const float *)((const uint8_t *)change->source + from), states[0],
                    states[1], bytes / element);
        break;
    }
    case SMB_FILL: fill(target, bytes, element, change->argument); break;
    case SMB_FETCH_ADD: {
        uint64_t *word = (uint64_t *)target;
        change->result = *word;
        *word += change->argument;
        break;
    }
    case SMB_COMPARE_SWAP: {
        uint64_t *word = (uint64_t *)target;
        change->result = *word;
        if (*word == change->expected)
            *word = change->argument;
        break;
    }
    }
}

/* Its states are as many as the rule has, each another segment with that range in one chunk. */
static bool step_fits(const struct smb_segment *segment, const struct smb_change *change)
{
    int count = smb_rule_states(change->op);
    if (segment->dtype != SMB_FLOAT32 || change->sink || !smb_rule_accepts(change->op, &change->hyper))
        return false;
    for (int i = 0; i < SMB_RULE_STATES_MAX; i++) {
        const struct smb_segment *state = change->states[i];
        if ((state != NULL) != (i < count))
            return false;
        if (state && (state == segment || (i > 0 && state == change->states[0]) || state->dtype != SMB_FLOAT32 ||
                      !smb_segment_holds(state, change->offset, change->bytes)))
            return false;
    }
    return true;
}

bool smb_segment_change_fits(const struct smb_segment *segment, const struct smb_change *change)
{
    uint32_t element = smb_dtype_bytes((int)segment->dtype);
    if (!smb_segment_holds(segment, change->offset, change->bytes) || change->offset % element != 0 ||
        change->bytes % element != 0)
        return false;
    bool encoded = smb_wire_is_dense(change->wire) && segment->dtype == SMB_FLOAT32 &&
                   (change->opcode == SMB_WRITE || change->opcode == SMB_ACCUMULATE);
    if (change->wire == SMB_WIRE_SPARSE)
        encoded = change->opcode == SMB_ACCUMULATE && !change->sink && entries_are_sound(change, element);
    if (change->wire != SMB_WIRE_EXACT && !encoded)
        return false;
    switch (change->opcode) {
    case SMB_READ:
    case SMB_WRITE:
    case SMB_FILL: return true;
    case SMB_ACCUMULATE:
    case SMB_ACCUMULATE_FROM: return smb_op_accepts((int)segment->dtype, change->op, change->scale);
    case SMB_FETCH_ADD:
    case SMB_COMPARE_SWAP: return change->bytes == 8 && segment->dtype == SMB_INT64;
    case SMB_APPLY: return step_fits(segment, change);
    default: return false;
    }
}

int smb_segment_still_there(const struct smb_segment *segment)
{
    atomic_thread_fence(memory_order_acquire);
    return smb_segment_deleted(segment) ? SMB_NOT_FOUND : SMB_OK;
}

int smb_segment_apply(struct smb_segment *segment, struct smb_change *change, uint64_t deadline_ns)
{
    /* APPLY passes the gate alone: it takes several locks. */
    if (change->opcode == SMB_APPLY || !smb_segment_change_fits(segment, change))
        return SMB_INVALID;
    if (smb_segment_deleted(segment))
        return SMB_NOT_FOUND;
    if (!smb_segment_is_shared(segment))
        return SMB_NAMESPACE;
    if (change->opcode == SMB_READ && read_unlocked(segment, change, deadline_ns == SMB_TRY_ONCE ? 2 : READ_ATTEMPTS))
        return smb_segment_still_there(segment);
    int status = smb_segment_lock(segment, change->offset, deadline_ns);
    if (status != SMB_OK)
        return status;
    if (change->opcode == SMB_READ) {
        kernel_copy(change->sink, segment->data + change->offset, change->bytes, change->streaming);
    } else {
        smb_segment_change_begin(segment, change->offset);
        smb_segment_change_range(segment, change, 0, change->bytes);
        if (change->sink)
            memcpy(change->sink, segment->data + change->offset, change->bytes);
        smb_segment_change_end(segment, change->offset);
    }
    smb_segment_unlock(segment, change->offset);
    return smb_segment_still_there(segment);
}
