#include "fake_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

static bool receive_all(int fd, void *bytes, size_t count)
{
    for (size_t done = 0; done < count;) {
        ssize_t n = recv(fd, (uint8_t *)bytes + done, count - done, 0);
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

/* Sends the right answer, except for what the test spoils. Data of an answer is the byte 7. */
static bool answer(struct fake_server *fake, int fd, const struct smb_frame *request)
{
    static const uint8_t sevens[1024] = {[0 ... 1023] = 7};
    uint8_t bytes[SMB_FRAME_BYTES + sizeof sevens];
    struct smb_frame reply = smb_frame_reply(request, SMB_OK);
    if (request->opcode == SMB_READ || request->flags & SMB_FLAG_FETCH)
        reply.length = reply.payload = request->length;
    if (fake->spoil && request->opcode == fake->spoil_opcode)
        fake->spoil(&reply);
    smb_frame_encode(&reply, bytes);
    uint32_t payload = reply.payload < sizeof sevens ? reply.payload : sizeof sevens;
    memcpy(bytes + SMB_FRAME_BYTES, sevens, payload);
    int count = (int)(SMB_FRAME_BYTES + payload);
    bool cut = request->opcode != SMB_HELLO && fake->answer_bytes_max >= 0 &&
               fake->answer_bytes_max < count;
    if (cut)
        count = fake->answer_bytes_max;
    return send(fd, bytes, (size_t)count, MSG_NOSIGNAL) == count && !cut;
}

static void serve(struct fake_server *fake, int fd)
{
    for (;;) {
        uint8_t bytes[SMB_FRAME_BYTES], payload[1024];
        struct smb_frame request;
        if (!receive_all(fd, bytes, sizeof bytes))
            return;
        CHECK_EQ(smb_frame_parse(bytes, &request), SMB_OK);
        CHECK(request.payload <= sizeof payload);
        if (!receive_all(fd, payload, request.payload))
            return;
        bool hello = request.opcode == SMB_HELLO;
        fake->requests += !hello;
        if (hello ? fake->silent_at_hello : fake->silent)
            continue;
        if (!answer(fake, fd, &request) || (hello && fake->hang_up_after_hello))
            return;
    }
}

static void *run(void *argument)
{
    struct fake_server *fake = argument;
    int fd = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0);
    fake->connection = fd;
    serve(fake, fd);
    close(fd);
    return NULL;
}

void fake_server_start(struct fake_server *fake)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof name;
    fake->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fake->listener >= 0);
    CHECK_EQ(bind(fake->listener, (struct sockaddr *)&name, sizeof name), 0);
    CHECK_EQ(listen(fake->listener, 8), 0);
    CHECK_EQ(getsockname(fake->listener, (struct sockaddr *)&name, &length), 0);
    fake->port = ntohs(name.sin_port);
    CHECK_EQ(pthread_create(&fake->thread, NULL, run, fake), 0);
}

void fake_server_join(struct fake_server *fake)
{
    pthread_join(fake->thread, NULL);
    close(fake->listener);
}
