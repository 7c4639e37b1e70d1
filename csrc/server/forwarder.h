/* forwarder.h: the thread that reads backups' answers and sends what sockets did not take, and the
 * connections that control threads bring it.
 *
 * Threads. As replica.h says.
 */
#ifndef SMB_FORWARDER_H
#define SMB_FORWARDER_H

struct smb_server;

/* Ends the thread, if there is one. */
void forwarder_stop(struct smb_server *server);

#endif
