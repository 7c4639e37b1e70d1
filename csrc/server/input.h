/* input.h: requests and their payloads, from the socket to where they are carried out. The
 * connection's loop. */
#ifndef SMB_INPUT_H
#define SMB_INPUT_H

#include "server/connection.h"

/* The header of the next request, which is then in hand. A HELLO and a token are answered at
 * once. */
enum step input_next_request(struct connection *connection);
/* Of the request in hand: to staging, straight to the segment, or, if it is refused, to nowhere. */
enum step input_receive_payload(struct connection *connection);

#endif
