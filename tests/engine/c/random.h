/* random.h: random numbers that are the same in every run (splitmix64). */
#ifndef RANDOM_H
#define RANDOM_H

#include <stdint.h>

struct random {
    uint64_t state;
};

static inline struct random random_make(uint64_t seed)
{
    return (struct random){.state = seed};
}

static inline uint64_t random_next(struct random *random)
{
    uint64_t z = random->state += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
}

static inline uint64_t random_below(struct random *random, uint64_t limit)
{
    return random_next(random) % limit;
}

#endif
