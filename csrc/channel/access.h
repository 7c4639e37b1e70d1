/* access.h: tokens of the data plane, and how they are proved. docs/protocol.md, "Access";
 * docs/decisions.md, 0013.
 *
 * A token is a few public words (session, segment, rights, expiry) and a secret. Only the
 * coordinator and the segment's server can compute the secret, with a key that both have. The
 * client gets the secret over TLS, and it is never sent on the data plane. On each connection the
 * client shows the words, and proves the secret with an HMAC over the server's HELLO and the
 * connection's bond (bond.h). A proof that was recorded or handed on is useless on another
 * connection.
 *
 * Pure: no state, no I/O. server/grants.h has a server's keys and the tokens that it was shown. */
#ifndef SMB_ACCESS_H
#define SMB_ACCESS_H

#include "base/frame.h"
#include "channel/bond.h"
#include "smb/types.h"

/* Names one connection. A proof for one does not hold for another. */
struct access_connection {
    uint64_t nonce; /* the server's */
    uint64_t client_nonce;
    uint64_t instance;
    uint64_t session;
    uint16_t lane;
    struct bond bond;
};
/* The lane number in proofs for the control plane, which no connection uses. Nonce and instance are
 * 0, and the bond is the caller's certificate. */
enum { ACCESS_CONTROL_LANE = 0xFFFF };

/* The server's answer to a good token, sent in argument and offset of the reply. It is made with
 * the token's secret, and is valid on this connection only. */
struct access_answer {
    uint64_t words[2];
};
struct access_answer access_answer(const struct smb_token *token,
                                   const struct access_connection *connection);
bool access_same_answer(const struct access_answer *one, const struct access_answer *other);

/* Computes the secret of a token. Only the coordinator and a server with its key can do so. */
void access_secret(const uint8_t key[SMB_KEY_BYTES], uint64_t session,
                   const struct smb_token *token, uint8_t secret[SMB_KEY_BYTES]);
/* The proof that a client sends instead of the secret. */
void access_proof(const uint8_t secret[SMB_KEY_BYTES], const struct access_connection *connection,
                  uint8_t proof[SMB_KEY_BYTES]);
/* The proof that clients sent before proofs had bonds. A server computes it only to tell such a
 * client the reason of its refusal. */
void access_unbound_proof(const uint8_t secret[SMB_KEY_BYTES],
                          const struct access_connection *connection, uint8_t proof[SMB_KEY_BYTES]);
/* Writes the payload of AUTHORIZE. Segment, epoch and session are in the frame's header. */
void access_store(const struct smb_token *token, const struct access_connection *connection,
                  uint8_t payload[SMB_AUTHORIZE_BYTES]);

#endif
