/* loop_thread.h: a loop's thread, which waits for events and gives connections their turns. */
#ifndef SMB_LOOP_THREAD_H
#define SMB_LOOP_THREAD_H

struct loop;
struct smb_server;

int loop_start(struct smb_server *server, int index);
/* Loops give connections to each other, so all loops must be stopped before the first one is
 * emptied. */
void loop_stop(struct loop *loop);
void loop_empty(struct loop *loop);

#endif
