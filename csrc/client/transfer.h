/* transfer.h: one request on its way, by streams over links and pieces of mapped segments. It lives
 * on the caller's stack in smb_transfer, and in memory of its own in an async operation. */
#ifndef SMB_TRANSFER_H
#define SMB_TRANSFER_H

#include "client/local.h"

enum { STREAMS_AT_HAND = 8 };

struct transfer {
    struct call call;
    struct local_work
        work; /* on mapped segments, if has_local_work: local_step() until it is done */
    struct smb_outcome local_outcome; /* of it: another thread may drive the links meanwhile */
    bool has_local_work;
    struct stream *streams; /* call.stream_count, to be submitted if there is any */
    struct stream at_hand[STREAMS_AT_HAND];
};

/* The range and the arguments make sense for the buffer. */
bool transfer_is_sound(const struct smb_buffer *buffer, const struct smb_request *request);
/* The caller's memory is a view of the buffer itself. */
bool transfer_uses_itself(const struct smb_buffer *buffer, const struct smb_request *request);
/* Sets up a sound request whose memory is none of the buffer's. It, and `outcome`, outlive the
 * transfer. Returns outcome->status; nothing is to be ended unless SMB_OK. */
int transfer_begin(struct transfer *transfer, struct smb_buffer *buffer,
                   const struct smb_request *request, struct smb_outcome *outcome);
/* Once its call and its local work are done. */
void transfer_end(struct transfer *transfer);
/* Adds a part's account, of mapped memory or of what was not begun, to the sum, and gives it the
 * part's unknown pieces: none of them is pending. The progress thread is done with the sum, but for
 * the pending pieces of its unknown. */
void transfer_add_outcome(struct smb_outcome *sum, const struct smb_outcome *part);
/* Counts a whole call, once, if the client counts: over links if `link`, of its kind. */
void transfer_count(struct smb_buffer *buffer, const struct smb_request *request,
                    const struct smb_outcome *outcome, const struct smb_link *link,
                    uint64_t begun_ns);

#endif
