/* pump.h: stands in for RDMA: one thread that moves records between a client and a server, and
 * copies the data that they refer to. */
#ifndef PUMP_H
#define PUMP_H

#include <pthread.h>
#include <stdatomic.h>

#include "rig.h"

enum { PUMP_SLOTS = 3, PUMP_PENDING = 512 };

struct pump {
    int client, server; /* our ends of the two socketpairs */
    int client_end;     /* the client's end, for the engine */
    struct smb_slots *slots;
    pthread_t thread;
    _Atomic bool broken;  /* break the connection now, with all that is in flight */
    uint64_t break_after; /* breaks after so many answers; 0: never */
    uint64_t forwarded, answered;
    bool busy[PUMP_SLOTS];
    struct {
        uint64_t sequence, sink, slot;
    } pending[PUMP_PENDING];
};

/* Makes a connection by reference to the server, with the client's end in client_end. */
void pump_start(struct pump *pump, struct smb_server *server);
/* Waits until the engine has shut it down, on either side. */
void pump_join(struct pump *pump);

#endif
