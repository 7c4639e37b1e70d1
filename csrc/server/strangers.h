/* strangers.h: TCP connections that have not shown yet who they are. Called by loop 0 only. */
#ifndef SMB_STRANGERS_H
#define SMB_STRANGERS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct connection;
struct smb_server;

enum {
    STRANGERS_MAX = 512 /* at once; each takes about 10 KiB, and 40 KiB during a TLS handshake */
};

struct stranger_source {
    uint8_t bytes[8];
};
struct stranger_count {
    struct stranger_source source;
    uint32_t now; /* 0: a free entry */
};
/* Only loop 0 uses it, except that other threads may read `now`. */
struct strangers {
    struct stranger_count counts[STRANGERS_MAX];
    struct connection *oldest, *newest;
    _Atomic uint64_t now;
};

/* There must be fewer than STRANGERS_MAX. */
void strangers_enter(struct connection *connection);
/* Harmless if the connection is not a stranger. */
void strangers_leave(struct connection *connection);
bool strangers_are_many(const struct smb_server *server);
/* The connection to close; NULL: there are no strangers. */
struct connection *strangers_least(struct smb_server *server);

#endif
