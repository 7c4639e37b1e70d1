/* Requests that wait by nature: begun, and waited for as often as one likes. */
#include <stdlib.h>

#include "base/clock.h"
#include "client/call.h"
#include "client/client.h"
#include "client/link.h"

struct smb_asking {
    struct smb_ask ask;
    struct smb_told told;
    struct call call;
    struct stream stream;
};

int smb_ask_start(struct smb_link *link, const struct smb_ask *ask, struct smb_asking **asking)
{
    struct smb_asking *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->ask = *ask;
    made->call.deadline_ns = UINT64_MAX;
    made->call.streams = &made->stream;
    made->call.stream_count = 1;
    made->call.streams_left = 1;
    made->stream = (struct stream){.call = &made->call, .link = link_retain(link), .ask = &made->ask, .told = &made->told,
                                   .have_piece = true, .segment_id = ask->segment, .epoch = ask->epoch};
    client_submit(link->client, &made->call);
    *asking = made;
    return SMB_OK;
}

int smb_ask_wait(struct smb_asking *asking, uint32_t timeout_ms, struct smb_told *told)
{
    uint64_t until_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    struct smb_client *client = asking->stream.link->client;
    if (!client_wait(client, &asking->call, until_ns, NULL, NULL))
        return SMB_BUSY;
    *told = asking->told;
    return told->status;
}

void smb_ask_end(struct smb_asking *asking)
{
    struct smb_client *client = asking->stream.link->client;
    /* If it is not done, the driver gives it up in its next round. */
    atomic_store(&asking->call.deadline_ns, 0);
    client_wake_driver(client);
    client_wait(client, &asking->call, UINT64_MAX, NULL, NULL);
    link_release(asking->stream.link);
    free(asking);
}
