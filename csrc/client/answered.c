#include "client/answered.h"

#include "sync/sync_words.h"

static int state_after(int status)
{
    return status == SMB_OK        ? SMB_OUTCOME_APPLIED
           : status == SMB_EVICTED ? SMB_OUTCOME_UNKNOWN
                                   : SMB_OUTCOME_NOT_APPLIED;
}

void link_take_failure(struct smb_link *link, struct inflight *inflight, int status)
{
    struct stream *stream = inflight->stream;
    /* A change that is known to be applied stays applied, even if its answer is lost. A server
     * refuses a repetition before it looks up the outcome of the first request, if the client has
     * lost its right, the server no longer has the segment, or it has no room for the request. Such
     * a refusal says nothing about the first request. */
    bool stays = inflight->fate == SMB_OUTCOME_APPLIED ||
                 (inflight->fate == SMB_OUTCOME_UNKNOWN &&
                  (status == SMB_DENIED || status == SMB_STALE_EPOCH || status == SMB_NOT_FOUND ||
                   status == SMB_OUT_OF_MEMORY));
    int state = stays ? inflight->fate : state_after(status);
    inflight_resolve(inflight, state);
    if (stream) {
        if (smb_opcode_changes(inflight->opcode))
            call_note_unknown(stream->call, inflight->buffer_offset, inflight->length, state);
        call_failed(stream, status);
    }
    inflight_landed(link, inflight);
}

/* A lock was granted to a caller that has left, so it is released at once. If the connection breaks
 * first, the lock expires. */
static void give_back(struct smb_link *link, const struct inflight *lock, uint64_t token,
                      uint64_t b)
{
    /* a token's lowest bit says to which lock it belongs; b: a shared holding's name, or a
     * publisher's version */
    uint64_t which = token % SYNC_LOCKS, name = which == SYNC_USER ? b : 0;

    struct inflight *inflight = inflight_take(link);
    if (!inflight)
        return;
    *inflight = (struct inflight){.sequence = link_next_sequence(link),
                                  .segment_id = lock->segment_id,
                                  .epoch = lock->epoch,
                                  .opcode = SMB_UNLOCK,
                                  .fate = SMB_OUTCOME_NOT_APPLIED};
    struct smb_frame frame = {.opcode = SMB_UNLOCK,
                              .argument = which | (name ? SYNC_SHARED << SYNC_LOCK_BITS : 0)};
    inflight_put_small(inflight, token);
    inflight_put_small(inflight, name);
    for (int i = 2; i < SMB_SYNC_WORDS; i++)
        inflight_put_small(inflight, 0);
    inflight_encode(link, inflight, &frame);
    inflight_append(&link->unsent_end, inflight);
    link->in_flight++;
}

void link_take_success(struct smb_link *link, struct inflight *inflight, uint64_t a, uint64_t b)
{
    struct stream *stream = inflight->stream;
    if (!stream && inflight->opcode == SMB_LOCK)
        give_back(link, inflight, a, b);
    inflight_resolve(inflight, SMB_OUTCOME_APPLIED);
    if (stream && stream->reply) {
        stream->reply->a = a;
        stream->reply->b = b;
    } else if (stream) {
        call_applied(stream, inflight->length, a);
    }
    inflight_landed(link, inflight);
}
