/* The limits of memory: copies and additions as plain C, with plain and with non-temporal stores,
 * and locks. */
#include "limits.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define HUGE_PAGE_BYTES ((uint64_t)2 << 20)

static void *check_map(void *at, const char *what)
{
    if (at == MAP_FAILED) {
        fail("%s: %s", what, strerror(errno));
    }
    return at;
}

void *allocate(uint64_t bytes)
{
    uint64_t unit = bytes < HUGE_PAGE_BYTES ? 4096 : HUGE_PAGE_BYTES;
    bytes = (bytes + unit - 1) / unit * unit;
    void *at = NULL;
    if (posix_memalign(&at, unit, bytes) != 0) {
        fail("no memory for %llu bytes", (unsigned long long)bytes);
    }
    madvise(at, bytes, MADV_HUGEPAGE);
    memset(at, 0, bytes);
    return at;
}

void *share(uint64_t bytes)
{
    int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE;
    return check_map(mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0), "shared memory");
}

void *share_file(uint64_t bytes)
{
    int fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0 || posix_fallocate(fd, 0, (off_t)bytes) != 0) {
        fail("a file of %llu bytes in /dev/shm: %s", (unsigned long long)bytes, strerror(errno));
    }
    void *at = check_map(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0),
                         "the file in /dev/shm");
    close(fd);
    madvise(at, bytes, MADV_HUGEPAGE);
    madvise(at, bytes, MADV_POPULATE_WRITE);
    return at;
}

/* ---- kernels: bytes are a multiple of 4, both sides begin at a cache line -------------------- */

typedef float vector __attribute__((vector_size(64), may_alias));

void add(float *restrict sum, const float *restrict source, uint64_t bytes)
{
    vector *s = (vector *)sum;
    const vector *x = (const vector *)source;
    uint64_t blocks = bytes / sizeof(vector) / 4;
    for (uint64_t i = 0; i < 4 * blocks; i += 4) {
        s[i] += x[i];
        s[i + 1] += x[i + 1];
        s[i + 2] += x[i + 2];
        s[i + 3] += x[i + 3];
    }
    for (uint64_t i = 4 * blocks * (sizeof(vector) / sizeof(float)); i < bytes / sizeof(float);
         i++) {
        sum[i] += source[i];
    }
}

#if defined(__AVX512F__)
typedef __m512 lane;
#define LANE_LOAD(at) _mm512_load_ps(at)
#define LANE_ADD(a, b) _mm512_add_ps(a, b)
#define LANE_STREAM(at, value) _mm512_stream_ps(at, value)
#elif defined(__AVX__)
typedef __m256 lane;
#define LANE_LOAD(at) _mm256_load_ps(at)
#define LANE_ADD(a, b) _mm256_add_ps(a, b)
#define LANE_STREAM(at, value) _mm256_stream_ps(at, value)
#elif defined(__x86_64__)
typedef __m128 lane;
#define LANE_LOAD(at) _mm_load_ps(at)
#define LANE_ADD(a, b) _mm_add_ps(a, b)
#define LANE_STREAM(at, value) _mm_stream_ps(at, value)
#endif

static void stream(float *restrict to, const float *restrict source, uint64_t bytes, bool adding)
{
#ifdef LANE_STREAM
    uint64_t step = sizeof(lane) / sizeof(float), count = bytes / sizeof(lane) * step;
    if (adding) {
        for (uint64_t i = 0; i < count; i += step) {
            LANE_STREAM(to + i, LANE_ADD(LANE_LOAD(to + i), LANE_LOAD(source + i)));
        }
    } else {
        for (uint64_t i = 0; i < count; i += step) {
            LANE_STREAM(to + i, LANE_LOAD(source + i));
        }
    }
    for (uint64_t i = count; i < bytes / sizeof(float); i++) {
        to[i] = adding ? to[i] + source[i] : source[i];
    }
    _mm_sfence();
#else
    (void)to, (void)source, (void)bytes, (void)adding;
    fail("no non-temporal stores here");
#endif
}

static void move(float *restrict to, const float *restrict source, uint64_t bytes)
{
    bool adding = plan.operation == ACCUMULATE;
    if (plan.nontemporal) {
        stream(to, source, bytes, adding);
    } else if (adding) {
        add(to, source, bytes);
    } else {
        memcpy(to, source, bytes);
    }
}

/* ---- stripe locks, between processes or threads ---------------------------------------------- */

static void pause_briefly(unsigned turn)
{
    if (turn % 64 == 63) {
        sched_yield(); /* its owner may have no core */
    }
#ifdef __x86_64__
    _mm_pause();
#endif
}

_Atomic unsigned *lock_stripe(uint64_t offset)
{
    _Atomic unsigned *lock = stripes + offset / STRIPE_BYTES * 16;
    for (unsigned turn = 0;; turn++) {
        if (!atomic_load_explicit(lock, memory_order_relaxed) &&
            !atomic_exchange_explicit(lock, 1, memory_order_acquire)) {
            /* pairs with unlock_stripe's store */
            return lock;
        }
        pause_briefly(turn);
    }
}

void unlock_stripe(_Atomic unsigned *lock)
{
    atomic_store_explicit(lock, 0, memory_order_release);
}

void call_memory(struct client *client)
{
    if (plan.operation == FETCH_ADD) {
        atomic_fetch_add_explicit(&shared->counter, client->source == client->own ? 1 : -1,
                                  memory_order_acq_rel);
    } else if (plan.operation == READ) {
        move(client->own, array, plan.bytes);
    } else if (!plan.locks) {
        move(array, client->source, plan.bytes);
    } else {
        /* Clients begin at different stripes, so that they follow each other without meeting. */
        uint64_t count = (plan.bytes + STRIPE_BYTES - 1) / STRIPE_BYTES;
        for (uint64_t i = 0; i < count; i++) {
            uint64_t at = (client->index * count / plan.clients + i) % count * STRIPE_BYTES;
            uint64_t bytes = plan.bytes - at < STRIPE_BYTES ? plan.bytes - at : STRIPE_BYTES;
            _Atomic unsigned *lock = lock_stripe(at);
            move(array + at / sizeof(float), client->source + at / sizeof(float), bytes);
            unlock_stripe(lock);
        }
    }
}
