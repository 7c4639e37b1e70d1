#include "server/output.h"

#include <string.h>
#include <sys/socket.h>

#include "base/assert.h"
#include "channel/channel.h"
#include "server/counters.h"
#include "server/loop.h"
#include "server/server.h"

bool output_all_sent(const struct connection *connection)
{
    return connection->out_start == connection->out_end &&
           connection->tail_start == connection->tail_end &&
           !channel_unsent_bytes(&connection->channel);
}

enum step output_send(struct connection *connection, struct iovec *parts, size_t count,
                      uint64_t *sent)
{
    uint32_t replies = connection->out_end - connection->out_start;
    parts[0] = (struct iovec){connection->out + connection->out_start, replies};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    union {
        struct cmsghdr header;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control;
    if (connection->pass_fd >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &connection->pass_fd, sizeof(int));
    }
    *sent = 0;
    ssize_t done = connection->pass_fd < 0
                       ? channel_write(&connection->channel, parts, (int)count)
                       : sendmsg(connection->channel.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0)
        /* the peer is gone, which is not an error of ours */
        return channel_failed(done) ? STEP_CLOSE : STEP_ON;
    if (connection->pass_fd >= 0) {
        smb_segment_release(connection->pass_segment);
        connection->pass_segment = NULL;
        connection->pass_fd = -1;
    }
    if ((uint64_t)done >= replies) {
        *sent = (uint64_t)done - replies;
        connection->out_start = connection->out_end = 0;
        connection->replies_held = 0;
    } else {
        connection->out_start += (uint32_t)done;
    }
    return STEP_ON;
}

enum step output_flush(struct connection *connection)
{
    if (output_all_sent(connection))
        return STEP_ON;
    uint64_t sent;
    uint32_t bytes = connection->tail_end - connection->tail_start;
    struct iovec parts[2];
    if (bytes)
        parts[1] = (struct iovec){connection->tail + connection->tail_start, bytes};
    enum step step = output_send(connection, parts, bytes ? 2 : 1, &sent);
    connection->tail_start += (uint32_t)sent;
    if (connection->tail_start == connection->tail_end)
        connection->tail_start = connection->tail_end = 0;
    return step;
}

enum step output_wait_for(struct connection *connection, enum connection_wait wait)
{
    if (output_flush(connection) == STEP_CLOSE)
        return STEP_CLOSE;
    connection->wait = output_all_sent(connection) ? wait : WAIT_OUTPUT;
    return STEP_WAIT;
}

void output_put(struct connection *connection, struct smb_frame *reply)
{
    SMB_ASSERT(connection->out_end <= OUT_BYTES - SMALL_REPLY_BYTES);
    uint8_t *header = connection->out + connection->out_end;
    reply->payload = smb_frame_checksum_bytes(reply);
    smb_frame_encode(reply, header);
    connection->out_end += SMB_FRAME_BYTES;
    if (reply->payload > 0) {
        smb_store_checksum(header + SMB_FRAME_BYTES, smb_crc32c(0, header, SMB_FRAME_BYTES));
        connection->out_end += SMB_CHECKSUM_BYTES;
    }
}

void output_put_with_tail(struct connection *connection, struct smb_frame *reply, uint32_t bytes)
{
    SMB_ASSERT(connection->out_end <= OUT_BYTES - SMALL_REPLY_BYTES && connection->tail_end == 0);
    SMB_ASSERT(connection->tail && bytes <= SMB_CHUNK_BYTES_MAX);
    uint8_t *header = connection->out + connection->out_end;
    reply->payload = bytes + smb_frame_checksum_bytes(reply);
    smb_frame_encode(reply, header);
    connection->out_end += SMB_FRAME_BYTES;
    if (reply->payload > bytes)
        smb_store_checksum(
            connection->tail + bytes,
            smb_crc32c(smb_crc32c(0, header, SMB_FRAME_BYTES), connection->tail, bytes));
    connection->tail_start = 0;
    connection->tail_end = reply->payload;
}

void output_put_by_reference(struct connection *connection, struct smb_frame *reply, uint32_t bytes)
{
    SMB_ASSERT(connection->out_end <= OUT_BYTES - SMALL_REPLY_BYTES);
    SMB_ASSERT(connection->named);
    reply->payload = bytes;
    smb_frame_encode(reply, connection->out + connection->out_end);
    connection->out_end += SMB_FRAME_BYTES;
}

enum step output_refuse(struct connection *connection, int why)
{
    server_count(&connection->loop->server->errors[why], 1);
    return STEP_CLOSE;
}
