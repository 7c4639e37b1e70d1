/* reply.h: how a request in hand ends: answered, refused, or deferred. Called by the connection's
 * loop. */
#ifndef SMB_REPLY_H
#define SMB_REPLY_H

#include "server/connection.h"

/* Refuses the request with that status. */
enum step reply_failure(struct connection *connection, int status);
/* Defers the request, whose chunk is locked; it will be tried again. */
enum step reply_defer(struct connection *connection);
/* Ends the request after its answer. `done`: it was executed, not refused, and is to be counted. */
void reply_finish(struct connection *connection, bool done);
/* Counts a request that was executed. */
void reply_count(struct connection *connection, const struct gate_request *request);
/* Memory of one chunk and a checksum, allocated when it is first needed. NULL: out of memory. */
uint8_t *reply_chunk_memory(uint8_t **memory);

#endif
