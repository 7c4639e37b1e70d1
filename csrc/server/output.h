/* output.h: sends a connection's replies and the data behind them. Called by the connection's
 * loop. */
#ifndef SMB_OUTPUT_H
#define SMB_OUTPUT_H

#include <stddef.h>
#include <sys/uio.h>

#include "server/connection.h"

bool output_all_sent(const struct connection *connection);
/* Sends the replies in `out`, then the parts, as far as the socket takes them. parts[0] must be
 * left free for the replies. *sent: how many bytes of the other parts were sent. */
enum step output_send(struct connection *connection, struct iovec *parts, size_t count,
                      uint64_t *sent);
/* Sends `out` and `tail`, as far as the socket takes them. */
enum step output_flush(struct connection *connection);
/* Before a connection waits for anything, it sends its answers. If the socket is full, it waits for
 * room instead: a peer that does not read gets no further service. */
enum step output_wait_for(struct connection *connection, enum connection_wait wait);
/* Adds a reply without data. connection_turn keeps room for one. */
void output_put(struct connection *connection, struct smb_frame *reply);
/* Adds a reply with `bytes` of data, which are in `tail`. */
void output_put_with_tail(struct connection *connection, struct smb_frame *reply, uint32_t bytes);
/* By reference: adds a reply whose `bytes` of data are in the slot that the request named. */
void output_put_by_reference(struct connection *connection, struct smb_frame *reply,
                             uint32_t bytes);
/* Stops sending and closes the connection: STEP_CLOSE. Counts `why` as an error. */
enum step output_refuse(struct connection *connection, int why);

#endif
