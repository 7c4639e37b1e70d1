/* segments.h: segments are added to a daemon and removed. registry.h finds the served ones by
 * id. */
#ifndef SMB_SEGMENTS_H
#define SMB_SEGMENTS_H

struct smb_server;

/* Releases all segments; the files stay. The loops must have stopped. */
void segments_clear(struct smb_server *server);

#endif
