#include "server/staging.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "server/loop.h"
#include "server/server.h"

int staging_make(struct connection *connection, uint32_t bytes)
{
    SMB_ASSERT(bytes <= SMB_CHUNK_BYTES_MAX);
    struct journal *journal = connection->loop->server->journal;
    if (!journal) {
        if (!connection->own_staging)
            connection->own_staging = aligned_alloc(4096, 4096 + SMB_CHUNK_BYTES_MAX);
        connection->staging = connection->own_staging ? connection->own_staging + 4096 : NULL;
        return connection->staging ? SMB_OK : SMB_OUT_OF_MEMORY;
    }
    int status = connection->slot.payload ? SMB_OK : journal_take_slot(journal, &connection->slot);
    if (status == SMB_OK)
        status = journal_reserve(journal, &connection->slot, bytes);
    connection->staging = connection->slot.payload;
    return status;
}

uint32_t staging_prefix_bytes(const struct smb_frame *frame)
{
    return smb_frame_fence_bytes(frame) + (smb_frame_brings(frame) ? SMB_APPLY_BYTES : 0U);
}

bool staging_is_from_segments(const struct smb_frame *frame)
{
    return frame->opcode == SMB_ACCUMULATE_FROM ||
           (frame->opcode == SMB_APPLY && !smb_frame_brings(frame));
}

bool staging_is_needed(const struct smb_frame *frame)
{
    return frame->payload > smb_frame_checksum_bytes(frame) || smb_opcode_changes(frame->opcode);
}

uint32_t staging_bytes(const struct smb_frame *frame)
{
    uint32_t body = smb_frame_brings(frame) ? frame->length : smb_frame_body(frame);
    return staging_is_from_segments(frame) && frame->length > body ? frame->length : body;
}

int staging_take_record(struct connection *connection, const uint8_t *record)
{
    const struct smb_frame *frame = &connection->request.frame;
    const uint8_t *small = record + SMB_RECORD_SMALL_AT;
    bool carries = frame->opcode == SMB_WRITE || frame->opcode == SMB_ACCUMULATE ||
                   smb_frame_brings(frame);
    uint32_t prefix = staging_prefix_bytes(frame);
    uint32_t body = frame->payload - smb_frame_checksum_bytes(frame) - prefix;
    connection->named = slots_at(connection->slots, smb_load64(record + SMB_RECORD_ENDS_AT));
    if ((carries || frame->opcode == SMB_READ) && !connection->named)
        return SMB_PROTOCOL;
    if (!carries && prefix + body > SMB_RECORD_SMALL_BYTES)
        return SMB_PROTOCOL; /* parts of a copy are not sent by reference */
    bool in_place = carries && smb_frame_wire(frame) != SMB_WIRE_SPARSE;
    if (!in_place && staging_is_needed(frame)) {
        int status = staging_make(connection, staging_bytes(frame));
        if (status != SMB_OK)
            return status;
    }
    if (in_place)
        connection->staging = connection->named->payload;
    else if (carries)
        memcpy(connection->staging, connection->named->payload, body);
    else if (body > 0)
        memcpy(connection->staging, small + prefix, body);
    if (prefix > 0)
        memcpy(connection->staging - prefix, small, prefix);
    return SMB_OK;
}

const struct slot *staging_slot(const struct connection *connection)
{
    if (!connection->loop->server->journal)
        return NULL;
    return connection->named && connection->staging == connection->named->payload
               ? connection->named
               : &connection->slot;
}
