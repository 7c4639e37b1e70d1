#include "pump.h"
#include "smb/segment.h"
#include "smb/server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

uint64_t rig_segment_id(int number, uint32_t index)
{
    return (uint64_t)number * 100 + index + 1;
}

const char *rig_segment_path(int number, uint32_t index)
{
    char name[32];
    snprintf(name, sizeof name, "segment-%d-%u", number, index);
    return scratch_path(name);
}

void rig_add_buffer(struct rig *rig, int number)
{
    for (uint32_t i = 0; i < rig->layout.segment_count; i++)
        CHECK_EQ(smb_server_create_segment(
                     rig->servers[i % RIG_SERVERS], rig_segment_path(number, i),
                     rig_segment_id(number, i), RIG_EPOCH, rig->dtype,
                     smb_layout_segment_bytes(&rig->layout, i), rig->layout.chunk_bytes),
                 SMB_OK);
}

void rig_start(struct rig *rig, struct smb_layout layout, int dtype)
{
    *rig = (struct rig){.layout = layout, .dtype = dtype};
    CHECK_EQ(smb_layout_check(&layout), SMB_OK);
    CHECK(layout.segment_count <= RIG_SEGMENTS_MAX);
    for (int i = 0; i < RIG_SERVERS; i++) {
        CHECK_EQ(smb_server_create(1000 + (uint64_t)i, 1 + i, (uint64_t)1 << 30, &rig->servers[i]),
                 SMB_OK);
        CHECK_EQ(smb_server_listen_tcp(rig->servers[i], "127.0.0.1", 0, &rig->ports[i]), SMB_OK);
        strcpy(rig->sockets[i], scratch_path(i ? "socket-1" : "socket-0"));
        CHECK_EQ(smb_server_listen_unix(rig->servers[i], rig->sockets[i]), SMB_OK);
    }
    rig_add_buffer(rig, 0);
}

void rig_stop(struct rig *rig)
{
    for (int i = 0; i < RIG_SERVERS; i++)
        smb_server_destroy(rig->servers[i]);
}

static void set_local(struct reach *reach, struct smb_buffer *buffer, struct smb_link *link,
                      int number, uint32_t index)
{
    struct smb_segment *segment;
    CHECK_EQ(
        smb_link_attach(link, rig_segment_id(number, index), RIG_EPOCH, RIG_TIMEOUT_MS, &segment),
        SMB_OK);
    CHECK_EQ(smb_buffer_set_local(buffer, index, segment), SMB_OK);
    if (number == 0)
        reach->segments[index] = segment;
    else
        smb_segment_release(segment); /* the buffer has its own reference */
}

struct smb_buffer *reach_buffer(struct reach *reach, struct rig *rig, enum way way, int number)
{
    struct smb_buffer *buffer;
    CHECK_EQ(smb_buffer_create(reach->client, &rig->layout, rig->dtype, &buffer), SMB_OK);
    struct smb_link *attaching[RIG_SERVERS] = {NULL};
    for (uint32_t i = 0; i < rig->layout.segment_count; i++) {
        uint32_t server = i % RIG_SERVERS;
        bool local = way == BY_MAPPING || (way == BY_BOTH && i % 2 == 0);
        if (!local) {
            CHECK_EQ(smb_buffer_set_link(buffer, i, rig_segment_id(number, i), RIG_EPOCH,
                                         reach->links[server]),
                     SMB_OK);
            continue;
        }
        uint64_t instance;
        if (!attaching[server])
            CHECK_EQ(smb_client_connect_unix(reach->client, rig->sockets[server], 9, RIG_TIMEOUT_MS,
                                             &attaching[server], &instance),
                     SMB_OK);
        set_local(reach, buffer, attaching[server], number, i);
    }
    for (int i = 0; i < RIG_SERVERS; i++)
        if (attaching[i])
            smb_link_close(attaching[i]);
    return buffer;
}

void reach_make(struct reach *reach, struct rig *rig, enum way way, uint64_t session)
{
    /* unique sessions: a lane of a session has one connection, and a second one would fence the
     * first */
    static _Atomic uint32_t reaches;
    *reach = (struct reach){0};
    session ^= (uint64_t)getpid() << 40 | (uint64_t)(++reaches) << 20;
    CHECK_EQ(smb_client_create(session, &reach->client), SMB_OK);
    for (int i = 0; i < RIG_SERVERS; i++) {
        uint64_t instance = 0;
        if (way == BY_UNIX)
            CHECK_EQ(smb_client_connect_unix(reach->client, rig->sockets[i], 1, RIG_TIMEOUT_MS,
                                             &reach->links[i], &instance),
                     SMB_OK);
        else if (way == BY_REFERENCE) {
            reach->pumps[i] = calloc(1, sizeof *reach->pumps[i]);
            pump_start(reach->pumps[i], rig->servers[i]);
            CHECK_EQ(smb_client_connect_reference(reach->client, reach->pumps[i]->client_end, 1,
                                                  RIG_TIMEOUT_MS, &reach->links[i], &instance),
                     SMB_OK);
        } else
            CHECK_EQ(smb_client_connect_tcp(reach->client, "127.0.0.1", rig->ports[i], 1,
                                            RIG_TIMEOUT_MS, &reach->links[i], &instance),
                     SMB_OK);
        CHECK_EQ(instance, 1000 + i);
    }
    reach->buffer = reach_buffer(reach, rig, way, 0);
}

void reach_end(struct reach *reach)
{
    smb_buffer_destroy(reach->buffer);
    for (int i = 0; i < RIG_SEGMENTS_MAX; i++)
        if (reach->segments[i])
            smb_segment_release(reach->segments[i]);
    for (int i = 0; i < RIG_SERVERS; i++)
        smb_link_close(reach->links[i]);
    smb_client_destroy(reach->client);
    for (int i = 0; i < RIG_SERVERS; i++) {
        if (reach->pumps[i])
            pump_join(reach->pumps[i]);
        free(reach->pumps[i]);
    }
}

struct smb_outcome must(struct smb_buffer *buffer, struct smb_request request)
{
    struct smb_outcome outcome;
    request.timeout_ms = RIG_TIMEOUT_MS;
    CHECK_EQ(smb_transfer(buffer, &request, &outcome), SMB_OK);
    CHECK_EQ(outcome.status, SMB_OK);
    CHECK_EQ(outcome.bytes_applied, request.bytes);
    return outcome;
}

int reach_try(struct smb_buffer *buffer, struct smb_request request)
{
    struct smb_outcome outcome;
    if (request.timeout_ms == 0)
        request.timeout_ms = RIG_TIMEOUT_MS;
    CHECK_EQ(smb_transfer(buffer, &request, &outcome), outcome.status);
    smb_outcome_release(&outcome);
    return outcome.status;
}

int raw_connect(uint16_t port)
{
    struct sockaddr_in name = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&name, sizeof name), 0);
    return fd;
}
