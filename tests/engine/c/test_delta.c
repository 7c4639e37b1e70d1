/* Deltas in memory of exactly their size: no delta makes the engine read or write outside it. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "random.h"
#include "smb/kernels.h"

enum { WORDS = 300, BYTES = 8 * WORDS };

static uint8_t *copy_of(const uint8_t *bytes, uint64_t size)
{
    uint8_t *made = malloc(size + (size == 0));
    CHECK(made != NULL);
    memcpy(made, bytes, size);
    return made;
}

/* The delta alone makes the new state from the old one, in every width and with every instruction
 * set. */
static void made_and_applied(void)
{
    struct random random = random_make(1);
    for (int isa = 0; isa < smb_isa_count(); isa++) {
        CHECK_EQ(smb_isa_select(isa), SMB_OK);
        for (uint32_t width = 1; width <= 8; width *= 2) {
            uint8_t start[BYTES], room[16 * BYTES];
            for (int i = 0; i < BYTES; i++)
                start[i] = (uint8_t)random_next(&random);
            uint8_t *old = copy_of(start, BYTES), *read = copy_of(start, BYTES);
            struct smb_run whole = {0, 0, BYTES / width};
            uint64_t sum = smb_state_sum(width, start, &whole, 1);
            for (int turn = 0; turn < 60; turn++) {
                uint64_t count = BYTES / width, first = random_below(&random, count),
                         length = random_below(&random, count - first + 1);
                uint8_t *fresh = copy_of(old + first * width, length * width);
                for (uint64_t change = 0; change < (uint64_t)turn && length > 0; change++)
                    fresh[random_below(&random, length * width)] ^= 1;
                struct smb_delta delta;
                struct smb_run run = {first, 0, length};
                CHECK_EQ(smb_delta_encode(width, old + first * width, fresh, &run, 1, room,
                                          sizeof room, &delta),
                         SMB_OK);
                uint8_t *sent = copy_of(room, delta.bytes);
                CHECK_EQ(smb_delta_apply(width, read, &whole, 1, count, sent, delta.bytes, &sum),
                         SMB_OK);
                CHECK(memcmp(read, old, BYTES) == 0 && sum == smb_state_sum(width, old, &whole, 1));
                free(sent);
                free(fresh);
            }
            free(old);
            free(read);
        }
    }
}

static uint64_t added(uint64_t sum, uint64_t other)
{
    return sum < SMB_SUM_PRIME - other ? sum + other : sum - (SMB_SUM_PRIME - other);
}

/* Runs of random lengths, which two owners have in turn, close together in memory of exactly their
 * size. Returns their number. */
static uint32_t runs_of(struct random *random, uint64_t count, struct smb_run *even,
                        struct smb_run *odd, uint64_t sizes[2])
{
    uint32_t number = 0;
    sizes[0] = sizes[1] = 0;
    for (uint64_t there = 0; there < count; number++) {
        uint64_t length = 1 + random_below(random, 9), left = count - there;
        struct smb_run *run = (number % 2 ? odd : even) + number / 2;
        *run = (struct smb_run){there, sizes[number % 2], length < left ? length : left};
        sizes[number % 2] += run->count;
        there += run->count;
    }
    return number;
}

static void gather(uint32_t width, const struct smb_run *runs, uint32_t run_count,
                   const uint8_t *state, uint8_t *memory)
{
    for (uint32_t i = 0; i < run_count; i++)
        memcpy(memory + runs[i].here * width, state + runs[i].there * width, runs[i].count * width);
}

/* Two owners of runs make the parts of one delta, and two readers with other runs apply it: each
 * has its elements of the new state, and the sums of both are the state's. */
static void parts_of_owners(void)
{
    struct random random = random_make(3);
    for (int turn = 0; turn < 200; turn++) {
        uint32_t width = 1U << random_below(&random, 4);
        uint64_t count = BYTES / width, sizes[2], sum = 0, bytes = 0;
        uint8_t state[BYTES], next[BYTES], sent[16 * BYTES];
        struct smb_run runs[2][BYTES], whole = {0, 0, count};
        for (int i = 0; i < BYTES; i++)
            next[i] = state[i] = (uint8_t)random_next(&random);
        for (uint64_t i = random_below(&random, 100); i > 0; i--)
            next[random_below(&random, BYTES)] ^= 4;
        uint32_t number = runs_of(&random, count, runs[0], runs[1], sizes);
        for (int owner = 0; owner < 2; owner++) {
            uint32_t here = (number + 1 - (uint32_t)owner) / 2;
            uint8_t *old = malloc(sizes[owner] * width), *fresh = malloc(sizes[owner] * width);
            CHECK(old != NULL && fresh != NULL);
            gather(width, runs[owner], here, state, old);
            gather(width, runs[owner], here, next, fresh);
            sum = added(sum, smb_state_sum(width, old, runs[owner], here));
            struct smb_delta delta;
            CHECK_EQ(smb_delta_encode(width, old, fresh, runs[owner], here, sent + bytes,
                                      sizeof sent - bytes, &delta),
                     SMB_OK);
            CHECK(memcmp(old, fresh, sizes[owner] * width) == 0);
            bytes += delta.bytes;
            free(old);
            free(fresh);
        }
        CHECK_EQ(sum, smb_state_sum(width, state, &whole, 1));
        number = runs_of(&random, count, runs[0], runs[1], sizes);
        uint64_t sums[2];
        for (int reader = 0; reader < 2; reader++) {
            uint32_t here = (number + 1 - (uint32_t)reader) / 2;
            uint8_t *read = malloc(sizes[reader] * width), *wanted = malloc(sizes[reader] * width);
            CHECK(read != NULL && wanted != NULL);
            gather(width, runs[reader], here, state, read);
            gather(width, runs[reader], here, next, wanted);
            sums[reader] = smb_state_sum(width, read, runs[reader], here);
            uint8_t *delta = copy_of(sent, bytes);
            CHECK_EQ(smb_delta_apply(width, read, runs[reader], here, count, delta, bytes,
                                     &sums[reader]),
                     SMB_OK);
            CHECK(memcmp(read, wanted, sizes[reader] * width) == 0);
            CHECK_EQ(sums[reader], smb_state_sum(width, read, runs[reader], here));
            free(delta);
            free(read);
            free(wanted);
        }
    }
}

/* Damaged, cut and random deltas. */
static void no_deltas(void)
{
    struct random random = random_make(2);
    for (int turn = 0; turn < 20000; turn++) {
        uint32_t width = 1U << random_below(&random, 4);
        uint8_t state[64] = {0}, fresh[64], room[1024];
        struct smb_delta delta;
        for (int i = 0; i < 64; i++)
            fresh[i] = (uint8_t)random_below(&random, 3);
        struct smb_run whole = {0, 0, 64 / width}, held = {8 / width, 0, 24 / width};
        CHECK_EQ(smb_delta_encode(width, state, fresh, &whole, 1, room, sizeof room, &delta),
                 SMB_OK);
        uint64_t bytes = random_below(&random, 3) ? delta.bytes
                                                  : random_below(&random, delta.bytes + 1),
                 sum = 0;
        uint8_t *sent = copy_of(room, bytes), *read = copy_of(state, 64);
        for (int i = 0; i < 3 && bytes > 0; i++)
            sent[random_below(&random, turn % 2     ? bytes
                                       : bytes < 16 ? bytes
                                                    : 16)] = (uint8_t)random_next(&random);
        int status = smb_delta_apply(width, read, &whole, 1, 64 / width, sent, bytes, &sum);
        CHECK(status == SMB_OK || status == SMB_INVALID);
        uint8_t *part = copy_of(state + 8, 24);
        CHECK_EQ(smb_delta_apply(width, part, &held, 1, 64 / width, sent, bytes, &sum), status);
        free(part);
        free(sent);
        free(read);
    }
    uint8_t word[8] = {0};
    uint64_t sum = 0;
    const struct smb_run one = {0, 0, 1}, many = {0, 0, SMB_DELTA_PART_MAX + 1},
                         mixed[] = {{5, 0, 1}, {4, 1, 1}}, far[] = {{0, 0, 1}, {UINT32_MAX, 1, 1}};
    CHECK_EQ(smb_delta_apply(3, word, &one, 1, 1, word, 0, &sum), SMB_INVALID);
    CHECK_EQ(smb_delta_apply(8, word, &one, 1, 1, word, 0, &sum), SMB_OK);
    CHECK_EQ(smb_delta_apply(8, word, &one, 1, 1, word, 8, &sum), SMB_INVALID);
    CHECK_EQ(smb_delta_encode(3, word, word, &one, 1, word, 8, NULL), SMB_INVALID);
    CHECK_EQ(smb_delta_encode(8, word, word, &many, 1, word, 8, NULL), SMB_INVALID);
    CHECK_EQ(smb_delta_encode(4, word, word, mixed, 2, word, 8, NULL), SMB_INVALID);
    CHECK_EQ(smb_delta_encode(4, word, word, far, 2, word, 8, NULL), SMB_INVALID);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(made_and_applied),
        TEST(parts_of_owners),
        TEST(no_deltas),
    };
    return RUN_TESTS(tests);
}
