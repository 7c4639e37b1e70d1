#include "client/buffer.h"

#include <stdlib.h>

#include "memory/segment.h"

int smb_buffer_create(struct smb_client *client, const struct smb_layout *layout, int dtype,
                      struct smb_buffer **buffer)
{
    if (smb_layout_check(layout) != SMB_OK || smb_dtype_bytes(dtype) == 0 ||
        layout->bytes % smb_dtype_bytes(dtype) != 0)
        return SMB_INVALID;
    struct smb_buffer *made = calloc(1,
                                     sizeof *made + layout->segment_count * sizeof made->paths[0]);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->client = client;
    made->layout = *layout;
    made->dtype = dtype;
    made->element_bytes = smb_dtype_bytes(dtype);
    *buffer = made;
    return SMB_OK;
}

int smb_buffer_set_link(struct smb_buffer *buffer, uint32_t index, uint64_t segment_id,
                        uint32_t epoch, struct smb_link *link)
{
    if (index >= buffer->layout.segment_count || link->client != buffer->client ||
        path_is_set(&buffer->paths[index]))
        return SMB_INVALID;
    int may = link_may_use(link);
    if (may != SMB_OK)
        return may;
    link_retain(link);
    buffer->paths[index] = (struct path){.segment_id = segment_id, .epoch = epoch, .link = link};
    return SMB_OK;
}

int smb_buffer_add_lane(struct smb_buffer *buffer, uint32_t index, struct smb_link *link)
{
    if (index >= buffer->layout.segment_count || link->client != buffer->client ||
        !buffer->paths[index].link || buffer->paths[index].further_count == SMB_LANES_FURTHER_MAX)
        return SMB_INVALID;
    int may = link_may_use(link);
    if (may != SMB_OK)
        return may;
    struct path *path = &buffer->paths[index];
    path->further[path->further_count++] = link_retain(link);
    buffer->further_count++;
    return SMB_OK;
}

int smb_buffer_set_local(struct smb_buffer *buffer, uint32_t index, struct smb_segment *segment)
{
    struct smb_segment_info info;
    smb_segment_info(segment, &info);
    if (index >= buffer->layout.segment_count || path_is_set(&buffer->paths[index]) ||
        info.dtype != (uint32_t)buffer->dtype || info.chunk_bytes != buffer->layout.chunk_bytes ||
        info.data_bytes != smb_layout_segment_bytes(&buffer->layout, index))
        return SMB_INVALID;
    smb_segment_retain(segment);
    buffer->paths[index] = (struct path){
        .segment_id = info.id, .epoch = info.epoch, .segment = segment};
    return SMB_OK;
}

void smb_buffer_destroy(struct smb_buffer *buffer)
{
    for (uint32_t i = 0; i < buffer->layout.segment_count; i++) {
        struct path *path = &buffer->paths[i];
        if (path->link)
            link_release(path->link);
        for (uint32_t lane = 0; lane < path->further_count; lane++)
            link_release(path->further[lane]);
        if (path->segment)
            smb_segment_release(path->segment);
    }
    free(buffer);
}
