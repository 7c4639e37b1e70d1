/* tls.h: TLS 1.3 over a non-blocking socket, by OpenSSL's libssl.
 *
 * Both ends show a certificate of the same authority. A server accepts certificates of roles that
 * may use data, and those of memory servers, which tls_server_name distinguishes. A client accepts
 * only the certificate of the memory server that it names: certificate.h.
 *
 * Data goes directly between OpenSSL and the caller's memory. Below OpenSSL this file has its own
 * send and receive functions: they always accept what OpenSSL has encrypted, and keep what the
 * socket does not take, which is sent first later. So bytes that tls_write has taken will be sent,
 * whatever happens to the caller's memory, and no record is offered to OpenSSL twice.
 *
 * Threads. A struct smb_tls is immutable, and any thread may use it. A struct tls may be used by
 * one thread at a time. */
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

/* Begins a connection's end over fd: a server's if `expected` is NULL, else that of a client that
 * wants the memory server of that name. The descriptor stays the caller's. NULL: out of memory. */
struct tls *tls_begin(struct smb_tls *with, int fd, const char *expected);
/* Begins a client's end that only looks at the peer of the control plane, by its role and name. */
struct tls *tls_begin_control(struct smb_tls *with, int fd, uint32_t role, const char *host);
/* Frees the end without sending anything. */
void tls_end(struct tls *tls);

/* Continues the handshake. SMB_OK: both ends have shown their certificates; a client learns only
 * with its first read whether the server accepts its own. SMB_BUSY: call again once the socket can
 * be read, or written if tls_unsent_bytes. SMB_UNTRUSTED: the peer has another name than expected,
 * or does not speak TLS: tls_why. SMB_LINK_LOST: the peer has closed, or the connection broke. */
int tls_handshake(struct tls *tls);

/* Like readv and writev on a non-blocking socket. After tls_read returned EAGAIN, no readable data
 * is left in here. */
ssize_t tls_read(struct tls *tls, const struct iovec *parts, int count);
ssize_t tls_write(struct tls *tls, const struct iovec *parts, int count);
/* Encrypted bytes taken by tls_write that the socket has not taken yet. tls_write, also with no
 * data, sends more of them. */
size_t tls_unsent_bytes(const struct tls *tls);
/* At a server, after the handshake: the memory server's name if the peer is one, else empty. */
const char *tls_server_name(const struct tls *tls);
/* At a server, after the handshake: the SHA-256 of the peer's certificate, in DER, if the peer is a
 * client or a reader, else false. */
bool tls_client_certificate(const struct tls *tls, uint8_t digest[32]);
/* Whether the peer's certificate still counts: it has not ended at now_s (seconds since 1970), and
 * the credentials `now` accept it. They are asked once, which takes up to half a millisecond, and
 * counted in *asked; from then on the connection keeps a reference to them. True before the
 * handshake is complete. False: tls_why. */
bool tls_still_accepts(struct tls *tls, struct smb_tls *now, int64_t now_s, int *asked);
/* Facts that only the two ends of this connection share, for proofs (bond.h). */
struct tls_facts {
    uint8_t exported[32];           /* RFC 8446, 7.5; label "EXPORTER-smb-channel", no context */
    uint8_t server[32], client[32]; /* SHA-256 of the two certificates, in DER */
};
/* False before the handshake is complete. */
bool tls_facts(const struct tls *tls, struct tls_facts *facts);
/* The peer's certificate as PEM. SMB_INVALID: it is longer than `room`. */
int tls_certificate(const struct tls *tls, char *pem, size_t room);
/* The error as text. Empty: no error, or a network error. */
const char *tls_why(const struct tls *tls);

#endif
