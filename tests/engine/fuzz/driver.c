/* Runs a target without libFuzzer: random inputs, and mutations of those before. progress thread
 * [RUNS [SEED]] */
#include <string.h>
#include <time.h>

#include "fuzz.h"

enum { KEPT = 64, BYTES_MAX = 600 };

static uint64_t state;

static uint64_t next(void) /* splitmix64 */
{
    uint64_t z = (state += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
}

static uint8_t interesting(void)
{
    static const uint8_t values[] = {0, 1, 2, 4, 7, 8, 16, 31, 63, 64, 127, 128, 254, 255};
    return next() % 3 ? values[next() % sizeof values] : (uint8_t)next();
}

int main(int argc, char **argv)
{
    static uint8_t kept[KEPT][BYTES_MAX];
    static size_t sizes[KEPT];
    long runs = argc > 1 ? atol(argv[1]) : 20000;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
    state = seed;
    printf("seed %llu: repeat with %s %ld %llu\n", (unsigned long long)seed, argv[0], runs,
           (unsigned long long)seed);
    fflush(stdout);
    for (long run = 0; run < runs; run++) {
        uint8_t *input = kept[run % KEPT];
        size_t *size = &sizes[run % KEPT];
        if (run < KEPT || next() % 8 == 0) {
            *size = next() % BYTES_MAX;
            for (size_t i = 0; i < *size; i++)
                input[i] = interesting();
        } else {
            size_t from = next() % KEPT;
            memmove(input, kept[from], BYTES_MAX);
            *size = sizes[from] ? sizes[from] : 1;
            for (uint64_t i = 0; i < 1 + next() % 8; i++)
                input[next() % *size] = interesting();
        }
        LLVMFuzzerTestOneInput(input, *size);
    }
    printf("%ld runs, 0 findings\n", runs);
    return 0;
}
