/* inflight.h: requests on their way: made from streams, kept in lists. The driver's. */
#ifndef SMB_INFLIGHT_H
#define SMB_INFLIGHT_H

#include "base/frame.h"
#include "client/call.h"
#include "client/doubt.h"
#include "client/link.h"
#include "memory/records.h"

/* Of fetch_add and compare_swap; a record keeps the results of the last RECORD_RESULTS. */
enum { ATOMICS_FLYING_MAX = 4 };
_Static_assert((int)ATOMICS_FLYING_MAX <= (int)RECORD_RESULTS, "every result that may be asked for again is kept");

/* A request on its way. */
struct flight {
    struct flight *next;           /* of the link's unsent or sent ones, or of its spare ones */
    struct stream *stream;         /* NULL: its caller has left */
    struct smb_doubt *doubt;       /* then: a reference, for a change */
    uint32_t doubt_index;
    uint64_t sequence;
    uint64_t segment_id;
    uint64_t buffer_offset;
    uint64_t made_ns;
    void *sink;                    /* where the answer's elements go */
    uint8_t *encoded;              /* its own memory: what is sent, as often as it is, or the answer until it is decoded */
    uint32_t answer_bytes;         /* of its payload, if there is one */
    uint32_t epoch;
    uint32_t length;
    uint8_t opcode;
    uint8_t wire;                  /* enum smb_wire */
    bool was_sent;                 /* some of it, over any connection */
    bool went_by_reference;        /* some time: a WRITE may have been made where no record of the server tells of it */
    int fate;                      /* enum smb_doubt_state: what is known of a change by now */
    const void *payload;           /* still to be sent after the header */
    uint32_t payload_bytes;
    uint8_t small[SMB_RECORD_SMALL_BYTES]; /* payload that is no caller's memory, or what comes before it */
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

static inline void flight_append(struct flight ***end, struct flight *flight)
{
    flight->next = NULL;
    **end = flight;
    *end = &flight->next;
}

/* Where the answer's payload is received. */
static inline uint8_t *flight_landing(const struct flight *flight)
{
    return flight->opcode == SMB_READ && flight->encoded ? flight->encoded : flight->sink;
}

static inline void flight_settle(struct flight *flight, int state)
{
    if (flight->doubt)
        doubt_settled(flight->doubt, flight->doubt_index, state);
}

/* A spare one, or NULL. */
struct flight *flight_take(struct smb_link *link);
/* Takes *at out of its list. */
struct flight *flight_take_from(struct flight **at, struct flight ***end);
/* Out of its list, it is spare again. */
void flight_put_back(struct smb_link *link, struct flight *flight);
/* Out of its list, and over: its stream may be, too. */
void flight_landed(struct smb_link *link, struct flight *flight);
void flight_put_small(struct flight *flight, uint64_t word);
/* Completes the frame and writes the header; with checksums, seals it. */
void flight_encode(struct smb_link *link, struct flight *flight, struct smb_frame *frame);
void flight_seal(struct flight *flight);
/* The stream's next frame, behind the unsent ones. false: no memory. */
bool flight_make(struct smb_link *link, struct stream *stream);
void flights_free(struct flight *flight);

/* Goes on to the stream's next piece: have_piece, or not. */
void stream_advance(struct stream *stream);

#endif
