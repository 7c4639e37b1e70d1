/* lanes.h: which connection speaks for a lane of a session, and which loop serves it. */
#ifndef SMB_LANES_H
#define SMB_LANES_H

#include <stdint.h>

struct connection;
struct smb_server;

/* Makes this connection the one that speaks for its lane. An older connection may still have
 * requests in its socket that its client gave up; executed now, they would undo what the client
 * does next. So the older one is fenced, and a request that it is executing is waited for
 * (microseconds, because execution does not wait), before the client is told to go on. */
void lanes_enter(struct connection *connection);
void lanes_leave(struct connection *connection);
/* Fences all connections of the session; their loops then close them. */
void lanes_fence_session(struct smb_server *server, uint64_t session);

#endif
