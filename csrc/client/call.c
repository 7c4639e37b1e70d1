#include "client/call.h"

#include "base/assert.h"
#include "client/client.h"

void call_failed(struct stream *stream, int status)
{
    struct smb_outcome *outcome = stream->call->outcome;
    stream->call->failed = true;
    if (stream->reply) {
        if (stream->reply->status == SMB_OK)
            stream->reply->status = status;
        return;
    }
    if (outcome->status == SMB_OK) {
        outcome->status = status;
        outcome->segment = stream->segment_index;
    }
}

void call_applied(struct stream *stream, uint32_t bytes, uint64_t result)
{
    stream->call->outcome->bytes_applied += bytes;
    stream->call->outcome->result = result;
}

void call_note_sent(struct call *call)
{
    call->outcome->sent = 1;
}

bool call_was_sent(const struct stream *stream)
{
    return stream->reply ? stream->reply->sent : stream->call->outcome->sent;
}

void call_stream_finished(struct stream *stream)
{
    SMB_ASSERT(stream->call->streams_left > 0);
    stream->call->streams_left--;
}

void call_submit(struct smb_client *client, struct call *call)
{
    SMB_ASSERT(!call->done && call->streams_left >= call->stream_count);
    pthread_mutex_lock(&client->mutex);
    call->next = client->arrivals;
    client->arrivals = call;
    if (client->sleeping)
        client_wake_progress(client);
    pthread_mutex_unlock(&client->mutex);
}

void call_ring(struct smb_client *client, struct call *bell)
{
    SMB_ASSERT(bell->is_bell);
    pthread_mutex_lock(&client->mutex);
    if (!atomic_exchange(&bell->rung, true)) {
        client->rung = true;
        if (client->sleeping)
            client_wake_progress(client);
    }
    pthread_mutex_unlock(&client->mutex);
}

void call_rearm(struct call *bell)
{
    SMB_ASSERT(bell->is_bell);
    bell->done = false;
    /* pairs with call_ring and the progress thread's ring: what they rang for is visible after
     * this */
    atomic_exchange(&bell->rung, false);
}
