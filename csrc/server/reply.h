/* reply.h: how a request in hand ends: answered, refused, or deferred. The connection's loop. */
#ifndef SMB_REPLY_H
#define SMB_REPLY_H

#include "server/connection.h"

/* Refused with that status. */
enum step reply_failure(struct connection *connection, int status);
/* The chunk is locked: it is tried again. */
enum step reply_defer(struct connection *connection);
/* The request in hand is answered. `done`: it was carried out, not refused, and is to be
 * counted. */
void reply_finish(struct connection *connection, bool done);
/* It was carried out. */
void reply_count(struct connection *connection, const struct gate_request *request);
/* A chunk and a checksum's worth, made when it is first needed. NULL: no memory. */
uint8_t *reply_chunk_memory(uint8_t **memory);

#endif
