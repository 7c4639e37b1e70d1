/* tls.h: TLS 1.3 over a socket that does not block, by OpenSSL's libssl.
 *
 * Both ends show a certificate of one authority. A server takes certificates of roles that may use
 * data, and those of memory servers, which tls_server_name tells apart. A client takes the
 * certificate of the memory server that it names, and no other: certificate.h.
 *
 * Bytes go straight between OpenSSL and the caller's memory. Below OpenSSL are send and recv of our
 * own: what OpenSSL has encrypted is always taken, and what the socket does not take of it is kept
 * and goes first. So bytes that tls_write took are on their way, whatever happens to the caller's
 * memory. No record is offered to OpenSSL twice.
 *
 * Threads. A struct smb_tls is never changed once it is made, and any thread may use it. A struct
 * tls is one thread's at a time. */
#ifndef SMB_TLS_H
#define SMB_TLS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "smb/tls.h"

enum { TLS_RECORD_BYTES = 16384 };

struct tls;

struct smb_tls *tls_retain(struct smb_tls *tls);

/* The connection's end of it: a server's where `expected` is NULL, else that of a client who wants
 * the memory server of that name. NULL: no memory. The descriptor stays the caller's. */
struct tls *tls_begin(struct smb_tls *with, int fd, const char *expected);
/* A client's end, for a look at whom the control plane has there: its role, and its name. */
struct tls *tls_begin_control(struct smb_tls *with, int fd, uint32_t role, const char *host);
/* Nothing is sent. */
void tls_end(struct tls *tls);

/* SMB_OK: both have shown who they are (what the server thinks of the client's certificate a client
 * hears with its first read). SMB_BUSY: once the socket can be read, or written where
 * tls_unsent_bytes. SMB_UNTRUSTED: the peer has another name than expected, or speaks no TLS:
 * tls_why. SMB_LINK_LOST: it has closed, or its connection broke. */
int tls_handshake(struct tls *tls);

/* As readv and writev of a socket that does not block. After EAGAIN of tls_read nothing that could
 * be read is held back here. */
ssize_t tls_read(struct tls *tls, const struct iovec *parts, int count);
ssize_t tls_write(struct tls *tls, const struct iovec *parts, int count);
/* Of what tls_write took so much has not gone, encrypted: tls_write, of nothing as well, goes on
 * with it. */
size_t tls_unsent_bytes(const struct tls *tls);
/* Once the handshake is done, at a server: which memory server the peer is. Empty: it is none. */
const char *tls_server_name(const struct tls *tls);
/* What both ends of this connection know alike, and those of no other: for proofs (bond.h). */
struct tls_facts {
    uint8_t exported[32];           /* RFC 8446, 7.5; label "EXPORTER-smb-channel", no context */
    uint8_t server[32], client[32]; /* SHA-256 of their certificates, in DER */
};
/* False: the handshake is not done. */
bool tls_facts(const struct tls *tls, struct tls_facts *facts);
/* The peer's, as PEM. SMB_INVALID: there is not so much room. */
int tls_certificate(const struct tls *tls, char *pem, size_t room);
/* The error as text. Empty: none, or one of the network. */
const char *tls_why(const struct tls *tls);

#endif
