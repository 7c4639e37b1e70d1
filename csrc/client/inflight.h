/* inflight.h: what link.c (frames out, connections), receive.c (what comes back), inflight.c (requests on their way), resume.c (a lane
 * goes on) and connect.c (new connections) share. Whoever drives the link only, but for connect.c. */
#ifndef SMB_INFLIGHT_H
#define SMB_INFLIGHT_H

#include "client/client.h"

static inline int link_state_of(const struct smb_link *link)
{
    return atomic_load_explicit(&link->state, memory_order_relaxed);
}

static inline void link_enter(struct smb_link *link, enum link_state state)
{
    atomic_store_explicit(&link->state, state, memory_order_release);
}

/* Of the next frame on any of the client's links. A server takes a lane's change for one that it has made unless its number is above
 * those of all that were: so numbers go up for as long as the client lives, whatever links it makes meanwhile. */
static inline uint64_t link_next_sequence(struct smb_link *link)
{
    link->made++;
    return atomic_fetch_add_explicit(&link->client->sequences, 1, memory_order_relaxed) + 1;
}

/* Of every frame that the client sends. */
static inline uint16_t client_frame_flags(const struct smb_client *client)
{
    return client->checksums ? SMB_FLAG_CHECKSUM : 0;
}

static inline uint32_t watermark_frame_bytes(const struct smb_link *link)
{
    return link->by_reference ? SMB_RECORD_BYTES : SMB_FRAME_BYTES + (link->client->checksums ? SMB_CHECKSUM_BYTES : 0);
}

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

/* ---- inflight.c */
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

/* ---- resume.c */
/* Begins to ask for the watermark of every segment that has changes in doubt. */
int link_ask_watermarks(struct smb_link *link);
int link_send_watermarks(struct smb_link *link, bool *moved);
int link_take_watermark(struct smb_link *link, const struct smb_frame *reply);
/* Every watermark is here: what was applied is answered, the rest is sent again. */
void link_resume(struct smb_link *link);

/* ---- receive.c */
/* One look at the socket. SMB_LINK_LOST: the connection is broken. */
int link_receive(struct smb_link *link, bool *moved);
/* What was received, into answers. */
int link_digest(struct smb_link *link);
/* The request is answered with success, and `a` and `b`. */
void link_take_success(struct smb_link *link, struct flight *flight, uint64_t a, uint64_t b);
/* What came is not what was sent: counted; SMB_LINK_LOST. */
int link_spoilt(struct smb_link *link);

#endif
