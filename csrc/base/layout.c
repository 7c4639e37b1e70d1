#include "base/layout.h"

#include "base/assert.h"

int smb_layout_check(const struct smb_layout *layout)
{
    /* keeps every sum below inside 64 bits */
    bool sound = layout->bytes > 0 && layout->bytes <= (uint64_t)1 << 56 &&
                 layout->chunk_bytes >= SMB_CHUNK_BYTES_MIN &&
                 layout->chunk_bytes <= SMB_CHUNK_BYTES_MAX &&
                 layout->chunk_bytes % SMB_CHUNK_BYTES_MIN == 0 &&
                 layout->stripe_bytes >= layout->chunk_bytes &&
                 layout->stripe_bytes <= (uint64_t)1 << 52 && /* also a stripe per segment */
                 layout->stripe_bytes % layout->chunk_bytes == 0 && layout->segment_count > 0 &&
                 layout->segment_count <= SMB_SEGMENTS_PER_BUFFER_MAX;
    return sound ? SMB_OK : SMB_INVALID;
}

uint64_t smb_layout_segment_bytes(const struct smb_layout *layout, uint32_t segment)
{
    if (smb_layout_check(layout) != SMB_OK || segment >= layout->segment_count)
        return 0;
    /* full stripes, then a shorter last one on segment whole % count */
    uint64_t whole = layout->bytes / layout->stripe_bytes;
    uint64_t rest = layout->bytes % layout->stripe_bytes;
    uint64_t mine = whole / layout->segment_count +
                    (segment < whole % layout->segment_count ? 1 : 0);
    return mine * layout->stripe_bytes + (segment == whole % layout->segment_count ? rest : 0);
}

/* Unchecked: the callers below have checked layout and offset. */
static struct smb_piece piece_at(const struct smb_layout *layout, uint64_t offset,
                                 uint64_t bytes_max)
{
    uint64_t stripe = offset / layout->stripe_bytes;
    uint64_t within = offset % layout->stripe_bytes;
    uint64_t bytes = layout->stripe_bytes - within;
    if (bytes > bytes_max)
        bytes = bytes_max;
    return (struct smb_piece){
        .segment = (uint32_t)(stripe % layout->segment_count),
        .segment_offset = stripe / layout->segment_count * layout->stripe_bytes + within,
        .buffer_offset = offset,
        .bytes = bytes,
    };
}

int smb_layout_piece(const struct smb_layout *layout, uint64_t buffer_offset, uint64_t bytes_max,
                     struct smb_piece *piece)
{
    if (smb_layout_check(layout) != SMB_OK || buffer_offset >= layout->bytes || bytes_max == 0)
        return SMB_INVALID;
    uint64_t left = layout->bytes - buffer_offset;
    if (bytes_max > left)
        bytes_max = left;
    if (layout->segment_count == 1) /* a single segment: its stripes adjoin */
        *piece = (struct smb_piece){
            .segment_offset = buffer_offset, .buffer_offset = buffer_offset, .bytes = bytes_max};
    else
        *piece = piece_at(layout, buffer_offset, bytes_max);
    return SMB_OK;
}

struct smb_cursor smb_cursor_make(const struct smb_layout *layout, uint32_t segment,
                                  uint64_t offset, uint64_t bytes)
{
    SMB_ASSERT(segment < layout->segment_count && bytes <= layout->bytes &&
               offset <= layout->bytes - bytes);
    struct smb_cursor cursor = {
        .layout = layout, .position = offset, .end = offset + bytes, .segment = segment};
    uint64_t stripe = offset / layout->stripe_bytes;
    uint32_t first = (uint32_t)(stripe % layout->segment_count);
    if (first != segment) { /* go to the start of the next stripe of this segment */
        uint64_t ahead = (segment + layout->segment_count - first) % layout->segment_count;
        cursor.position = (stripe + ahead) * layout->stripe_bytes;
    }
    return cursor;
}

bool smb_cursor_next(struct smb_cursor *cursor, struct smb_piece *piece)
{
    if (cursor->position >= cursor->end)
        return false;
    const struct smb_layout *layout = cursor->layout;
    uint64_t to_chunk_end = layout->chunk_bytes - cursor->position % layout->chunk_bytes;
    uint64_t left = cursor->end - cursor->position;
    *piece = piece_at(layout, cursor->position, to_chunk_end < left ? to_chunk_end : left);
    cursor->position += piece->bytes;
    /* the stripes between belong to the other segments */
    if (cursor->position % layout->stripe_bytes == 0)
        cursor->position += (layout->segment_count - 1) * layout->stripe_bytes;
    return true;
}
