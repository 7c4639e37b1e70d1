/* handshake.h: who a peer is: TLS, its HELLO, its tokens. The connection's loop. */
#ifndef SMB_HANDSHAKE_H
#define SMB_HANDSHAKE_H

#include "server/connection.h"

/* The TLS handshake, as far as it goes now. */
/* Nothing is made for a peer that has said nothing. */
enum step handshake_secure(struct connection *connection);
/* Its HELLO. */
enum step handshake_greet(struct connection *connection, const struct smb_frame *frame);
/* A token. The first that is good also shows that the peer is whom its HELLO said. */
enum step handshake_authorize(struct connection *connection, const struct smb_frame *frame,
                              const uint8_t *payload);
/* What a peer of another version sent is not understood, so nothing of it is repeated. */
enum step handshake_refuse_version(struct connection *connection);

#endif
