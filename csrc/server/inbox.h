/* inbox.h: what any thread may give a loop: a connection, or the answer to a wait. The loop takes
 * both at its next turn (loop_thread.c). */
#ifndef SMB_INBOX_H
#define SMB_INBOX_H

struct connection;
struct loop;
struct wait;

/* Wakes a loop. */
void loop_wake(struct loop *loop);
/* Gives a loop a connection, which is new or was taken out of its own loop. */
void loop_give(struct loop *loop, struct connection *connection);
/* Gives a wait, whose `answer` is set, to its connection's loop. */
void wait_answered(struct wait *wait);

#endif
