/* input.h: receives requests and their payloads. Called by the connection's loop. */
#ifndef SMB_INPUT_H
#define SMB_INPUT_H

#include "server/connection.h"

/* Reads the header of the next request, which is then in hand. HELLO and AUTHORIZE are answered at
 * once. */
enum step input_next_request(struct connection *connection);
/* Receives the payload of the request in hand: to staging, directly into the segment, or, if the
 * request is refused, to be thrown away. */
enum step input_receive_payload(struct connection *connection);

#endif
