/* delta.h: the differences between two states of a model, and sums that distinguish states.
 *
 * A state is a sequence of elements of 1, 2, 4 or 8 bytes (the width). Memory may hold only some
 * runs of them. A delta is a sequence of parts. A part has a header of 16 bytes (first element: 8;
 * changes: 4; bytes that follow: 4; little-endian). For each change it has the gap and the new
 * bits. The gap is the number of elements of the state since the last change, or since the first
 * element: in one byte, or 255 and the gap in 4 bytes.
 *
 * The sum of a state adds the products of its 64-bit words and their factors, modulo the largest
 * prime below 2^64. What follows the last element counts as zeros. A product is linear in the
 * elements of its word, so a state's sum follows from an older state's sum and the changes, and is
 * the sum of the sums of its parts, however they are cut. The sum is not a signature: it does not
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
    uint64_t next; /* the element from which the next gap counts */
};

__extension__ typedef unsigned __int128 delta_wide;

enum { DELTA_PRIME_BELOW = 59 }; /* 2^64 less the prime */
_Static_assert(SMB_SUM_PRIME + (DELTA_PRIME_BELOW - 1) == UINT64_MAX, "2^64 less the prime");

enum { DELTA_PRODUCTS_MAX = 128 }; /* so many products of a word and a factor fit in 128 bits */

/* A factor has 56 bits. */
static inline uint64_t delta_factor(uint64_t word)
{
    uint64_t mixed = (word + 1) * 0x9E3779B97F4A7C15U;
    return (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9U >> 8 | 1;
}

/* Returns a number modulo the prime. */
static inline uint64_t delta_reduced(delta_wide number)
{
    while (number >> 64)
        number = (number >> 64) * DELTA_PRIME_BELOW + (uint64_t)number;
    return (uint64_t)number >= SMB_SUM_PRIME ? (uint64_t)number - SMB_SUM_PRIME : (uint64_t)number;
}

static inline uint64_t delta_added(uint64_t sum, uint64_t other)
{
    return delta_reduced((delta_wide)sum + other);
}

static inline uint64_t delta_load(const uint8_t *from, uint32_t width)
{
    uint64_t value = 0;
    switch (width) { /* with a constant size, so that copying takes one instruction */
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

/* Changes the element at `to`, and returns by how much the sum of the state changes. */
static inline uint64_t delta_change(uint8_t *to, uint64_t element, uint32_t width, uint64_t value)
{
    uint64_t byte = element * width, before = delta_load(to, width),
             factor = delta_factor(byte / 8);
    uint64_t more = value > before ? value - before : before - value;
    delta_store(to, value, width);
    more = delta_reduced((delta_wide)(more << 8 * (byte % 8)) * factor);
    return value > before || more == 0 ? more : SMB_SUM_PRIME - more;
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
                             const uint8_t *fresh, uint64_t element)
{
    uint64_t value = delta_load(fresh, width), gap = element - out->next;
    uint8_t *to = out->data + out->bytes;
    out->sum = delta_added(out->sum, delta_change(old, element, width, value));
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
    out->next = element + 1;
}

/* One run of a part: count elements, which begin with element `first` of the state. In kernels.c,
 * with the instruction set in use. False: no room; `old` has become `fresh` nevertheless. */
bool kernel_delta_encode(uint32_t width, uint8_t *old, const uint8_t *fresh, uint64_t count,
                         uint64_t first, struct delta_out *out);

#endif
