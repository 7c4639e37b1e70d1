/* fake_server.h: a server that answers one connection as it is told to, wrong where a test wants it
 * wrong. */
#ifndef FAKE_SERVER_H
#define FAKE_SERVER_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/frame.h"
#include "check.h"

struct fake_server {
    /* Changes the answer to a request (HELLO too) before it is sent; NULL: none is changed. */
    void (*spoil)(struct smb_frame *reply);
    uint8_t spoil_opcode; /* which answers */
    int answer_bytes_max; /* of the first data request's answer: then it hangs up; -1: all */
    bool hang_up_after_hello;
    bool silent; /* greets, then never answers */
    bool silent_at_hello;
    uint16_t port;          /* out */
    _Atomic int requests;   /* out: data requests that have arrived whole */
    _Atomic int connection; /* out: 0 until it has one */
    int listener;
    pthread_t thread;
};

void fake_server_start(struct fake_server *fake);
/* Waits until it has closed its connection: after its client has, or after it hung up itself. */
void fake_server_join(struct fake_server *fake);

#endif
