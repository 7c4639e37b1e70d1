/* The one parser, with any 64 bytes: what it accepts is sound, and is what the bytes say. */
#include <string.h>

#include "fuzz.h"
#include "wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t bytes[SMB_FRAME_BYTES] = {0x53, 0x4d, SMB_FRAME_VERSION};
    /* Mostly behind a good beginning, or nothing else would ever be reached. */
    size_t skip = size > 0 && data[0] % 8 ? 3 : 0;
    memcpy(bytes + skip, data, size < sizeof bytes - skip ? size : sizeof bytes - skip);
    struct smb_frame frame;
    if (smb_frame_parse(bytes, &frame) != SMB_OK)
        return 0;
    uint8_t again[SMB_FRAME_BYTES];
    smb_frame_encode(&frame, again);
    MUST(memcmp(bytes, again, sizeof bytes) == 0);
    MUST(frame.opcode >= SMB_HELLO && frame.opcode < SMB_OPCODE_COUNT && frame.length <= SMB_CHUNK_BYTES_MAX);
    MUST(frame.payload <= SMB_CHUNK_BYTES_MAX + SMB_TOKEN_BYTES);
    if (frame.flags & SMB_FLAG_REPLY)
        return 0;
    MUST(frame.offset <= UINT64_MAX - frame.length);
    MUST(!smb_opcode_changes(frame.opcode) || (frame.sequence > 0 && frame.length > 0));
    MUST(frame.opcode < SMB_LOCK || frame.payload == SMB_SYNC_BYTES);
    return 0;
}
