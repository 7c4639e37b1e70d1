/* Atomicity: sums are exact whoever adds, reads are never torn, and the death of a process that
 * adds harms no other. */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "memory/change.h"
#include "memory/segment.h"
#include "random.h"
#include "rig.h"

/* ---- exact sums ------------------------------------------------------------------------------ */

enum { ELEMENTS = 20001, THREADS = 8, PROCESSES = 4, RANGE_MAX = 6000 };

static int rounds(void)
{
    return 60 / check_thinned();
}

static int64_t delta(uint64_t index)
{
    /* depends on the position, so that a misplaced addition is seen */
    return (int64_t)(index % 251) + 1;
}

struct range {
    uint64_t offset, count;
};

/* The range of a round, computed by the worker and by the checker. */
static struct range range_of(int worker, int round)
{
    struct random random = random_make((uint64_t)(worker * 1000 + round));
    uint64_t offset = random_below(&random, ELEMENTS);
    uint64_t most = ELEMENTS - offset < RANGE_MAX ? ELEMENTS - offset : RANGE_MAX;
    return (struct range){offset, 1 + random_below(&random, most)};
}

static void *deltas_of(int dtype)
{
    void *values = malloc(ELEMENTS * 8);
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        if (dtype == SMB_INT64)
            ((int64_t *)values)[i] = delta(i);
        else
            ((float *)values)[i] = (float)delta(i);
    }
    return values;
}

struct worker {
    pthread_t thread;
    struct rig *rig;
    int number;
};

static void *add_ranges(void *argument)
{
    struct worker *worker = argument;
    uint32_t element = smb_dtype_bytes(worker->rig->dtype);
    uint8_t *deltas = deltas_of(worker->rig->dtype);
    struct reach reach;
    /* A pump needs the servers, which exist in this process only. */
    int ways = worker->number < THREADS ? WAYS : BY_REFERENCE;
    reach_make(&reach, worker->rig, (enum way)(worker->number % ways),
               (uint64_t)worker->number + 1);
    for (int round = 0; round < rounds(); round++) {
        struct range range = range_of(worker->number, round);
        must(reach.buffer, (struct smb_request){.opcode = SMB_ACCUMULATE,
                                                .op = SMB_SUM,
                                                .scale = 1.0,
                                                .offset = range.offset * element,
                                                .bytes = range.count * element,
                                                .source = deltas + range.offset * element});
    }
    reach_end(&reach);
    free(deltas);
    return NULL;
}

/* Forks a worker before the servers have threads; it begins when it is told where they are. */
static pid_t fork_worker(int number, int go)
{
    pid_t child = check_fork();
    if (child > 0)
        return child;
    struct rig rig;
    CHECK_EQ(read(go, &rig, sizeof rig), sizeof rig);
    struct worker worker = {.rig = &rig, .number = number};
    add_ranges(&worker);
    exit(0);
}

static void check_sums(struct rig *rig)
{
    int64_t *expected = calloc(ELEMENTS, sizeof *expected);
    for (int worker = 0; worker < THREADS + PROCESSES; worker++) {
        for (int round = 0; round < rounds(); round++) {
            struct range range = range_of(worker, round);
            for (uint64_t i = range.offset; i < range.offset + range.count; i++)
                expected[i] += delta(i);
        }
    }
    struct reach reach;
    void *found = malloc(ELEMENTS * 8);
    reach_make(&reach, rig, BY_TCP, 99);
    must(reach.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = rig->layout.bytes, .sink = found});
    for (uint64_t i = 0; i < ELEMENTS; i++)
        CHECK_EQ(rig->dtype == SMB_INT64 ? ((int64_t *)found)[i] : (int64_t)((float *)found)[i],
                 expected[i]);
    reach_end(&reach);
    free(found);
    free(expected);
}

static void sums_are_exact(int dtype)
{
    pid_t children[PROCESSES];
    struct worker workers[THREADS];
    struct rig rig;
    int go[2];
    CHECK_EQ(pipe(go), 0);
    for (int i = 0; i < PROCESSES; i++)
        children[i] = fork_worker(THREADS + i, go[0]);
    rig_start(&rig, (struct smb_layout){ELEMENTS * smb_dtype_bytes(dtype), 8192, 4096, 3}, dtype);
    for (int i = 0; i < PROCESSES; i++)
        CHECK_EQ(write(go[1], &rig, sizeof rig), sizeof rig);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.rig = &rig, .number = i};
        CHECK_EQ(pthread_create(&workers[i].thread, NULL, add_ranges, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    for (int i = 0; i < PROCESSES; i++) {
        int status;
        CHECK_EQ(waitpid(children[i], &status, 0), children[i]);
        CHECK_EQ(status, 0);
    }
    check_sums(&rig);
    rig_stop(&rig);
    close(go[0]);
    close(go[1]);
}

/* Eight threads and four processes, over TCP, Unix socket, mapping, both at once and (threads) by
 * reference, add to overlapping ranges of integers. */
static void sums_of_integers_are_exact(void)
{
    sums_are_exact(SMB_INT64);
}

/* The same with floats whose sums are whole numbers. */
static void sums_of_floats_are_exact(void)
{
    sums_are_exact(SMB_FLOAT32);
}

/* Threads add to one word by fetch_add, in every way: no two of them get the same old value. */
struct counter {
    pthread_t thread;
    struct rig *rig;
    enum way way;
    uint8_t *seen;
};

enum { COUNTS = 500 };

static void *count_up(void *argument)
{
    struct counter *counter = argument;
    struct reach reach;
    reach_make(&reach, counter->rig, counter->way, 1 + (uint64_t)counter->way);
    for (int i = 0; i < COUNTS; i++) {
        struct smb_outcome outcome = must(
            reach.buffer,
            (struct smb_request){.opcode = SMB_FETCH_ADD, .offset = 24, .bytes = 8, .argument = 1});
        CHECK(outcome.result < WAYS * COUNTS);
        CHECK_EQ(__atomic_add_fetch(&counter->seen[outcome.result], 1, __ATOMIC_RELAXED), 1);
    }
    reach_end(&reach);
    return NULL;
}

static void tickets_are_unique(void)
{
    struct rig rig;
    struct counter counters[WAYS];
    static uint8_t seen[WAYS * COUNTS];
    rig_start(&rig, (struct smb_layout){4096, 4096, 4096, 1}, SMB_INT64);
    for (int way = 0; way < WAYS; way++) {
        counters[way] = (struct counter){.rig = &rig, .way = (enum way)way, .seen = seen};
        CHECK_EQ(pthread_create(&counters[way].thread, NULL, count_up, &counters[way]), 0);
    }
    for (int way = 0; way < WAYS; way++)
        pthread_join(counters[way].thread, NULL);
    for (int i = 0; i < WAYS * COUNTS; i++)
        CHECK_EQ(seen[i], 1);
    rig_stop(&rig);
}

/* ---- untorn reads ---------------------------------------------------------------------------- */

enum { DISTINCT = 100 };
static const uint64_t WAIT_NS = 20000000000U;

struct torn {
    pthread_t thread;
    struct rig *rig;
    enum way way;
    int reads;
    uint64_t bytes; /* of the part of the chunk that is written and read at once */
    bool streaming;
    _Atomic bool *stop;
    uint64_t distinct;
};

/* All elements are equal before and after each change. */
static void *keep_changing(void *argument)
{
    struct torn *torn = argument;
    struct reach reach;
    int64_t *values = malloc(torn->bytes);
    reach_make(&reach, torn->rig, torn->way, 20);
    for (int64_t round = 0; !atomic_load(torn->stop); round++) {
        for (uint64_t i = 0; i < torn->bytes / 8; i++)
            values[i] = round % 3 ? 1 : round;
        struct smb_request request = {.opcode = round % 3 ? SMB_ACCUMULATE : SMB_WRITE,
                                      .op = SMB_SUM,
                                      .scale = 1.0,
                                      .bytes = torn->bytes,
                                      .source = values};
        if (torn->streaming) {
            struct smb_change change = {
                .opcode = SMB_WRITE, .bytes = torn->bytes, .source = values, .streaming = true};
            CHECK_EQ(smb_segment_apply(reach.segments[0], &change, smb_now_ns() + WAIT_NS), SMB_OK);
        } else {
            must(reach.buffer, request);
        }
        if (round % 16 == 0)
            sched_yield();
    }
    reach_end(&reach);
    free(values);
    return NULL;
}

static void *keep_reading(void *argument)
{
    struct torn *torn = argument;
    struct reach reach;
    int64_t *values = malloc(torn->bytes), last = -1;
    reach_make(&reach, torn->rig, torn->way, 21);
    for (int read = 0; read < torn->reads || torn->distinct < DISTINCT; read++) {
        /* checked while writers were active */
        if (torn->streaming) {
            struct smb_change change = {
                .opcode = SMB_READ, .bytes = torn->bytes, .sink = values, .streaming = true};
            CHECK_EQ(smb_segment_apply(reach.segments[0], &change, smb_now_ns() + WAIT_NS), SMB_OK);
        } else {
            must(reach.buffer,
                 (struct smb_request){.opcode = SMB_READ, .bytes = torn->bytes, .sink = values});
        }
        CHECK(memcmp(values, values + 1, torn->bytes - 8) == 0);
        torn->distinct += values[0] != last;
        last = values[0];
    }
    reach_end(&reach);
    free(values);
    return NULL;
}

static void no_read_is_torn(uint32_t bytes, int reads_local, int reads_remote)
{
    struct rig rig;
    _Atomic bool stop = false;
    rig_start(&rig, (struct smb_layout){bytes, bytes, bytes, 1}, SMB_INT64);
    struct torn writers[] = {
        {.way = BY_MAPPING}, {.way = BY_MAPPING, .streaming = true}, {.way = BY_TCP}};
    struct torn readers[] = {{.way = BY_MAPPING, .reads = reads_local},
                             {.way = BY_MAPPING, .reads = reads_local, .streaming = true},
                             {.way = BY_TCP, .reads = reads_remote},
                             {.way = BY_UNIX, .reads = reads_remote}};
    enum { WRITERS = sizeof writers / sizeof *writers, READERS = sizeof readers / sizeof *readers };
    for (int i = 0; i < WRITERS; i++) {
        writers[i].rig = &rig, writers[i].stop = &stop, writers[i].bytes = bytes;
        CHECK_EQ(pthread_create(&writers[i].thread, NULL, keep_changing, &writers[i]), 0);
    }
    for (int i = 0; i < READERS; i++) {
        readers[i].rig = &rig, readers[i].bytes = bytes;
        CHECK_EQ(pthread_create(&readers[i].thread, NULL, keep_reading, &readers[i]), 0);
    }
    for (int i = 0; i < READERS; i++)
        pthread_join(readers[i].thread, NULL);
    atomic_store(&stop, true);
    for (int i = 0; i < WRITERS; i++)
        pthread_join(writers[i].thread, NULL);
    rig_stop(&rig);
}

/* Of over a hundred thousand reads, in each way, of a chunk that is written and added to all the
 * time, none mixes two changes. */
static void reads_are_never_torn(void)
{
    no_read_is_torn(16384, 45000 / check_thinned(), 6000 / check_thinned());
}

/* The same with the largest usual chunk, which is sent directly from the segment and received
 * directly into it. */
static void large_reads_are_never_torn(void)
{
    no_read_is_torn(262144, 2000 / check_thinned(), 1000 / check_thinned());
}

/* ---- death inside a change ------------------------------------------------------------------- */

enum {
    DEATH_ELEMENTS = 131072,
    DEATH_CHUNK = DEATH_ELEMENTS * 8,
    KILLS_INSIDE = 20,
    DEATH_SECONDS = 40
};

static pid_t fork_adder(const char *path, const int64_t *deltas)
{
    pid_t child = check_fork();
    if (child > 0)
        return child;
    struct smb_segment *segment;
    CHECK_EQ(smb_segment_open(path, &segment), SMB_OK);
    for (;;) {
        struct smb_change change = {.opcode = SMB_ACCUMULATE,
                                    .op = SMB_SUM,
                                    .scale = 1.0,
                                    .bytes = DEATH_CHUNK,
                                    .source = deltas};
        CHECK_EQ(smb_segment_apply(segment, &change, smb_now_ns() + 5000000000U), SMB_OK);
    }
}

/* Each element is deltas[i] times k or k + 1, for one k. */
static void check_old_or_new(const volatile int64_t *data, const int64_t *deltas)
{
    int64_t least = INT64_MAX, most = 0;
    for (int i = 0; i < DEATH_ELEMENTS; i++) {
        CHECK_EQ(data[i] % deltas[i], 0);
        int64_t times = data[i] / deltas[i];
        least = times < least ? times : least;
        most = times > most ? times : most;
    }
    CHECK(most - least <= 1);
}

/* SIGKILL in the middle of an addition: the next process finds the lock and frees it, every element
 * is old or new, and the chunk can be read and changed as before. Repeated until the kill has hit
 * inside the lock often enough. */
static void killed_while_adding(void)
{
    const char *path = scratch_path("a");
    struct random random = random_make(20260304);
    struct smb_segment *segment;
    struct smb_segment_info info;
    uint64_t end_ns = check_now_ns() + DEATH_SECONDS * (uint64_t)1000000000U;
    int64_t *deltas = malloc(DEATH_CHUNK);
    for (int i = 0; i < DEATH_ELEMENTS; i++)
        deltas[i] = delta((uint64_t)i);
    CHECK_EQ(smb_segment_create(path, 1, 1, SMB_INT64, DEATH_CHUNK, DEATH_CHUNK, &segment), SMB_OK);
    const volatile int64_t *data = smb_segment_data(segment);
    do {
        CHECK(check_now_ns() < end_ns);
        pid_t child = fork_adder(path, deltas);
        WAIT_UNTIL(__atomic_load_n(&data[DEATH_ELEMENTS - 1], __ATOMIC_RELAXED) != 0);
        usleep((useconds_t)random_below(&random, 500));
        CHECK_EQ(kill(child, SIGKILL), 0);
        CHECK_EQ(waitpid(child, NULL, 0), child);
        CHECK_EQ(smb_segment_lock(segment, 0, check_now_ns() + 5000000000U), SMB_OK);
        check_old_or_new(data, deltas);
        smb_segment_unlock(segment, 0);
        struct smb_change clear = {.opcode = SMB_FILL, .bytes = DEATH_CHUNK};
        CHECK_EQ(smb_segment_apply(segment, &clear, SMB_TRY), SMB_OK);
        int64_t word = 1;
        struct smb_change read = {.opcode = SMB_READ, .offset = 8, .bytes = 8, .sink = &word};
        CHECK_EQ(smb_segment_apply(segment, &read, SMB_TRY), SMB_OK);
        CHECK_EQ(word, 0);
        smb_segment_info(segment, &info);
    } while (info.recovered_locks < KILLS_INSIDE);
    smb_segment_release(segment);
    free(deltas);
}

static void *add_one(void *argument)
{
    int64_t one = 1;
    struct smb_change change = {
        .opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = 1.0, .bytes = 8, .source = &one};
    CHECK_EQ(smb_segment_apply(argument, &change, smb_now_ns() + 15000000000U), SMB_OK);
    return NULL;
}

/* A process that waits for the lock of one that dies in the middle of a change is woken and gets
 * the lock. */
static void death_wakes_who_waits(void)
{
    struct smb_segment *segment;
    pthread_t waiting[3];
    CHECK_EQ(smb_segment_create(scratch_path("a"), 1, 1, SMB_INT64, 4096, 4096, &segment), SMB_OK);
    int held[2];
    CHECK_EQ(pipe(held), 0);
    pid_t child = check_fork();
    if (child == 0) {
        CHECK_EQ(smb_segment_lock(segment, 0, SMB_TRY), SMB_OK);
        smb_segment_change_begin(segment, 0);
        CHECK_EQ(write(held[1], "x", 1), 1);
        for (;;)
            pause();
    }
    char byte;
    CHECK_EQ(read(held[0], &byte, 1), 1);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&waiting[i], NULL, add_one, segment), 0);
    CHECK_EQ(kill(child, SIGKILL), 0);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    for (int i = 0; i < 3; i++)
        pthread_join(waiting[i], NULL);
    struct smb_segment_info info;
    smb_segment_info(segment, &info);
    CHECK_EQ(info.recovered_locks, 1);
    CHECK_EQ(*(int64_t *)smb_segment_data(segment), 3);
    /* The count is even again: readers need no lock, and notice a change that is under way. */
    int64_t word;
    struct smb_change read_word = {.opcode = SMB_READ, .bytes = 8, .sink = &word};
    CHECK_EQ(smb_segment_lock(segment, 0, SMB_TRY), SMB_OK);
    CHECK_EQ(smb_segment_apply(segment, &read_word, SMB_TRY), SMB_OK);
    smb_segment_unlock(segment, 0);
    smb_segment_release(segment);
    close(held[0]);
    close(held[1]);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(sums_of_integers_are_exact), TEST(sums_of_floats_are_exact),
        TEST(tickets_are_unique),         TEST(reads_are_never_torn),
        TEST(large_reads_are_never_torn), TEST(killed_while_adding),
        TEST(death_wakes_who_waits),
    };
    return RUN_TESTS(tests);
}
