/* fake_server.h: a server that answers one connection as a test says, also wrongly. */
#ifndef FAKE_SERVER_H
#define FAKE_SERVER_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/frame.h"
#include "check.h"

struct fake_server {
    /* Changes the answer to a request (HELLO too) before it is sent; NULL: no change. */
    void (*spoil)(struct smb_frame *reply);
    uint8_t spoil_opcode; /* the opcode whose answers are changed */
    /* sends so many bytes of the first data request's answer, then hangs up; -1: sends all */
    int answer_bytes_max;
    bool hang_up_after_hello;
    bool silent; /* answers HELLO, then nothing */
    bool silent_at_hello;
    uint16_t port;          /* out */
    _Atomic int requests;   /* out: data requests that have arrived completely */
    _Atomic int connection; /* out: 0 until it has a connection */
    int listener;
    pthread_t thread;
};

void fake_server_start(struct fake_server *fake);
/* Waits until the server has closed its connection, after its client closed or because it hung
 * up. */
void fake_server_join(struct fake_server *fake);

#endif
