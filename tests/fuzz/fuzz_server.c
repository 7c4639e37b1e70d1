/* A real server, spoken to over its socket: frames that are nearly right, and bytes that are none. Whatever comes, it goes on
 * serving, and the segment that nobody names keeps its bytes. */
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "fuzz.h"
#include "segment.h"
#include "wire.h"

enum { WITNESS = 0x1111, SCRATCH = 0x2222, EPOCH = 5, BYTES = 65536, CHUNK = 16384, PAYLOAD_MAX = 70000 };

static struct smb_server *server;
static char socket_path[128];
static uint64_t session = 1;

static int say_hello(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    strcpy(name.sun_path, socket_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(fd >= 0 && connect(fd, (struct sockaddr *)&name, sizeof name) == 0);
    struct smb_frame hello = {.opcode = SMB_HELLO, .session = ++session, .lane = 3};
    uint8_t bytes[SMB_FRAME_BYTES];
    smb_frame_encode(&hello, bytes);
    MUST(write(fd, bytes, sizeof bytes) == (ssize_t)sizeof bytes);
    MUST(recv(fd, bytes, sizeof bytes, MSG_WAITALL) == (ssize_t)sizeof bytes);
    return fd;
}

static void start(void)
{
    struct smb_recovery recovery;
    strcpy(socket_path, fuzz_path("socket"));
    MUST(smb_server_create(1, 1, 1 << 26, &server) == SMB_OK);
    MUST(smb_server_create_segment(server, fuzz_path("witness"), WITNESS, EPOCH, SMB_INT64, BYTES, CHUNK) == SMB_OK);
    MUST(smb_server_create_segment(server, fuzz_path("scratch"), SCRATCH, EPOCH, SMB_INT64, BYTES, CHUNK) == SMB_OK);
    MUST(smb_server_open_journal(server, fuzz_path("journal"), &recovery) == SMB_OK);
    MUST(smb_server_listen_unix(server, socket_path) == SMB_OK);
}

static const uint8_t *witness(void)
{
    static struct smb_segment *segment;
    if (!segment)
        MUST(smb_segment_open(fuzz_path("witness"), &segment) == SMB_OK);
    return smb_segment_data(segment);
}

/* A frame whose payload fits it, but for what the input changes about it. */
static size_t make_frame(struct input *input, uint64_t sequence, uint8_t *bytes)
{
    static const uint16_t lengths[] = {8, 8, 16, 4096, 16384, 24, 65535, 0};
    uint64_t what = take(input, 2);
    struct smb_frame frame = {.opcode = (uint8_t)(what % (SMB_OPCODE_COUNT + 1)),
                              .flags = (uint16_t)(take(input, 1) & SMB_FLAGS_KNOWN & ~SMB_FLAG_REPLY),
                              .dtype = SMB_INT64, .op = (uint8_t)(take(input, 1) % 8), .lane = 3, .epoch = EPOCH,
                              .session = session, .sequence = sequence, .segment = SCRATCH,
                              .offset = take(input, 1) * 8 + take(input, 1) * 4096,
                              .length = lengths[take(input, 1) % 8], .argument = smb_bits_of((double)(take(input, 1) % 4))};
    bool fenced = frame.flags & SMB_FLAG_FENCED;
    frame.payload = frame.opcode == SMB_WRITE || frame.opcode == SMB_ACCUMULATE ? frame.length
                    : frame.opcode == SMB_ACCUMULATE_FROM ? SMB_FROM_BYTES
                    : frame.opcode == SMB_COMPARE_SWAP ? 8
                    : frame.opcode >= SMB_LOCK ? SMB_SYNC_BYTES : 0;
    frame.payload += fenced ? SMB_TOKEN_BYTES : 0;
    if (frame.opcode >= SMB_WATERMARK || frame.opcode <= SMB_ATTACH)
        frame.dtype = 0, frame.length = 0, frame.offset = 0;
    if (frame.opcode >= SMB_LOCK)
        frame.argument = take(input, 1) % 3;
    smb_frame_encode(&frame, bytes);
    memset(bytes + SMB_FRAME_BYTES, 0, frame.payload);
    for (uint32_t i = 0; i < frame.payload && i < 32; i += 8) /* small words: tokens, times, offsets, another segment */
        smb_store64(bytes + SMB_FRAME_BYTES + i, take(input, 1) % 5 ? take(input, 1) : SCRATCH);
    if (what >> 8 & 1) /* one byte of the header is something else, but never the name of the witness */
        bytes[take(input, 1) % SMB_FRAME_BYTES] ^= (uint8_t)take(input, 1);
    if (smb_load64(bytes + 32) == WITNESS)
        smb_store64(bytes + 32, SCRATCH);
    return SMB_FRAME_BYTES + frame.payload;
}

static void speak(int fd, struct input *input)
{
    static uint8_t bytes[SMB_FRAME_BYTES + PAYLOAD_MAX];
    for (uint64_t sequence = 1; input->at < input->end; sequence++) {
        size_t count = make_frame(input, sequence, bytes);
        if (take(input, 1) % 16 == 0)
            count = take(input, 2) % (count + 1); /* cut short: what follows is read as its rest */
        if (send(fd, bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)count)
            return;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint64_t runs;
    if (!server)
        start();
    struct input input = {data, data + size};
    int fd = say_hello();
    speak(fd, &input);
    shutdown(fd, SHUT_WR);
    uint8_t ignored[4096];
    while (recv(fd, ignored, sizeof ignored, 0) > 0) {
    }
    close(fd);
    smb_server_end_session(server, session); /* what it still holds is given up */
    if (++runs % 64 == 0)
        for (int i = 0; i < BYTES; i++)
            MUST(witness()[i] == 0);
    return 0;
}
