#include "kernels/delta.h"

static bool is_width(uint32_t width)
{
    return width == 1 || width == 2 || width == 4 || width == 8;
}

/* True if the elements of the runs make one part. */
static bool is_part(const struct smb_run *runs, uint32_t run_count)
{
    uint64_t count = 0, end = run_count ? runs[0].there : 0;
    for (uint32_t run = 0; run < run_count; run++) {
        if (runs[run].there < end || runs[run].count > SMB_DELTA_PART_MAX - count)
            return false;
        count += runs[run].count;
        end = runs[run].there + runs[run].count;
    }
    return run_count > 0 && end - runs[0].there <= UINT32_MAX;
}

int smb_delta_encode(uint32_t width, void *old, const void *fresh, const struct smb_run *runs,
                     uint32_t run_count, void *to, uint64_t room, struct smb_delta *delta)
{
    if (!is_width(width) || !is_part(runs, run_count))
        return SMB_INVALID;
    struct delta_out out = {
        .data = to, .bytes = DELTA_HEADER_BYTES, .room = room, .next = runs[0].there};
    bool fits = room >= DELTA_HEADER_BYTES + DELTA_BLOCK_BYTES;
    for (uint32_t run = 0; run < run_count; run++) {
        uint64_t at = runs[run].here * width, count = runs[run].count;
        uint8_t *here = (uint8_t *)old + at;
        const uint8_t *from = (const uint8_t *)fresh + at;
        if (fits)
            fits = kernel_delta_encode(width, here, from, count, runs[run].there, &out);
        else
            memcpy(here, from, count * width);
    }
    if (!fits)
        return SMB_OUT_OF_MEMORY;
    delta_store(out.data, runs[0].there, 8);
    delta_store(out.data + 8, out.changes, 4);
    delta_store(out.data + 12, out.bytes - DELTA_HEADER_BYTES, 4);
    *delta = (struct smb_delta){
        .bytes = out.changes ? out.bytes : 0, .changes = out.changes, .sum = out.sum};
    return SMB_OK;
}

/* Memory that has some runs of a state. */
struct held {
    uint32_t width, run_count;
    uint8_t *memory;
    const struct smb_run *runs;
    uint64_t count; /* elements of the whole state */
};

/* Returns the first run that ends behind an element of the state, or the number of runs. */
static uint32_t run_behind(const struct held *held, uint64_t element)
{
    uint32_t low = 0, high = held->run_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (held->runs[middle].there + held->runs[middle].count <= element)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The publisher may have written any bytes, so every access is checked to lie within a run. */
static bool apply_part(const struct held *held, uint64_t at, uint64_t changes, const uint8_t *from,
                       const uint8_t *end, uint64_t *sum)
{
    const struct smb_run *run = held->runs + run_behind(held, at),
                         *last = held->runs + held->run_count;
    uint32_t width = held->width;
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
        if (at >= held->count || gap >= held->count - at)
            return false;
        at += gap;
        while (run < last && run->there + run->count <= at)
            run++;
        if (run < last && at >= run->there) {
            uint8_t *to = held->memory + (run->here + (at - run->there)) * width;
            *sum = delta_added(*sum, delta_change(to, at, width, delta_load(from, width)));
        }
        from += width;
        at++;
    }
    return from == end;
}

int smb_delta_apply(uint32_t width, void *state, const struct smb_run *runs, uint32_t run_count,
                    uint64_t count, const void *delta, uint64_t bytes, uint64_t *sum)
{
    struct held held = {width, run_count, state, runs, count};
    const uint8_t *from = delta, *end = from + bytes;
    uint64_t added = 0;
    if (!is_width(width) || *sum >= SMB_SUM_PRIME)
        return SMB_INVALID;
    while (from < end) {
        if (end - from < DELTA_HEADER_BYTES)
            return SMB_INVALID;
        uint64_t first = delta_load(from, 8), changes = delta_load(from + 8, 4),
                 length = delta_load(from + 12, 4);
        from += DELTA_HEADER_BYTES;
        if (length > (uint64_t)(end - from) ||
            !apply_part(&held, first, changes, from, from + length, &added))
            return SMB_INVALID;
        from += length;
    }
    *sum = delta_added(*sum, added);
    return SMB_OK;
}

static uint64_t words_sum(const uint8_t *from, uint64_t word, uint64_t count)
{
    uint64_t sum = 0;
    for (uint64_t end = word + count; word < end;) {
        uint64_t stop = end - word < DELTA_PRODUCTS_MAX ? end : word + DELTA_PRODUCTS_MAX;
        delta_wide products = 0;
        for (; word < stop; word++, from += 8)
            products += (delta_wide)delta_load(from, 8) * delta_factor(word);
        sum = delta_added(sum, delta_reduced(products));
    }
    return sum;
}

/* The sum of at most as many elements as a word has. */
static uint64_t elements_sum(uint32_t width, const uint8_t *from, uint64_t byte, uint64_t end)
{
    delta_wide products = 0;
    for (; byte < end; byte += width, from += width)
        products += (delta_wide)(delta_load(from, width) << 8 * (byte % 8)) *
                    delta_factor(byte / 8);
    return delta_reduced(products);
}

uint64_t smb_state_sum(uint32_t width, const void *state, const struct smb_run *runs,
                       uint32_t run_count)
{
    uint64_t sum = 0;
    for (const struct smb_run *run = runs; run < runs + run_count; run++) {
        const uint8_t *from = (const uint8_t *)state + run->here * width;
        uint64_t byte = run->there * width, end = byte + run->count * width,
                 words = (byte + 7) / 8 * 8, rest = end / 8 * 8;
        if (words > rest) /* within one word */
            words = rest = end;
        sum = delta_added(sum, elements_sum(width, from, byte, words));
        sum = delta_added(sum, words_sum(from + (words - byte), words / 8, (rest - words) / 8));
        sum = delta_added(sum, elements_sum(width, from + (rest - byte), rest, end));
    }
    return sum;
}
