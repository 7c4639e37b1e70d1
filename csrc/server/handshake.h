/* handshake.h: who a peer is: TLS, its HELLO, its tokens. Called by the connection's loop. */
#ifndef SMB_HANDSHAKE_H
#define SMB_HANDSHAKE_H

#include "server/connection.h"

/* Continues the TLS handshake as far as it can go now. */
/* No memory is allocated for a peer that has sent nothing. */
enum step handshake_secure(struct connection *connection);
/* Answers a HELLO. */
enum step handshake_greet(struct connection *connection, const struct smb_frame *frame);
/* Answers an AUTHORIZE. The first good token also proves the session that HELLO named. */
enum step handshake_authorize(struct connection *connection, const struct smb_frame *frame,
                              const uint8_t *payload);
/* From here on this connection is the one of its session and lane. Call it once the peer has shown
 * its right to that. */
void handshake_speak_for_lane(struct connection *connection);
/* Tells the peer the reason, then closes the connection. */
enum step handshake_refuse(struct connection *connection, const struct smb_frame *frame,
                           int status);
/* Frames of another protocol version cannot be parsed, so the reply repeats no field of them. */
enum step handshake_refuse_version(struct connection *connection);

#endif
