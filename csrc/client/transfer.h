/* transfer.h: one request on its way, by streams over links and pieces of mapped segments. It lives
 * on the caller's stack in smb_transfer, and in allocated memory in an async operation. */
#ifndef SMB_TRANSFER_H
#define SMB_TRANSFER_H

#include "client/local.h"

enum { STREAMS_AT_HAND = 8 };

struct transfer {
    struct call call;
    /* the part on mapped segments, if has_local_work: call local_step() until it is done */
    struct local_work work;
    /* outcome of that part, separate because another thread may drive the links meanwhile */
    struct smb_outcome local_outcome;
    bool has_local_work;
    struct stream *streams; /* call.stream_count of them; submit the call if there is any */
    struct stream at_hand[STREAMS_AT_HAND];
};

/* Whether the range and the arguments are valid for the buffer. */
bool transfer_is_sound(const struct smb_buffer *buffer, const struct smb_request *request);
/* Whether the caller's memory is a view of the buffer itself. */
bool transfer_uses_itself(const struct smb_buffer *buffer, const struct smb_request *request);
/* Sets up a sound request whose memory is not a view of the buffer. `request` and `outcome` must
 * outlive the transfer. Returns outcome->status; call transfer_end only after SMB_OK. */
int transfer_begin(struct transfer *transfer, struct smb_buffer *buffer,
                   const struct smb_request *request, struct smb_outcome *outcome);
/* Call it once the call and the local work are done. */
void transfer_end(struct transfer *transfer);
/* Adds the account of a part (of mapped memory, or of what was not begun) to the sum, and gives the
 * sum the part's unknown pieces, none of which is pending. The progress thread must be done with
 * the sum, except for the pending pieces of its unknown. */
void transfer_add_outcome(struct smb_outcome *sum, const struct smb_outcome *part);
/* Counts a whole call, once, if the client counts; if `link` is not NULL, as a call over links of
 * its kind. */
void transfer_count(struct smb_buffer *buffer, const struct smb_request *request,
                    const struct smb_outcome *outcome, const struct smb_link *link,
                    uint64_t begun_ns);

#endif
