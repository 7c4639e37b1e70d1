#include "client/sparse.h"

#include <string.h>

static uint64_t first_entry_from(const struct smb_request *request, uint64_t element)
{
    uint64_t low = 0, high = request->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if ((uint64_t)request->indices[middle] < element)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool sparse_cut(const struct smb_request *request, uint32_t element, uint64_t entries_max,
                struct smb_piece *rest, struct smb_piece *piece, uint64_t *first, uint64_t *entries)
{
    uint64_t start = rest->buffer_offset / element, end = start + rest->bytes / element;
    *first = first_entry_from(request, start);
    uint64_t last = first_entry_from(request, end);
    if (last <= *first) {
        rest->bytes = 0;
        return false;
    }
    /* The indices were checked, but the caller may change them meanwhile, so this takes no more
     * than there is room for. */
    uint64_t found = last - *first < rest->bytes / element ? last - *first : rest->bytes / element;
    *entries = found < entries_max ? found : entries_max;
    uint64_t skip = ((uint64_t)request->indices[*first] - start) * element;
    uint64_t stop = ((uint64_t)request->indices[*first + *entries - 1] + 1 - start) * element;
    *piece = (struct smb_piece){.segment = rest->segment,
                                .segment_offset = rest->segment_offset + skip,
                                .buffer_offset = rest->buffer_offset + skip,
                                .bytes = stop - skip};
    rest->segment_offset += stop, rest->buffer_offset += stop;
    rest->bytes = *entries == found ? 0 : rest->bytes - stop;
    return true;
}

bool sparse_run(const struct smb_request *request, uint32_t element, struct smb_piece *rest,
                struct smb_piece *piece, uint64_t *first)
{
    uint64_t start = rest->buffer_offset / element, end = start + rest->bytes / element;
    *first = first_entry_from(request, start);
    uint64_t at = *first < request->count ? (uint64_t)request->indices[*first] : end;
    /* The indices were checked, but the caller may change them meanwhile. */
    if (at < start || at >= end) {
        rest->bytes = 0;
        return false;
    }
    uint64_t most = request->count - *first < end - at ? request->count - *first : end - at;
    uint64_t length = 1;
    while (length < most && (uint64_t)request->indices[*first + length] == at + length)
        length++;
    uint64_t skip = (at - start) * element, stop = skip + length * element;
    *piece = (struct smb_piece){.segment = rest->segment,
                                .segment_offset = rest->segment_offset + skip,
                                .buffer_offset = rest->buffer_offset + skip,
                                .bytes = stop - skip};
    rest->segment_offset += stop, rest->buffer_offset += stop, rest->bytes -= stop;
    return true;
}

void sparse_encode(const struct smb_request *request, uint32_t element,
                   const struct smb_piece *piece, uint64_t first, uint64_t entries, uint8_t *to)
{
    const uint8_t *values = (const uint8_t *)request->source + first * element;
    for (uint64_t i = 0; i < entries; i++, to += SMB_WIRE_INDEX_BYTES + element) {
        uint32_t index = (uint32_t)((uint64_t)request->indices[first + i] -
                                    piece->buffer_offset / element);
        memcpy(to, &index, sizeof index);
        memcpy(to + SMB_WIRE_INDEX_BYTES, values + i * element, element);
    }
}

bool sparse_is_sound(const struct smb_request *request, uint32_t element)
{
    bool reads = request->opcode == SMB_READ;
    if (!request->indices || request->count == 0 || !request->source != reads ||
        !request->sink == reads)
        return false;
    for (uint64_t i = 1; i < request->count; i++)
        if (request->indices[i] <= request->indices[i - 1])
            return false;
    return request->indices[0] >= 0 && (uint64_t)request->indices[0] == request->offset / element &&
           (uint64_t)request->indices[request->count - 1] + 1 ==
               (request->offset + request->bytes) / element;
}
