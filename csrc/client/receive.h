/* receive.h: answers: headers, and data straight to the caller's memory. The progress thread's. */
#ifndef SMB_RECEIVE_H
#define SMB_RECEIVE_H

#include "client/inflight.h"

/* One look at the socket. SMB_LINK_LOST: the connection is broken. */
int link_receive(struct smb_link *link, bool *moved);
/* Makes answers of the received bytes. */
int link_digest(struct smb_link *link);
/* Counts an answer with a wrong checksum. Returns SMB_LINK_LOST. */
int link_spoilt(struct smb_link *link);

#endif
