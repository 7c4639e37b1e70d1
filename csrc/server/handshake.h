/* handshake.h: who a peer is: TLS, its HELLO, its tokens. The connection's loop. */
#ifndef SMB_HANDSHAKE_H
#define SMB_HANDSHAKE_H

#include "server/connection.h"

/* The TLS handshake, as far as it goes now. */
/* Nothing is made for a peer that has said nothing. */
enum step handshake_secure(struct connection *connection);
/* Its HELLO. */
enum step handshake_greet(struct connection *connection, const struct smb_frame *frame);
/* A token. The first good one also proves the session that HELLO named. */
enum step handshake_authorize(struct connection *connection, const struct smb_frame *frame,
                              const uint8_t *payload);
/* It has shown that it may: the connection is the one of its session and lane from here on. */
void handshake_speak_for_lane(struct connection *connection);
/* The peer learns why before it is closed. */
enum step handshake_refuse(struct connection *connection, const struct smb_frame *frame,
                           int status);
/* Frames of another version are not understood, so the reply repeats nothing of them. */
enum step handshake_refuse_version(struct connection *connection);

#endif
