/* read.h: reads, answered from the segment or from a copy. The connection's loop. */
#ifndef SMB_READ_H
#define SMB_READ_H

#include "server/connection.h"

/* Reads are sent straight from the segment, under the chunks' locks: the socket copies them once, at one instant. Of the one that
 * it does not take whole the rest is set aside before its lock is released, so that a slow peer never holds it. */
enum step answer_read(struct connection *connection);

#endif
