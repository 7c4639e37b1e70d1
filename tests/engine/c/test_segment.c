/* Segment files: created completely or not at all, and opened only if every field of the header is
 * valid. */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/frame.h"
#include "check.h"
#include "memory/change.h"
#include "kernels/kernels.h"
#include "memory/segment.h"
#include "random.h"

enum { CHUNK = 8192, DATA = 3 * CHUNK + 24 };

static struct smb_segment *make(const char *name, int dtype)
{
    struct smb_segment *segment = NULL;
    CHECK_EQ(smb_segment_create(scratch_path(name), 77, 5, dtype, DATA, CHUNK, &segment), SMB_OK);
    return segment;
}

static int apply(struct smb_segment *segment, int opcode, uint64_t offset, uint64_t bytes,
                 const void *source, void *sink)
{
    struct smb_change change = {.opcode = opcode,
                                .op = SMB_SUM,
                                .scale = 1.0,
                                .offset = offset,
                                .bytes = bytes,
                                .source = source,
                                .sink = sink};
    return smb_segment_apply(segment, &change, SMB_TRY);
}

/* A new segment is zeroed and has its identity, and one mapping reads what another mapping
 * writes. */
static void create_and_open(void)
{
    struct smb_segment *made = make("a", SMB_INT64), *opened = NULL, *by_fd = NULL;
    CHECK_EQ(scratch_files(), 1);
    CHECK_EQ(smb_segment_open(scratch_path("a"), &opened), SMB_OK);
    CHECK_EQ(smb_segment_open_fd(smb_segment_fd(made), geteuid(), &by_fd), SMB_OK);
    struct smb_segment_info info;
    smb_segment_info(opened, &info);
    CHECK(info.id == 77 && info.epoch == 5 && info.dtype == SMB_INT64 && info.chunk_bytes == CHUNK);
    CHECK(info.data_bytes == DATA && !info.deleted && info.recovered_locks == 0);
    struct stat file;
    CHECK_EQ(stat(scratch_path("a"), &file), 0);
    CHECK_EQ(file.st_size, info.file_bytes);
    CHECK_EQ(info.file_bytes, smb_segment_file_bytes(DATA, CHUNK));
    /* every page is allocated, so no store can fail later */
    CHECK(file.st_blocks * 512 >= file.st_size);
    CHECK_EQ(file.st_mode & 07777, 0600);
    for (uint64_t i = 0; i < DATA; i++)
        CHECK_EQ(((uint8_t *)smb_segment_data(opened))[i], 0);
    int64_t value = -5, back = 0;
    CHECK_EQ(apply(made, SMB_WRITE, CHUNK + 8, 8, &value, NULL), SMB_OK);
    CHECK_EQ(apply(by_fd, SMB_READ, CHUNK + 8, 8, NULL, &back), SMB_OK);
    CHECK_EQ(back, -5);
    CHECK_EQ(memcmp((uint8_t *)smb_segment_data(opened) + CHUNK + 8, &value, 8), 0);
    smb_segment_release(made);
    smb_segment_release(opened);
    smb_segment_release(by_fd);
}

/* A second creation under the same name is refused, leaves the first file unchanged, and leaves no
 * other file. */
static void existing_name_is_refused(void)
{
    struct smb_segment *made = make("a", SMB_UINT8), *second = NULL;
    memset(smb_segment_data(made), 9, DATA);
    CHECK_EQ(smb_segment_create(scratch_path("a"), 78, 1, SMB_UINT8, 100, CHUNK, &second),
             SMB_EXISTS);
    CHECK(second == NULL);
    CHECK_EQ(scratch_files(), 1);
    struct smb_segment *opened;
    CHECK_EQ(smb_segment_open(scratch_path("a"), &opened), SMB_OK);
    CHECK_EQ(((uint8_t *)smb_segment_data(opened))[DATA - 1], 9);
    smb_segment_release(made);
    smb_segment_release(opened);
}

/* Invalid arguments are refused, and no file appears. */
static void refused_arguments(void)
{
    struct smb_segment *segment;
    const char *path = scratch_path("a");
    CHECK_EQ(smb_segment_create(path, 0, 1, SMB_UINT8, 100, CHUNK, &segment), SMB_INVALID);
    CHECK_EQ(smb_segment_create(path, 1, 1, 0, 100, CHUNK, &segment), SMB_INVALID);
    CHECK_EQ(smb_segment_create(path, 1, 1, SMB_FLOAT8_E5M2 + 1, 100, CHUNK, &segment),
             SMB_INVALID);
    CHECK_EQ(smb_segment_create(path, 1, 1, SMB_UINT8, 0, CHUNK, &segment), SMB_INVALID);
    CHECK_EQ(smb_segment_create(path, 1, 1, SMB_UINT8, UINT64_MAX, CHUNK, &segment), SMB_INVALID);
    CHECK_EQ(smb_segment_create(path, 1, 1, SMB_UINT8, 100, 0, &segment), SMB_INVALID);
    CHECK_EQ(smb_segment_create(path, 1, 1, SMB_UINT8, 100, 5000, &segment), SMB_INVALID);
    CHECK_EQ(smb_segment_create(path, 1, 1, SMB_UINT8, 100, 2 * SMB_CHUNK_BYTES_MAX, &segment),
             SMB_INVALID);
    CHECK_EQ(smb_segment_create("/proc/no/such/place", 1, 1, SMB_UINT8, 100, CHUNK, &segment),
             SMB_SYSTEM);
    CHECK_EQ(smb_segment_file_bytes(0, CHUNK), 0);
    CHECK_EQ(smb_segment_file_bytes(UINT64_MAX, CHUNK), 0);
    CHECK_EQ(smb_segment_file_bytes(1, 4097), 0);
    CHECK_EQ(smb_segment_open(path, &segment), SMB_NOT_FOUND);
    CHECK_EQ(scratch_files(), 0);
}

/* Beyond the file system's capacity: refused as out of memory, with no file left and no signal
 * later. */
static void file_system_without_room(void)
{
    struct smb_segment *segment;
    CHECK_EQ(smb_segment_create(scratch_path("a"), 1, 1, SMB_UINT8, (uint64_t)1 << 50,
                                SMB_CHUNK_BYTES_MAX, &segment),
             SMB_OUT_OF_MEMORY);
    CHECK_EQ(scratch_files(), 0);
}

/* Memory that is refused although the file system has it: what was written until then is
 * removed. */
static void no_room_in_the_middle(void)
{
    struct smb_segment *segment = NULL;
    struct rlimit before, little;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    little = (struct rlimit){.rlim_cur = 400000, .rlim_max = before.rlim_max};
    signal(SIGXFSZ, SIG_IGN); /* as Python does */
    CHECK(setrlimit(RLIMIT_FSIZE, &little) == 0);
    CHECK_EQ(smb_segment_create(scratch_path("a"), 1, 1, SMB_UINT8, 1 << 20, CHUNK, &segment),
             SMB_OUT_OF_MEMORY);
    CHECK(segment == NULL);
    CHECK_EQ(scratch_files(), 0);
    little.rlim_cur = 5 << 20; /* in the middle of its large pages, or of what comes after them */
    CHECK(setrlimit(RLIMIT_FSIZE, &little) == 0);
    CHECK_EQ(smb_segment_create(scratch_path("a"), 1, 1, SMB_UINT8, 7 << 20, CHUNK, &segment),
             SMB_OUT_OF_MEMORY);
    CHECK_EQ(smb_segment_create(scratch_path("a"), 1, 1, SMB_UINT8, 5 << 20, CHUNK, &segment),
             SMB_OUT_OF_MEMORY);
    CHECK_EQ(scratch_files(), 0);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK_EQ(smb_segment_create(scratch_path("a"), 1, 1, SMB_UINT8, 1 << 20, CHUNK, &segment),
             SMB_OK);
    smb_segment_release(segment);
}

/* KiB of the mapping that contains the address, of that kind (proc(5), smaps). */
static long mapped_kib(const void *address, const char *kind)
{
    char line[512];
    unsigned long from, to;
    bool here = false;
    long kib = -1;
    FILE *maps = fopen("/proc/self/smaps", "re");
    while (kib < 0 && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            here = from <= (uintptr_t)address && (uintptr_t)address < to;
        else if (here && strncmp(line, kind, strlen(kind)) == 0)
            kib = strtol(line + strlen(kind), NULL, 10);
    }
    fclose(maps);
    return kib;
}

/* Whether a process may ask for large pages if the file system makes none by itself. */
static bool kernel_makes_large_pages(void)
{
    enum { LARGE = 2 << 20 };
    int fd = open(scratch_path("probe"), O_RDWR | O_CREAT, 0600);
    CHECK_EQ(ftruncate(fd, LARGE), 0);
    uint8_t *around = mmap(NULL, 2 * LARGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *base = around + (-(uintptr_t)around & (LARGE - 1));
    CHECK(mmap(base, LARGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == base);
    *base = 1;
    bool made = madvise(base, LARGE, 25 /* MADV_COLLAPSE */) == 0;
    munmap(around, 2 * LARGE);
    close(fd);
    unlink(scratch_path("probe"));
    return made;
}

/* Large pages from two megabytes on, in the daemon and in clients, without special rights; and
 * everything is zeros, to the last byte. */
static void large_pages(void)
{
    enum { BYTES = (5 << 20) + 4096 };
    struct smb_segment *made, *opened;
    CHECK_EQ(smb_segment_create(scratch_path("a"), 1, 1, SMB_UINT8, BYTES, CHUNK, &made), SMB_OK);
    for (int tries = 0; tries < 20 && mapped_kib(smb_segment_data(made), "ShmemPmdMapped:") < 4096;
         tries++) {
        smb_segment_release(made); /* on a busy machine the kernel may find none at once */
        CHECK_EQ(unlink(scratch_path("a")), 0);
        CHECK_EQ(smb_segment_create(scratch_path("a"), 1, 1, SMB_UINT8, BYTES, CHUNK, &made),
                 SMB_OK);
    }
    CHECK_EQ(smb_segment_open(scratch_path("a"), &opened), SMB_OK);
    for (int i = 0; i < BYTES; i++)
        CHECK(((uint8_t *)smb_segment_data(made))[i] == 0);
    memset(smb_segment_data(opened), 3, BYTES);
    CHECK_EQ(((uint8_t *)smb_segment_data(made))[BYTES - 1], 3);
    /* every page is mapped */
    CHECK(mapped_kib(smb_segment_data(made), "Rss:") >= BYTES >> 10);
    /* addresses are not wasted */
    CHECK_EQ(mapped_kib(smb_segment_data(opened), "Size:"),
             smb_segment_file_bytes(BYTES, CHUNK) >> 10);
    if (kernel_makes_large_pages()) {
        CHECK_EQ(mapped_kib(smb_segment_data(made), "ShmemPmdMapped:"), 4096);
        CHECK_EQ(mapped_kib(smb_segment_data(opened), "ShmemPmdMapped:"), 4096);
    } else {
        printf("large_pages: this kernel makes none where it is asked to (MADV_COLLAPSE)\n");
    }
    smb_segment_release(made);
    smb_segment_release(opened);
}

/* A file system that fills up while segments are created: the one that does not fit fails
 * completely, the others stay usable. */
static void full_file_system(void)
{
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("tmpfs", scratch_path(""), "tmpfs", 0, "size=184k") != 0) {
        printf("full_file_system: not run, it takes the right to mount\n");
        return;
    }
    struct smb_segment *first = NULL, *second = NULL;
    CHECK_EQ(smb_segment_create(scratch_path("a"), 1, 1, SMB_UINT8, 65536, CHUNK, &first), SMB_OK);
    CHECK_EQ(smb_segment_create(scratch_path("b"), 2, 1, SMB_UINT8, 131072, CHUNK, &second),
             SMB_OUT_OF_MEMORY);
    CHECK(second == NULL);
    CHECK_EQ(scratch_files(), 1);
    memset(smb_segment_data(first), 7, 65536);
    CHECK_EQ(smb_segment_create(scratch_path("b"), 2, 1, SMB_UINT8, 65536, CHUNK, &second), SMB_OK);
    memset(smb_segment_data(second), 8, 65536); /* every page is allocated: no signal */
    CHECK_EQ(((uint8_t *)smb_segment_data(first))[65535], 7);
    smb_segment_release(first);
    smb_segment_release(second);
}

static void put(const char *path, uint64_t offset, const void *bytes, size_t count)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(pwrite(fd, bytes, count, (off_t)offset), count);
    close(fd);
}

static int open_status(const char *path)
{
    struct smb_segment *segment;
    int status = smb_segment_open(path, &segment);
    if (status == SMB_OK)
        smb_segment_release(segment);
    return status;
}

/* Changes one field of a valid header: refused. Restores it: opened. */
static void check_field(const char *path, uint64_t offset, uint32_t bytes, uint64_t bad,
                        int expected)
{
    uint64_t good = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK_EQ(pread(fd, &good, bytes, (off_t)offset), bytes);
    close(fd);
    put(path, offset, &bad, bytes);
    CHECK_EQ(open_status(path), expected);
    put(path, offset, &good, bytes);
    CHECK_EQ(open_status(path), SMB_OK);
}

/* With any field of the header wrong, the file is refused before it is mapped. */
static void corrupted_headers(void)
{
    const char *path = scratch_path("a");
    smb_segment_release(make("a", SMB_INT32));
    static const uint64_t wrong[] = {
        0, 1, 7, 4096, 4097, UINT32_MAX, (uint64_t)1 << 40, INT64_MAX, UINT64_MAX};
    check_field(path, 0, 8, 0, SMB_INVALID); /* magic */
    check_field(path, 8, 4, 2, SMB_VERSION); /* the previous format */
    check_field(path, 8, 4, 4, SMB_VERSION);
    check_field(path, 92, 4, 1, SMB_NAMESPACE);     /* another PID namespace */
    check_field(path, 92, 4, 0, SMB_NAMESPACE);     /* an unknown namespace */
    check_field(path, 12, 4, 0x30028, SMB_VERSION); /* another C library's locks */
    check_field(path, 16, 8, 0, SMB_INVALID);       /* id */
    check_field(path, 28, 4, 0, SMB_INVALID);       /* dtype */
    check_field(path, 28, 4, SMB_FLOAT8_E5M2 + 1, SMB_INVALID);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        check_field(path, 32, 8, wrong[i], SMB_INVALID); /* data_bytes */
        check_field(path, 40, 8, wrong[i], SMB_INVALID); /* file_bytes */
        if (wrong[i] != 4096)
            check_field(path, 48, 8, wrong[i], SMB_INVALID); /* chunks_offset */
        check_field(path, 56, 8, wrong[i], SMB_INVALID);     /* records_offset */
        check_field(path, 64, 8, wrong[i], SMB_INVALID);     /* data_offset */
        if ((uint32_t)wrong[i] != 4096)
            check_field(path, 72, 4, wrong[i], SMB_INVALID); /* chunk_bytes */
        check_field(path, 76, 4, wrong[i], SMB_INVALID);     /* record_count */
    }
}

static int take_over_status(const char *path, struct smb_segment **segment)
{
    int status = smb_segment_take_over(path, segment);
    if (status != SMB_OK)
        *segment = NULL;
    return status;
}

/* A file of the previous format, with fewer records and no namespace: its daemon takes it over with
 * its data, and others may map it from then on. A file of a later format is refused. */
static void format_before(void)
{
    enum { RECORDS = 32, DATA_AT = 3 * 4096 };
    const char *path = scratch_path("a");
    smb_segment_release(make("a", SMB_UINT8));
    uint64_t bytes = DATA_AT + (DATA + 4095) / 4096 * 4096, data_at = DATA_AT;
    CHECK(bytes < smb_segment_file_bytes(DATA, CHUNK));
    put(path, 8, &(uint32_t){2}, 4);
    put(path, 40, &bytes, 8);
    put(path, 64, &data_at, 8);
    put(path, 76, &(uint32_t){RECORDS}, 4);
    put(path, 92, &(uint32_t){1}, 4);
    put(path, DATA_AT + 5, "x", 1);
    CHECK_EQ(truncate(path, (off_t)bytes), 0);
    CHECK_EQ(open_status(path), SMB_VERSION);
    struct smb_segment *taken, *opened;
    CHECK_EQ(take_over_status(path, &taken), SMB_OK);
    CHECK_EQ(((uint8_t *)smb_segment_data(taken))[5], 'x');
    CHECK_EQ(smb_segment_records(taken).count, RECORDS);
    CHECK_EQ(smb_segment_open(path, &opened), SMB_OK);
    uint8_t byte = 'y', back = 0;
    CHECK_EQ(apply(opened, SMB_WRITE, DATA - 1, 1, &byte, NULL), SMB_OK);
    CHECK_EQ(apply(taken, SMB_READ, DATA - 1, 1, NULL, &back), SMB_OK);
    CHECK_EQ(back, 'y');
    smb_segment_release(taken);
    smb_segment_release(opened);
    put(path, 8, &(uint32_t){6}, 4); /* a later version */
    CHECK_EQ(take_over_status(path, &taken), SMB_VERSION);
}

/* Runs it as the first process of a new PID namespace; false: this process may not create one. */
static bool in_namespace(int (*run)(void), int expected)
{
    int left = 0;
    pid_t outer = check_fork();
    if (outer == 0) {
        if (unshare(CLONE_NEWPID) != 0)
            _exit(200);
        pid_t inner = fork();
        if (inner == 0) /* inside the namespace it has no parent to look after it */
            _exit(run());
        CHECK_EQ(waitpid(inner, &left, 0), inner);
        _exit(WIFEXITED(left) ? WEXITSTATUS(left) : 201);
    }
    CHECK_EQ(waitpid(outer, &left, 0), outer);
    CHECK(WIFEXITED(left));
    if (WEXITSTATUS(left) == 200)
        return false;
    CHECK_EQ(WEXITSTATUS(left), expected);
    return true;
}

static struct smb_segment *outside; /* mapped before namespaces are created */

static int open_inside(void)
{
    struct smb_segment *segment;
    int by_fd = smb_segment_open_fd(smb_segment_fd(outside), geteuid(), &segment);
    int by_path = smb_segment_open(scratch_path("a"), &segment);
    return getpid() == 1 && by_fd == by_path ? by_path : 100;
}

static int take_over_inside(void)
{
    struct smb_segment *segment;
    uint8_t byte = 7;
    int status = smb_segment_take_over(scratch_path("a"), &segment);
    return status == SMB_OK ? apply(segment, SMB_WRITE, 1, 1, &byte, NULL) : status;
}

/* A process of another PID namespace is refused the mapping: its threads have the numbers of others
 * here, and the kernel identifies the dead holder of a lock by its number. A daemon that moves to
 * another namespace takes the segment along, and earlier clients get SMB_NAMESPACE. */
static void namespaces_do_not_share(void)
{
    outside = make("a", SMB_UINT8);
    (void)scratch_path("a");
    if (!in_namespace(open_inside, SMB_NAMESPACE)) {
        printf("namespaces_do_not_share: not run, it takes the right to make a PID namespace\n");
        return;
    }
    CHECK(smb_segment_is_shared(outside));
    CHECK(in_namespace(take_over_inside, SMB_OK));
    CHECK(!smb_segment_is_shared(outside));
    uint8_t byte = 0;
    CHECK_EQ(apply(outside, SMB_READ, 1, 1, NULL, &byte), SMB_NAMESPACE);
    CHECK_EQ(apply(outside, SMB_WRITE, 1, 1, &byte, NULL), SMB_NAMESPACE);
    CHECK_EQ(open_status(scratch_path("a")), SMB_NAMESPACE);
    struct smb_segment *taken;
    CHECK_EQ(smb_segment_take_over(scratch_path("a"), &taken), SMB_OK);
    CHECK_EQ(apply(taken, SMB_READ, 1, 1, NULL, &byte), SMB_OK);
    CHECK_EQ(byte, 7);
    smb_segment_release(taken);
    smb_segment_release(outside);
}

/* A count that was left odd, or made even too early, is right again with the next change: during it
 * and after it. */
static void parity_is_set(void)
{
    struct smb_segment *segment = make("a", SMB_UINT8);
    for (int stray = 0; stray < 4; stray++) {
        for (int i = 0; i < stray; i++) {
            if (i % 2)
                smb_segment_change_begin(segment, 0);
            else
                smb_segment_change_end(segment, 0);
        }
        uint8_t byte = (uint8_t)(1 + stray), back = 0;
        CHECK_EQ(smb_segment_lock(segment, 0, SMB_TRY), SMB_OK);
        smb_segment_change_begin(segment, 0);
        CHECK(smb_segment_changing(segment, 0));
        smb_segment_change_end(segment, 0);
        CHECK(!smb_segment_changing(segment, 0));
        smb_segment_unlock(segment, 0);
        CHECK_EQ(apply(segment, SMB_WRITE, 0, 1, &byte, NULL), SMB_OK);
        CHECK_EQ(apply(segment, SMB_READ, 0, 1, NULL, &back), SMB_OK);
        CHECK_EQ(back, byte);
    }
    smb_segment_release(segment);
}

/* A file that is shorter or longer than its header says, or not a regular file, is refused. */
static void wrong_sizes(void)
{
    const char *path = scratch_path("a");
    smb_segment_release(make("a", SMB_INT32));
    off_t bytes = (off_t)smb_segment_file_bytes(DATA, CHUNK);
    static const off_t shorter[] = {0, 1, 63, 64, 327, 328, 4095, 4096, 8192};
    CHECK_EQ(truncate(path, bytes + 4096), 0);
    CHECK_EQ(open_status(path), SMB_INVALID);
    CHECK_EQ(truncate(path, bytes), 0);
    CHECK_EQ(open_status(path), SMB_OK);
    CHECK_EQ(truncate(path, bytes - 1), 0);
    CHECK_EQ(open_status(path), SMB_INVALID);
    for (size_t i = sizeof shorter / sizeof *shorter; i-- > 0;) {
        CHECK_EQ(truncate(path, shorter[i]), 0);
        CHECK_EQ(open_status(path), SMB_INVALID);
    }
    CHECK_EQ(open_status("/dev/shm"), SMB_UNTRUSTED);
    CHECK_EQ(open_status("/dev/null"), SMB_UNTRUSTED);
    CHECK_EQ(symlink("/dev/null", scratch_path("link")), 0);
    /* symbolic links are not followed */
    CHECK_EQ(open_status(scratch_path("link")), SMB_UNTRUSTED);
    struct smb_segment *segment;
    CHECK_EQ(smb_segment_open_fd(-1, geteuid(), &segment), SMB_SYSTEM);
    int pipes[2];
    CHECK_EQ(pipe(pipes), 0);
    CHECK_EQ(smb_segment_open_fd(pipes[0], geteuid(), &segment), SMB_UNTRUSTED);
    close(pipes[0]);
    close(pipes[1]);
}

/* A range outside the data, across a chunk's end, or with half an element is refused and changes
 * nothing. */
static void bounds(void)
{
    struct smb_segment *segment = make("a", SMB_INT64);
    uint8_t *bytes = calloc(1, DATA);
    memset(bytes, 1, DATA);
    static const struct {
        uint64_t offset, bytes;
        int status;
    } cases[] = {
        {0, 8, SMB_OK},
        {0, CHUNK, SMB_OK},
        {CHUNK - 8, 8, SMB_OK},
        {DATA - 8, 8, SMB_OK},
        {3 * CHUNK, 24, SMB_OK},
        {0, 0, SMB_INVALID},
        {0, CHUNK + 8, SMB_INVALID},
        {CHUNK - 8, 16, SMB_INVALID},
        {DATA, 8, SMB_INVALID},
        {DATA - 8, 16, SMB_INVALID},
        {0, 4, SMB_INVALID},
        {4, 8, SMB_INVALID},
        {UINT64_MAX - 7, 8, SMB_INVALID},
        {UINT64_MAX - 7, 16, SMB_INVALID},
        {8, UINT64_MAX - 7, SMB_INVALID},
        {0, UINT64_MAX, SMB_INVALID},
        {(uint64_t)1 << 63, (uint64_t)1 << 63, SMB_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memset(smb_segment_data(segment), 0, DATA);
        CHECK_EQ(apply(segment, SMB_WRITE, cases[i].offset, cases[i].bytes, bytes, NULL),
                 cases[i].status);
        uint64_t changed = 0;
        for (uint64_t b = 0; b < DATA; b++)
            changed += ((uint8_t *)smb_segment_data(segment))[b];
        CHECK_EQ(changed, cases[i].status == SMB_OK ? cases[i].bytes : 0);
        CHECK_EQ(apply(segment, SMB_READ, cases[i].offset, cases[i].bytes, NULL, bytes),
                 cases[i].status);
        memset(bytes, 1, DATA);
    }
    CHECK_EQ(apply(segment, SMB_FETCH_ADD, 0, 16, NULL, NULL), SMB_INVALID);
    CHECK_EQ(apply(segment, SMB_HELLO, 0, 8, NULL, NULL), SMB_INVALID);
    struct smb_change half = {
        .opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = 0.5, .bytes = 8, .source = bytes};
    CHECK_EQ(smb_segment_apply(segment, &half, SMB_TRY), SMB_INVALID);
    free(bytes);
    smb_segment_release(segment);
}

/* FETCH_ADD and COMPARE_SWAP return the old value, and an unequal compare changes nothing. */
static void words(void)
{
    struct smb_segment *segment = make("a", SMB_INT64);
    struct smb_change add = {
        .opcode = SMB_FETCH_ADD, .offset = 16, .bytes = 8, .argument = (uint64_t)-3};
    CHECK_EQ(smb_segment_apply(segment, &add, SMB_TRY), SMB_OK);
    CHECK_EQ(add.result, 0);
    CHECK_EQ(smb_segment_apply(segment, &add, SMB_TRY), SMB_OK);
    CHECK_EQ(add.result, -3);
    struct smb_change swap = {
        .opcode = SMB_COMPARE_SWAP, .offset = 16, .bytes = 8, .argument = 1, .expected = 5};
    CHECK_EQ(smb_segment_apply(segment, &swap, SMB_TRY), SMB_OK);
    CHECK_EQ(swap.result, -6);
    swap.expected = (uint64_t)-6;
    CHECK_EQ(smb_segment_apply(segment, &swap, SMB_TRY), SMB_OK);
    CHECK_EQ(swap.result, -6);
    CHECK_EQ(((int64_t *)smb_segment_data(segment))[2], 1);
    smb_segment_release(segment);
    segment = make("b", SMB_COMPLEX64); /* eight bytes, too, but not one number */
    CHECK_EQ(apply(segment, SMB_FETCH_ADD, 0, 8, NULL, NULL), SMB_INVALID);
    smb_segment_release(segment);
}

static uint64_t bits_of_float(float value)
{
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

/* The same for the other dtypes: the result has the element's bits and zeros above them, what lies
 * above them in a request is not looked at, and the neighbours stay as they are. */
static void elements(void)
{
    const uint64_t high = 0xABCDULL << 32;
    static const char *const names[] = {"a", "b", "c", "d", "e", "f"};
    const struct {
        int dtype;
        uint32_t bytes;
        uint64_t old, addend, sum;
    } cases[] = {
        {SMB_INT32, 4, 0x7FFFFFFF, high + 2, 0x80000001},
        {SMB_UINT32, 4, 0xFFFFFFFF, high + 3, 2},
        {SMB_UINT64, 8, UINT64_MAX, 3, 2},
        {SMB_FLOAT32, 4, bits_of_float(0x1p24F), high + bits_of_float(1), bits_of_float(0x1p24F)},
        {SMB_FLOAT32, 4, bits_of_float(1.5F), bits_of_float(-0.25F), bits_of_float(1.25F)},
        {SMB_FLOAT64, 8, smb_bits_of(0x1p24), smb_bits_of(1), smb_bits_of(0x1.000001p24)},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct smb_segment *segment = make(names[i], cases[i].dtype);
        uint32_t bytes = cases[i].bytes;
        uint8_t *data = smb_segment_data(segment);
        memset(data, 0x55, 64);
        memcpy(data + 16, &cases[i].old, bytes);
        struct smb_change add = {
            .opcode = SMB_FETCH_ADD, .offset = 16, .bytes = bytes, .argument = cases[i].addend};
        CHECK_EQ(smb_segment_apply(segment, &add, SMB_TRY), SMB_OK);
        CHECK_EQ(add.result, cases[i].old);
        CHECK(memcmp(data + 16, &cases[i].sum, bytes) == 0);
        struct smb_change swap = {.opcode = SMB_COMPARE_SWAP,
                                  .offset = 16,
                                  .bytes = bytes,
                                  .argument = 7,
                                  .expected = cases[i].sum + 1};
        CHECK_EQ(smb_segment_apply(segment, &swap, SMB_TRY), SMB_OK);
        CHECK_EQ(swap.result, cases[i].sum);
        CHECK(memcmp(data + 16, &cases[i].sum, bytes) == 0);
        swap.expected = cases[i].sum + (bytes < 8 ? high : 0);
        CHECK_EQ(smb_segment_apply(segment, &swap, SMB_TRY), SMB_OK);
        CHECK_EQ(swap.result, cases[i].sum);
        uint64_t stored = 0;
        memcpy(&stored, data + 16, bytes);
        CHECK_EQ(stored, 7);
        CHECK(data[15] == 0x55 && data[16 + bytes] == 0x55);
        CHECK_EQ(apply(segment, SMB_FETCH_ADD, 16, 2 * (uint64_t)bytes, NULL, NULL), SMB_INVALID);
        smb_segment_release(segment);
    }
}

/* Fill repeats an element of each width; accumulate with a sink returns the new values. */
static void fill_and_fetch(void)
{
    static const int dtypes[] = {SMB_UINT8, SMB_BFLOAT16, SMB_INT32, SMB_INT64};
    for (int d = 0; d < 4; d++) {
        struct smb_segment *segment = make("a", dtypes[d]);
        uint32_t element = smb_dtype_bytes(dtypes[d]);
        uint64_t bits = 0x0102030405060708U, sink[4] = {0};
        struct smb_change change = {.opcode = SMB_FILL, .offset = 8, .bytes = 16, .argument = bits};
        CHECK_EQ(smb_segment_apply(segment, &change, SMB_TRY), SMB_OK);
        const uint8_t *data = smb_segment_data(segment);
        CHECK(data[7] == 0 && data[24] == 0);
        for (uint32_t i = 0; i < 16; i++)
            CHECK_EQ(data[8 + i], ((uint8_t *)&bits)[i % element]);
        change = (struct smb_change){.opcode = SMB_ACCUMULATE,
                                     .op = SMB_REPLACE,
                                     .scale = 1.0,
                                     .offset = 8,
                                     .bytes = 8,
                                     .source = "ABCDEFG",
                                     .sink = sink};
        CHECK_EQ(smb_segment_apply(segment, &change, SMB_TRY), SMB_OK);
        CHECK(memcmp(sink, "ABCDEFG", 8) == 0 && sink[1] == 0);
        smb_segment_release(segment);
        unlink(scratch_path("a"));
    }
}

/* After one process deleted it, every mapping of it refuses operations. */
static void deleted_for_all(void)
{
    struct smb_segment *made = make("a", SMB_UINT8), *opened;
    CHECK_EQ(smb_segment_open(scratch_path("a"), &opened), SMB_OK);
    uint8_t byte = 1;
    CHECK_EQ(apply(opened, SMB_WRITE, 0, 1, &byte, NULL), SMB_OK);
    smb_segment_mark_deleted(made);
    CHECK_EQ(apply(opened, SMB_WRITE, 0, 1, &byte, NULL), SMB_NOT_FOUND);
    CHECK_EQ(apply(opened, SMB_READ, 0, 1, NULL, &byte), SMB_NOT_FOUND);
    smb_segment_release(made);
    smb_segment_release(opened);
}

/* Until something is written to any chunk, whoever writes, and also after the file is opened again. */
static void what_was_never_written_to(void)
{
    struct smb_segment *segment = make("a", SMB_UINT8), *other;
    CHECK_EQ(smb_segment_open(scratch_path("a"), &other), SMB_OK);
    uint8_t byte = 1;
    CHECK_EQ(apply(other, SMB_READ, CHUNK, 1, NULL, &byte), SMB_OK);
    CHECK_EQ(smb_segment_lock(other, CHUNK, SMB_TRY), SMB_OK);
    smb_segment_unlock(other, CHUNK);
    CHECK(smb_segment_untouched(segment));
    CHECK_EQ(apply(other, SMB_WRITE, CHUNK, 1, &byte, NULL), SMB_OK);
    CHECK(!smb_segment_untouched(segment));
    smb_segment_release(other);
    CHECK_EQ(smb_segment_open(scratch_path("a"), &other), SMB_OK);
    CHECK(!smb_segment_untouched(other));
    smb_segment_release(segment);
    smb_segment_release(other);
    /* who holds the bytes changes them without a count */
    segment = make("b", SMB_UINT8);
    CHECK(smb_segment_untouched(segment));
    CHECK_EQ(smb_segment_bind(segment), SMB_OK);
    CHECK(!smb_segment_untouched(segment));
    smb_segment_release(segment);
}

/* A held lock makes a try busy and a wait time out, and is free again for the next. */
static void lock_waits_are_bounded(void)
{
    struct smb_segment *segment = make("a", SMB_UINT8), *other;
    CHECK_EQ(smb_segment_open(scratch_path("a"), &other), SMB_OK);
    CHECK_EQ(smb_segment_lock(segment, CHUNK, SMB_TRY), SMB_OK);
    uint8_t byte = 1;
    CHECK_EQ(apply(other, SMB_WRITE, CHUNK, 1, &byte, NULL), SMB_BUSY);
    struct smb_change change = {.opcode = SMB_WRITE, .offset = CHUNK, .bytes = 1, .source = &byte};
    uint64_t before_ns = check_now_ns();
    CHECK_EQ(smb_segment_apply(other, &change, before_ns + 20000000U), SMB_TIMEOUT);
    CHECK(check_now_ns() - before_ns >= 20000000U);
    /* the neighbouring chunk is free */
    CHECK_EQ(apply(other, SMB_WRITE, 0, 1, &byte, NULL), SMB_OK);
    /* nothing changes yet, so readers need no lock */
    CHECK_EQ(apply(other, SMB_READ, CHUNK, 1, NULL, &byte), SMB_OK);
    smb_segment_change_begin(segment, CHUNK);
    CHECK_EQ(apply(other, SMB_READ, CHUNK, 1, NULL, &byte), SMB_BUSY);
    smb_segment_change_end(segment, CHUNK);
    smb_segment_unlock(segment, CHUNK);
    CHECK_EQ(apply(other, SMB_WRITE, CHUNK, 1, &byte, NULL), SMB_OK);
    smb_segment_release(segment);
    smb_segment_release(other);
}

/* Every byte of the range and none beside it, with every instruction set, for any alignment of both
 * ends. */
static void copies_are_exact(void)
{
    enum { ROOM = 65536, LARGEST = 60000 };
    static uint8_t from[ROOM], to[ROOM], expected[ROOM];
    struct random random = random_make(7);
    for (size_t i = 0; i < ROOM; i++)
        from[i] = (uint8_t)random_below(&random, 256);
    int best = smb_isa_current();
    for (int isa = 0; isa < smb_isa_count(); isa++) {
        CHECK_EQ(smb_isa_select(isa), SMB_OK);
        for (int round = 0; round < 2000; round++) {
            /* small, some cache lines, and too large for the first cache */
            static const uint64_t below[] = {64, 5000, 5000, 5000, LARGEST + 1};
            uint64_t bytes = random_below(&random, below[round % 5]);
            uint64_t at = random_below(&random, 200), source_at = random_below(&random, 200);
            memset(to, 0xA5, sizeof to);
            memset(expected, 0xA5, sizeof expected);
            memcpy(expected + at, from + source_at, bytes);
            kernel_copy(to + at, from + source_at, bytes, round % 2);
            CHECK(memcmp(to, expected, sizeof to) == 0);
        }
    }
    CHECK_EQ(smb_isa_select(best), SMB_OK);
}

/* A file that belongs to another user, or that others may change, is not mapped, neither by name
 * nor by descriptor. Its bytes are not read, and opening it does not block. */
static void what_others_may_change_is_refused(void)
{
    smb_segment_release(make("own", SMB_INT64));
    const char *names[] = {"own", "foreign", "link", "second", "group", "all", "pipe", "directory"};
    char paths[8][200];
    for (int i = 0; i < 8; i++)
        strcpy(paths[i], scratch_path(names[i]));
    smb_segment_release(make("group", SMB_INT64));
    smb_segment_release(make("all", SMB_INT64));
    CHECK_EQ(chmod(paths[4], 0620), 0);
    CHECK_EQ(chmod(paths[5], 0602), 0);
    CHECK_EQ(symlink(paths[0], paths[2]), 0);
    CHECK_EQ(mkfifo(paths[6], 0600), 0);
    CHECK_EQ(mkdir(paths[7], 0700), 0);
    bool root = geteuid() == 0; /* only root can give a file away */
    if (root) {
        smb_segment_release(make("foreign", SMB_INT64));
        CHECK_EQ(chown(paths[1], 4711, 0), 0);
    }
    struct smb_segment *opened;
    for (int i = root ? 1 : 2; i < 8; i++) {
        if (i == 3)
            CHECK_EQ(link(paths[0], paths[3]), 0);
        CHECK_EQ(smb_segment_open(paths[i], &opened), SMB_UNTRUSTED);
        CHECK_EQ(smb_segment_take_over(paths[i], &opened), SMB_UNTRUSTED);
        if (i == 3)
            CHECK_EQ(unlink(paths[3]), 0);
    }
    int fd = open(paths[0], O_RDWR | O_CLOEXEC), loose = open(paths[4], O_RDWR | O_CLOEXEC);
    CHECK_EQ(smb_segment_open_fd(fd, geteuid() + 1, &opened), SMB_UNTRUSTED);
    CHECK_EQ(smb_segment_open_fd(loose, geteuid(), &opened), SMB_UNTRUSTED);
    CHECK_EQ(smb_segment_open_fd(fd, geteuid(), &opened), SMB_OK);
    smb_segment_release(opened);
    CHECK_EQ(smb_segment_take_over(paths[0], &opened), SMB_OK);
    smb_segment_release(opened);
    CHECK_EQ(close(fd) | close(loose) | rmdir(paths[7]), 0);
}

/* The users whose listeners a client trusts: its own and root. */
static void who_is_believed(void)
{
    uint32_t own = geteuid();
    CHECK(smb_believes(own) && smb_believes(0));
    CHECK(!smb_believes(own + 4711));
}

int main(void)
{
    static const struct test tests[] = {
        TEST(copies_are_exact),
        TEST(create_and_open),
        TEST(what_others_may_change_is_refused),
        TEST(who_is_believed),
        TEST(existing_name_is_refused),
        TEST(refused_arguments),
        TEST(file_system_without_room),
        TEST(no_room_in_the_middle),
        TEST(large_pages),
        TEST(full_file_system),
        TEST(corrupted_headers),
        TEST(format_before),
        TEST(namespaces_do_not_share),
        TEST(parity_is_set),
        TEST(wrong_sizes),
        TEST(bounds),
        TEST(words),
        TEST(elements),
        TEST(fill_and_fetch),
        TEST(deleted_for_all),
        TEST(what_was_never_written_to),
        TEST(what_was_never_written_to),
        TEST(lock_waits_are_bounded),
    };
    return RUN_TESTS(tests);
}
