/* Bytes inside TLS: one record or thousands, in pieces of any size, through full sockets, with keys
 * that change on the way; which peers are accepted; and calls of a client that go on over new
 * connections. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <openssl/ssl.h>

#include "channel/bond.h"
#include "channel/certificate.h"
#include "channel/channel.h"
#include "base/frame.h"
#include "lab.h"
#include "random.h"
#include "rig.h"
#include "server/uses.h"
#include "smb/server.h"

enum { BYTES = 3 << 20 };
#define LONG_TEXT "a-text-that-is-longer-than-the-name-of-any-role"

/* ---- both ends of a connection, in one thread ------------------------------------------------ */

struct ends {
    struct channel server, client;
};

static void open_ends(struct ends *ends, struct smb_tls *servers, struct smb_tls *clients,
                      const char *expected)
{
    int fds[2], bytes = 8192;
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    for (int i = 0; i < 2; i++)
        /* fills up quickly */
        CHECK_EQ(setsockopt(fds[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes), 0);
    ends->server = (struct channel){fds[0], tls_begin(servers, fds[0], NULL)};
    ends->client = (struct channel){fds[1], tls_begin(clients, fds[1], expected)};
    CHECK(ends->server.tls && ends->client.tls);
}

static void close_ends(struct ends *ends)
{
    channel_close(&ends->server);
    channel_close(&ends->client);
    CHECK(ends->server.fd == -1 && !ends->server.tls);
}

/* Runs both handshakes until neither has anything to do; gives both results. */
static void shake(struct ends *ends, int *server, int *client_end)
{
    *server = *client_end = SMB_BUSY;
    for (int i = 0; i < 100 && (*server == SMB_BUSY || *client_end == SMB_BUSY); i++) {
        if (*client_end == SMB_BUSY)
            *client_end = tls_handshake(ends->client.tls);
        else
            /* the part of a long chain that did not fit before */
            channel_write(&ends->client, NULL, 0);
        if (*server == SMB_BUSY)
            *server = tls_handshake(ends->server.tls);
    }
}

static uint8_t pattern(size_t i)
{
    return (uint8_t)(i * 7 + i / 251);
}

static struct random seeded = {20261123};

/* Cuts [at, at + up to `most`) of the memory into parts of random size. */
static int cut(uint8_t *memory, size_t at, size_t end, size_t most, struct iovec *parts)
{
    int count = 0, wanted = 1 + (int)(random_below(&seeded, 6));
    while (count < wanted && at < end) {
        size_t sizes[] = {0, 1, 64, 300, 5000, 16384, 40000};
        size_t bytes = sizes[random_below(&seeded, 7)];
        bytes = bytes < end - at ? bytes : end - at;
        bytes = bytes < most ? bytes : most;
        parts[count++] = (struct iovec){memory + at, bytes};
        at += bytes;
    }
    return count;
}

/* Both directions at once, through sockets that hold 8 KiB: every byte arrives once and in order.
 * Keys change every 64 records. */
static void bytes_arrive(void)
{
    struct ends ends;
    int server, client_end;
    static uint8_t sent[BYTES], got[2][BYTES];
    open_lab();
    struct smb_tls *servers = context_of(&authority, &server_0),
                   *clients = context_of(&authority, &client);
    open_ends(&ends, servers, clients, "server-0.server.smb");
    shake(&ends, &server, &client_end);
    CHECK_EQ(server, SMB_OK);
    CHECK_EQ(client_end, SMB_OK);
    for (size_t i = 0; i < BYTES; i++)
        sent[i] = pattern(i);
    const struct channel *sides[2] = {&ends.server, &ends.client};
    size_t out[2] = {0}, in[2] = {0};
    bool was_full = false;
    while (in[0] < BYTES || in[1] < BYTES) {
        int side = (int)(random_below(&seeded, 2));
        struct iovec parts[8];
        ssize_t done = channel_write(sides[side], parts, cut(sent, out[side], BYTES, BYTES, parts));
        CHECK(!channel_failed(done));
        out[side] += done > 0 ? (size_t)done : 0;
        was_full |= channel_unsent_bytes(sides[side]);
        side = (int)(random_below(&seeded, 2));
        int count = cut(got[side], in[side], BYTES, BYTES, parts);
        done = count > 0 ? channel_read(sides[side], parts, count) : 0;
        CHECK(!channel_failed(done));
        in[side] += done > 0 ? (size_t)done : 0;
    }
    CHECK(was_full);
    CHECK(memcmp(sent, got[0], BYTES) == 0 && memcmp(sent, got[1], BYTES) == 0);
    smb_tls_release(servers);
    smb_tls_release(clients);
    close_ends(&ends);
    close_lab();
}

/* Accepted bytes are sent as they were, although their memory changes before the socket takes them:
 * a reader never sees a mixture. */
static void memory_may_change(void)
{
    struct ends ends;
    int server, client_end;
    static uint8_t memory[1 << 20], got[1 << 20];
    open_lab();
    struct smb_tls *servers = context_of(&authority, &server_0),
                   *clients = context_of(&authority, &client);
    open_ends(&ends, servers, clients, "server-0.server.smb");
    shake(&ends, &server, &client_end);
    CHECK_EQ(server, SMB_OK);
    memset(memory, 1, sizeof memory);
    struct iovec part = {memory, sizeof memory}, sink = {got, sizeof got};
    ssize_t taken = channel_write(&ends.server, &part, 1);
    CHECK(taken > 0 && taken < (ssize_t)sizeof memory && channel_unsent_bytes(&ends.server));
    memset(memory, 2, sizeof memory);
    ssize_t have = 0;
    while (have < taken) {
        sink = (struct iovec){got + have, (size_t)(taken - have)};
        ssize_t done = channel_read(&ends.client, &sink, 1);
        CHECK(!channel_failed(done));
        have += done > 0 ? done : 0;
        CHECK(!channel_failed(channel_write(&ends.server, NULL, 0)));
    }
    for (ssize_t i = 0; i < taken; i++)
        CHECK_EQ(got[i], 1);
    smb_tls_release(servers);
    smb_tls_release(clients);
    close_ends(&ends);
    close_lab();
}

static void expect(const struct holder *trusted_by_server, const struct holder *server,
                   const struct holder *trusted_by_client, const struct holder *user,
                   const char *expected, const char *why_server, const char *why_client,
                   const char *server_name)
{
    struct ends ends;
    int of_server, of_client;
    struct smb_tls *servers = context_of(trusted_by_server, server),
                   *clients = context_of(trusted_by_client, user);
    open_ends(&ends, servers, clients, expected);
    smb_tls_release(servers);
    smb_tls_release(clients);
    shake(&ends, &of_server, &of_client);
    CHECK_EQ(of_client, why_client && !why_server ? SMB_UNTRUSTED : SMB_OK);
    CHECK_EQ(of_server, why_server || why_client ? SMB_UNTRUSTED : SMB_OK);
    if (of_server == SMB_OK)
        CHECK_EQ(strcmp(tls_server_name(ends.server.tls), server_name), 0);
    else
        CHECK(!tls_server_name(ends.server.tls)[0]);
    if (why_server) { /* the client learns it with its first read */
        uint8_t byte;
        struct iovec part = {&byte, 1};
        CHECK(strstr(tls_why(ends.server.tls), why_server) != NULL);
        CHECK_EQ(channel_read(&ends.client, &part, 1), -1);
        CHECK_EQ(errno, EPROTO);
    }
    if (why_client)
        CHECK(strstr(tls_why(ends.client.tls), why_client) != NULL);
    close_ends(&ends);
}

/* A peer whose certificate is for another name or role, or of another authority, is refused by
 * either side with the reason. */
static void who_may(void)
{
    struct holder other, reader, operator, server_1, stranger, coordinator, two, odd, long_one,
        none, of_client_only, wild, server_2, of_two, nameless;
    open_lab();
    issue(&other, NULL, NULL, NULL);
    issue(&reader, &authority, "URI:smb:role/reader", "clientAuth");
    issue(&operator, &authority, "URI:smb:role/operator", "clientAuth");
    issue(&server_1, &authority,
          "URI:smb:role/server,DNS:server-0.server.smb,DNS:server-1.server.smb", BOTH);
    issue(&stranger, &other, "URI:smb:role/client", "clientAuth");
    issue(&coordinator, &authority,
          "URI:smb:role/coordinator,DNS:coordinator.smb,DNS:server-0.server.smb", BOTH);
    issue(&two, &authority, "URI:smb:role/client,URI:smb:role/operator", "clientAuth");
    issue(&odd, &authority, "URI:smb:role/client,URI:smb:role/" LONG_TEXT, "clientAuth");
    issue(&long_one, &authority, "URI:smb:role/client" LONG_TEXT, "clientAuth");
    issue(&none, &authority, "DNS:server-0.server.smb", BOTH);
    issue(&of_client_only, &authority, "URI:smb:role/server,DNS:server-0.server.smb", "clientAuth");
    issue(&wild, &authority, "URI:smb:role/server,DNS:*.server.smb", BOTH);
    issue(&server_2, &authority, "URI:smb:role/server,URI:smb:name/server-2", BOTH);
    issue(&of_two, &authority, "URI:smb:role/server,URI:smb:name/server-2,URI:smb:name/server-3",
          BOTH);
    issue(&nameless, &authority, "URI:smb:role/server,URI:smb:name/" LONG_TEXT LONG_TEXT, BOTH);
    const char *name = "server-0.server.smb", *reply = "it does not accept us";
    const struct holder *users[] = {&client, &reader, &operator};
    for (int i = 0; i < 3; i++)
        expect(&authority, &server_0, &authority, users[i], name, NULL, NULL, "");
    expect(&authority, &server_0, &authority, &client, "SERVER-0.server.smb", NULL,
           "expected the certificate of SERVER-0.server.smb", "");
    expect(&authority, &server_0, &authority, &stranger, name, "is not good", reply, "");
    expect(&authority, &server_0, &authority, &server_1, name, "role \"server\"", reply, "");
    expect(&authority, &server_0, &authority, &server_2, name, NULL, NULL, "server-2");
    expect(&authority, &server_0, &authority, &of_two, name, "role \"server\"", reply, "");
    expect(&authority, &server_0, &authority, &nameless, name, "role \"server\"", reply, "");
    expect(&authority, &server_0, &authority, &coordinator, name, "role \"coordinator\"", reply,
           "");
    expect(&authority, &server_0, &authority, &two, name, "role \"operator\" and others", reply,
           "");
    expect(&authority, &server_0, &authority, &odd, name, "role \"?\" and others", reply, "");
    expect(&authority, &server_0, &authority, &long_one, name, "role \"?\", name", reply, "");
    expect(&authority, &server_0, &authority, &none, name, "it shows", reply, "");
    expect(&authority, &server_1, &authority, &client, name, NULL,
           "it shows the certificate of role \"server\"", "");
    expect(&authority, &server_0, &authority, &client, "server-0.server.sm", NULL,
           "name \"server-0\"", "");
    expect(&authority, &server_0, &authority, &client, ".server.smb", NULL, "it shows", "");
    expect(&authority, &wild, &authority, &client, name, NULL, "it shows", "");
    expect(&authority, &coordinator, &authority, &client, name, NULL, "role \"coordinator\"", "");
    expect(&authority, &none, &authority, &client, name, NULL, "role \"\"", "");
    expect(&authority, &of_client_only, &authority, &client, name, NULL, "purpose", "");
    expect(&authority, &server_0, &other, &client, name, NULL, "is not good", "");
    struct holder *all[] = {&other,          &reader, &operator, &server_1, &stranger,
                            &coordinator,    &two,    &odd,      &long_one, &none,
                            &of_client_only, &wild,   &server_2, &of_two,   &nameless};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        forget(all[i]);
    struct smb_tls *tls;
    char why[SMB_WHY_BYTES];
    CHECK_EQ(smb_tls_create(authority.certificate_pem, server_0.certificate_pem, client.key_pem,
                            &tls, why),
             SMB_INVALID);
    CHECK(why[0]);
    CHECK_EQ(smb_tls_create("nothing", server_0.certificate_pem, server_0.key_pem, &tls, why),
             SMB_INVALID);
    close_lab();
}

/* Of several certificates in one file each counts. A damaged one makes the file invalid; it was
 * once ignored. */
static void files_of_several(void)
{
    struct holder other;
    struct smb_tls *tls;
    char why[SMB_WHY_BYTES], two[2 * PEM_BYTES];
    open_lab();
    issue(&other, NULL, NULL, NULL);
    for (int spoilt = 0; spoilt < 4; spoilt++) {
        int expected = spoilt ? SMB_INVALID : SMB_OK;
        for (int of_chain = 0; of_chain < 2; of_chain++) {
            int first = snprintf(two, sizeof two, "%s",
                                 of_chain ? server_0.certificate_pem : other.certificate_pem);
            char *second = two + first;
            snprintf(second, sizeof two - (size_t)first, "%s\n", authority.certificate_pem);
            if (spoilt == 1)
                second[80] = second[80] == 'A' ? 'B' : 'A';
            if (spoilt == 2)
                second[80] = '*';
            if (spoilt == 3)
                second[strlen(second) / 2] = 0;
            int status = smb_tls_create(of_chain ? authority.certificate_pem : two,
                                        of_chain ? two : server_0.certificate_pem, server_0.key_pem,
                                        &tls, why);
            CHECK_EQ(status, expected);
            CHECK((status == SMB_OK) == !why[0]);
            if (status == SMB_OK)
                smb_tls_release(tls);
        }
    }
    forget(&other);
    close_lab();
}

/* A stranger's chain is examined only as far as an honest chain can be long. */
static void long_chains(void)
{
    static char shown[128 << 10];
    const struct {
        int others, status;
        const char *why;
    } cases[] = {{CERTIFICATES_MAX - 1, SMB_OK, ""},
                 {CERTIFICATES_MAX, SMB_UNTRUSTED, "chain too long"},
                 {130, SMB_UNTRUSTED, "excessive message size"}};
    open_lab();
    struct smb_tls *servers = context_of(&authority, &server_0), *clients;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ends ends;
        struct smb_holder holder;
        int server, client_end, bytes = snprintf(shown, sizeof shown, "%s", client.certificate_pem);
        char why[SMB_WHY_BYTES];
        for (int j = 0; j < cases[i].others; j++)
            bytes += snprintf(shown + bytes, sizeof shown - (size_t)bytes, "%s",
                              authority.certificate_pem);
        CHECK_EQ(smb_tls_create(authority.certificate_pem, shown, client.key_pem, &clients, why),
                 SMB_OK);
        open_ends(&ends, servers, clients, "server-0.server.smb");
        smb_tls_release(clients);
        shake(&ends, &server, &client_end);
        CHECK_EQ(server, cases[i].status);
        CHECK(strstr(tls_why(ends.server.tls), cases[i].why) != NULL);
        /* gRPC gives the first certificate twice */
        for (int twice = 0; twice < 2; twice++) {
            const char *from = twice ? shown : shown + strlen(client.certificate_pem);
            char *both = NULL;
            CHECK(asprintf(&both, "%s%s", client.certificate_pem, from) > 0);
            bool taken = cases[i].others + twice <= CERTIFICATES_MAX;
            CHECK_EQ(smb_tls_judge(servers, both, SMB_ROLE_CLIENT, "", &holder, why),
                     taken ? SMB_OK : SMB_UNTRUSTED);
            CHECK(taken || strstr(why, "chain too long"));
            free(both);
        }
        close_ends(&ends);
    }
    for (size_t at = strlen(shown); at < sizeof shown - 1; at++)
        shown[at] = '\n';
    char why[SMB_WHY_BYTES];
    CHECK_EQ(smb_tls_judge(servers, shown, SMB_ROLE_CLIENT, "", &(struct smb_holder){0}, why),
             SMB_INVALID);
    smb_tls_release(servers);
    close_lab();
}

/* A peer that does not speak TLS ends the handshake, on both sides; so does a connection that ends
 * in the middle of it. */
static void no_tls(void)
{
    open_lab();
    struct smb_tls *servers = context_of(&authority, &server_0),
                   *clients = context_of(&authority, &client);
    for (int kind = 0; kind < 4; kind++) {
        struct ends ends;
        open_ends(&ends, servers, clients, "server-0.server.smb");
        const struct channel *judge = kind < 2 ? &ends.server : &ends.client;
        int other = kind < 2 ? ends.client.fd : ends.server.fd;
        if (kind % 2)
            CHECK_EQ(shutdown(other, SHUT_WR), 0);
        else
            CHECK_EQ(send(other, "SM\1\1 what a client says that speaks no TLS", 40, 0), 40);
        int status = SMB_BUSY;
        for (int i = 0; i < 10 && status == SMB_BUSY; i++)
            status = tls_handshake(judge->tls);
        CHECK_EQ(status, kind % 2 ? SMB_LINK_LOST : SMB_UNTRUSTED);
        CHECK(kind % 2 || strstr(tls_why(judge->tls), "does not speak TLS"));
        close_ends(&ends);
    }
    smb_tls_release(servers);
    smb_tls_release(clients);
    close_lab();
}

/* The other end's OpenSSL without a socket: its output lies in `said`. */
struct raw_client {
    SSL_CTX *context;
    SSL *ssl;
    BIO *heard, *said;
    int fd;
};

static void open_raw(struct raw_client *raw, int fd)
{
    raw->fd = fd;
    raw->context = SSL_CTX_new(TLS_client_method());
    CHECK_EQ(SSL_CTX_use_certificate(raw->context, client.certificate), 1);
    CHECK_EQ(SSL_CTX_use_PrivateKey(raw->context, client.key), 1);
    raw->ssl = SSL_new(raw->context);
    raw->heard = BIO_new(BIO_s_mem());
    raw->said = BIO_new(BIO_s_mem());
    SSL_set_bio(raw->ssl, raw->heard, raw->said);
    SSL_set_connect_state(raw->ssl);
}

static void carry(struct raw_client *raw)
{
    uint8_t bytes[16384];
    int count;
    while ((count = BIO_read(raw->said, bytes, sizeof bytes)) > 0)
        CHECK_EQ(send(raw->fd, bytes, (size_t)count, 0), count);
    while ((count = (int)recv(raw->fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0)
        CHECK_EQ(BIO_write(raw->heard, bytes, count), count);
}

/* A peer that sends only key updates gets a limited turn, however many it sends. */
static void key_updates_end_a_turn(void)
{
    enum { FLOOD_BYTES = 200 << 10 };
    int fds[2], room = 1 << 20, left = 0;
    uint8_t memory[64];
    struct raw_client raw;
    open_lab();
    struct smb_tls *servers = context_of(&authority, &server_0);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    CHECK_EQ(setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room), 0);
    struct channel server = {fds[0], tls_begin(servers, fds[0], NULL)};
    open_raw(&raw, fds[1]);
    int status = SMB_BUSY;
    for (int i = 0; i < 10 && (status == SMB_BUSY || !SSL_is_init_finished(raw.ssl)); i++) {
        SSL_do_handshake(raw.ssl);
        carry(&raw);
        status = status == SMB_BUSY ? tls_handshake(server.tls) : status;
    }
    CHECK_EQ(status, SMB_OK);
    carry(&raw);
    while (BIO_ctrl_pending(raw.said) < FLOOD_BYTES) {
        CHECK_EQ(SSL_key_update(raw.ssl, SSL_KEY_UPDATE_NOT_REQUESTED), 1);
        CHECK_EQ(SSL_do_handshake(raw.ssl), 1);
    }
    CHECK_EQ(SSL_write(raw.ssl, "data", 4), 4);
    carry(&raw);
    struct iovec part = {memory, sizeof memory};
    ssize_t done = tls_read(server.tls, &part, 1);
    CHECK(done == -1 && errno == EAGAIN);
    CHECK_EQ(ioctl(fds[0], FIONREAD, &left), 0);
    CHECK(left > 0);
    for (int turns = 0; done == -1 && errno == EAGAIN && turns < 10; turns++)
        done = tls_read(server.tls, &part, 1);
    CHECK_EQ(done, 4); /* and no data is lost */
    SSL_free(raw.ssl);
    SSL_CTX_free(raw.context);
    close(raw.fd);
    channel_close(&server);
    smb_tls_release(servers);
    close_lab();
}

/* ---- a client's calls ------------------------------------------------------------------------ */

enum { ELEMENTS = 200000, CALLERS = 3, CALLS = 12 };

struct caller {
    pthread_t thread;
    struct smb_buffer *buffer;
};

static void *call(void *argument)
{
    struct caller *caller = argument;
    uint64_t bytes = ELEMENTS * sizeof(double);
    double *got = malloc(bytes), *ones = malloc(bytes);
    for (int i = 0; i < ELEMENTS; i++)
        ones[i] = 1;
    for (int i = 0; i < CALLS; i++) {
        must(caller->buffer, (struct smb_request){.opcode = SMB_ACCUMULATE,
                                                  .op = SMB_SUM,
                                                  .scale = 1,
                                                  .bytes = bytes,
                                                  .source = ones});
        must(caller->buffer, (struct smb_request){.opcode = SMB_READ, .bytes = bytes, .sink = got});
    }
    free(got);
    free(ones);
    return NULL;
}

/* Threads add and read inside TLS while their connections break and are made again: every addition
 * counts once. */
static void calls_go_on(void)
{
    struct rig rig;
    struct smb_client *made;
    struct smb_link *links[RIG_SERVERS];
    struct smb_buffer *buffer;
    struct caller callers[CALLERS];
    struct smb_tls_peer peers[RIG_SERVERS];
    uint64_t instance;
    char why[SMB_WHY_BYTES];
    open_lab();
    struct smb_tls *servers = context_of(&authority, &server_0),
                   *clients = context_of(&authority, &client);
    rig_start(&rig, (struct smb_layout){ELEMENTS * 8, 262144, 262144, 2}, SMB_FLOAT64);
    CHECK_EQ(smb_client_create(77, &made), SMB_OK);
    CHECK_EQ(smb_buffer_create(made, &rig.layout, rig.dtype, &buffer), SMB_OK);
    for (int i = 0; i < RIG_SERVERS; i++) {
        struct smb_tls_peer another = {"127.0.0.1", rig.ports[i], clients, "server-1.server.smb"};
        smb_server_use_tls(rig.servers[i], servers);
        peers[i] = (struct smb_tls_peer){"127.0.0.1", rig.ports[i], clients, "server-0.server.smb"};
        CHECK_EQ(
            smb_client_connect_tls(made, &another, 0, RIG_TIMEOUT_MS, &links[i], &instance, why),
            SMB_UNTRUSTED);
        CHECK(strstr(why, "server-0"));
        CHECK_EQ(
            smb_client_connect_tls(made, &peers[i], 0, RIG_TIMEOUT_MS, &links[i], &instance, why),
            SMB_OK);
        CHECK_EQ(smb_buffer_set_link(buffer, (uint32_t)i, rig_segment_id(0, (uint32_t)i), RIG_EPOCH,
                                     links[i]),
                 SMB_OK);
    }
    for (int i = 0; i < CALLERS; i++) {
        callers[i] = (struct caller){.buffer = buffer};
        CHECK_EQ(pthread_create(&callers[i].thread, NULL, call, &callers[i]), 0);
    }
    for (int i = 0; i < 30; i++) { /* the newer connection of a lane ends the older one */
        CHECK_EQ(
            smb_link_resume_tls(links[i % 2], &peers[i % 2], 0, RIG_TIMEOUT_MS, &instance, why),
            SMB_OK);
        usleep(3000);
    }
    for (int i = 0; i < CALLERS; i++)
        CHECK_EQ(pthread_join(callers[i].thread, NULL), 0);
    double *got = malloc(ELEMENTS * 8);
    must(buffer, (struct smb_request){.opcode = SMB_READ, .bytes = ELEMENTS * 8, .sink = got});
    for (int i = 0; i < ELEMENTS; i++)
        CHECK(got[i] == CALLERS * CALLS);
    free(got);
    smb_buffer_destroy(buffer);
    for (int i = 0; i < RIG_SERVERS; i++)
        smb_link_close(links[i]);
    smb_client_destroy(made);
    rig_stop(&rig);
    smb_tls_release(servers);
    smb_tls_release(clients);
    close_lab();
}

/* Small answers that a peer does not read wait encrypted, and not in the connection's own buffer.
 * They count as a backlog like others, once. */
static void answers_wait_inside(void)
{
    enum { AT_ONCE = 100 };
    struct rig rig;
    struct smb_server_counters counters;
    int status;
    uint8_t bytes[(1 + AT_ONCE) * SMB_FRAME_BYTES];
    open_lab();
    struct smb_tls *servers = context_of(&authority, &server_0),
                   *clients = context_of(&authority, &client);
    rig_start(&rig, (struct smb_layout){65536, 65536, 65536, 1}, SMB_UINT8);
    smb_server_use_tls(rig.servers[0], servers);
    int fd = raw_connect(rig.ports[0]);
    struct channel channel = {fd, tls_begin(clients, fd, "server-0.server.smb")};
    while ((status = tls_handshake(channel.tls)) == SMB_BUSY)
        CHECK(poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 10000) == 1);
    CHECK_EQ(status, SMB_OK);
    struct smb_frame hello = {.opcode = SMB_HELLO, .session = 73};
    struct smb_frame read = {.opcode = SMB_READ,
                             .dtype = SMB_UINT8,
                             .session = 73,
                             .epoch = RIG_EPOCH,
                             .segment = rig_segment_id(0, 0),
                             .length = 8};
    smb_frame_encode(&hello, bytes);
    for (int i = 1; i <= AT_ONCE; i++)
        smb_frame_encode(&read, bytes + i * SMB_FRAME_BYTES);
    struct iovec all = {bytes, sizeof bytes},
                 more = {bytes + SMB_FRAME_BYTES, AT_ONCE * SMB_FRAME_BYTES};
    CHECK_EQ(channel_write(&channel, &all, 1), (ssize_t)sizeof bytes);
    /* The answers fill megabytes of the two sockets first. */
    while (!channel_unsent_bytes(&channel))
        CHECK(!channel_failed(channel_write(&channel, &more, 1)));
    WAIT_UNTIL((CHECK(!channel_failed(
                    channel_write(&channel, &more, channel_unsent_bytes(&channel) ? 0 : 1))),
                smb_server_counters(rig.servers[0], &counters), counters.backlog_bytes > 0));
    CHECK_EQ(counters.backlog_total, 1);
    channel_close(&channel);
    WAIT_UNTIL((smb_server_counters(rig.servers[0], &counters), counters.backlog_bytes == 0));
    rig_stop(&rig);
    smb_tls_release(servers);
    smb_tls_release(clients);
    close_lab();
}

static struct bond bond_at(const struct channel *end, bool serves, uint64_t namespaces, bool ids)
{
    struct bond bond;
    CHECK_EQ(bond_of(end, false, serves, namespaces, ids, &bond), SMB_OK);
    return bond;
}

static bool same_bond(const struct bond *one, const struct bond *other)
{
    return memcmp(one->bytes, other->bytes, sizeof one->bytes) == 0;
}

/* Both ends of a connection have the same bond, and no two connections have: not two connections of
 * the same peers, nor the two of a man in the middle, nor one inside TLS and one outside, whatever
 * their HELLO says. */
static void bonds_are_of_one_connection(void)
{
    enum { COUNT = 3, KINDS = 5 };
    struct ends ends[COUNT];
    struct bond found[COUNT + KINDS];
    int server, client_end;
    uint64_t here = bond_namespaces();
    open_lab();
    struct smb_tls *servers = context_of(&authority, &server_0),
                   *clients = context_of(&authority, &client);
    for (int i = 0; i < COUNT; i++) {
        open_ends(&ends[i], servers, clients, "server-0.server.smb");
        CHECK_EQ(bond_of(&ends[i].client, false, false, 0, false, &found[i]), SMB_SYSTEM);
        shake(&ends[i], &server, &client_end);
        found[i] = bond_at(&ends[i].client, false, 0, false);
        struct bond other_end = bond_at(&ends[i].server, true, 0, false);
        CHECK(same_bond(&found[i], &other_end));
    }
    struct channel plain[2] = {{ends[0].server.fd, NULL}, {ends[0].client.fd, NULL}};
    CHECK(here != 0 && bond_is_unix(&plain[0]));
    for (int ids = 0; ids < 2; ids++) { /* this process is both ends */
        struct bond other_end = bond_at(&plain[1], false, here, ids);
        found[COUNT + ids] = bond_at(&plain[0], true, here, ids);
        CHECK(same_bond(&found[COUNT + ids], &other_end));
    }
    found[COUNT + 2] = bond_at(&plain[0], true, here + 1, false);
    CHECK_EQ(bond_of(&plain[0], true, true, 0, false, &found[COUNT + 3]), SMB_OK);
    struct channel tcp = {socket(AF_INET, SOCK_STREAM, 0), NULL};
    CHECK(!bond_is_unix(&tcp));
    found[COUNT + 4] = bond_at(&tcp, true, 0, false);
    channel_close(&tcp);
    for (int i = 0; i < COUNT + KINDS; i++)
        for (int j = 0; j < i; j++)
            CHECK(!same_bond(&found[i], &found[j]));
    for (int i = 0; i < COUNT; i++)
        close_ends(&ends[i]);
    smb_tls_release(servers);
    smb_tls_release(clients);
    close_lab();
}

/* A client's or reader's certificate is counted, over all its connections: so many, and then no
 * more, until one ends. Others are let in meanwhile. Memory servers and operators are not counted.
 * What is counted last, a connection or a request that waits, frees the entry. */
static void one_certificate_has_a_share(void)
{
    open_lab();
    struct holder reader, operator, server_1, others[2];
    issue(&reader, &authority, "URI:smb:role/reader", "clientAuth");
    issue(&operator, &authority, "URI:smb:role/operator", "clientAuth");
    issue(&server_1, &authority, "URI:smb:role/server,URI:smb:name/server-1", BOTH);
    for (int i = 0; i < 2; i++)
        issue(&others[i], &authority, "URI:smb:role/client", "clientAuth");
    const struct holder *shown[] = {&reader, &others[0], &others[1], &operator, &server_1};
    enum { SHOWN = 5, COUNTED = 3 };
    struct smb_tls *servers = context_of(&authority, &server_0), *clients[SHOWN];
    struct ends ends[SHOWN];
    struct uses uses = {0};
    struct use *use, *first[SHOWN];
    uses_init(&uses);
    for (int i = 0; i < SHOWN; i++) {
        int server, client_end;
        clients[i] = context_of(&authority, shown[i]);
        open_ends(&ends[i], servers, clients[i], "server-0.server.smb");
        CHECK_EQ(uses_enter(&uses, ends[i].server.tls, &use), SMB_OK);
        CHECK(!use); /* before the handshake nobody is known */
        shake(&ends[i], &server, &client_end);
        CHECK_EQ(server, SMB_OK);
        CHECK_EQ(uses_enter(&uses, ends[i].server.tls, &first[i]), SMB_OK);
        CHECK_EQ(first[i] != NULL, i < COUNTED);
    }
    CHECK(first[0] != first[1] && first[1] != first[2]);
    for (int i = 1; i < CONNECTIONS_PER_CERTIFICATE; i++) {
        CHECK_EQ(uses_enter(&uses, ends[0].server.tls, &use), SMB_OK);
        CHECK(use == first[0]);
    }
    CHECK_EQ(uses_enter(&uses, ends[0].server.tls, &use), SMB_OUT_OF_MEMORY);
    CHECK(!use);
    for (int i = 1; i < SHOWN; i++) {
        CHECK_EQ(uses_enter(&uses, ends[i].server.tls, &use), SMB_OK);
        uses_leave(&uses, use);
    }
    uses_leave(&uses, first[0]);
    CHECK_EQ(uses_enter(&uses, ends[0].server.tls, &use), SMB_OK);
    for (int i = 0; i < WAITS_PER_CERTIFICATE; i++)
        CHECK(uses_take_wait(&uses, first[0]));
    CHECK(!uses_take_wait(&uses, first[0]));
    CHECK(uses_take_wait(&uses, first[1]) && uses_take_wait(&uses, NULL));
    uses_give_wait(&uses, first[0]);
    CHECK(uses_take_wait(&uses, first[0]));
    for (int i = 0; i < CONNECTIONS_PER_CERTIFICATE; i++)
        uses_leave(&uses, first[0]);
    for (int i = 0; i < WAITS_PER_CERTIFICATE; i++)
        uses_give_wait(&uses, first[0]);
    uses_give_wait(&uses, first[1]);
    uses_give_wait(&uses, NULL);
    for (int i = 1; i < SHOWN; i++)
        uses_leave(&uses, first[i]);
    for (int i = 0; i < USE_BUCKETS; i++)
        CHECK(!uses.buckets[i]);
    uses_destroy(&uses);
    for (int i = 0; i < SHOWN; i++) {
        close_ends(&ends[i]);
        smb_tls_release(clients[i]);
    }
    smb_tls_release(servers);
    forget(&reader);
    forget(&operator);
    forget(&server_1);
    forget(&others[0]);
    forget(&others[1]);
    close_lab();
}

int main(void)
{
    static const struct test tests[] = {TEST(bytes_arrive),
                                        TEST(memory_may_change),
                                        TEST(who_may),
                                        TEST(files_of_several),
                                        TEST(long_chains),
                                        TEST(no_tls),
                                        TEST(key_updates_end_a_turn),
                                        TEST(calls_go_on),
                                        TEST(answers_wait_inside),
                                        TEST(bonds_are_of_one_connection),
                                        TEST(one_certificate_has_a_share)};
    return RUN_TESTS(tests);
}
