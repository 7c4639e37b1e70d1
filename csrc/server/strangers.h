/* strangers.h: connections over TCP that have not shown yet who they are. Loop 0 only. */
#ifndef SMB_STRANGERS_H
#define SMB_STRANGERS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct connection;
struct smb_server;

enum {
    STRANGERS_MAX = 512 /* at once: about 10 KiB each, and 40 with a TLS handshake under way */
};

struct stranger_source {
    uint8_t bytes[8];
};
struct stranger_count {
    struct stranger_source source;
    uint32_t now; /* 0: a free entry */
};
/* Loop 0's, but for `now`, which others may read. */
struct strangers {
    struct stranger_count counts[STRANGERS_MAX];
    struct connection *oldest, *newest;
    _Atomic uint64_t now;
};

/* There are fewer than STRANGERS_MAX. */
void strangers_enter(struct connection *connection);
/* No harm where it is none. */
void strangers_leave(struct connection *connection);
bool strangers_are_many(const struct smb_server *server);
/* The one to go; NULL: there are none. */
struct connection *strangers_least(struct smb_server *server);

#endif
