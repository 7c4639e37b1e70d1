/* receive.h: receives answers: headers, and data directly into the caller's memory. Called by the
 * progress thread. */
#ifndef SMB_RECEIVE_H
#define SMB_RECEIVE_H

#include "client/inflight.h"

/* Reads the socket once. SMB_LINK_LOST: the connection is broken. */
int link_receive(struct smb_link *link, bool *moved);
/* Parses the received bytes into answers. */
int link_digest(struct smb_link *link);
/* Counts an answer with a wrong checksum. Returns SMB_LINK_LOST. */
int link_spoilt(struct smb_link *link);

#endif
