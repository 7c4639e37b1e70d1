/* client.h: a session: its links to servers, and the calls that are sent over them.
 *
 * I/O. Of the threads that wait for a call, one is the progress thread. It moves the bytes of all
 * calls on all links of the client. When its own call is done, another waiting thread takes over.
 * So a lone caller sends and receives by itself, without a wakeup in between, and many callers
 * share the links and fill them. The client has one thread of its own, for async operations
 * (async.h), which is such a caller.
 *
 * Ownership. `mutex` guards: has_progress_thread, arrivals, rung, each call's `done` and `waits`,
 * and which links want a connection. Everything else in links, streams, calls and unknown outcomes
 * belongs to the progress thread. */
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
    /* the owner's and one for each link: a garbage collector may free them in any order */
    _Atomic uint32_t references;
    uint64_t session;
    bool checksums;   /* set before the first link is made */
    bool wants_proof; /* set before the first link is made */
    pid_t pid;        /* the process that made it */
    _Atomic uint64_t spoilt;
    pthread_mutex_t mutex;
    pthread_cond_t link_wanted;
    bool has_progress_thread;
    bool sleeping; /* the progress thread is in poll and must be woken */
    bool rung;     /* a bell rang since the progress thread last slept */
    _Atomic bool closing;
    _Atomic uint64_t links_made;
    /* last sequence number used, shared by all links: a later link of a lane continues above the
     * numbers of earlier ones */
    _Atomic uint64_t sequences;
    struct smb_link *links; /* all links that are not freed */
    struct call *arrivals;
    int wake_fd;
    /* used only by the progress thread */
    struct call *calls; /* calls in progress */
    struct smb_link *active;
};

/* interval at which a blocking call asks whether it shall end, for Ctrl-C */
enum { LOOK_MS = 100 };

/* Whether the call of this thread shall end; see smb_set_look. Call it without locks. */
bool client_look(void);
/* Whether a function was set. */
bool client_has_look(void);
struct smb_client *client_retain(struct smb_client *client);
void client_release(struct smb_client *client);
void client_wake_progress(struct smb_client *client);
/* False in a child of fork, which has a mere copy: the connections are the parent's, and a thread
 * that the child lacks may hold the mutex. */
bool client_is_ours(const struct smb_client *client);

/* The flags of every frame that the client sends. */
static inline uint16_t client_frame_flags(const struct smb_client *client)
{
    return client->checksums ? SMB_FLAG_CHECKSUM : 0;
}

#endif
