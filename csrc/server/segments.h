/* segments.h: segments come to a daemon, and go. What is served, by id: registry.h. */
#ifndef SMB_SEGMENTS_H
#define SMB_SEGMENTS_H

struct smb_server;

/* Gives all references up; the files stay. The loops have stopped. */
void segments_clear(struct smb_server *server);

#endif
