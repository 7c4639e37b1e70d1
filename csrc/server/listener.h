/* listener.h: ports and the Unix socket. Loop 0 accepts for all; each connection then gets its
 * loop. */
#ifndef SMB_LISTENER_H
#define SMB_LISTENER_H

#include <stdint.h>

struct smb_server;

enum {
    CONNECTIONS_MAX = 4096, /* each may hold 2 chunks of staging memory */
    LISTENERS_MAX = 4
};

struct listener {
    int fd;
    int transport;
    struct smb_server *server;
};

/* Loop 0: as many as there are, up to a bound; epoll tells again of those that are left. */
void listener_accept(struct listener *listener);

#endif
