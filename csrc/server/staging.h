/* staging.h: where the payload of a request goes, and the memory from which a change is made.
 * Called by the connection's loop. */
#ifndef SMB_STAGING_H
#define SMB_STAGING_H

#include "server/connection.h"

/* Gives the connection a journal slot with room for `bytes`. Payloads are received there, and
 * changes are made from there. */
int staging_make(struct connection *connection, uint32_t bytes);
/* The size of the part of the payload that lies before the rest in memory: a token, or words that
 * elements follow. */
uint32_t staging_prefix_bytes(const struct smb_frame *frame);
/* Whether the operand is another segment: ACCUMULATE_FROM, or APPLY without its gradient. */
bool staging_is_from_segments(const struct smb_frame *frame);
/* Whether the request needs a journal slot: every change is made from one, also a change without a
 * payload. */
bool staging_is_needed(const struct smb_frame *frame);
/* Size of the slot's content. A change from another segment has that segment's bytes there, after
 * its payload. */
uint32_t staging_bytes(const struct smb_frame *frame);
/* Puts the payload of an admitted record together in `staging`. Elements stay in the slot that the
 * record names, to save a copy. Indices are copied, because they must not change after they were
 * checked. SMB_PROTOCOL: the record names no slot but needs one. */
int staging_take_record(struct connection *connection, const uint8_t *record);
/* The slot from which a change is made. */
const struct slot *staging_slot(const struct connection *connection);

#endif
