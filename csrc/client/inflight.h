/* inflight.h: in-flight requests: made from streams, kept in lists. Used by the progress thread
 * only. */
#ifndef SMB_INFLIGHT_H
#define SMB_INFLIGHT_H

#include "base/frame.h"
#include "client/call.h"
#include "client/unknown.h"
#include "client/link.h"
#include "memory/records.h"

/* How many fetch_add and compare_swap a link has unanswered at most. A completion record keeps the
 * results of the last RECORD_RESULTS of them, so each can be repeated. */
enum { ATOMICS_IN_FLIGHT_MAX = 4 };
_Static_assert((int)ATOMICS_IN_FLIGHT_MAX <= (int)RECORD_RESULTS,
               "every result that may be asked for again is kept");

/* A request on its way. */
struct inflight {
    struct inflight *next;       /* in the link's list of unsent, sent or spare ones */
    struct stream *stream;       /* NULL: the caller has left */
    struct smb_unknown *unknown; /* for a change whose caller has left: a reference */
    uint32_t unknown_index;
    uint64_t sequence;
    uint64_t segment_id;
    uint64_t buffer_offset;
    uint64_t made_ns;
    void *sink; /* where the answer's elements go */
    /* memory of this struct, or NULL: the payload of a change, kept to be sent and sent again; for
     * a READ the answer, until it is decoded to `sink` */
    uint8_t *encoded;
    uint32_t answer_bytes; /* size of the answer's payload, if it has one */
    uint32_t epoch;
    uint32_t length;
    uint8_t opcode;
    uint8_t wire;  /* enum smb_wire */
    bool was_sent; /* part of it was sent, over any connection */
    /* it was sent over a connection by reference at least once. The server may then have made a
     * WRITE although its watermark does not say so. */
    bool went_by_reference;
    /* enum smb_outcome_state: the outcome of a change, as far as it is known */
    int fate;
    const void *payload; /* sent after the header */
    uint32_t payload_bytes;
    /* the payload's first bytes, sent before `payload`: a token, and words that are not in the
     * caller's memory; may be all of the payload */
    uint8_t small[SMB_RECORD_SMALL_BYTES];
    uint32_t small_bytes;
    uint8_t checksum[SMB_CHECKSUM_BYTES]; /* sent after the payload, if the client uses checksums */
    uint32_t checksum_bytes;
    uint8_t header[SMB_FRAME_BYTES];
    uint8_t ends[SMB_RECORD_ENDS_BYTES]; /* the end of its record, on a connection by reference */
};

static inline bool opcode_is_atomic(int opcode)
{
    return opcode == SMB_FETCH_ADD || opcode == SMB_COMPARE_SWAP;
}

static inline void inflight_append(struct inflight ***end, struct inflight *inflight)
{
    inflight->next = NULL;
    **end = inflight;
    *end = &inflight->next;
}

/* The memory that receives the answer's payload. */
static inline uint8_t *inflight_landing(const struct inflight *inflight)
{
    return inflight->opcode == SMB_READ && inflight->encoded ? inflight->encoded : inflight->sink;
}

static inline void inflight_resolve(struct inflight *inflight, int state)
{
    if (inflight->unknown)
        unknown_resolved(inflight->unknown, inflight->unknown_index, state);
}

/* Returns a spare struct, or a new one; NULL: out of memory. */
struct inflight *inflight_take(struct smb_link *link);
/* Takes *at out of its list and returns it; *end is the list's end. */
struct inflight *inflight_take_from(struct inflight **at, struct inflight ***end);
/* Puts a struct that is in no list among the spare ones. */
void inflight_put_back(struct smb_link *link, struct inflight *inflight);
/* Ends a request that is in no list. If it was the stream's last one, the stream ends, too. */
void inflight_landed(struct smb_link *link, struct inflight *inflight);
void inflight_put_small(struct inflight *inflight, uint64_t word);
/* Completes the frame and writes it to the request's header, with the checksum. */
void inflight_encode(struct smb_link *link, struct inflight *inflight, struct smb_frame *frame);
/* Computes the checksum anew, if the client uses checksums: the header has changed. */
void inflight_seal(struct inflight *inflight);
/* Makes the stream's next frame, and appends it to the link's unsent ones. False: out of memory. */
bool inflight_make(struct smb_link *link, struct stream *stream);
void inflight_free_all(struct inflight *inflight);

/* Moves to the stream's next piece, and sets have_piece. */
void stream_advance(struct stream *stream);
/* With several lanes to a segment: takes the next piece, if it has none. Returns have_piece. */
bool stream_take(struct stream *stream);
/* With several lanes: whether the other lanes have taken all pieces. */
bool stream_is_empty(const struct stream *stream);

#endif
