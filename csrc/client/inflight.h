/* inflight.h: in-flight requests: made from streams, kept in lists. Only the progress thread uses
 * them. */
#ifndef SMB_INFLIGHT_H
#define SMB_INFLIGHT_H

#include "base/frame.h"
#include "client/call.h"
#include "client/unknown.h"
#include "client/link.h"
#include "memory/records.h"

/* Of fetch_add and compare_swap; a record keeps the results of the last RECORD_RESULTS. */
enum { ATOMICS_IN_FLIGHT_MAX = 4 };
_Static_assert((int)ATOMICS_IN_FLIGHT_MAX <= (int)RECORD_RESULTS,
               "every result that may be asked for again is kept");

/* A request on its way. */
struct inflight {
    struct inflight *next;       /* of the link's unsent or sent ones, or of its spare ones */
    struct stream *stream;       /* NULL: its caller has left */
    struct smb_unknown *unknown; /* then: a reference, for a change */
    uint32_t unknown_index;
    uint64_t sequence;
    uint64_t segment_id;
    uint64_t buffer_offset;
    uint64_t made_ns;
    void *sink; /* where the answer's elements go */
    /* its own memory: what is sent, as often as it is, or the answer until it is decoded */
    uint8_t *encoded;
    uint32_t answer_bytes; /* of its payload, if there is one */
    uint32_t epoch;
    uint32_t length;
    uint8_t opcode;
    uint8_t wire;  /* enum smb_wire */
    bool was_sent; /* some of it, over any connection */
    /* some time: a WRITE may have been made where no record of the server tells of it */
    bool went_by_reference;
    int fate;            /* enum smb_outcome_state: what is known of a change by now */
    const void *payload; /* still to be sent after the header */
    uint32_t payload_bytes;
    /* payload that is no caller's memory, or what comes before it */
    uint8_t small[SMB_RECORD_SMALL_BYTES];
    uint32_t small_bytes;
    uint8_t checksum[SMB_CHECKSUM_BYTES]; /* after the payload, if the client uses them */
    uint32_t checksum_bytes;
    uint8_t header[SMB_FRAME_BYTES];
    uint8_t ends[SMB_RECORD_ENDS_BYTES]; /* of its record, on a connection by reference */
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

/* A spare one, or NULL. */
struct inflight *inflight_take(struct smb_link *link);
/* Takes *at out of its list. */
struct inflight *inflight_take_from(struct inflight **at, struct inflight ***end);
/* Out of its list, it is spare again. */
void inflight_put_back(struct smb_link *link, struct inflight *inflight);
/* Out of its list, and over: its stream may be, too. */
void inflight_landed(struct smb_link *link, struct inflight *inflight);
void inflight_put_small(struct inflight *inflight, uint64_t word);
/* Completes the frame and writes the header; with checksums, seals it. */
void inflight_encode(struct smb_link *link, struct inflight *inflight, struct smb_frame *frame);
void inflight_seal(struct inflight *inflight);
/* The stream's next frame, behind the unsent ones. false: no memory. */
bool inflight_make(struct smb_link *link, struct stream *stream);
void inflight_free_all(struct inflight *inflight);

/* Goes on to the stream's next piece: have_piece, or not. */
void stream_advance(struct stream *stream);
/* Of several lanes to a segment: takes the next piece, if it has none. Returns have_piece. */
bool stream_take(struct stream *stream);
/* Of several lanes: the others have taken all that it could. */
bool stream_is_empty(const struct stream *stream);

#endif
