#include "server/inbox.h"

#include <unistd.h>

#include "server/connection.h"
#include "server/loop.h"

void loop_wake(struct loop *loop)
{
    uint64_t one = 1;
    /* The eventfd's counter cannot be full here. If the write failed, the loop would be awake
     * anyway. */
    if (write(loop->wake, &one, sizeof one) < 0)
        return;
}

void loop_give(struct loop *loop, struct connection *connection)
{
    pthread_mutex_lock(&loop->inbox_lock);
    connection->link = loop->inbox;
    loop->inbox = connection;
    pthread_mutex_unlock(&loop->inbox_lock);
    loop_wake(loop);
}

void wait_answered(struct wait *wait)
{
    struct loop *loop = wait->loop;
    pthread_mutex_lock(&loop->answers_lock);
    bool first = loop->answers == NULL;
    wait->next_answer = loop->answers;
    loop->answers = wait;
    pthread_mutex_unlock(&loop->answers_lock);
    if (first)
        loop_wake(loop);
}
