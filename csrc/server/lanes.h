/* lanes.h: which connection speaks for a lane of a session, and which loop serves it. */
#ifndef SMB_LANES_H
#define SMB_LANES_H

#include <stdint.h>

struct connection;
struct smb_server;

/* From here on this connection speaks for its lane. An older one may still have requests in its
 * socket that its client gave up: carried out now, they would undo what the client does next. So it
 * is fenced, and a request of it that is being carried out is waited for (microseconds: nothing
 * waits there), before the client hears that it may go on. */
void lanes_enter(struct connection *connection);
void lanes_leave(struct connection *connection);
/* No connection of the session does anything any more; their loops close them. */
void lanes_fence_session(struct smb_server *server, uint64_t session);

#endif
