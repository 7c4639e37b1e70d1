/* client.h: a session: its links to servers, and the calls that travel on them.
 *
 * I/O. Of the threads that wait for a call, one is the progress thread. It moves the bytes of all
 * calls on all links of the client. When its own call is done, another waiting thread takes over.
 * So a lone caller sends and receives by itself, without a wake-up in between. Many callers share
 * the links and fill them. The client has one thread of its own, for async operations (async.h),
 * which is such a caller.
 *
 * Ownership. `mutex` guards: has_progress_thread, arrivals, rung, each call's `done` and `waits`,
 * and which links want a connection. All else of links, streams, calls and unknown outcomes belongs
 * to the progress thread.
 */
#ifndef SMB_CLIENT_H
#define SMB_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/frame.h"
#include "base/stats.h"
#include "smb/client.h"

struct call;
struct smb_link;

struct smb_client {
    struct client_stats stats;
    /* its owner's and one for each link: a garbage collector may free them in any order */
    _Atomic uint32_t references;
    uint64_t session;
    bool checksums;   /* from before its first link */
    bool wants_proof; /* likewise */
    _Atomic uint64_t spoilt;
    pthread_mutex_t mutex;
    pthread_cond_t link_wanted;
    bool has_progress_thread;
    bool sleeping; /* the progress thread is in poll: wake it */
    bool rung;     /* a bell, since the progress thread slept last */
    _Atomic bool closing;
    _Atomic uint64_t links_made;
    /* numbers used, by all links: one lane's later link goes on above what its earlier ones used */
    _Atomic uint64_t sequences;
    struct smb_link *links; /* all that are not freed */
    struct call *arrivals;
    int wake_fd;
    /* the progress thread's */
    struct call *calls; /* in progress */
    struct smb_link *active;
};

enum { LOOK_MS = 100 }; /* so often a blocking call sees whether it is wanted still: Ctrl-C */

/* Whether the call of this thread is to be given up; see smb_set_look. Nothing is locked. */
bool client_look(void);
/* Whether there is anything to be looked at. */
bool client_has_look(void);
struct smb_client *client_retain(struct smb_client *client);
void client_release(struct smb_client *client);
void client_wake_progress(struct smb_client *client);

/* Of every frame that the client sends. */
static inline uint16_t client_frame_flags(const struct smb_client *client)
{
    return client->checksums ? SMB_FLAG_CHECKSUM : 0;
}

#endif
