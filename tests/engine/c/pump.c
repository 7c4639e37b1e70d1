#include "pump.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include "base/frame.h"
#include "smb/server.h"

static bool read_whole(int fd, uint8_t *bytes, size_t count)
{
    return recv(fd, bytes, count, MSG_WAITALL) == (ssize_t)count;
}

static bool write_whole(int fd, const uint8_t *bytes, size_t count)
{
    return send(fd, bytes, count, MSG_NOSIGNAL) == (ssize_t)count;
}

static uint64_t take_slot(struct pump *pump)
{
    for (uint64_t i = 0; i < PUMP_SLOTS; i++) {
        if (!pump->busy[i]) {
            pump->busy[i] = true;
            return i;
        }
    }
    return SMB_NO_SLOT;
}

/* Forwards one record to the server, with a slot if it needs one. */
static bool forward(struct pump *pump)
{
    uint8_t record[SMB_RECORD_BYTES];
    struct smb_frame frame;
    if (!read_whole(pump->client, record, sizeof record))
        return false;
    CHECK_EQ(smb_frame_parse(record, &frame), SMB_OK);
    uint8_t *ends = record + SMB_RECORD_ENDS_AT;
    uint64_t source = smb_load64(ends), sink = smb_load64(ends + 8), bytes = smb_load64(ends + 16),
             slot = SMB_NO_SLOT;
    bool carries = frame.opcode == SMB_WRITE || frame.opcode == SMB_ACCUMULATE;
    if (carries || frame.opcode == SMB_READ) {
        slot = take_slot(pump);
        CHECK(slot != SMB_NO_SLOT);
    }
    if (carries)
        memcpy(smb_slots_payload(pump->slots, (uint32_t)slot), (const void *)(uintptr_t)source,
               (uint32_t)bytes);
    smb_store64(ends, slot);
    smb_store64(ends + 8, 0);
    int i = 0;
    while (pump->pending[i].sequence != 0)
        CHECK(++i < PUMP_PENDING);
    pump->pending[i].sequence = frame.sequence;
    pump->pending[i].sink = sink;
    pump->pending[i].slot = slot;
    pump->forwarded++;
    return write_whole(pump->server, record, sizeof record);
}

/* Forwards one answer to the client, after its data. */
static bool answer(struct pump *pump)
{
    uint8_t header[SMB_FRAME_BYTES];
    struct smb_frame frame;
    if (!read_whole(pump->server, header, sizeof header))
        return false;
    CHECK_EQ(smb_frame_parse(header, &frame), SMB_OK);
    for (int i = 0; frame.opcode != SMB_HELLO && i < PUMP_PENDING; i++) {
        if (pump->pending[i].sequence != frame.sequence)
            continue;
        uint64_t slot = pump->pending[i].slot;
        if (frame.payload > 0)
            memcpy((void *)(uintptr_t)pump->pending[i].sink,
                   smb_slots_payload(pump->slots, (uint32_t)slot), frame.payload);
        if (slot != SMB_NO_SLOT)
            pump->busy[slot] = false;
        pump->pending[i].sequence = 0;
    }
    pump->answered++;
    return write_whole(pump->client, header, sizeof header);
}

static void *run(void *argument)
{
    struct pump *pump = argument;
    uint8_t hello[SMB_FRAME_BYTES];
    bool on = read_whole(pump->client, hello, sizeof hello) &&
              write_whole(pump->server, hello, sizeof hello);
    while (on && !atomic_load(&pump->broken)) {
        bool room = false;
        for (int i = 0; i < PUMP_SLOTS; i++)
            room |= !pump->busy[i];
        struct pollfd pollers[2] = {{.fd = room ? pump->client : -1, .events = POLLIN},
                                    {.fd = pump->server, .events = POLLIN}};
        CHECK(poll(pollers, 2, 20) >= 0);
        /* Data of a side that hung up does not matter any more. The client's hang-up is noticed
         * also when there is no room. */
        char byte;
        if (recv(pump->client, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
            break;
        if (pollers[1].revents)
            on = answer(pump);
        else if (pollers[0].revents)
            on = forward(pump);
        on &= pump->break_after == 0 || pump->answered < pump->break_after;
    }
    close(pump->server);
    close(pump->client);
    return NULL;
}

void pump_start(struct pump *pump, struct smb_server *server)
{
    int of_client[2], of_server[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, of_client), 0);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, of_server), 0);
    CHECK_EQ(smb_server_take_slots(server, PUMP_SLOTS, &pump->slots), SMB_OK);
    CHECK_EQ(smb_server_adopt_reference(server, of_server[0], pump->slots), SMB_OK);
    pump->server = of_server[1];
    pump->client = of_client[0];
    pump->client_end = of_client[1];
    CHECK_EQ(pthread_create(&pump->thread, NULL, run, pump), 0);
}

void pump_join(struct pump *pump)
{
    CHECK_EQ(pthread_join(pump->thread, NULL), 0);
    smb_slots_release(pump->slots);
}
