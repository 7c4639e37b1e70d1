/* listener.h: TCP ports and the Unix socket. Loop 0 accepts for all loops, and then gives each
 * connection to its loop. */
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

/* Called by loop 0: accepts waiting peers up to a limit; epoll reports the remaining ones again. */
void listener_accept(struct listener *listener);

#endif
