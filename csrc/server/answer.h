/* answer.h: executes the request in hand and answers it. Called by the connection's loop. */
#ifndef SMB_ANSWER_H
#define SMB_ANSWER_H

#include "server/connection.h"

/* Answers the request in hand, which is complete. */
enum step answer_request(struct connection *connection);
/* Ends the connection's feed to a copy here, if it is one. */
void answer_end_feed(struct connection *connection);
/* Sends answers to requests that waited (waits.h), as many as there is room for. */
void answer_put_late(struct connection *connection);

#endif
