/* New connections: a socket to the server, and the exchanges before it carries a lane's frames. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/address.h"
#include "base/channel.h"
#include "base/clock.h"
#include "client/call.h"
#include "client/client.h"
#include "client/link.h"

enum { HANDSHAKES_TRIED = 7 /* within a quarter of a second */ };

/* For how long a connection may take: to its deadline, or until the client is closed. */
struct until {
    const struct smb_client *client;
    uint64_t deadline_ns;
};

static struct until until_in(const struct smb_client *client, uint32_t timeout_ms)
{
    return (struct until){client, smb_now_ns() + (uint64_t)timeout_ms * 1000000U};
}

/* SMB_OK: the descriptor is ready for `events`. SMB_DISCONNECTED: the client was closed. */
static int wait_ready(int fd, short events, struct until until)
{
    for (;;) {
        uint64_t now = smb_now_ns();
        if (now >= until.deadline_ns)
            return SMB_TIMEOUT;
        struct pollfd poller = {.fd = fd, .events = events};
        uint64_t ms = (until.deadline_ns - now) / 1000000U + 1;
        int count = poll(&poller, 1, ms < LOOK_MS ? (int)ms : LOOK_MS);
        if (count > 0)
            return SMB_OK;
        if (count < 0 && errno != EINTR)
            return SMB_SYSTEM;
        if (client_look())
            return SMB_TIMEOUT;
        if (atomic_load_explicit(&until.client->closing, memory_order_relaxed))
            return SMB_DISCONNECTED;
    }
}

static int connect_to(int fd, const struct sockaddr *name, socklen_t length, struct until until)
{
    if (connect(fd, name, length) == 0)
        return SMB_OK;
    if (errno == EAGAIN) /* a Unix listener whose queue is full */
        return SMB_DISCONNECTED;
    if (errno != EINPROGRESS)
        return SMB_DISCONNECTED;
    int status = wait_ready(fd, POLLOUT, until);
    int failure = 0;
    socklen_t failure_length = sizeof failure;
    if (status == SMB_OK && getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &failure_length) != 0)
        return SMB_SYSTEM;
    errno = failure;
    return status != SMB_OK ? status : failure != 0 ? SMB_DISCONNECTED : SMB_OK;
}

/* SMB_OK: `done` bytes more have been moved, maybe none. SMB_LINK_LOST: the connection is over. */
static int after_move(const struct channel *channel, ssize_t done, bool receiving, struct until until)
{
    if ((done == 0 && receiving) || channel_failed(done))
        return SMB_LINK_LOST;
    if (done > 0 && (receiving || !channel_unsent_bytes(channel)))
        return SMB_OK;
    return wait_ready(channel->fd, receiving ? POLLIN : POLLOUT, until);
}

static int send_all(const struct channel *channel, const uint8_t *bytes, size_t count, struct until until)
{
    for (size_t done = 0; done < count || channel_unsent_bytes(channel);) {
        struct iovec part = {(uint8_t *)(uintptr_t)bytes + done, count - done};
        ssize_t n = channel_write(channel, &part, done < count ? 1 : 0);
        int status = n == 0 && done == count && !channel_unsent_bytes(channel) ? SMB_OK : after_move(channel, n, false, until);
        if (status != SMB_OK)
            return status;
        done += n > 0 ? (size_t)n : 0;
    }
    return SMB_OK;
}

/* As recv; a descriptor that comes along goes to *passed_fd. */
static ssize_t receive_some(const struct channel *channel, uint8_t *bytes, size_t room, int *passed_fd)
{
    struct iovec part = {bytes, room};
    union {
        struct cmsghdr header;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    if (channel->tls)
        return channel_read(channel, &part, 1);
    ssize_t done = recvmsg(channel->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr *header = done > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)) && *passed_fd < 0)
        memcpy(passed_fd, CMSG_DATA(header), sizeof(int));
    return done;
}

/* One request and its answer, before the link carries calls. `body`: of AUTHORIZE, else NULL. It travels by record where that is
 * said. *passed_fd gets a descriptor that came along, or -1. */
static int exchange(const struct channel *channel, const struct smb_frame *request, const uint8_t *body, bool by_record,
                    struct until until, struct smb_frame *reply, int *passed_fd)
{
    uint8_t bytes[SMB_RECORD_BYTES] = {0};
    struct smb_frame asked = *request;
    uint32_t checked = SMB_FRAME_BYTES + (body ? SMB_AUTHORIZE_BYTES : 0);
    asked.payload = checked - SMB_FRAME_BYTES + smb_frame_checksum_bytes(request);
    smb_frame_encode(&asked, bytes);
    if (body)
        memcpy(bytes + SMB_FRAME_BYTES, body, SMB_AUTHORIZE_BYTES);
    smb_store_checksum(bytes + checked, smb_crc32c(0, bytes, checked));
    size_t whole = by_record ? SMB_RECORD_BYTES : SMB_FRAME_BYTES + asked.payload;
    if (by_record)
        smb_store64(bytes + SMB_RECORD_ENDS_AT, SMB_NO_SLOT);
    int status = send_all(channel, bytes, whole, until);
    if (status != SMB_OK)
        return status;
    whole = SMB_FRAME_BYTES; /* until the header says more */
    for (size_t done = 0; done < whole;) {
        ssize_t n = receive_some(channel, bytes + done, whole - done, passed_fd);
        status = after_move(channel, n, true, until);
        if (status != SMB_OK)
            return status;
        done += n > 0 ? (size_t)n : 0;
        if (done != SMB_FRAME_BYTES || n < 0)
            continue;
        status = smb_frame_parse(bytes, reply);
        if (status != SMB_OK || reply->payload > smb_frame_checksum_bytes(reply))
            return status != SMB_OK ? status : SMB_PROTOCOL;
        whole += reply->payload;
    }
    if (reply->flags & SMB_FLAG_CHECKSUM && !smb_checksum_is(bytes + SMB_FRAME_BYTES, smb_crc32c(0, bytes, SMB_FRAME_BYTES)))
        return SMB_LINK_LOST;
    if ((request->flags & SMB_FLAG_CHECKSUM) != (reply->flags & SMB_FLAG_CHECKSUM))
        return reply->status == SMB_VERSION ? SMB_VERSION : SMB_PROTOCOL;
    if (!(reply->flags & SMB_FLAG_REPLY) || reply->opcode != request->opcode || reply->session != request->session)
        return reply->status == SMB_VERSION ? SMB_VERSION : SMB_PROTOCOL;
    return reply->status;
}

static int open_tcp(const char *address, uint16_t port, struct until until, int *fd)
{
    struct address peer;
    if (!address_parse(address, port, &peer))
        return SMB_INVALID;
    *fd = socket(peer.name.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (*fd < 0)
        return SMB_SYSTEM;
    int on = 1;
    setsockopt(*fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return connect_to(*fd, &peer.name.any, peer.length, until);
}

static int open_unix(const char *path, struct until until, int *fd)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    *fd = -1;
    if (strlen(path) >= sizeof name.sun_path)
        return SMB_INVALID;
    strcpy(name.sun_path, path);
    *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    return *fd < 0 ? SMB_SYSTEM : connect_to(*fd, (struct sockaddr *)&name, sizeof name, until);
}

static int shake_hands(const struct channel *channel, const struct smb_client *client, uint16_t lane, struct until until,
                       struct access_connection *proof, uint64_t *identity)
{
    struct smb_frame hello = {.opcode = SMB_HELLO, .flags = client_frame_flags(client), .lane = lane, .session = client->session};
    struct smb_frame reply;
    int passed = -1;
    if (client->wants_proof && getrandom(&hello.offset, sizeof hello.offset, 0) != sizeof hello.offset)
        return SMB_SYSTEM;
    int status = exchange(channel, &hello, NULL, false, until, &reply, &passed);
    if (passed >= 0)
        close(passed);
    if (status != SMB_OK)
        return status == SMB_LINK_LOST ? SMB_DISCONNECTED : status;
    *proof = (struct access_connection){.nonce = reply.offset, .client_nonce = hello.offset, .instance = reply.segment,
                                        .session = client->session, .lane = lane};
    *identity = reply.argument;
    return SMB_OK;
}

static bool same_token(const struct smb_token *one, const struct smb_token *other)
{
    return one->segment == other->segment && memcmp(one->secret, other->secret, SMB_KEY_BYTES) == 0;
}

/* One that is not good any more, unless a newer one has taken its place: of buffers that are gone none stays for ever. */
static void forget_token(struct smb_link *link, uint32_t at, const struct smb_token *token)
{
    pthread_mutex_lock(&link->client->mutex);
    if (same_token(&link->tokens[at], token))
        link->tokens[at] = link->tokens[--link->token_count];
    pthread_mutex_unlock(&link->client->mutex);
}

static int show_token(struct smb_link *link, const struct channel *channel, bool by_reference, const struct smb_token *token,
                      const struct access_connection *proof, struct until until)
{
    uint8_t body[SMB_AUTHORIZE_BYTES];
    struct smb_frame frame = {.opcode = SMB_AUTHORIZE, .flags = client_frame_flags(link->client), .lane = link->lane,
                              .session = link->client->session, .segment = token->segment, .epoch = token->epoch};
    struct smb_frame reply;
    int passed = -1;
    access_store(token, proof, body);
    int status = exchange(channel, &frame, body, by_reference, until, &reply, &passed);
    if (passed >= 0)
        close(passed);
    if (status != SMB_OK || !link->client->wants_proof)
        return status;
    struct access_answer right = access_answer(token, proof), answer = {{reply.argument, reply.offset}};
    return access_same_answer(&right, &answer) ? SMB_OK : SMB_UNTRUSTED;
}

/* What the link was given so far, on a connection that is not the link's yet. One that the server does not take is no reason to
 * do without the others; but who is to prove who he is has taken at least one, and nobody's word before that counts. */
static int show_tokens(struct smb_link *link, const struct channel *channel, bool by_reference, const struct access_connection *proof,
                       struct until until, bool *proven)
{
    int status = SMB_OK;
    uint32_t doubtful = 0;
    *proven = !link->client->wants_proof;
    for (uint32_t i = 0; status == SMB_OK;) {
        struct smb_token token;
        pthread_mutex_lock(&link->client->mutex);
        if (i >= link->token_count && *proven && doubtful > 0)
            i = doubtful = 0; /* now they are shown to whom we believe */
        bool more = i < link->token_count, trusted = link->trusted;
        if (more)
            token = link->tokens[i];
        pthread_mutex_unlock(&link->client->mutex);
        if (!more)
            return !*proven && (trusted || doubtful > 0) ? SMB_UNTRUSTED : SMB_OK;
        status = show_token(link, channel, by_reference, &token, proof, until);
        if (status == SMB_DENIED && *proven) {
            forget_token(link, i, &token); /* the last one has its place now */
            status = SMB_OK;
        } else if (status == SMB_DENIED) {
            doubtful++;
            status = SMB_OK;
            i++;
        } else {
            *proven |= status == SMB_OK;
            i++;
        }
    }
    return status;
}

/* Closes the channel unless SMB_OK. */
static int greet(struct smb_client *client, struct channel *channel, int status, uint16_t lane, struct until until,
                 struct smb_link **link, uint64_t *instance)
{
    uint64_t identity = 0;
    struct access_connection proof = {0};
    struct smb_link *made = NULL;
    if (status == SMB_OK)
        status = shake_hands(channel, client, lane, until, &proof, &identity);
    *instance = proof.instance;
    if (status == SMB_OK && !(made = calloc(1, sizeof *made)))
        status = SMB_OUT_OF_MEMORY;
    if (status != SMB_OK)
        return status;
    made->client = client_retain(client);
    made->id = atomic_fetch_add(&client->links_made, 1) + 1;
    made->identity = identity;
    made->proof = proof;
    made->references = 1;
    made->channel = *channel;
    *channel = (struct channel){.fd = -1};
    made->lane = lane;
    made->window = WINDOW_FRAMES;
    made->unsent_end = &made->unsent;
    made->sent_end = &made->sent;
    pthread_mutex_lock(&client->mutex);
    made->next_of_all = client->links;
    client->links = made;
    pthread_mutex_unlock(&client->mutex);
    *link = made;
    return SMB_OK;
}

/* A new link over a channel that was opened with that status. */
static int connect_over(struct smb_client *client, struct channel channel, int status, uint16_t lane, struct until until,
                        struct smb_link **link, uint64_t *instance)
{
    status = greet(client, &channel, status, lane, until, link, instance);
    channel_close(&channel); /* none, if it is the link's */
    return status;
}

int smb_client_connect_tcp(struct smb_client *client, const char *address, uint16_t port, uint16_t lane, uint32_t timeout_ms,
                           struct smb_link **link, uint64_t *instance)
{
    struct until until = until_in(client, timeout_ms);
    struct channel channel = {.fd = -1};
    int status = open_tcp(address, port, until, &channel.fd);
    return connect_over(client, channel, status, lane, until, link, instance);
}

int smb_client_connect_unix(struct smb_client *client, const char *path, uint16_t lane, uint32_t timeout_ms,
                            struct smb_link **link, uint64_t *instance)
{
    struct until until = until_in(client, timeout_ms);
    struct channel channel = {.fd = -1};
    int status = open_unix(path, until, &channel.fd);
    status = connect_over(client, channel, status, lane, until, link, instance);
    if (status == SMB_OK)
        (*link)->local = true;
    return status;
}

/* One that somebody else opened. */
static int take_fd(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0 ? SMB_OK : SMB_SYSTEM;
}

int smb_client_connect_fd(struct smb_client *client, int fd, uint16_t lane, uint32_t timeout_ms, struct smb_link **link,
                          uint64_t *instance)
{
    return connect_over(client, (struct channel){.fd = fd}, take_fd(fd), lane, until_in(client, timeout_ms), link, instance);
}

int smb_client_connect_reference(struct smb_client *client, int fd, uint16_t lane, uint32_t timeout_ms, struct smb_link **link,
                                 uint64_t *instance)
{
    int status = client->checksums ? SMB_INVALID : take_fd(fd);
    status = connect_over(client, (struct channel){.fd = fd}, status, lane, until_in(client, timeout_ms), link, instance);
    if (status == SMB_OK)
        (*link)->by_reference = true; /* nothing is on its way yet */
    return status;
}

/* ---- inside TLS */

static int secure_once(struct channel *channel, struct smb_tls *tls, const char *expected, struct until until)
{
    channel->tls = tls_begin(tls, channel->fd, expected);
    int status = channel->tls ? SMB_BUSY : SMB_OUT_OF_MEMORY;
    while (status == SMB_BUSY) {
        status = tls_handshake(channel->tls);
        if (status == SMB_BUSY) {
            int ready = wait_ready(channel->fd, channel_unsent_bytes(channel) ? POLLOUT : POLLIN, until);
            status = ready == SMB_OK ? SMB_BUSY : ready;
        }
    }
    return status;
}

/* A server that has more strangers than it bears closes some, and we may be one: it is tried again. */
static int open_tls(const char *address, uint16_t port, struct smb_tls *tls, const char *expected, struct until until,
                    struct channel *channel, char *why)
{
    int status = SMB_LINK_LOST;
    for (int i = 0; i < HANDSHAKES_TRIED && status == SMB_LINK_LOST; i++) {
        struct timespec pause = {.tv_nsec = i ? 2000000L << i : 0};
        if (i > 0 && (smb_now_ns() + (uint64_t)pause.tv_nsec > until.deadline_ns || client_look()))
            break;
        if (i > 0)
            nanosleep(&pause, NULL);
        channel_close(channel);
        status = open_tcp(address, port, until, &channel->fd);
        if (status == SMB_OK)
            status = secure_once(channel, tls, expected, until);
    }
    if (status == SMB_UNTRUSTED)
        snprintf(why, SMB_WHY_BYTES, "%s", tls_why(channel->tls));
    return status == SMB_LINK_LOST ? SMB_DISCONNECTED : status;
}

/* A server's word on our certificate comes with the first answer. */
static int refusal(const struct channel *channel, int status, char *why)
{
    if (status != SMB_DISCONNECTED || !channel->tls || !tls_why(channel->tls)[0])
        return status;
    snprintf(why, SMB_WHY_BYTES, "%s", tls_why(channel->tls));
    return SMB_UNTRUSTED;
}

int smb_client_connect_tls(struct smb_client *client, const char *address, uint16_t port, struct smb_tls *tls, const char *expected,
                           uint16_t lane, uint32_t timeout_ms, struct smb_link **link, uint64_t *instance, char why[SMB_WHY_BYTES])
{
    struct until until = until_in(client, timeout_ms);
    struct channel channel = {.fd = -1};
    why[0] = 0;
    int status = open_tls(address, port, tls, expected, until, &channel, why);
    status = refusal(&channel, greet(client, &channel, status, lane, until, link, instance), why);
    channel_close(&channel);
    return status;
}

/* ---- connecting again */

/* The channel is the link's from here on, if SMB_OK. */
static int hand_over(struct smb_link *link, struct channel *channel, bool by_reference, uint64_t accept_instance, struct until until,
                     uint64_t *instance)
{
    uint64_t identity = 0;
    struct access_connection proof = {0};
    bool proven;
    int status = shake_hands(channel, link->client, link->lane, until, &proof, &identity);
    *instance = proof.instance;
    if (status == SMB_OK && identity != link->identity && *instance != accept_instance)
        status = SMB_NOT_FOUND;
    if (status != SMB_OK)
        return status;
    /* From here on whoever shows a token shows it there: none is left out. */
    pthread_mutex_lock(&link->client->mutex);
    link->proof = proof;
    link->proven = false;
    pthread_mutex_unlock(&link->client->mutex);
    status = show_tokens(link, channel, by_reference, &proof, until, &proven);
    if (status != SMB_OK)
        return status;
    struct channel *fresh = malloc(sizeof *fresh);
    if (!fresh)
        return SMB_OUT_OF_MEMORY;
    *fresh = *channel;
    *channel = (struct channel){.fd = -1};
    pthread_mutex_lock(&link->client->mutex);
    link->proven |= proven;
    link->trusted |= proven;
    pthread_mutex_unlock(&link->client->mutex);
    link->identity = identity;
    atomic_store(&link->fresh_by_reference, by_reference);
    struct channel *older = atomic_exchange(&link->fresh, fresh);
    if (older)
        channel_close(older);
    free(older);
    client_want_link(link, false);
    client_wake_progress(link->client);
    return SMB_OK;
}

static int resume_over(struct smb_link *link, struct channel channel, bool by_reference, int status, uint64_t accept_instance,
                       struct until until, uint64_t *instance, char *why)
{
    *instance = 0;
    if (status == SMB_OK)
        status = hand_over(link, &channel, by_reference, accept_instance, until, instance);
    if (why)
        status = refusal(&channel, status, why);
    if (status == SMB_SESSION_ENDED && link->client->wants_proof && !channel.tls && !link->local && !by_reference)
        status = SMB_UNTRUSTED; /* said before any proof: the coordinator tells of a session's end */
    channel_close(&channel); /* none, if it is the link's */
    if (status == SMB_SESSION_ENDED) {
        atomic_store_explicit(&link->closed_why, status, memory_order_relaxed);
        atomic_store_explicit(&link->closing, true, memory_order_release); /* pairs with link_progress, which may be awake */
        client_wake_progress(link->client);
    }
    return status;
}

int smb_link_resume_tcp(struct smb_link *link, const char *address, uint16_t port, uint64_t accept_instance,
                        uint32_t timeout_ms, uint64_t *instance)
{
    struct until until = until_in(link->client, timeout_ms);
    struct channel channel = {.fd = -1};
    int status = open_tcp(address, port, until, &channel.fd);
    return resume_over(link, channel, false, status, accept_instance, until, instance, NULL);
}

int smb_link_resume_tls(struct smb_link *link, const char *address, uint16_t port, struct smb_tls *tls, const char *expected,
                        uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance, char why[SMB_WHY_BYTES])
{
    struct until until = until_in(link->client, timeout_ms);
    struct channel channel = {.fd = -1};
    why[0] = 0;
    int status = open_tls(address, port, tls, expected, until, &channel, why);
    return resume_over(link, channel, false, status, accept_instance, until, instance, why);
}

int smb_link_resume_unix(struct smb_link *link, const char *path, uint64_t accept_instance, uint32_t timeout_ms,
                         uint64_t *instance)
{
    struct until until = until_in(link->client, timeout_ms);
    struct channel channel = {.fd = -1};
    int status = open_unix(path, until, &channel.fd);
    return resume_over(link, channel, false, status, accept_instance, until, instance, NULL);
}

int smb_link_resume_fd(struct smb_link *link, int fd, uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance)
{
    return resume_over(link, (struct channel){.fd = fd}, false, take_fd(fd), accept_instance, until_in(link->client, timeout_ms), instance, NULL);
}

int smb_link_resume_reference(struct smb_link *link, int fd, uint64_t accept_instance, uint32_t timeout_ms, uint64_t *instance)
{
    int status = link->client->checksums ? SMB_INVALID : take_fd(fd);
    return resume_over(link, (struct channel){.fd = fd}, true, status, accept_instance, until_in(link->client, timeout_ms), instance, NULL);
}

int smb_link_attach(struct smb_link *link, uint64_t segment_id, uint32_t epoch, uint32_t timeout_ms,
                    struct smb_segment **segment)
{
    struct smb_frame request = {.opcode = SMB_ATTACH, .flags = client_frame_flags(link->client), .lane = link->lane, .session = link->client->session,
                                .sequence = link_next_sequence(link), .segment = segment_id, .epoch = epoch};
    struct smb_frame reply;
    int fd = -1;
    int status = client_may_use(link);
    if (status != SMB_OK)
        return status;
    status = exchange(&link->channel, &request, NULL, false, until_in(link->client, timeout_ms), &reply, &fd);
    if (status == SMB_OK && fd < 0)
        status = SMB_PROTOCOL;
    if (status == SMB_OK)
        status = smb_segment_open_fd(fd, segment);
    if (fd >= 0)
        close(fd);
    if (status == SMB_LINK_LOST || status == SMB_PROTOCOL || status == SMB_TIMEOUT)
        atomic_store(&link->state, LINK_CLOSED);
    return status;
}

/* Among those that are shown on each connection; a newer one takes its place. */
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

/* As any other request, on the connection of now. If that is another one when it arrives, it was shown there already, or is
 * proved once more. */
static int show_now(struct smb_link *link, const struct smb_token *token, const struct access_connection *proof,
                    uint64_t deadline_ns, struct smb_reply *reply)
{
    uint8_t body[SMB_AUTHORIZE_BYTES];
    access_store(token, proof, body);
    struct smb_ask ask = {.opcode = SMB_AUTHORIZE, .segment = token->segment, .epoch = token->epoch};
    for (int i = 0; i < SMB_AUTHORIZE_WORDS; i++)
        ask.words[i] = smb_load64(body + 8 * i);
    struct smb_pending *pending;
    *reply = (struct smb_reply){.status = SMB_TIMEOUT};
    int status = smb_ask_start(link, &ask, &pending);
    if (status != SMB_OK)
        return status;
    uint64_t now_ns = smb_now_ns();
    status = smb_ask_wait(pending, now_ns < deadline_ns ? (uint32_t)((deadline_ns - now_ns) / 1000000U) : 0, reply);
    smb_ask_end(pending);
    return status == SMB_BUSY ? SMB_TIMEOUT : reply->status;
}

/* Whoever answers has not proved who he is, and did not take a good token, or has proved it wrongly: he is left. */
static int leave_unproven(struct smb_link *link, int status)
{
    atomic_store_explicit(&link->closed_why, status == SMB_UNTRUSTED ? SMB_UNTRUSTED : SMB_LINK_LOST, memory_order_relaxed);
    atomic_store_explicit(&link->closing, true, memory_order_release);
    client_wake_progress(link->client);
    return status;
}

int smb_link_authorize(struct smb_link *link, const struct smb_token *token, uint32_t timeout_ms, uint64_t *why)
{
    uint64_t deadline_ns = until_in(link->client, timeout_ms).deadline_ns;
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
        bool same = newest.nonce == proof.nonce && newest.instance == proof.instance && newest.client_nonce == proof.client_nonce;
        link->proven |= good && same;
        link->trusted |= good;
        bool proven = link->proven;
        pthread_mutex_unlock(&link->client->mutex);
        if (good)
            return SMB_OK;
        if (same && status == SMB_OK)
            return leave_unproven(link, SMB_UNTRUSTED);
        if (same)
            return wants_proof && !proven ? leave_unproven(link, SMB_DENIED) : SMB_DENIED;
        proof = newest;
        status = SMB_OK;
    }
    return status;
}
