#include "channel/tls.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#include "base/assert.h"
#include "channel/certificate.h"

enum {
    /* scattered parts of at most this size in all are gathered into one record */
    GATHER_BYTES = 4096,
    /* ciphertext read in one system call; a larger size was not faster */
    READ_AHEAD_BYTES = 2 * (TLS_RECORD_BYTES + 256),
    LEFT_BYTES = GATHER_BYTES + 2 * TLS_RECORD_BYTES + 4096,
    PEM_BYTES_MAX = 1 << 20,
    SHOWN_BYTES_MAX = 32 << 10, /* limit of the certificates in a handshake */
    /* the same certificates as text, the first one twice */
    SHOWN_PEM_BYTES_MAX = 3 * SHOWN_BYTES_MAX,
    LINGER_BYTES = 1 << 16,
    LOOKS_MAX = 4, /* so a peer that sends only key updates cannot keep the thread busy */
#ifdef SMB_FAILPOINTS
    RECORDS_PER_KEY = 64 /* so that tests see keys change */
#else
    RECORDS_PER_KEY = 1 << 23 /* RFC 8446, 5.5: AES-GCM is good for 2^24.5 full records */
#endif
};

struct smb_tls {
    _Atomic uint32_t references;
    SSL_CTX *server, *client;
    struct denied denied;
};

struct tls {
    SSL *ssl;
    struct smb_tls *with;
    int fd;
    bool greeted;     /* the handshake is complete */
    bool may_receive; /* the last read did not empty the socket */
    /* reads of the socket since the last record with data; at most LOOKS_MAX in one call */
    uint8_t looks;
    bool hold;        /* more data follows at once, so small writes wait for it */
    int broken;       /* the errno with which the socket failed for good; 0: it has not failed */
    uint32_t records; /* records written under the present key */
    uint32_t left_start, left_end; /* the encrypted bytes that the socket has not taken yet */
    uint8_t *left;
    struct wanted wanted;
    struct smb_holder peer; /* set once the peer's certificate is accepted */
    char why[SMB_WHY_BYTES];
};

/* ---- who may be at the other end ------------------------------------------------------------- */

/* Replaces OpenSSL's own verification. An alert tells the peer why it was refused. */
static int verify(X509_STORE_CTX *chain, void *unused)
{
    SSL *ssl = X509_STORE_CTX_get_ex_data(chain, SSL_get_ex_data_X509_STORE_CTX_idx());
    struct tls *tls = SSL_get_app_data(ssl);
    (void)unused;
    int error = certificate_judge(SSL_CTX_get_cert_store(SSL_get_SSL_CTX(ssl)), &tls->with->denied,
                                  X509_STORE_CTX_get0_cert(chain),
                                  X509_STORE_CTX_get0_untrusted(chain), &tls->wanted, &tls->peer,
                                  tls->why);
    X509_STORE_CTX_set_error(chain, error);
    return error == X509_V_OK;
}

/* ---- contexts -------------------------------------------------------------------------------- */

static const char *last_error(void)
{
    unsigned long code = ERR_peek_last_error();
    const char *reason = code ? ERR_reason_error_string(code) : NULL;
    return reason ? reason : "no reason given";
}

/* The next certificate of a text with several. NULL: the end, or, with *good false, damaged
 * text. */
static X509 *next_certificate(BIO *pem, bool *good)
{
    X509 *one = PEM_read_bio_X509(pem, NULL, NULL, NULL);
    unsigned long error = one ? 0 : ERR_peek_last_error();
    *good = one ||
            (ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE);
    if (!one && *good)
        ERR_clear_error(); /* clears the error that the end of the text left */
    return one;
}

static bool add_authorities(SSL_CTX *context, BIO *pem)
{
    X509_STORE *store = SSL_CTX_get_cert_store(context);
    int count = 0;
    bool good = true;
    for (X509 *one; good && (one = next_certificate(pem, &good)); count++) {
        good = X509_STORE_add_cert(store, one) == 1;
        X509_free(one);
    }
    return good && count > 0;
}

static bool use_chain(SSL_CTX *context, BIO *pem)
{
    X509 *own = PEM_read_bio_X509(pem, NULL, NULL, NULL);
    bool good = own && SSL_CTX_use_certificate(context, own) == 1;
    X509_free(own);
    for (X509 *one; good && (one = next_certificate(pem, &good));) {
        good = SSL_CTX_add0_chain_cert(context, one) == 1;
        if (!good)
            X509_free(one);
    }
    return good;
}

static bool use_key(SSL_CTX *context, BIO *pem)
{
    /* the empty password keeps OpenSSL from asking for one at the terminal */
    EVP_PKEY *key = PEM_read_bio_PrivateKey(pem, NULL, NULL, (void *)(uintptr_t)"");
    bool good = key && SSL_CTX_use_PrivateKey(context, key) == 1 &&
                SSL_CTX_check_private_key(context) == 1;
    EVP_PKEY_free(key);
    return good;
}

static SSL_CTX *make_context(const SSL_METHOD *method, const char *const pems[3])
{
    SSL_CTX *context = SSL_CTX_new(method);
    if (!context)
        return NULL;
    /* The cipher that is fastest on processors with instructions for AES comes first. */
    bool good = SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
                SSL_CTX_set_ciphersuites(
                    context,
                    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256") ==
                    1 &&
                /* no session is resumed, so that a replaced certificate counts at once */
                SSL_CTX_set_num_tickets(context, 0) == 1;
    SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_max_cert_list(context, SHOWN_BYTES_MAX);
    SSL_CTX_set_security_level(context, CERTIFICATE_SECURITY_LEVEL);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    SSL_CTX_set_cert_verify_callback(context, verify, NULL);
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, READ_AHEAD_BYTES);
    bool (*const take[3])(SSL_CTX *, BIO *) = {add_authorities, use_chain, use_key};
    for (int i = 0; i < 3 && good; i++) {
        BIO *pem = BIO_new_mem_buf(pems[i], -1);
        good = pem && take[i](context, pem);
        BIO_free(pem);
    }
    if (good)
        return context;
    SSL_CTX_free(context);
    return NULL;
}

int smb_tls_create(const char *ca, const char *certificate, const char *key, struct smb_tls **tls,
                   char why[SMB_WHY_BYTES])
{
    const char *const pems[3] = {ca, certificate, key};
    why[0] = 0;
    for (int i = 0; i < 3; i++)
        if (strnlen(pems[i], PEM_BYTES_MAX) == PEM_BYTES_MAX)
            return SMB_INVALID;
    struct smb_tls *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    ERR_clear_error();
    made->references = 1;
    made->server = make_context(TLS_server_method(), pems);
    made->client = made->server ? make_context(TLS_client_method(), pems) : NULL;
    if (!made->client) {
        snprintf(why, SMB_WHY_BYTES, "%s", last_error());
        ERR_clear_error();
        smb_tls_release(made);
        return SMB_INVALID;
    }
    *tls = made;
    return SMB_OK;
}

/* The next list of a text with several, as next_certificate. */
static X509_CRL *next_list(BIO *pem, bool *good)
{
    X509_CRL *one = PEM_read_bio_X509_CRL(pem, NULL, NULL, NULL);
    unsigned long error = one ? 0 : ERR_peek_last_error();
    *good = one ||
            (ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE);
    if (!one && *good)
        ERR_clear_error();
    return one;
}

static int take_lists(struct denied *denied, const char *lists)
{
    BIO *pem = BIO_new_mem_buf(lists, -1);
    bool good = true;
    denied->lists = sk_X509_CRL_new_null();
    bool room = pem && denied->lists;
    for (X509_CRL *one; room && good && (one = next_list(pem, &good));) {
        room = sk_X509_CRL_push(denied->lists, one) > 0;
        if (!room)
            X509_CRL_free(one);
    }
    BIO_free(pem);
    return !room ? SMB_OUT_OF_MEMORY : good ? SMB_OK : SMB_INVALID;
}

int smb_tls_deny(struct smb_tls *tls, const char *lists, const char *denied,
                 char why[SMB_WHY_BYTES])
{
    SMB_ASSERT(!tls->denied.lists && !tls->denied.lines);
    size_t bytes = strnlen(denied, PEM_BYTES_MAX);
    why[0] = 0;
    if (bytes == PEM_BYTES_MAX || strnlen(lists, PEM_BYTES_MAX) == PEM_BYTES_MAX)
        return SMB_INVALID;
    ERR_clear_error();
    int status = lists[0] ? take_lists(&tls->denied, lists) : SMB_OK;
    if (status == SMB_INVALID)
        snprintf(why, SMB_WHY_BYTES, "%s", last_error());
    ERR_clear_error();
    if (status != SMB_OK || bytes == 0)
        return status;
    tls->denied.lines = malloc(bytes + 2);
    if (!tls->denied.lines)
        return SMB_OUT_OF_MEMORY;
    tls->denied.lines[0] = '\n';
    memcpy(tls->denied.lines + 1, denied, bytes + 1);
    return SMB_OK;
}

struct smb_tls *tls_retain(struct smb_tls *tls)
{
    SMB_ASSERT(atomic_load_explicit(&tls->references, memory_order_relaxed) > 0);
    atomic_fetch_add_explicit(&tls->references, 1, memory_order_relaxed);
    return tls;
}

void smb_tls_release(struct smb_tls *tls)
{
    SMB_ASSERT(atomic_load_explicit(&tls->references, memory_order_relaxed) > 0);
    if (atomic_fetch_sub_explicit(&tls->references, 1, memory_order_acq_rel) != 1)
        return;
    SSL_CTX_free(tls->server);
    SSL_CTX_free(tls->client);
    sk_X509_CRL_pop_free(tls->denied.lists, X509_CRL_free);
    free(tls->denied.lines);
    free(tls);
}

/* ---- the socket below ------------------------------------------------------------------------ */

static bool keep(struct tls *tls, const uint8_t *bytes, size_t count)
{
    if (!tls->left && !(tls->left = malloc(LEFT_BYTES)))
        return false;
    if (tls->left_start == tls->left_end)
        tls->left_start = tls->left_end = 0;
    if (count > LEFT_BYTES - tls->left_end)
        return false;
    memcpy(tls->left + tls->left_end, bytes, count);
    tls->left_end += (uint32_t)count;
    return true;
}

/* Sends the kept bytes, then `bytes`, as far as the socket takes them. *taken counts bytes of
 * `bytes` only. */
static bool put(struct tls *tls, const void *bytes, size_t count, size_t *taken)
{
    size_t before = tls->left_end - tls->left_start;
    struct iovec parts[2] = {{tls->left + tls->left_start, before},
                             {(void *)(uintptr_t)bytes, count}};
    struct msghdr message = {.msg_iov = before > 0 ? parts : parts + 1,
                             .msg_iovlen = before > 0 ? 1 + (count > 0) : 1};
    ssize_t done = sendmsg(tls->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    *taken = 0;
    if (done < 0 && errno != EAGAIN && errno != EINTR) {
        tls->broken = errno;
        return false;
    }
    size_t went = done > 0 ? (size_t)done : 0, of_before = went < before ? went : before;
    tls->left_start += (uint32_t)of_before;
    *taken = went - of_before;
    return true;
}

static int bio_write(BIO *bio, const char *bytes, size_t count, size_t *written)
{
    struct tls *tls = BIO_get_data(bio);
    size_t taken = 0;
    BIO_clear_retry_flags(bio);
    if (tls->broken)
        return 0;
    if (!(tls->hold && count <= GATHER_BYTES + 256) && !put(tls, bytes, count, &taken))
        return 0;
    if (taken < count && !keep(tls, (const uint8_t *)bytes + taken, count - taken)) {
        if (taken == 0) { /* the peer makes us write much and reads nothing */
            BIO_set_retry_write(bio);
            return 0;
        }
        *written = taken;
        return 1;
    }
    *written = count;
    return 1;
}

static int bio_read(BIO *bio, char *bytes, size_t room, size_t *have)
{
    struct tls *tls = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    ssize_t done = -1;
    errno = EAGAIN;
    if (tls->may_receive && tls->looks < LOOKS_MAX) {
        tls->looks++;
        done = recv(tls->fd, bytes, room, MSG_DONTWAIT);
    }
    if (done > 0) {
        tls->may_receive = (size_t)done == room;
        *have = (size_t)done;
        return 1;
    }
    if (done < 0 && (errno == EAGAIN || errno == EINTR)) {
        tls->may_receive = false;
        BIO_set_retry_read(bio);
    } else {
        tls->broken = done == 0 ? ECONNRESET : errno;
    }
    return 0;
}

static long bio_control(BIO *bio, int command, long number, void *pointer)
{
    (void)bio, (void)number, (void)pointer;
    return command == BIO_CTRL_FLUSH || command == BIO_CTRL_DUP;
}

static BIO_METHOD *bio_method;

static void make_method(void)
{
    bio_method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "smb socket");
    if (bio_method) {
        BIO_meth_set_write_ex(bio_method, bio_write);
        BIO_meth_set_read_ex(bio_method, bio_read);
        BIO_meth_set_ctrl(bio_method, bio_control);
    }
}

/* ---- a connection ---------------------------------------------------------------------------- */

/* Starts one end of a connection. `wanted` says which peers are accepted. */
static struct tls *begin(struct smb_tls *with, int fd, const struct wanted *wanted)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_method);
    struct tls *tls = calloc(1, sizeof *tls);
    if (!tls || !bio_method) {
        free(tls);
        return NULL;
    }
    tls->fd = fd;
    tls->wanted = *wanted;
    tls->with = tls_retain(with);
    tls->ssl = SSL_new(wanted->serves ? with->client : with->server);
    BIO *bio = BIO_new(bio_method);
    if (!tls->ssl || !bio) {
        BIO_free(bio);
        tls_end(tls);
        return NULL;
    }
    BIO_set_data(bio, tls);
    BIO_set_init(bio, 1);
    SSL_set_bio(tls->ssl, bio, bio);
    SSL_set_app_data(tls->ssl, tls);
    if (wanted->serves)
        SSL_set_connect_state(tls->ssl);
    else
        SSL_set_accept_state(tls->ssl);
    return tls;
}

static bool take_host(struct wanted *wanted, const char *host)
{
    if (strlen(host) >= sizeof wanted->host)
        return false;
    strcpy(wanted->host, host);
    wanted->serves = true;
    return true;
}

struct tls *tls_begin(struct smb_tls *with, int fd, const char *expected)
{
    struct wanted wanted = {.roles = expected ? SMB_ROLE_SERVER : SMB_ROLES_OF_DATA};
    return expected && !take_host(&wanted, expected) ? NULL : begin(with, fd, &wanted);
}

struct tls *tls_begin_control(struct smb_tls *with, int fd, uint32_t role, const char *host)
{
    static const uint8_t http2[] = {2, 'h', '2'};
    struct wanted wanted = {.roles = role};
    struct tls *tls = take_host(&wanted, host) ? begin(with, fd, &wanted) : NULL;
    if (tls)
        /* this function of OpenSSL returns 0 on success */
        SSL_set_alpn_protos(tls->ssl, http2, sizeof http2);
    return tls;
}

/* After a refusal, reads what the peer still sends. Closing a socket with unread bytes would
 * discard our last message, which has the reason. */
static void linger(struct tls *tls)
{
    uint8_t nowhere[4096];
    shutdown(tls->fd, SHUT_WR);
    for (int i = 0; i < LINGER_BYTES / (int)sizeof nowhere &&
                    recv(tls->fd, nowhere, sizeof nowhere, MSG_DONTWAIT) > 0;
         i++)
        ;
}

void tls_end(struct tls *tls)
{
    if (tls->why[0] && !tls->broken)
        linger(tls);
    SSL_free(tls->ssl);
    smb_tls_release(tls->with);
    free(tls->left);
    free(tls);
}

size_t tls_unsent_bytes(const struct tls *tls)
{
    return tls->left_end - tls->left_start;
}

const char *tls_server_name(const struct tls *tls)
{
    return tls->greeted && strcmp(tls->peer.role, "server") == 0 ? tls->peer.name : "";
}

bool tls_client_certificate(const struct tls *tls, uint8_t digest[32])
{
    const X509 *peer = SSL_get0_peer_certificate(tls->ssl);
    bool client = strcmp(tls->peer.role, "client") == 0 || strcmp(tls->peer.role, "reader") == 0;
    return tls->greeted && client && peer && X509_digest(peer, EVP_sha256(), digest, NULL) == 1;
}

bool tls_still_accepts(struct tls *tls, struct smb_tls *now, int64_t now_s, int *asked)
{
    if (!tls->greeted)
        return true;
    if (now_s >= tls->peer.ends_s) {
        snprintf(tls->why, sizeof tls->why, "its certificate has expired");
        return false;
    }
    if (tls->with == now)
        return true;
    ++*asked;
    if (certificate_judge(SSL_CTX_get_cert_store(now->server), &now->denied,
                          SSL_get0_peer_certificate(tls->ssl), SSL_get_peer_cert_chain(tls->ssl),
                          &tls->wanted, &tls->peer, tls->why) != X509_V_OK)
        return false;
    smb_tls_release(tls->with);
    tls->with = tls_retain(now);
    return true;
}

bool tls_facts(const struct tls *tls, struct tls_facts *facts)
{
    static const char label[] = "EXPORTER-smb-channel";
    bool serves = SSL_is_server(tls->ssl);
    const X509 *own = SSL_get_certificate(tls->ssl), *peer = SSL_get0_peer_certificate(tls->ssl);
    return tls->greeted && own && peer &&
           SSL_export_keying_material(tls->ssl, facts->exported, sizeof facts->exported, label,
                                      sizeof label - 1, NULL, 0, 0) == 1 &&
           X509_digest(serves ? own : peer, EVP_sha256(), facts->server, NULL) == 1 &&
           X509_digest(serves ? peer : own, EVP_sha256(), facts->client, NULL) == 1;
}

int tls_certificate(const struct tls *tls, char *pem, size_t room)
{
    const X509 *peer = SSL_get0_peer_certificate(tls->ssl);
    BIO *text = BIO_new(BIO_s_mem());
    char *bytes = NULL;
    int status = peer && text && PEM_write_bio_X509(text, (X509 *)(uintptr_t)peer) == 1
                     ? SMB_OK
                     : SMB_OUT_OF_MEMORY;
    long count = status == SMB_OK ? BIO_get_mem_data(text, &bytes) : 0;
    if (status == SMB_OK && (size_t)count >= room)
        status = SMB_INVALID;
    if (status == SMB_OK) {
        memcpy(pem, bytes, (size_t)count);
        pem[count] = 0;
    }
    BIO_free(text);
    return status;
}

/* ---- certificates that were shown elsewhere -------------------------------------------------- */

int smb_tls_judge(struct smb_tls *tls, const char *chain, uint32_t roles, const char *host,
                  struct smb_holder *holder, char why[SMB_WHY_BYTES])
{
    struct wanted wanted = {.roles = roles};
    if (strnlen(chain, SHOWN_PEM_BYTES_MAX) == SHOWN_PEM_BYTES_MAX ||
        (host[0] && !take_host(&wanted, host)))
        return SMB_INVALID;
    BIO *pem = BIO_new_mem_buf(chain, -1);
    STACK_OF(X509) *others = sk_X509_new_null();
    X509 *own = pem ? PEM_read_bio_X509(pem, NULL, NULL, NULL) : NULL, *one;
    bool good = own && others;
    snprintf(why, SMB_WHY_BYTES, "it did not show a readable certificate");
    while (good && sk_X509_num(others) <= CERTIFICATES_MAX &&
           (one = next_certificate(pem, &good))) {
        good = sk_X509_push(others, one) > 0;
        if (!good)
            X509_free(one);
    }
    good = good && certificate_judge(SSL_CTX_get_cert_store(tls->client), &tls->denied, own, others,
                                     &wanted, holder, why) == X509_V_OK;
    X509_free(own);
    sk_X509_pop_free(others, X509_free);
    BIO_free(pem);
    ERR_clear_error();
    return good ? SMB_OK : SMB_UNTRUSTED;
}

const char *tls_why(const struct tls *tls)
{
    return tls->why;
}

static int kind_of_failure(struct tls *tls, int result)
{
    int kind = SSL_get_error(tls->ssl, result);
    if (kind == SSL_ERROR_WANT_READ)
        return EAGAIN;
    if (tls->broken)
        return tls->broken;
    if (kind == SSL_ERROR_ZERO_RETURN)
        return ECONNRESET;
    if (!tls->why[0]) {
        int reason = ERR_GET_REASON(ERR_peek_last_error());
        const char *text = last_error();
        if (reason > SSL_AD_REASON_OFFSET && reason < SSL_AD_REASON_OFFSET + 256)
            snprintf(tls->why, sizeof tls->why,
                     "it does not accept us as a member of its cluster (%s)", text);
        else if (kind == SSL_ERROR_WANT_WRITE)
            snprintf(tls->why, sizeof tls->why, "it does not read what we send");
        else
            snprintf(tls->why, sizeof tls->why, "it does not speak TLS as we do (%s)", text);
    }
    return EPROTO;
}

/* The errno of an OpenSSL call that failed: EAGAIN if it must be repeated once the socket has more.
 * Empties the thread's error queue, because the program may use OpenSSL itself and look at that
 * queue. */
static int failure(struct tls *tls, int result)
{
    int error = kind_of_failure(tls, result);
    ERR_clear_error();
    return error;
}

int tls_handshake(struct tls *tls)
{
    size_t taken;
    if (tls->greeted)
        return SMB_OK;
    if (tls_unsent_bytes(tls) && (!put(tls, NULL, 0, &taken) || tls_unsent_bytes(tls)))
        return tls->broken ? SMB_LINK_LOST : SMB_BUSY;
    tls->may_receive = true;
    tls->looks = 0;
    ERR_clear_error();
    int result = SSL_do_handshake(tls->ssl);
    if (result == 1) {
        tls->greeted = true;
        return SMB_OK;
    }
    int error = failure(tls, result);
    return error == EAGAIN ? SMB_BUSY : tls->why[0] ? SMB_UNTRUSTED : SMB_LINK_LOST;
}

ssize_t tls_read(struct tls *tls, const struct iovec *parts, int count)
{
    size_t total = 0;
    tls->may_receive = true;
    tls->looks = 0;
    ERR_clear_error();
    for (int i = 0; i < count; i++) {
        for (size_t at = 0, have; at < parts[i].iov_len; at += have, total += have) {
            int result = SSL_read_ex(tls->ssl, (uint8_t *)parts[i].iov_base + at,
                                     parts[i].iov_len - at, &have);
            if (result == 1) {
                tls->looks = 0;
                continue;
            }
            int error = failure(tls, result);
            if (total > 0)
                return (ssize_t)total; /* the next call will report the same failure */
            errno = error;
            return errno == ECONNRESET ? 0 : -1;
        }
    }
    return (ssize_t)total;
}

/* Writes one record. */
static bool write_record(struct tls *tls, const void *bytes, size_t count, bool more)
{
    size_t written = 0;
    if (++tls->records == RECORDS_PER_KEY) {
        tls->records = 0;
        if (SSL_key_update(tls->ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1)
            ERR_clear_error();
    }
    tls->hold = more;
    int result = SSL_write_ex(tls->ssl, bytes, count, &written);
    tls->hold = false;
    if (result == 1)
        return true;
    errno = failure(tls, result);
    /* our send function never makes OpenSSL wait, so EAGAIN is an error here */
    if (errno == EAGAIN)
        errno = EPROTO;
    return false;
}

ssize_t tls_write(struct tls *tls, const struct iovec *parts, int count)
{
    uint8_t gathered[GATHER_BYTES];
    size_t total = 0, taken;
    if (tls_unsent_bytes(tls) && !put(tls, NULL, 0, &taken)) {
        errno = tls->broken;
        return -1;
    }
    ERR_clear_error();
    for (int i = 0; i < count && !tls_unsent_bytes(tls);) {
        size_t together = 0;
        int first = i;
        while (i < count && parts[i].iov_len <= sizeof gathered - together)
            together += parts[i++].iov_len;
        const uint8_t *from = gathered;
        if (i == first + 1) {
            from = parts[first].iov_base;
        } else if (i > first) {
            uint8_t *to = gathered;
            for (int part = first; part < i; to += parts[part++].iov_len)
                if (parts[part].iov_len > 0)
                    memcpy(to, parts[part].iov_base, parts[part].iov_len);
        }
        if (together > 0) {
            if (!write_record(tls, from, together, i < count))
                return total > 0 ? (ssize_t)total : -1;
            total += together;
        }
        if (i == count)
            break;
        const uint8_t *bytes = parts[i].iov_base;
        size_t length = parts[i].iov_len;
        for (size_t at = 0; at < length && (at == 0 || !tls_unsent_bytes(tls));) {
            size_t piece = length - at < TLS_RECORD_BYTES ? length - at : TLS_RECORD_BYTES;
            if (!write_record(tls, bytes + at, piece, false))
                return total > 0 ? (ssize_t)total : -1;
            at += piece;
            total += piece;
            if (at == length)
                i++;
        }
    }
    if (total > 0 || count == 0)
        return (ssize_t)total;
    errno = EAGAIN;
    return -1;
}
