/* Where bytes lie: for any layout a range is covered exactly once over all segments. */
#include <string.h>

#include "base/layout.h"
#include "check.h"
#include "random.h"

static struct smb_layout random_layout(struct random *random)
{
    uint32_t chunk = SMB_CHUNK_BYTES_MIN << random_below(random, 4);
    struct smb_layout layout = {.chunk_bytes = chunk,
                                .stripe_bytes = chunk * (1 + random_below(random, 4)),
                                .segment_count = 1 + (uint32_t)random_below(random, 7)};
    /* odd sizes, and fewer stripes than segments */
    layout.bytes = 1 + random_below(random, 12 * layout.stripe_bytes);
    CHECK_EQ(smb_layout_check(&layout), SMB_OK);
    return layout;
}

/* Marks a piece in `seen` and compares it with smb_layout_piece, which is the same rule written for
 * the whole buffer. */
static void see(const struct smb_layout *layout, const struct smb_piece *piece, uint8_t *seen)
{
    struct smb_piece alone;
    CHECK_EQ(smb_layout_piece(layout, piece->buffer_offset, piece->bytes, &alone), SMB_OK);
    CHECK(alone.segment == piece->segment && alone.segment_offset == piece->segment_offset &&
          alone.bytes == piece->bytes);
    CHECK(piece->bytes > 0);
    CHECK_EQ(piece->segment_offset / layout->chunk_bytes,
             /* never leaves a chunk */
             (piece->segment_offset + piece->bytes - 1) / layout->chunk_bytes);
    CHECK(piece->segment_offset + piece->bytes <= smb_layout_segment_bytes(layout, piece->segment));
    for (uint64_t i = 0; i < piece->bytes; i++)
        seen[piece->buffer_offset + i]++;
}

/* The pieces of all segments cover any range once, and nothing else. */
static void pieces_cover_a_range_once(void)
{
    struct random random = random_make(1);
    for (int round = 0; round < 400 / check_thinned(); round++) {
        struct smb_layout layout = random_layout(&random);
        uint64_t offset = random_below(&random, layout.bytes);
        uint64_t bytes = round % 8 ? 1 + random_below(&random, layout.bytes - offset)
                                   : layout.bytes - offset;
        uint8_t *seen = calloc(1, layout.bytes);
        for (uint32_t segment = 0; segment < layout.segment_count; segment++) {
            struct smb_cursor cursor = smb_cursor_make(&layout, segment, offset, bytes);
            struct smb_piece piece;
            uint64_t last_end = 0;
            while (smb_cursor_next(&cursor, &piece)) {
                CHECK_EQ(piece.segment, segment);
                CHECK(piece.segment_offset >= last_end); /* positions grow within a segment */
                last_end = piece.segment_offset + piece.bytes;
                see(&layout, &piece, seen);
            }
        }
        for (uint64_t i = 0; i < layout.bytes; i++)
            CHECK_EQ(seen[i], i >= offset && i < offset + bytes);
        free(seen);
    }
}

/* Walking the buffer by smb_layout_piece fills every segment without gap or overlap: two bytes
 * never have the same place. */
static void places_are_distinct_and_dense(void)
{
    struct random random = random_make(2);
    for (int round = 0; round < 200 / check_thinned(); round++) {
        struct smb_layout layout = random_layout(&random);
        uint8_t *taken[8] = {NULL};
        uint64_t sum = 0;
        for (uint32_t s = 0; s < layout.segment_count; s++) {
            taken[s] = calloc(1, smb_layout_segment_bytes(&layout, s) + 1);
            sum += smb_layout_segment_bytes(&layout, s);
        }
        CHECK_EQ(sum, layout.bytes);
        for (uint64_t at = 0; at < layout.bytes;) {
            struct smb_piece piece;
            CHECK_EQ(smb_layout_piece(&layout, at, 1 + random_below(&random, 40000), &piece),
                     SMB_OK);
            CHECK_EQ(piece.buffer_offset, at);
            CHECK(piece.segment_offset + piece.bytes <=
                  smb_layout_segment_bytes(&layout, piece.segment));
            for (uint64_t i = 0; i < piece.bytes; i++)
                CHECK_EQ(taken[piece.segment][piece.segment_offset + i]++, 0);
            at += piece.bytes;
        }
        for (uint32_t s = 0; s < layout.segment_count; s++)
            free(taken[s]);
    }
}

static bool accepts(uint64_t bytes, uint64_t stripe_bytes, uint32_t chunk_bytes,
                    uint32_t segment_count)
{
    struct smb_layout layout = {bytes, stripe_bytes, chunk_bytes, segment_count};
    return smb_layout_check(&layout) == SMB_OK;
}

/* A layout whose size computations would overflow, or that splits chunks, is refused; a
 * neighbouring one is accepted. */
static void refused_layouts(void)
{
    CHECK(accepts(1, 4096, 4096, 1));
    CHECK(!accepts(0, 4096, 4096, 1));
    CHECK(!accepts(1, 0, 4096, 1));
    CHECK(!accepts(1, 4096, 0, 1));
    CHECK(!accepts(1, 4096, 2048, 1));
    CHECK(!accepts(1, 6000, 4096, 1));
    CHECK(!accepts(1, 4096, 8192, 1));
    CHECK(!accepts(1, 4 << 20, 2 << 20, 1)); /* the chunk size is above the limit */
    CHECK(accepts(1, 4 << 20, 1 << 20, 1));
    CHECK(!accepts(1, 4096, 4096, 0));
    CHECK(accepts(1, 4096, 4096, SMB_SEGMENTS_PER_BUFFER_MAX));
    CHECK(!accepts(1, 4096, 4096, SMB_SEGMENTS_PER_BUFFER_MAX + 1));
    CHECK(!accepts(UINT64_MAX, 4096, 4096, 1));
    CHECK(!accepts(1, UINT64_MAX - 4095, 4096, 1));
}

/* A piece outside the buffer, or of no bytes, is refused. */
static void refused_pieces(void)
{
    struct smb_layout layout = {10000, 4096, 4096, 2};
    struct smb_piece piece;
    CHECK_EQ(smb_layout_piece(&layout, 10000, 1, &piece), SMB_INVALID);
    CHECK_EQ(smb_layout_piece(&layout, UINT64_MAX, 1, &piece), SMB_INVALID);
    CHECK_EQ(smb_layout_piece(&layout, 0, 0, &piece), SMB_INVALID);
    CHECK_EQ(smb_layout_piece(&layout, 9999, UINT64_MAX, &piece), SMB_OK);
    CHECK_EQ(piece.bytes, 1);
    CHECK_EQ(smb_layout_segment_bytes(&layout, 2), 0);
}

/* The largest accepted layout does not overflow a cursor: a segment without bytes has no pieces. */
static void largest_layout_stays_in_64_bits(void)
{
    uint64_t stripe = 4096;
    while (accepts(1, stripe * 2, 4096, SMB_SEGMENTS_PER_BUFFER_MAX))
        stripe *= 2;
    struct smb_layout layout = {stripe < (uint64_t)1 << 56 ? stripe : (uint64_t)1 << 56, stripe,
                                4096, SMB_SEGMENTS_PER_BUFFER_MAX};
    CHECK_EQ(smb_layout_check(&layout), SMB_OK);
    for (uint32_t segment = 1; segment < layout.segment_count; segment++) {
        struct smb_cursor cursor = smb_cursor_make(&layout, segment, 0, layout.bytes);
        struct smb_piece piece;
        CHECK(!smb_cursor_next(&cursor, &piece));
        CHECK_EQ(smb_layout_segment_bytes(&layout, segment), 0);
    }
    struct smb_cursor cursor = smb_cursor_make(&layout, 0, layout.bytes - 8, 8);
    struct smb_piece piece;
    CHECK(smb_cursor_next(&cursor, &piece));
    CHECK(!smb_cursor_next(&cursor, &piece));
}

int main(void)
{
    static const struct test tests[] = {
        TEST(pieces_cover_a_range_once),
        TEST(places_are_distinct_and_dense),
        TEST(refused_layouts),
        TEST(refused_pieces),
        TEST(largest_layout_stays_in_64_bits),
    };
    return RUN_TESTS(tests);
}
