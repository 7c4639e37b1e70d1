/* inbox.h: what any thread may put into a loop: a connection, an answer to a wait. The loop takes
 * both at its next turn (loop_thread.c). */
#ifndef SMB_INBOX_H
#define SMB_INBOX_H

struct connection;
struct loop;
struct wait;

/* Wakes a loop. */
void loop_wake(struct loop *loop);
/* Gives it a connection, which has no loop yet or was taken out of its own. */
void loop_give(struct loop *loop, struct connection *connection);
/* `answer` is set: it goes to the connection's loop. */
void wait_answered(struct wait *wait);

#endif
