/* clock.h: the two clocks in use, in nanoseconds, and how long a thread polls for its peer before
 * it sleeps. */
#ifndef SMB_CLOCK_H
#define SMB_CLOCK_H

#include <stdint.h>
#include <time.h>

enum {
    SPIN_NS = 100000, /* longer than it takes to wake a thread whose core sleeps */
    /* with more bytes under way a wakeup costs little in comparison, so the core is left to
     * others */
    SPIN_BYTES_MAX = 1 << 20
};

static inline uint64_t smb_clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

/* The clock of this process's waits and deadlines. */
static inline uint64_t smb_now_ns(void)
{
    return smb_clock_ns(CLOCK_MONOTONIC);
}

/* The clock of times that are stored in segments: the same for every process on the host and every
 * run of the daemon. */
static inline uint64_t smb_boot_ns(void)
{
    return smb_clock_ns(CLOCK_BOOTTIME);
}

#endif
