/* sessions.h: which sessions have ended. A server remembers the last ENDED_MAX of them and refuses
 * these. */
#ifndef SMB_SESSIONS_H
#define SMB_SESSIONS_H

#include <stdbool.h>
#include <stdint.h>

struct smb_server;

bool session_has_ended(struct smb_server *server, uint64_t session);
/* Notes that the session has ended; waits.c releases what it held. */
void session_note_ended(struct smb_server *server, uint64_t session);

#endif
