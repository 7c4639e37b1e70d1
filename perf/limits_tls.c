/* The limit inside TLS: OpenSSL on the sockets as they are, and nothing else. */
#include "limits.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

enum { DESCRIPTORS_MAX = 1024, RECORD_BYTES = 16384, READ_AHEAD_BYTES = 2 * (RECORD_BYTES + 256) };

static SSL_CTX *context;
static SSL *sessions[DESCRIPTORS_MAX];

static _Noreturn void give_up(const char *what)
{
    const char *reason = ERR_reason_error_string(ERR_peek_last_error());
    fail("TLS: %s: %s", what, reason ? reason : "no reason given");
}

/* Both ends show it; that it is nobody's costs as much as a real one. */
void tls_prepare(void)
{
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *own = X509_new();
    signal(SIGPIPE, SIG_IGN);
    if (!key || !own || !X509_set_version(own, 2) ||
        !ASN1_INTEGER_set(X509_get_serialNumber(own), 1) ||
        !X509_gmtime_adj(X509_getm_notBefore(own), -300) ||
        !X509_gmtime_adj(X509_getm_notAfter(own), 86400) ||
        !X509_NAME_add_entry_by_txt(X509_get_subject_name(own), "CN", MBSTRING_ASC,
                                    (const unsigned char *)"limits", -1, -1, 0) ||
        !X509_set_issuer_name(own, X509_get_subject_name(own)) || !X509_set_pubkey(own, key) ||
        !X509_sign(own, key, EVP_sha256())) {
        give_up("a certificate");
    }
    context = SSL_CTX_new(TLS_method());
    if (!context || !SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) ||
        !SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") ||
        !SSL_CTX_set_num_tickets(context, 0) || !SSL_CTX_use_certificate(context, own) ||
        !SSL_CTX_use_PrivateKey(context, key) ||
        !X509_STORE_add_cert(SSL_CTX_get_cert_store(context), own)) {
        give_up("a context");
    }
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                  SSL_MODE_AUTO_RETRY);
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, READ_AHEAD_BYTES);
}

void tls_begin(int socket, bool server)
{
    if (socket >= DESCRIPTORS_MAX || !(sessions[socket] = SSL_new(context)) ||
        !SSL_set_fd(sessions[socket], socket) ||
        (server ? SSL_accept(sessions[socket]) : SSL_connect(sessions[socket])) != 1) {
        give_up("a handshake");
    }
    if (plan.polling) {
        fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    }
}

ssize_t tls_move(int socket, void *at, uint64_t bytes, bool sending)
{
    SSL *session = sessions[socket];
    size_t moved = 0;
    ERR_clear_error();
    int done = sending ? SSL_write_ex(session, at, bytes, &moved)
                       : SSL_read_ex(session, at, bytes, &moved);
    if (done == 1) {
        return (ssize_t)moved;
    }
    int why = SSL_get_error(session, done);
    errno = why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE ? EAGAIN : ECONNRESET;
    return -1;
}
