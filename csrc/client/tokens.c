#include "client/tokens.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "client/client.h"

enum { SHOWING_NS = 1000000 }; /* until a token is shown again, while a connection is being made */

static bool same_token(const struct smb_token *one, const struct smb_token *other)
{
    return one->segment == other->segment && memcmp(one->secret, other->secret, SMB_KEY_BYTES) == 0;
}

/* Forgets a token that is no longer valid, unless a newer one has replaced it, so that tokens of
 * buffers that are gone do not stay forever. */
static void forget_token(struct smb_link *link, uint32_t at, const struct smb_token *token)
{
    pthread_mutex_lock(&link->client->mutex);
    if (same_token(&link->tokens[at], token))
        link->tokens[at] = link->tokens[--link->token_count];
    pthread_mutex_unlock(&link->client->mutex);
}

static int show_token(struct smb_link *link, const struct channel *channel, bool by_reference,
                      const struct smb_token *token, const struct access_connection *proof,
                      struct until until)
{
    uint8_t body[SMB_AUTHORIZE_BYTES];
    struct smb_frame frame = {.opcode = SMB_AUTHORIZE,
                              .flags = client_frame_flags(link->client),
                              .lane = link->lane,
                              .session = link->client->session,
                              .segment = token->segment,
                              .epoch = token->epoch};
    struct smb_frame reply;
    int passed = -1;
    access_store(token, proof, body);
    int status = dial_exchange(channel, &frame, body, by_reference, until, &reply, &passed);
    if (passed >= 0)
        close(passed);
    if (status != SMB_OK || !link->client->wants_proof)
        return status;
    struct access_answer right = access_answer(token, proof),
                         answer = {{reply.argument, reply.offset}};
    return access_same_answer(&right, &answer) ? SMB_OK : SMB_UNTRUSTED;
}

int tokens_show(struct smb_link *link, const struct channel *channel, bool by_reference,
                const struct access_connection *proof, struct until until, bool *proven)
{
    int status = SMB_OK;
    uint32_t denied_unproven = 0;
    *proven = !link->client->wants_proof;
    for (uint32_t i = 0; status == SMB_OK;) {
        struct smb_token token;
        pthread_mutex_lock(&link->client->mutex);
        if (i >= link->token_count && *proven && denied_unproven > 0)
            i = denied_unproven = 0; /* start again, now that the server has proved itself */
        bool more = i < link->token_count, trusted = link->trusted;
        if (more)
            token = link->tokens[i];
        pthread_mutex_unlock(&link->client->mutex);
        if (!more)
            return !*proven && (trusted || denied_unproven > 0) ? SMB_UNTRUSTED : SMB_OK;
        status = show_token(link, channel, by_reference, &token, proof, until);
        if (status == SMB_DENIED && *proven) {
            forget_token(link, i, &token); /* the last token has moved to this place */
            status = SMB_OK;
        } else if (status == SMB_DENIED) {
            denied_unproven++;
            status = SMB_OK;
            i++;
        } else {
            *proven |= status == SMB_OK;
            i++;
        }
    }
    return status;
}

/* Adds the token to those that are shown on each connection, or replaces an older one. */
static int keep_token(struct smb_link *link, const struct smb_token *token)
{
    uint32_t at = 0;
    while (at < link->token_count && link->tokens[at].segment != token->segment)
        at++;
    if (at == link->token_room) {
        uint32_t room = link->token_room ? 2 * link->token_room : 8;
        struct smb_token *larger = realloc(link->tokens, room * sizeof *larger);
        if (!larger)
            return SMB_OUT_OF_MEMORY;
        link->tokens = larger;
        link->token_room = room;
    }
    link->tokens[at] = *token;
    link->token_count += at == link->token_count;
    return SMB_OK;
}

int smb_link_keep_token(struct smb_link *link, const struct smb_token *token)
{
    pthread_mutex_lock(&link->client->mutex);
    int status = keep_token(link, token);
    pthread_mutex_unlock(&link->client->mutex);
    return status;
}

/* Sends the token as any other request, on the present connection. If another connection has
 * replaced it by then, the token was shown there already, or is proved once more. */
static int show_now(struct smb_link *link, const struct smb_token *token,
                    const struct access_connection *proof, uint64_t deadline_ns,
                    struct smb_reply *reply)
{
    uint8_t body[SMB_AUTHORIZE_BYTES];
    access_store(token, proof, body);
    struct smb_ask ask = {
        .opcode = SMB_AUTHORIZE, .segment = token->segment, .epoch = token->epoch};
    for (int i = 0; i < SMB_AUTHORIZE_WORDS; i++)
        ask.words[i] = smb_load64(body + 8 * i);
    struct smb_pending *pending;
    *reply = (struct smb_reply){.status = SMB_TIMEOUT};
    int status = smb_ask_start(link, &ask, &pending);
    if (status != SMB_OK)
        return status;
    uint64_t now_ns = smb_now_ns();
    status = smb_ask_wait(
        pending, now_ns < deadline_ns ? (uint32_t)((deadline_ns - now_ns) / 1000000U) : 0, reply);
    smb_ask_end(&pending);
    return status == SMB_BUSY ? SMB_TIMEOUT : reply->status;
}

/* The server refused a good token without proof of its identity, or its proof is wrong: the
 * connection is given up. */
static int leave_unproven(struct smb_link *link, int status)
{
    atomic_store_explicit(&link->closed_why,
                          status == SMB_UNTRUSTED ? SMB_UNTRUSTED : SMB_LINK_LOST,
                          memory_order_relaxed);
    atomic_store_explicit(&link->closing, true, memory_order_release);
    client_wake_progress(link->client);
    return status;
}

int smb_link_authorize(struct smb_link *link, const struct smb_token *token, uint32_t timeout_ms,
                       uint64_t *why)
{
    uint64_t deadline_ns = dial_until(link->client, timeout_ms).deadline_ns;
    bool wants_proof = link->client->wants_proof;
    pthread_mutex_lock(&link->client->mutex);
    int status = keep_token(link, token);
    *why = 0;
    struct access_connection proof = link->proof;
    pthread_mutex_unlock(&link->client->mutex);
    while (status == SMB_OK) {
        struct smb_reply reply;
        struct access_answer right = access_answer(token, &proof);
        status = show_now(link, token, &proof, deadline_ns, &reply);
        *why = status == SMB_DENIED ? reply.a : 0;
        struct access_answer answer = {{reply.a, reply.b}};
        bool good = status == SMB_OK && (!wants_proof || access_same_answer(&right, &answer));
        if (status != SMB_OK && status != SMB_DENIED)
            return status;
        pthread_mutex_lock(&link->client->mutex);
        struct access_connection newest = link->proof;
        bool same = newest.nonce == proof.nonce && newest.instance == proof.instance &&
                    newest.client_nonce == proof.client_nonce;
        link->proven |= good && same;
        link->trusted |= good;
        bool proven = link->proven, showing = link->showing > 0;
        pthread_mutex_unlock(&link->client->mutex);
        if (good)
            return SMB_OK;
        if (showing && smb_now_ns() < deadline_ns) {
            nanosleep(&(struct timespec){.tv_nsec = SHOWING_NS}, NULL);
            proof = newest;
            status = SMB_OK;
            continue;
        }
        if (same && status == SMB_OK)
            return leave_unproven(link, SMB_UNTRUSTED);
        if (same)
            return wants_proof && !proven && !showing ? leave_unproven(link, SMB_DENIED)
                                                      : SMB_DENIED;
        proof = newest;
        status = SMB_OK;
    }
    return status;
}
