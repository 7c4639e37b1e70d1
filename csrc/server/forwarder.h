/* forwarder.h: the thread that reads backups' answers and sends what sockets did not take, and the
 * connections that control threads give it.
 *
 * Threads. See replica.h. */
#ifndef SMB_FORWARDER_H
#define SMB_FORWARDER_H

struct smb_server;

/* Ends the thread, if it was started. */
void forwarder_stop(struct smb_server *server);

#endif
