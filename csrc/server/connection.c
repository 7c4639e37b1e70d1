#include "server/connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "server/admit.h"
#include "server/answer.h"
#include "server/counters.h"
#include "server/handshake.h"
#include "server/input.h"
#include "server/lanes.h"
#include "server/loop.h"
#include "server/output.h"
#include "server/server.h"

struct connection *connection_create(struct loop *loop, int fd, int transport)
{
    struct connection *connection = calloc(1, sizeof *connection);
    if (!connection)
        return NULL;
    if (transport == SMB_TRANSPORT_TCP) {
        /* an answer must not wait for the next one; a failure costs time, not correctness */
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    connection->loop = loop;
    connection->channel.fd = fd;
    connection->transport = transport;
    connection->opened_ns = smb_now_ns();
    connection->pass_fd = -1;
    pthread_mutex_init(&connection->turn, NULL);
    server_count(&loop->server->opened[transport], 1);
    server_count(&loop->server->now[transport], 1);
    return connection;
}

void connection_destroy(struct connection *connection)
{
    strangers_leave(connection);
    lanes_leave(connection);
    answer_end_feed(connection);
    waits_forget(connection);
    uses_leave(&connection->loop->server->uses, connection->use);
    grants_clear(&connection->peer.grants);
    pthread_mutex_destroy(&connection->turn);
    gate_done(&connection->request);
    if (connection->pass_segment)
        smb_segment_release(connection->pass_segment);
    atomic_fetch_sub_explicit(&connection->loop->server->now[connection->transport], 1,
                              memory_order_relaxed);
    channel_close(&connection->channel);
    if (connection->secures)
        smb_tls_release(connection->secures);
    if (connection->slot.payload)
        journal_give_slot(connection->loop->server->journal, &connection->slot);
    if (connection->slots)
        smb_slots_release(connection->slots);
    free(connection->own_staging);
    free(connection->tail);
    free(connection);
}

void connection_be_stranger(struct connection *connection, struct smb_tls *tls)
{
    connection->secures = tls;
    strangers_enter(connection);
}

bool connection_is_empty(const struct connection *connection)
{
    return connection->wait == WAIT_INPUT && !connection->have_request && !connection->waits &&
           !connection->answered;
}

bool connection_is_silent(const struct connection *connection, uint64_t now_ns)
{
    return !connection->proven &&
           now_ns > connection->opened_ns + (uint64_t)HELLO_DEADLINE_MS * 1000000U;
}

bool connection_turn(struct connection *connection)
{
    enum step step = connection->secures ? handshake_secure(connection) : STEP_ON;
    for (int frames = 0; step == STEP_ON;) {
        /* Data of an answer is sent, and there is room for one more answer, before the next request
         * is read. */
        answer_put_late(connection);
        bool must_flush = connection->tail_end > 0 || connection->pass_fd >= 0 ||
                          connection->out_start > 0 || channel_unsent_bytes(&connection->channel) ||
                          connection->replies_held >= REPLIES_HELD_MAX ||
                          connection->out_end > OUT_BYTES - SMALL_REPLY_BYTES;
        if (must_flush) {
            step = output_flush(connection);
            if (step == STEP_ON && !output_all_sent(connection)) {
                connection->wait = WAIT_OUTPUT;
                step = STEP_WAIT;
            }
        } else if (!connection->have_request) {
            if (frames++ == FRAMES_PER_TURN)
                step = output_wait_for(connection, WAIT_TURN);
            else
                step = input_next_request(connection);
        } else {
            pthread_mutex_lock(&connection->turn);
            if (atomic_load_explicit(&connection->fenced, memory_order_relaxed))
                step = STEP_CLOSE;
            else if (connection->payload_have < connection->request.frame.payload)
                step = input_receive_payload(connection);
            else
                step = answer_request(connection);
            pthread_mutex_unlock(&connection->turn);
        }
    }
    return step == STEP_WAIT;
}
