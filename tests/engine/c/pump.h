/* pump.h: stands in for RDMA: one thread that moves records, and by memcpy what they refer to,
 * between a client and a server. */
#ifndef PUMP_H
#define PUMP_H

#include <pthread.h>
#include <stdatomic.h>

#include "rig.h"

enum { PUMP_SLOTS = 3, PUMP_PENDING = 512 };

struct pump {
    int client, server; /* our ends of the two socketpairs */
    int client_end;     /* the engine's */
    struct smb_slots *slots;
    pthread_t thread;
    _Atomic bool broken;  /* break it now, with whatever is under way */
    uint64_t break_after; /* so many answers it is broken; 0: never */
    uint64_t forwarded, answered;
    bool busy[PUMP_SLOTS];
    struct {
        uint64_t sequence, sink, slot;
    } pending[PUMP_PENDING];
};

/* A connection by reference to the server, its end for the client in client_end. */
void pump_start(struct pump *pump, struct smb_server *server);
/* Waits until the engine has shut it, on either side. */
void pump_join(struct pump *pump);

#endif
