#include "memory/delta.h"

static bool is_width(uint32_t width)
{
    return width == 1 || width == 2 || width == 4 || width == 8;
}

int smb_delta_encode(uint32_t width, void *old, const void *fresh, uint64_t count, uint64_t first,
                     void *to, uint64_t room, struct smb_delta *delta)
{
    if (!is_width(width) || count > SMB_DELTA_PART_MAX)
        return SMB_INVALID;
    struct delta_out out = {.data = to, .bytes = DELTA_HEADER_BYTES, .room = room};
    bool fits = room >= DELTA_HEADER_BYTES + DELTA_BLOCK_BYTES;
    if (fits)
        fits = kernel_delta_encode(width, old, fresh, count, first, &out);
    else
        memcpy(old, fresh, count * width);
    if (!fits)
        return SMB_OUT_OF_MEMORY;
    delta_store(out.data, first, 8);
    delta_store(out.data + 8, out.changes, 4);
    delta_store(out.data + 12, out.bytes - DELTA_HEADER_BYTES, 4);
    *delta = (struct smb_delta){
        .bytes = out.changes ? out.bytes : 0, .changes = out.changes, .sum = out.sum};
    return SMB_OK;
}

/* The publisher may have written any bytes, so every access is checked to lie within the state. */
static bool apply_part(uint32_t width, uint8_t *state, uint64_t count, uint64_t at,
                       uint64_t changes, const uint8_t *from, const uint8_t *end, uint64_t *sum)
{
    for (; changes > 0; changes--) {
        uint64_t room = (uint64_t)(end - from);
        if (room < 1 + width)
            return false;
        uint64_t gap = *from++;
        if (gap == DELTA_LONG_GAP) {
            if (room < 5 + width)
                return false;
            gap = delta_load(from, 4);
            from += 4;
        }
        if (at >= count || gap >= count - at)
            return false;
        at += gap;
        *sum += delta_change(state + at * width, at, width, delta_load(from, width));
        from += width;
        at++;
    }
    return from == end;
}

int smb_delta_apply(uint32_t width, void *state, uint64_t count, const void *delta, uint64_t bytes,
                    uint64_t *sum)
{
    const uint8_t *from = delta, *end = from + bytes;
    uint64_t added = 0;
    if (!is_width(width))
        return SMB_INVALID;
    while (from < end) {
        if (end - from < DELTA_HEADER_BYTES)
            return SMB_INVALID;
        uint64_t first = delta_load(from, 8), changes = delta_load(from + 8, 4),
                 length = delta_load(from + 12, 4);
        from += DELTA_HEADER_BYTES;
        if (length > (uint64_t)(end - from) ||
            !apply_part(width, state, count, first, changes, from, from + length, &added))
            return SMB_INVALID;
        from += length;
    }
    *sum += added;
    return SMB_OK;
}

uint64_t smb_state_sum(const void *state, uint64_t words)
{
    const uint8_t *from = state;
    uint64_t sum = 0;
    for (uint64_t word = 0; word < words; word++)
        sum += delta_term(delta_factor(word), delta_load(from + 8 * word, 8));
    return sum;
}
