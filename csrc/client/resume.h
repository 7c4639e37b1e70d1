/* resume.h: a lane resumes over a new connection: watermarks, and what is sent again. The progress
 * thread's. */
#ifndef SMB_RESUME_H
#define SMB_RESUME_H

#include "client/link.h"

/* How far a segment has come, asked when a link resumes. */
struct watermark {
    uint64_t segment_id;
    uint64_t sequence; /* of the question */
    uint64_t value;
    /* up to here some changes were refused: the value alone does not speak for them */
    uint64_t refused;
    uint32_t epoch;
    int status;
    bool answered;
};

static inline uint32_t watermark_frame_bytes(const struct smb_link *link)
{
    return link->by_reference
               ? SMB_RECORD_BYTES
               : SMB_FRAME_BYTES + (link->client->checksums ? SMB_CHECKSUM_BYTES : 0);
}

/* Repeated requests go out under the link's epoch, if it has one. */
void link_take_epoch(struct smb_link *link);
/* Begins to ask for the watermark of every segment that has changes of unknown outcome. */
int link_ask_watermarks(struct smb_link *link);
int link_send_watermarks(struct smb_link *link, bool *moved);
int link_take_watermark(struct smb_link *link, const struct smb_frame *reply);
/* Every watermark is here: what was applied is answered, the rest is sent again. */
void link_resume(struct smb_link *link);

#endif
