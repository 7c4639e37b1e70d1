#include "server/handshake.h"

#include <sys/random.h>

#include "base/assert.h"
#include "base/clock.h"
#include "channel/bond.h"
#include "channel/channel.h"
#include "server/counters.h"
#include "server/feed.h"
#include "server/lanes.h"
#include "server/loop.h"
#include "server/output.h"
#include "server/server.h"
#include "server/sessions.h"

enum step handshake_secure(struct connection *connection)
{
    struct channel *channel = &connection->channel;
    if (!channel->tls && !(channel->tls = tls_begin(connection->secures, channel->fd, NULL)))
        return output_refuse(connection, SMB_OUT_OF_MEMORY);
    int status = tls_handshake(channel->tls);
    if (status == SMB_BUSY) {
        connection->wait = channel_unsent_bytes(channel) ? WAIT_OUTPUT : WAIT_INPUT;
        return STEP_WAIT;
    }
    if (status != SMB_OK)
        return status == SMB_UNTRUSTED ? output_refuse(connection, SMB_UNTRUSTED) : STEP_CLOSE;
    smb_tls_release(connection->secures);
    connection->secures = NULL;
    return STEP_ON;
}

void handshake_speak_for_lane(struct connection *connection)
{
    SMB_ASSERT(!connection->proven && connection->loop->not_greeted > 0);
    connection->proven = true;
    strangers_leave(connection);
    connection->loop->not_greeted--;
    lanes_enter(connection);
}

enum step handshake_refuse(struct connection *connection, const struct smb_frame *frame, int status)
{
    if (connection->out_end + SMALL_REPLY_BYTES <= OUT_BYTES) {
        struct smb_frame reply = smb_frame_reply(frame, status);
        output_put(connection, &reply);
        output_flush(connection);
    }
    if (status == SMB_DENIED)
        note_denied(connection, frame);
    return output_refuse(connection, status);
}

/* For a guarded server: only memory servers may use the lane that feeds copies. On other lanes a
 * memory server (its relay, which fills mirrors) needs tokens as every client does. */
static bool may_take_lane(const struct connection *connection, const struct smb_frame *frame)
{
    const struct tls *tls = connection->channel.tls;
    return frame->lane != REPLICA_LANE || (tls && tls_server_name(tls)[0]);
}

enum step handshake_greet(struct connection *connection, const struct smb_frame *frame)
{
    if (frame->opcode != SMB_HELLO || connection->greeted)
        return output_refuse(connection, SMB_PROTOCOL);
    struct smb_server *server = connection->loop->server;
    /* this server has not heard from the coordinator yet; the peer tries again */
    if (server->guarded && !access_ready(&server->keys))
        return output_refuse(connection, SMB_DENIED);
    if (server->guarded && !may_take_lane(connection, frame))
        return handshake_refuse(connection, frame, SMB_DENIED);
    if (server->guarded &&
        getrandom(&connection->nonce, sizeof connection->nonce, 0) != sizeof connection->nonce)
        return output_refuse(connection, SMB_SYSTEM);
    bool by_reference = connection->slots != NULL;
    bool ids = server->guarded && !by_reference && bond_is_unix(&connection->channel) &&
               frame->argument != 0 && frame->argument == bond_namespaces();
    if (server->guarded && bond_of(&connection->channel, by_reference, true, frame->argument, ids,
                                   &connection->bond) != SMB_OK)
        return output_refuse(connection, SMB_SYSTEM);
    connection->greeted = true;
    connection->checksums = frame->flags & SMB_FLAG_CHECKSUM;
    connection->session = frame->session;
    connection->lane = frame->lane;
    connection->client_nonce = frame->offset;
    connection->request.peer = &connection->peer;
    connection->peer.fed = frame->lane == REPLICA_LANE;
    /* If tokens are required, the mere name of a session must not shut its other connections
     * out. */
    if (!server->guarded)
        handshake_speak_for_lane(connection);
    /* Checked after the connection has entered the lanes: if the session ends meanwhile, either
     * this check sees it, or the connection is fenced. */
    if (session_has_ended(server, frame->session))
        return handshake_refuse(connection, frame, SMB_SESSION_ENDED);
    struct smb_frame reply = smb_frame_reply(frame, SMB_OK);
    reply.offset = connection->nonce;
    reply.segment = server->instance;
    reply.length = SMB_FEATURES | (ids ? SMB_BOND_HAS_IDS : 0);
    reply.argument = server->journal ? journal_identity(server->journal) : server->instance;
    output_put(connection, &reply);
    count_request(connection, NULL, SMB_HELLO, 0, smb_now_ns() - connection->opened_ns);
    return STEP_ON;
}

enum step handshake_authorize(struct connection *connection, const struct smb_frame *frame,
                              const uint8_t *payload)
{
    struct smb_server *server = connection->loop->server;
    struct access_connection self = {.nonce = connection->nonce,
                                     .client_nonce = connection->client_nonce,
                                     .instance = server->instance,
                                     .session = connection->session,
                                     .lane = connection->lane,
                                     .bond = connection->bond};
    struct grant grant;
    struct access_answer answer = {0};
    uint64_t why = 0;
    int status = server->guarded
                     ? access_check(&server->keys, &self, frame, payload, &grant, &answer, &why)
                     : SMB_OK;
    if (status == SMB_OK && !connection->proven) {
        if (uses_enter(&server->uses, connection->channel.tls, &connection->use) != SMB_OK)
            return output_refuse(connection, SMB_OUT_OF_MEMORY);
        handshake_speak_for_lane(connection);
        if (session_has_ended(server, frame->session))
            return handshake_refuse(connection, frame, SMB_SESSION_ENDED);
    }
    if (status == SMB_OK && server->guarded)
        status = grants_put(&connection->peer.grants, &grant);
    if (status == SMB_OK)
        count_request(connection, NULL, SMB_AUTHORIZE, 0, 0);
    else
        server_count(&server->errors[status], 1);
    if (status == SMB_DENIED)
        note_denied(connection, frame);
    struct smb_frame reply = smb_frame_reply(frame, status);
    reply.argument = status == SMB_OK ? answer.words[0] : why;
    reply.offset = status == SMB_OK ? answer.words[1] : 0;
    output_put(connection, &reply);
    return STEP_ON;
}

enum step handshake_refuse_version(struct connection *connection)
{
    return handshake_refuse(connection, &(struct smb_frame){.opcode = SMB_HELLO}, SMB_VERSION);
}
