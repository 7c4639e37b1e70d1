/* Large pages without the administrator's help. tmpfs makes none unless it is mounted so, but a
 * process may ask for them where it has small pages (MADV_COLLAPSE, Linux 6.1). One small page in
 * each large one is enough for that; the kernel zeroes the rest at once, several times as fast as
 * page by page. Calls on shared memory from 64 MiB on are then 1.2 to 1.4 times as fast, and writes
 * over TCP a tenth faster (perf/README.md). */
#include "memory/pages.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "smb/types.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { PAGE = 4096, LARGE_PAGE = 2 << 20, ZEROS = 256 << 10, TRIES = 3 };
static uint8_t zeros[ZEROS]; /* never written */

static bool is_on_tmpfs(int fd)
{
    struct statfs file_system;
    return fstatfs(fd, &file_system) == 0 && file_system.f_type == TMPFS_MAGIC;
}

static int no_pages(int failure)
{
    errno = failure;
    return failure == ENOSPC || failure == EFBIG || failure == ENOMEM ? SMB_OUT_OF_MEMORY
                                                                      : SMB_SYSTEM;
}

/* Maps at an address that suits large pages. */
static void *map_aligned(int fd, uint64_t bytes, int flags)
{
    uint64_t around = bytes + LARGE_PAGE;
    uint8_t *reserved = mmap(NULL, around, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                             -1, 0);
    if (reserved == MAP_FAILED)
        return MAP_FAILED;
    uint8_t *base = reserved + (-(uintptr_t)reserved & (LARGE_PAGE - 1)),
            *end = base + (bytes + PAGE - 1) / PAGE * PAGE;
    void *mapped = mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | flags, fd, 0);
    int saved = errno;
    if (mapped == MAP_FAILED) {
        munmap(reserved, around);
        errno = saved;
        return MAP_FAILED;
    }
    if (base > reserved)
        munmap(reserved, (size_t)(base - reserved));
    if (end < reserved + around)
        munmap(end, (size_t)(reserved + around - end));
    return mapped;
}

void *pages_map(int fd, uint64_t bytes)
{
    /* Populated now: a first touch on the hot path would cost a fault per page. */
    if (bytes >= LARGE_PAGE && is_on_tmpfs(fd))
        return map_aligned(fd, bytes, MAP_POPULATE);
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
}

/* Whether the file's first `bytes`, whole large pages, consist of large pages now. If not, some may
 * be large. */
static bool allocate_large(int fd, uint64_t bytes)
{
    if (!is_on_tmpfs(fd) || ftruncate(fd, (off_t)bytes) != 0)
        return false;
    for (uint64_t at = 0; at < bytes; at += LARGE_PAGE)
        if (pwrite(fd, zeros, PAGE, (off_t)at) != PAGE)
            return false;
    uint8_t *base = map_aligned(fd, bytes, 0);
    if (base == MAP_FAILED)
        return false;
    for (uint64_t at = 0; at < bytes; at += LARGE_PAGE)
        /* touched, because a large page is only made where a page is mapped */
        *(volatile const uint8_t *)(base + at);
    int failure = EAGAIN; /* somebody else held a page for a moment */
    for (int tries = 0; tries < TRIES && failure == EAGAIN; tries++)
        failure = madvise(base, bytes, MADV_COLLAPSE) == 0 ? 0 : errno;
    munmap(base, bytes);
    /* If the processor's large pages are larger than ours, success says nothing about a smaller
     * range. */
    struct stat file;
    return failure == 0 && fstat(fd, &file) == 0 && (uint64_t)file.st_blocks * 512 >= bytes;
}

/* Writes zeros if the file system accepts writes (hugetlbfs does not). Pages of fallocate would
 * each be zeroed at their first fault, which takes longer. */
static int write_zeros(int fd, uint64_t from, uint64_t to)
{
    for (uint64_t done = from; done < to;) {
        uint64_t left = to - done;
        ssize_t written = pwrite(fd, zeros, left < sizeof zeros ? (size_t)left : sizeof zeros,
                                 (off_t)done);
        if (written > 0) {
            done += (uint64_t)written;
        } else if (written < 0 && errno == EINVAL && done == 0) {
            int failure = posix_fallocate(fd, 0, (off_t)to);
            if (failure != EINTR)
                return failure == 0 ? SMB_OK : no_pages(failure);
        } else if (written == 0 || errno != EINTR) {
            return no_pages(written == 0 ? EIO : errno);
        }
    }
    return SMB_OK;
}

int pages_allocate(int fd, uint64_t bytes)
{
    struct statvfs space;
    if (fstatvfs(fd, &space) == 0 && space.f_blocks != 0 && bytes / space.f_frsize > space.f_bfree)
        /* fails before all free space is taken; ramfs reports no blocks, and has no limit */
        return no_pages(ENOSPC);
    uint64_t large = bytes / LARGE_PAGE * LARGE_PAGE;
    return write_zeros(fd, large > 0 && allocate_large(fd, large) ? large : 0, bytes);
}
