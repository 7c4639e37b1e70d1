/* output.h: replies of a connection and the data behind them, on their way to the socket. The
 * connection's loop. */
#ifndef SMB_OUTPUT_H
#define SMB_OUTPUT_H

#include <stddef.h>
#include <sys/uio.h>

#include "server/connection.h"

bool output_all_sent(const struct connection *connection);
/* Sends the replies in `out`, then the parts, as far as the socket takes them; parts[0] is left
 * free for the replies. *sent says how much of the other parts went. */
enum step output_send(struct connection *connection, struct iovec *parts, size_t count,
                      uint64_t *sent);
/* Sends `out` and `tail`, as far as the socket takes them. */
enum step output_flush(struct connection *connection);
/* Before it waits for anything a connection sends what it has; if the socket is full it waits for
 * room instead: a peer that does not read is not served further. */
enum step output_wait_for(struct connection *connection, enum connection_wait wait);
/* A reply without data. There is room for one: connection_turn sees to it. */
void output_put(struct connection *connection, struct smb_frame *reply);
/* With so many bytes of data, which are in `tail`. */
void output_put_with_tail(struct connection *connection, struct smb_frame *reply, uint32_t bytes);
/* By reference: so many bytes of data are in the slot that the request named. */
void output_put_by_reference(struct connection *connection, struct smb_frame *reply,
                             uint32_t bytes);
/* Nothing more goes out, and the connection is closed: STEP_CLOSE. Counted as that error. */
enum step output_refuse(struct connection *connection, int why);

#endif
