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
            uint64_t sum = smb_state_sum(start, WORDS);
            for (int turn = 0; turn < 60; turn++) {
                uint64_t count = BYTES / width, first = random_below(&random, count),
                         length = random_below(&random, count - first + 1);
                uint8_t *fresh = copy_of(old + first * width, length * width);
                for (uint64_t change = 0; change < (uint64_t)turn && length > 0; change++)
                    fresh[random_below(&random, length * width)] ^= 1;
                struct smb_delta delta;
                CHECK_EQ(smb_delta_encode(width, old + first * width, fresh, length, first, room,
                                          sizeof room, &delta),
                         SMB_OK);
                uint8_t *sent = copy_of(room, delta.bytes);
                CHECK_EQ(smb_delta_apply(width, read, count, sent, delta.bytes, &sum), SMB_OK);
                CHECK(memcmp(read, old, BYTES) == 0 && sum == smb_state_sum(old, WORDS));
                free(sent);
                free(fresh);
            }
            free(old);
            free(read);
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
        CHECK_EQ(smb_delta_encode(width, state, fresh, 64 / width, 0, room, sizeof room, &delta),
                 SMB_OK);
        uint64_t bytes = random_below(&random, 3) ? delta.bytes
                                                  : random_below(&random, delta.bytes + 1),
                 sum = 0;
        uint8_t *sent = copy_of(room, bytes), *read = copy_of(state, 64);
        for (int i = 0; i < 3 && bytes > 0; i++)
            sent[random_below(&random, turn % 2     ? bytes
                                       : bytes < 16 ? bytes
                                                    : 16)] = (uint8_t)random_next(&random);
        int status = smb_delta_apply(width, read, 64 / width, sent, bytes, &sum);
        CHECK(status == SMB_OK || status == SMB_INVALID);
        free(sent);
        free(read);
    }
    uint8_t word[8] = {0};
    uint64_t sum = 0;
    CHECK_EQ(smb_delta_apply(3, word, 1, word, 0, &sum), SMB_INVALID);
    CHECK_EQ(smb_delta_apply(8, word, 1, word, 0, &sum), SMB_OK);
    CHECK_EQ(smb_delta_apply(8, word, 1, word, 8, &sum), SMB_INVALID);
    CHECK_EQ(smb_delta_encode(3, word, word, 1, 0, word, 8, NULL), SMB_INVALID);
    CHECK_EQ(smb_delta_encode(8, word, word, SMB_DELTA_PART_MAX + 1, 0, word, 8, NULL),
             SMB_INVALID);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(made_and_applied),
        TEST(no_deltas),
    };
    return RUN_TESTS(tests);
}
