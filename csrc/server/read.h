/* read.h: answers reads from the segment, or from bytes copied out of it. Called by the
 * connection's loop. */
#ifndef SMB_READ_H
#define SMB_READ_H

#include "server/connection.h"

/* Reads are sent directly from the segment, under the chunks' locks: the socket copies them once,
 * at one instant. The rest of a chunk, which the socket does not take, is copied before the lock is
 * released. So a slow peer never holds a lock. */
enum step answer_read(struct connection *connection);

#endif
