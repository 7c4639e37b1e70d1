/* answer.h: the request in hand is carried out and answered. The connection's loop. */
#ifndef SMB_ANSWER_H
#define SMB_ANSWER_H

#include "server/connection.h"

/* All of it is here. */
enum step answer_request(struct connection *connection);
enum step answer_failure(struct connection *connection, int status);
/* The chunk is locked: it is tried again. */
enum step answer_defer(struct connection *connection);
/* The request in hand is answered. `done`: it was carried out, not refused, and is to be
 * counted. */
void answer_finish(struct connection *connection, bool done);
/* It was carried out. */
void answer_count(struct connection *connection, const struct gate_request *request);
/* A chunk and a checksum's worth, made when it is first needed. NULL: no memory. */
uint8_t *answer_chunk_memory(uint8_t **memory);
/* It feeds a backup no more, if it did. */
void answer_end_feed(struct connection *connection);
/* Answers to what waited (waits.h), as many as there is room for. */
void answer_put_late(struct connection *connection);

#endif
