/* answer.h: the request in hand is carried out and answered. The connection's loop. */
#ifndef SMB_ANSWER_H
#define SMB_ANSWER_H

#include "server/connection.h"

/* All of it is here. */
enum step answer_request(struct connection *connection);
/* It feeds a backup no more, if it did. */
void answer_end_feed(struct connection *connection);
/* Answers to what waited (waits.h), as many as there is room for. */
void answer_put_late(struct connection *connection);

#endif
