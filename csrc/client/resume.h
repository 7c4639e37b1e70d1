/* resume.h: resumes a lane over a new connection: asks for watermarks, and sends requests again.
 * Called by the progress thread. */
#ifndef SMB_RESUME_H
#define SMB_RESUME_H

#include "client/link.h"

/* How far a segment has come, asked when a link resumes. */
struct watermark {
    uint64_t segment_id;
    uint64_t sequence; /* number of the WATERMARK request */
    uint64_t value;
    /* some changes up to this number were refused, so for them the value alone says nothing */
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

/* Gives repeated requests the link's epoch, if it has one. */
void link_take_epoch(struct smb_link *link);
/* Begins to ask for the watermark of every segment that has changes of unknown outcome. */
int link_ask_watermarks(struct smb_link *link);
int link_send_watermarks(struct smb_link *link, bool *moved);
int link_take_watermark(struct smb_link *link, const struct smb_frame *reply);
/* Once every watermark has come: answers the requests that were applied, and sends the others
 * again. */
void link_resume(struct smb_link *link);

#endif
