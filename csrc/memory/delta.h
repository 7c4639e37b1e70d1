/* delta.h: the differences between two states of a model, and sums that distinguish states.
 *
 * A state is memory of whole 64-bit words, seen as elements of 1, 2, 4 or 8 bytes (the width). A
 * delta is a sequence of parts. A part has a header of 16 bytes (first element: 8; changes: 4;
 * bytes that follow: 4; little-endian). For each change it has the gap and the new bits. The gap is
 * the number of elements since the last change, or since the first element: in one byte, or 255 and
 * the gap in 4 bytes.
 *
 * The sum of a state adds a hash of each word and its position, modulo 2^64, so a state's sum
 * follows from an older state's sum and the changes. The sum is not a signature: it does not
 * protect against somebody who constructs another state with the same sum. */
#ifndef SMB_DELTA_H
#define SMB_DELTA_H

#include <stdbool.h>
#include <string.h>

#include "smb/kernels.h"

enum {
    DELTA_HEADER_BYTES = 16,
    DELTA_LONG_GAP = 255,
    DELTA_BLOCK_BYTES = 64 * (1 + 4 + 1) /* the most that 64 bytes of a state take, of any width */
};

struct delta_out {
    uint8_t *data;
    uint64_t bytes, room, changes, sum;
};

static inline uint64_t delta_factor(uint64_t word)
{
    uint64_t mixed = (word + 1) * 0x9E3779B97F4A7C15U;
    return (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9U | 1;
}

static inline uint64_t delta_load(const uint8_t *from, uint32_t width)
{
    uint64_t value = 0;
    switch (width) { /* with a constant size, so that each copy is one instruction */
    case 1: return *from;
    case 2: memcpy(&value, from, 2); return value;
    case 4: memcpy(&value, from, 4); return value;
    default: memcpy(&value, from, 8); return value;
    }
}

static inline void delta_store(uint8_t *to, uint64_t value, uint32_t width)
{
    switch (width) {
    case 1: *to = (uint8_t)value; break;
    case 2: memcpy(to, &value, 2); break;
    case 4: memcpy(to, &value, 4); break;
    default: memcpy(to, &value, 8); break;
    }
}

static inline uint64_t delta_term(uint64_t factor, uint64_t word)
{
    __extension__ unsigned __int128 product = (unsigned __int128)word * factor;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Changes the element at `to`, and returns by how much the sum of the state changes. The whole word
 * in which `to` lies must belong to the state. */
static inline uint64_t delta_change(uint8_t *to, uint64_t element, uint32_t width, uint64_t value)
{
    uint64_t byte = element * width, factor = delta_factor(byte / 8);
    uint8_t *word = to - byte % 8;
    uint64_t before = delta_term(factor, delta_load(word, 8));
    delta_store(to, value, width);
    return delta_term(factor, delta_load(word, 8)) - before;
}

/* Keeps one bit for each element: that of its first byte. */
static inline uint64_t delta_elements(uint64_t bytes, uint32_t width)
{
    switch (width) {
    case 1: return bytes;
    case 2: return (bytes | bytes >> 1) & 0x5555555555555555U;
    case 4: bytes |= bytes >> 1; return (bytes | bytes >> 2) & 0x1111111111111111U;
    default:
        bytes |= bytes >> 1;
        bytes |= bytes >> 2;
        return (bytes | bytes >> 4) & 0x0101010101010101U;
    }
}

static inline void delta_put(struct delta_out *out, uint32_t width, uint8_t *old,
                             const uint8_t *fresh, uint64_t element, uint64_t gap)
{
    uint64_t value = delta_load(fresh, width);
    uint8_t *to = out->data + out->bytes;
    out->sum += delta_change(old, element, width, value);
    if (gap < DELTA_LONG_GAP) {
        *to++ = (uint8_t)gap;
    } else {
        *to++ = DELTA_LONG_GAP;
        delta_store(to, gap, 4);
        to += 4;
    }
    delta_store(to, value, width);
    out->bytes = (uint64_t)(to + width - out->data);
    out->changes++;
}

/* In kernels.c, with the instruction set in use. False: no room; `old` has become `fresh`
 * nevertheless. */
bool kernel_delta_encode(uint32_t width, uint8_t *old, const uint8_t *fresh, uint64_t count,
                         uint64_t first, struct delta_out *out);

#endif
