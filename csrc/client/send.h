/* send.h: streams become frames, and frames go to the socket. The progress thread's. */
#ifndef SMB_SEND_H
#define SMB_SEND_H

#include "client/inflight.h"

/* The stream goes to the end of the link's queue. */
void link_enqueue(struct smb_link *link, struct stream *stream);
/* The stream at the head of the queue leaves it. */
void link_dequeue(struct smb_link *link);
void link_take_out_of_queue(struct smb_link *link, struct stream *stream);
/* Streams take turns, so that a small call is not held up behind a large one. */
void send_fill_window(struct smb_link *link);
/* Of several lanes: lets go of the streams that have nothing left to take, whether or not this lane
 * has a connection. */
void send_drop_empty(struct smb_link *link);
/* Unsent frames from the callers' memory straight to the socket. */
int send_some(struct smb_link *link, bool *moved);

#endif
