/* Requests that may wait: sent once, then waited for any number of times. */
#include <stdlib.h>

#include "base/clock.h"
#include "client/call.h"
#include "client/client.h"
#include "client/link.h"
#include "client/wait.h"

struct smb_pending {
    struct smb_ask ask;
    struct smb_reply reply;
    struct call call;
    struct stream stream;
};

int smb_ask_start(struct smb_link *link, const struct smb_ask *ask, struct smb_pending **pending)
{
    int may = ask->opcode == SMB_AUTHORIZE ? SMB_OK : link_may_use(link);
    if (may != SMB_OK)
        return may;
    struct smb_pending *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->ask = *ask;
    made->call.deadline_ns = UINT64_MAX;
    made->call.streams = &made->stream;
    made->call.stream_count = 1;
    made->call.streams_left = 1;
    made->stream = (struct stream){.call = &made->call,
                                   .link = link_retain(link),
                                   .ask = &made->ask,
                                   .reply = &made->reply,
                                   .have_piece = true,
                                   .segment_id = ask->segment,
                                   .epoch = ask->epoch};
    call_submit(link->client, &made->call);
    *pending = made;
    return SMB_OK;
}

int smb_ask_wait(struct smb_pending *pending, uint32_t timeout_ms, struct smb_reply *reply)
{
    uint64_t until_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    struct smb_client *client = pending->stream.link->client;
    if (!call_wait(client, &pending->call, until_ns, NULL, NULL))
        return SMB_BUSY;
    *reply = pending->reply;
    return reply->status;
}

void smb_ask_end(struct smb_pending **request)
{
    struct smb_pending *pending = *request;
    if (!pending || !client_is_ours(pending->stream.link->client))
        return;
    *request = NULL;
    struct smb_client *client = pending->stream.link->client;
    /* If the call is not done, the progress thread gives it up in its next round. */
    atomic_store(&pending->call.deadline_ns, 0);
    client_wake_progress(client);
    call_wait(client, &pending->call, UINT64_MAX, NULL, NULL);
    link_release(pending->stream.link);
    free(pending);
}
