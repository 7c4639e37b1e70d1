/* fuzz.h: what each target gives, and what they share. Built with clang's libFuzzer, or with
 * progress thread.c and any compiler. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)                                                             \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                \
        }                                                                           \
    } while (0)

/* A file of this process's in tmpfs, removed at the end. Static memory: used before the next
 * call. */
const char *fuzz_path(const char *name);

/* The input, byte by byte; zeros after its end. */
struct input {
    const uint8_t *at, *end;
};

static inline uint64_t take(struct input *input, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)(input->at < input->end ? *input->at++ : 0) << (8 * i);
    return value;
}

#endif
