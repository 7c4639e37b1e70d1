#include "client/wait.h"

#include <time.h>

#include "base/clock.h"
#include "client/progress.h"

/* Call with the mutex held. Finds a progress thread if another call needs one. */
static void hand_over(struct smb_client *client)
{
    client->has_progress_thread = false;
    struct call *const lists[] = {client->calls, client->arrivals};
    for (int i = 0; i < 2; i++) {
        for (struct call *heir = lists[i]; heir; heir = heir->next) {
            if (heir->waits) {
                pthread_cond_signal(&heir->wake);
                return;
            }
        }
    } /* threads that do not wait are about to check whether there is a progress thread */
}

static void make_wake(struct call *call)
{
    if (!call->has_wake)
        pthread_cond_init(&call->wake, NULL);
    call->has_wake = true;
}

/* Call with the mutex held. */
static void sleep_caller(struct smb_client *client, struct call *call, uint64_t until_ns)
{
    make_wake(call);
    call->waits = true;
    if (until_ns == UINT64_MAX) {
        pthread_cond_wait(&call->wake, &client->mutex);
    } else {
        struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                                 .tv_nsec = (long)(until_ns % 1000000000U)};
        pthread_cond_clockwait(&call->wake, &client->mutex, CLOCK_MONOTONIC, &until);
    }
    call->waits = false;
}

bool call_wait(struct smb_client *client, struct call *call, uint64_t until_ns,
               bool (*work)(void *), void *work_argument)
{
    pthread_mutex_lock(&client->mutex);
    while ((!call->done || work) && smb_now_ns() < until_ns) {
        if (work && (client->has_progress_thread || call->done)) {
            /* Another thread may have completed the call's frames before this one began its own
             * part. */
            pthread_mutex_unlock(&client->mutex);
            bool more = true;
            while (more && smb_now_ns() < until_ns)
                more = work(work_argument);
            work = more ? work : NULL;
            pthread_mutex_lock(&client->mutex);
        } else if (!client->has_progress_thread) {
            client->has_progress_thread = true;
            pthread_mutex_unlock(&client->mutex);
            if (progress_run(client, call, until_ns, work, work_argument))
                work = NULL;
            pthread_mutex_lock(&client->mutex);
            hand_over(client);
        } else {
            sleep_caller(client, call, until_ns);
        }
    }
    bool done = call->done && !work;
    if (!call->done && !client->has_progress_thread)
        hand_over(client); /* this thread may have been chosen as the next progress thread */
    pthread_mutex_unlock(&client->mutex);
    if (done && call->has_wake) {
        pthread_cond_destroy(&call->wake);
        call->has_wake = false;
    }
    return done;
}

void call_run(struct smb_client *client, struct call *call, bool (*work)(void *),
              void *work_argument)
{
    call_submit(client, call);
    while (!call_wait(client, call,
                      client_has_look() ? smb_now_ns() + LOOK_MS * 1000000U : UINT64_MAX, work,
                      work_argument)) {
        if (call->stopped || !client_look())
            continue;
        /* Ends as a late call: what was sent has an unknown outcome, and nothing more is sent. */
        call->stopped = true;
        atomic_store(&call->deadline_ns, 0);
        client_wake_progress(client);
    }
}

int smb_unknown_resolve(struct smb_client *client, struct smb_unknown *unknown, uint32_t timeout_ms)
{
    struct smb_outcome outcome = {0};
    struct call call = {.outcome = &outcome,
                        .deadline_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U,
                        .streams_left = 1,
                        .resolves = unknown};
    call_run(client, &call, NULL, NULL);
    return outcome.status;
}
