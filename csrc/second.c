/* The second driver: a thread that moves the bytes of links that the driver lends it, so that a large call on two connections
 * has two cores.
 *
 * It sleeps on `changed` until links are lent (`working`), and works until none of them has anything to do, or it is recalled. A
 * link whose connection broke, or that is to be closed, it leaves to the driver. Links go to and fro under `mutex`: what one driver
 * wrote the other one finds. Lending, recalling and ending are the driver's; a link that is lent is nobody else's meanwhile. */
#include "client.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    SPIN_NS = 50000, /* as the driver does, between two looks at its links, and before it sleeps for want of any */
    POLLED_MAX = 1 + SMB_SEGMENTS_PER_BUFFER_MAX
};

int second_make(struct second *second)
{
    second->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (second->wake_fd < 0)
        return SMB_SYSTEM;
    pthread_mutex_init(&second->mutex, NULL);
    pthread_cond_init(&second->changed, NULL);
    return SMB_OK;
}

/* ---- the thread */

static bool has_work(struct smb_link *link)
{
    return link_busy(link) && link_fd(link) >= 0 && !atomic_load_explicit(&link->closing, memory_order_relaxed);
}

static void sleep_on_links(struct second *second)
{
    struct pollfd pollers[POLLED_MAX];
    nfds_t count = 0;
    pollers[count++] = (struct pollfd){.fd = second->wake_fd, .events = POLLIN};
    for (struct smb_link *link = second->links; link && count < POLLED_MAX; link = link->next_lent)
        if (has_work(link))
            pollers[count++] = (struct pollfd){.fd = link_fd(link),
                                               .events = (short)(POLLIN | (link_wants_output(link) ? POLLOUT : 0))};
    poll(pollers, count, count == POLLED_MAX ? 1 : -1); /* more links than are looked at */
    uint64_t ignored;
    if (pollers[0].revents && read(second->wake_fd, &ignored, sizeof ignored) < 0)
        return;
}

static void carry(struct second *second)
{
    uint64_t last_move_ns = smb_now_ns();
    while (!atomic_load_explicit(&second->recalled, memory_order_acquire)) {
        bool moved = false, more = false;
        for (struct smb_link *link = second->links; link; link = link->next_lent) {
            if (!has_work(link))
                continue;
            moved |= link_progress(link);
            more |= has_work(link);
        }
        if (!more)
            return;
        uint64_t now_ns = smb_now_ns();
        if (moved) {
            last_move_ns = now_ns;
        } else if (now_ns - last_move_ns > SPIN_NS) {
            sleep_on_links(second);
            last_move_ns = smb_now_ns();
        } else {
            sched_yield();
        }
    }
}

/* A call that follows another closely finds it awake. */
static void look_for_work(struct second *second)
{
    uint64_t since_ns = smb_now_ns();
    while (!atomic_load_explicit(&second->working, memory_order_relaxed) && smb_now_ns() - since_ns < SPIN_NS)
        sched_yield();
}

static void *run(void *argument)
{
    struct smb_client *client = argument;
    struct second *second = &client->second;
    pthread_mutex_lock(&second->mutex);
    while (!second->quit) {
        if (!atomic_load_explicit(&second->working, memory_order_relaxed)) {
            pthread_cond_wait(&second->changed, &second->mutex);
            continue;
        }
        pthread_mutex_unlock(&second->mutex);
        carry(second);
        pthread_mutex_lock(&second->mutex);
        atomic_store_explicit(&second->working, false, memory_order_release);
        pthread_cond_broadcast(&second->changed);
        pthread_mutex_unlock(&second->mutex);
        client_wake_sleeper(client);
        look_for_work(second);
        pthread_mutex_lock(&second->mutex);
    }
    pthread_mutex_unlock(&second->mutex);
    return NULL;
}

/* Signals are for the threads of the program. */
static bool start(struct smb_client *client)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&client->second.thread, NULL, run, client) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started)
        client->second.process = getpid();
    return started;
}

/* In a child of fork the thread does not exist, and who holds the mutex nobody knows: there all is left as it is. */
void second_end(struct second *second)
{
    if (second->process != 0 && second->process != getpid())
        return;
    if (second->process != 0) {
        pthread_mutex_lock(&second->mutex);
        second->quit = true;
        pthread_cond_broadcast(&second->changed);
        pthread_mutex_unlock(&second->mutex);
        pthread_join(second->thread, NULL);
    }
    pthread_cond_destroy(&second->changed);
    pthread_mutex_destroy(&second->mutex);
    close(second->wake_fd);
}

/* ---- the driver */

bool second_has(const struct smb_client *client, const struct smb_link *link)
{
    const struct smb_link *lent = client->second.links;
    while (lent && lent != link)
        lent = lent->next_lent;
    return lent != NULL;
}

void second_lend(struct smb_client *client)
{
    struct second *second = &client->second;
    if (second->links)
        return;
    struct smb_link *lent = NULL;
    for (struct smb_link *link = client->active; link; link = link->next) {
        if (link->bulk && link->is_odd && atomic_load_explicit(&link->state, memory_order_relaxed) == LINK_UP &&
            has_work(link)) {
            link->next_lent = lent;
            lent = link;
        }
    }
    if (!lent || (second->process == 0 && !start(client))) /* without a thread the driver does it all */
        return;
    pthread_mutex_lock(&second->mutex);
    second->links = lent;
    atomic_store_explicit(&second->working, true, memory_order_relaxed); /* the mutex orders it */
    pthread_cond_broadcast(&second->changed);
    pthread_mutex_unlock(&second->mutex);
}

bool second_is_over(struct smb_client *client)
{
    if (!client->second.links)
        return false;
    bool over = !atomic_load_explicit(&client->second.working, memory_order_acquire);
    for (struct smb_link *link = client->second.links; link; link = link->next_lent)
        over |= atomic_load_explicit(&link->closing, memory_order_relaxed);
    return over;
}

void second_take_back(struct smb_client *client)
{
    struct second *second = &client->second;
    if (!second->links)
        return;
    uint64_t one = 1;
    atomic_store_explicit(&second->recalled, true, memory_order_release);
    bool wake = atomic_load_explicit(&second->working, memory_order_acquire);
    pthread_mutex_lock(&second->mutex);
    if (wake && write(second->wake_fd, &one, sizeof one) < 0)
        wake = false; /* its counter is not 0: it wakes anyway */
    while (atomic_load_explicit(&second->working, memory_order_acquire))
        pthread_cond_wait(&second->changed, &second->mutex);
    second->links = NULL;
    pthread_mutex_unlock(&second->mutex);
    atomic_store_explicit(&second->recalled, false, memory_order_relaxed);
}
