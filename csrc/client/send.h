/* send.h: makes frames from streams, and sends them. Called by the progress thread. */
#ifndef SMB_SEND_H
#define SMB_SEND_H

#include "client/inflight.h"

/* Appends the stream to the link's queue. */
void link_enqueue(struct smb_link *link, struct stream *stream);
/* Removes the stream at the head of the queue. */
void link_dequeue(struct smb_link *link);
void link_take_out_of_queue(struct smb_link *link, struct stream *stream);
/* Streams take turns, so that a small call is not held up behind a large one. */
void send_fill_window(struct smb_link *link);
/* With several lanes: removes the streams that have nothing left to take, also if this lane has no
 * connection. */
void send_drop_empty(struct smb_link *link);
/* Sends unsent frames, directly from the callers' memory. */
int send_some(struct smb_link *link, bool *moved);

#endif
