/* Makes links, connects them again, and gets a segment's descriptor over a link. */
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "channel/channel.h"
#include "client/client.h"
#include "client/dial.h"
#include "client/link.h"
#include "client/tokens.h"
#include "smb/segment.h"

static int shake_hands(const struct channel *channel, const struct smb_client *client,
                       uint16_t lane, bool by_reference, struct until until,
                       struct access_connection *proof, uint64_t *identity, uint32_t *features)
{
    bool local = !by_reference && !channel->tls && bond_is_unix(channel);
    struct smb_frame hello = {.opcode = SMB_HELLO,
                              .flags = client_frame_flags(client),
                              .lane = lane,
                              .session = client->session,
                              .argument = local ? bond_namespaces() : 0};
    struct smb_frame reply;
    int passed = -1;
    if (client->wants_proof &&
        getrandom(&hello.offset, sizeof hello.offset, 0) != sizeof hello.offset)
        return SMB_SYSTEM;
    int status = dial_exchange(channel, &hello, NULL, false, until, &reply, &passed);
    if (passed >= 0)
        close(passed);
    if (status != SMB_OK)
        return status == SMB_LINK_LOST ? SMB_DISCONNECTED : status;
    *proof = (struct access_connection){.nonce = reply.offset,
                                        .client_nonce = hello.offset,
                                        .instance = reply.segment,
                                        .session = client->session,
                                        .lane = lane};
    *identity = reply.argument;
    *features = reply.length;
    /* Without bonds, whoever receives our proofs could use them on another connection. Somebody on
     * the way may have cleared the bit to get such a proof, so none is sent. */
    if (client->wants_proof && !(reply.length & SMB_FEATURE_BONDS))
        return SMB_VERSION;
    return bond_of(channel, by_reference, false, hello.argument, reply.length & SMB_BOND_HAS_IDS,
                   &proof->bond);
}

/* Makes a link of the client; NULL: out of memory. */
static struct smb_link *make_link(struct smb_client *client, uint16_t lane)
{
    struct smb_link *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->client = client_retain(client);
    made->id = atomic_fetch_add(&client->links_made, 1) + 1;
    made->references = 1;
    made->channel.fd = -1;
    made->lane = lane;
    made->window = WINDOW_FRAMES;
    made->unsent_end = &made->unsent;
    made->sent_end = &made->sent;
    return made;
}

static void add_link(struct smb_link *made)
{
    struct smb_client *client = made->client;
    pthread_mutex_lock(&client->mutex);
    made->next_of_all = client->links;
    client->links = made;
    pthread_mutex_unlock(&client->mutex);
}

/* The shortest round trip that the kernel has measured on the connection: a longer one may have
 * waited for a busy host. 0: unknown. */
static uint32_t round_trip_us(int fd)
{
    struct tcp_info info = {0};
    socklen_t length = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0)
        return 0;
    return info.tcpi_min_rtt == UINT32_MAX ? 0 : info.tcpi_min_rtt; /* not measured yet */
}

/* Exchanges HELLO and makes a link. The link owns the channel if SMB_OK; otherwise it stays the
 * caller's to close. */
static int greet(struct smb_client *client, struct channel *channel, int status, uint16_t lane,
                 bool by_reference, struct until until, struct smb_link **link, uint64_t *instance)
{
    uint64_t identity = 0;
    uint32_t features = 0;
    struct access_connection proof = {0};
    struct smb_link *made = NULL;
    if (status == SMB_OK)
        status = shake_hands(channel, client, lane, by_reference, until, &proof, &identity,
                             &features);
    *instance = proof.instance;
    if (status == SMB_OK && !(made = make_link(client, lane)))
        status = SMB_OUT_OF_MEMORY;
    if (status != SMB_OK)
        return status;
    made->identity = identity;
    made->round_trip_us = round_trip_us(channel->fd);
    atomic_store_explicit(&made->features, features, memory_order_relaxed);
    made->proof = proof;
    made->channel = *channel;
    *channel = (struct channel){.fd = -1};
    add_link(made);
    *link = made;
    return SMB_OK;
}

int smb_link_beside(struct smb_link *link, uint16_t lane, int follows, struct smb_link **beside)
{
    struct smb_link *made = make_link(link->client, lane);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    pthread_mutex_lock(&link->client->mutex);
    made->identity = link->identity;
    made->trusted = link->trusted;
    pthread_mutex_unlock(&link->client->mutex);
    atomic_store_explicit(&made->features,
                          atomic_load_explicit(&link->features, memory_order_relaxed),
                          memory_order_relaxed);
    link_enter(made, LINK_DOWN);
    atomic_store_explicit(&made->given_up, follows != 0, memory_order_relaxed);
    add_link(made);
    link_want(made, follows != 0);
    *beside = made;
    return SMB_OK;
}

/* Makes a link over a channel, unless opening the channel failed with `status`. */
static int connect_over(struct smb_client *client, struct channel channel, int status,
                        uint16_t lane, bool by_reference, struct until until,
                        struct smb_link **link, uint64_t *instance)
{
    status = greet(client, &channel, status, lane, by_reference, until, link, instance);
    channel_close(&channel); /* does nothing if the link owns it */
    return status;
}

int smb_client_connect_tcp(struct smb_client *client, const char *address, uint16_t port,
                           uint16_t lane, uint32_t timeout_ms, struct smb_link **link,
                           uint64_t *instance)
{
    struct until until = dial_until(client, timeout_ms);
    struct channel channel = {.fd = -1};
    int status = dial_tcp(address, port, until, &channel.fd);
    return connect_over(client, channel, status, lane, false, until, link, instance);
}

int smb_client_connect_unix(struct smb_client *client, const char *path, uint16_t lane,
                            uint32_t timeout_ms, struct smb_link **link, uint64_t *instance)
{
    struct until until = dial_until(client, timeout_ms);
    struct channel channel = {.fd = -1};
    int status = dial_unix(path, until, &channel.fd);
    status = connect_over(client, channel, status, lane, false, until, link, instance);
    if (status == SMB_OK)
        (*link)->local = true;
    return status;
}

int smb_client_connect_reference(struct smb_client *client, int fd, uint16_t lane,
                                 uint32_t timeout_ms, struct smb_link **link, uint64_t *instance)
{
    int status = client->checksums ? SMB_INVALID : dial_fd(fd);
    status = connect_over(client, (struct channel){.fd = fd}, status, lane, true,
                          dial_until(client, timeout_ms), link, instance);
    if (status == SMB_OK)
        (*link)->by_reference = true; /* no request has been sent yet */
    return status;
}

/* Returns SMB_UNTRUSTED, with why[], if the server refused our certificate; else `status`. In TLS
 * 1.3 the handshake is over before the server has judged the certificate, so a refusal arrives in
 * place of the first answer. */
static int refusal(const struct channel *channel, int status, char *why)
{
    if (status != SMB_DISCONNECTED || !channel->tls || !tls_why(channel->tls)[0])
        return status;
    snprintf(why, SMB_WHY_BYTES, "%s", tls_why(channel->tls));
    return SMB_UNTRUSTED;
}

int smb_client_connect_tls(struct smb_client *client, const struct smb_tls_peer *peer,
                           uint16_t lane, uint32_t timeout_ms, struct smb_link **link,
                           uint64_t *instance, char why[SMB_WHY_BYTES])
{
    struct until until = dial_until(client, timeout_ms);
    struct channel channel = {.fd = -1};
    why[0] = 0;
    int status = dial_tls(peer, until, &channel, why);
    status = greet(client, &channel, status, lane, false, until, link, instance);
    status = refusal(&channel, status, why);
    channel_close(&channel);
    return status;
}

/* Gives the link the channel, which it owns if SMB_OK. */
static int hand_over(struct smb_link *link, struct channel *channel, bool by_reference,
                     uint64_t accept_instance, struct until until, uint64_t *instance)
{
    uint64_t identity = 0;
    uint32_t features = 0;
    struct access_connection proof = {0};
    bool proven;
    int status = shake_hands(channel, link->client, link->lane, by_reference, until, &proof,
                             &identity, &features);
    *instance = proof.instance;
    if (status == SMB_OK && identity != link->identity && *instance != accept_instance)
        status = SMB_NOT_FOUND;
    if (status != SMB_OK)
        return status;
    /* From here on smb_link_authorize makes its proofs for this connection. A token that is added
     * while tokens_show runs is shown by at least one of the two. */
    pthread_mutex_lock(&link->client->mutex);
    struct access_connection before = link->proof;
    bool proven_before = link->proven;
    link->proof = proof;
    link->proven = false;
    link->showing++;
    pthread_mutex_unlock(&link->client->mutex);
    struct channel *fresh = malloc(sizeof *fresh);
    status = fresh ? tokens_show(link, channel, by_reference, &proof, until, &proven)
                   : SMB_OUT_OF_MEMORY;
    if (status != SMB_OK) {
        free(fresh);
        pthread_mutex_lock(&link->client->mutex);
        if (link->proof.nonce == proof.nonce) { /* the older connection goes on */
            link->proof = before;
            link->proven = proven_before;
        }
        link->showing--;
        pthread_mutex_unlock(&link->client->mutex);
        return status;
    }
    *fresh = *channel;
    *channel = (struct channel){.fd = -1};
    pthread_mutex_lock(&link->client->mutex);
    link->showing--;
    link->proven |= proven;
    link->trusted |= proven;
    link->identity = identity;
    link->in_hands = false;
    pthread_mutex_unlock(&link->client->mutex);
    atomic_store_explicit(&link->features, features, memory_order_relaxed);
    atomic_store(&link->fresh_by_reference, by_reference);
    /* Set here, because the progress thread may not be using the link. */
    atomic_store_explicit(&link->given_up, false, memory_order_release);
    struct channel *older = atomic_exchange(&link->fresh, fresh);
    if (older)
        channel_close(older);
    free(older);
    link_want(link, false);
    client_wake_progress(link->client);
    return SMB_OK;
}

static int resume_over(struct smb_link *link, struct channel channel, bool by_reference, int status,
                       uint64_t accept_instance, struct until until, uint64_t *instance, char *why)
{
    *instance = 0;
    if (status == SMB_OK)
        status = hand_over(link, &channel, by_reference, accept_instance, until, instance);
    if (why)
        status = refusal(&channel, status, why);
    if (status == SMB_SESSION_ENDED && link->client->wants_proof && !channel.tls && !link->local &&
        !by_reference)
        /* said before any proof, so it cannot be trusted; the coordinator tells clients of a
         * session's end */
        status = SMB_UNTRUSTED;
    channel_close(&channel); /* does nothing if the link owns it */
    if (status == SMB_SESSION_ENDED) {
        atomic_store_explicit(&link->closed_why, status, memory_order_relaxed);
        /* pairs with link_progress, which may be running */
        atomic_store_explicit(&link->closing, true, memory_order_release);
        client_wake_progress(link->client);
    }
    return status;
}

int smb_link_resume_tcp(struct smb_link *link, const char *address, uint16_t port,
                        uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance)
{
    struct until until = dial_until(link->client, timeout_ms);
    struct channel channel = {.fd = -1};
    int status = dial_tcp(address, port, until, &channel.fd);
    atomic_store_explicit(&link->local, false, memory_order_relaxed);
    return resume_over(link, channel, false, status, accept_instance, until, instance, NULL);
}

int smb_link_resume_tls(struct smb_link *link, const struct smb_tls_peer *peer,
                        uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance,
                        char why[SMB_WHY_BYTES])
{
    struct until until = dial_until(link->client, timeout_ms);
    struct channel channel = {.fd = -1};
    why[0] = 0;
    int status = dial_tls(peer, until, &channel, why);
    return resume_over(link, channel, false, status, accept_instance, until, instance, why);
}

int smb_link_resume_unix(struct smb_link *link, const char *path, uint64_t accept_instance,
                         uint32_t timeout_ms, uint64_t *instance)
{
    struct until until = dial_until(link->client, timeout_ms);
    struct channel channel = {.fd = -1};
    int status = dial_unix(path, until, &channel.fd);
    atomic_store_explicit(&link->local, true, memory_order_relaxed);
    return resume_over(link, channel, false, status, accept_instance, until, instance, NULL);
}

int smb_link_resume_reference(struct smb_link *link, int fd, uint64_t accept_instance,
                              uint32_t timeout_ms, uint64_t *instance)
{
    int status = link->client->checksums ? SMB_INVALID : dial_fd(fd);
    return resume_over(link, (struct channel){.fd = fd}, true, status, accept_instance,
                       dial_until(link->client, timeout_ms), instance, NULL);
}

int smb_link_attach(struct smb_link *link, uint64_t segment_id, uint32_t epoch, uint32_t timeout_ms,
                    struct smb_segment **segment)
{
    struct smb_frame request = {.opcode = SMB_ATTACH,
                                .flags = client_frame_flags(link->client),
                                .lane = link->lane,
                                .session = link->client->session,
                                .sequence = link_next_sequence(link),
                                .segment = segment_id,
                                .epoch = epoch};
    struct smb_frame reply;
    uint32_t owner = 0;
    int fd = -1;
    int status = link_may_use(link);
    if (status != SMB_OK)
        return status;
    status = dial_exchange(&link->channel, &request, NULL, false,
                           dial_until(link->client, timeout_ms), &reply, &fd);
    if (status == SMB_OK && fd < 0)
        status = SMB_PROTOCOL;
    if (status == SMB_OK)
        status = peer_uid(link->channel.fd, &owner);
    if (status == SMB_OK)
        status = smb_segment_open_fd(fd, owner, segment);
    if (fd >= 0)
        close(fd);
    if (status == SMB_LINK_LOST || status == SMB_PROTOCOL || status == SMB_TIMEOUT)
        atomic_store(&link->state, LINK_CLOSED);
    return status;
}
