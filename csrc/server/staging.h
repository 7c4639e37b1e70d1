/* staging.h: where the payload of a request goes, and what a change is made from. The connection's
 * loop. */
#ifndef SMB_STAGING_H
#define SMB_STAGING_H

#include "server/connection.h"

/* Gives the connection a journal slot with room for so many bytes. Payloads are received there, and
 * changes are made from there. */
int staging_make(struct connection *connection, uint32_t bytes);
/* Of the payload, what lies before the rest in memory: a token; words that elements follow. */
uint32_t staging_prefix_bytes(const struct smb_frame *frame);
/* Its operand is another segment: ACCUMULATE_FROM, APPLY that does not bring it. */
bool staging_is_from_segments(const struct smb_frame *frame);
/* Every change is made from the journal slot, also one without a payload. */
bool staging_is_needed(const struct smb_frame *frame);
/* A change from another segment has that segment's bytes there, after its payload. */
uint32_t staging_bytes(const struct smb_frame *frame);
/* Of a record that is admitted: the payload is put together in `staging`. Elements are in the slot
 * that it names and stay there, so that they are not copied; but indices are, as they must not
 * change between being checked and being used. SMB_PROTOCOL: it names none where it must. */
int staging_take_record(struct connection *connection, const uint8_t *record);
/* The slot that a change is made from. */
const struct slot *staging_slot(const struct connection *connection);

#endif
