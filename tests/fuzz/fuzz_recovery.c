/* What a killed daemon left, changed at will: segment header, completion records, sync words, journal. Recovery takes what is
 * sound or refuses it; it never leaves its files, and the server works afterwards. The chunks' locks are left alone: those of a
 * C library can't be checked, and only the daemon's own user can write them. */
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"
#include "journal.h"
#include "server.h"

enum { ID = 0x77, EPOCH = 3, BYTES = 65536, CHUNK = 16384, PATCHES = 24, HEADER_AT = 0, SYNC_AT = 2048, RECORDS_AT = 8192,
       SLOT_AT = 4096 + 4 * JOURNAL_SLOTS_MAX, TEMPLATE = SLOT_AT + 3 * 4096 };

static uint8_t *segment_template, *journal_template;
static uint64_t segment_bytes;

static void read_whole(const char *name, uint8_t *bytes, size_t count)
{
    int fd = open(fuzz_path(name), O_RDONLY | O_CLOEXEC);
    MUST(fd >= 0 && pread(fd, bytes, count, 0) == (ssize_t)count);
    close(fd);
}

/* A segment and a journal with an addition that was stopped in its second block. */
static void make_templates(void)
{
    struct smb_server *server;
    struct smb_recovery recovery;
    MUST(smb_server_create(1, 1, 1 << 26, &server) == SMB_OK);
    MUST(smb_server_create_segment(server, fuzz_path("segment"), ID, EPOCH, SMB_INT64, BYTES, CHUNK) == SMB_OK);
    MUST(smb_server_open_journal(server, fuzz_path("journal"), &recovery) == SMB_OK);
    struct smb_segment *segment = server_find(server, ID);
    struct slot slot;
    MUST(journal_take_slot(server->journal, &slot) == SMB_OK && slot.number == 0);
    MUST(journal_reserve(server->journal, &slot, 4096) == SMB_OK);
    struct smb_change change = {.opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = 1.0, .bytes = 4096, .source = slot.payload};
    struct change_name name = {.session = 9, .sequence = 5, .lane = 0};
    slot_describe(server->journal, &slot, ID, &change, &name);
    slot_begin(server->journal, &slot, segment, &change);
    segment_bytes = smb_segment_file_bytes(BYTES, CHUNK);
    segment_template = malloc(segment_bytes);
    journal_template = malloc(TEMPLATE);
    read_whole("segment", segment_template, segment_bytes);
    read_whole("journal", journal_template, TEMPLATE);
    smb_segment_mark(segment, 0, 0);
    smb_segment_change_end(segment, 0);
    smb_segment_release(segment);
    smb_server_destroy(server);
}

static void write_file(const char *name, const uint8_t *bytes, size_t count, uint64_t whole)
{
    int fd = open(fuzz_path(name), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    MUST(fd >= 0 && pwrite(fd, bytes, count, 0) == (ssize_t)count && ftruncate(fd, (off_t)whole) == 0);
    close(fd);
}

static void patch(struct input *input, uint8_t *segment, uint8_t *journal)
{
    for (int i = 0; i < PATCHES && input->at < input->end; i++) {
        uint64_t where = take(input, 1), at = take(input, 2);
        uint8_t value = (uint8_t)take(input, 1);
        switch (where % 6) {
        case 0: segment[HEADER_AT + at % 160] = value; break;
        case 1: segment[SYNC_AT + at % 512] = value; break;
        case 2: segment[RECORDS_AT + at % 4096] = value; break;
        case 3: journal[at % 32] = value; break;
        case 4: journal[4096 + at % 64] = value; break;
        default: journal[SLOT_AT + 4096 + at % 112] = value; break;
        }
    }
}

/* The first frames of a client: everything that recovery left is used. */
static void use(struct smb_server *server)
{
    uint16_t port;
    uint64_t instance;
    struct smb_client *client;
    struct smb_link *link;
    MUST(smb_server_listen_tcp(server, "127.0.0.1", 0, &port) == SMB_OK);
    MUST(smb_client_create(9, &client) == SMB_OK);
    MUST(smb_client_connect_tcp(client, "127.0.0.1", port, 0, 5000, &link, &instance) == SMB_OK);
    static const int opcodes[] = {SMB_LOCK, SMB_ARRIVE, SMB_AWAIT_VERSION, SMB_PIN, SMB_FENCE, SMB_PUBLISH, SMB_UNLOCK};
    for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) {
        struct smb_ask ask = {.opcode = opcodes[i], .segment = ID, .epoch = EPOCH,
                              .words = {opcodes[i] == SMB_LOCK ? 1000 : 1, 0, 0, 0}};
        struct smb_asking *asking;
        struct smb_told told;
        MUST(smb_ask_start(link, &ask, &asking) == SMB_OK);
        MUST(smb_ask_wait(asking, 5000, &told) != SMB_BUSY);
        smb_ask_end(asking);
    }
    smb_link_close(link);
    smb_client_destroy(client);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t *segment, *journal;
    if (!segment_template) {
        make_templates();
        segment = malloc(segment_bytes);
        journal = malloc(TEMPLATE);
    }
    memcpy(segment, segment_template, segment_bytes);
    memcpy(journal, journal_template, TEMPLATE);
    struct input input = {data, data + size};
    bool whole = take(&input, 1) % 16 != 0;
    bool talk = take(&input, 1) % 8 == 0;
    patch(&input, segment, journal);
    write_file("segment", segment, segment_bytes, whole ? segment_bytes : take(&input, 2) * 64);
    write_file("journal", journal, TEMPLATE, SLOT_AT + (uint64_t)JOURNAL_SLOTS_MAX * (8192 + SMB_CHUNK_BYTES_MAX));

    struct smb_server *server;
    struct smb_segment_info info;
    struct smb_recovery recovery;
    MUST(smb_server_create(2, 1, 1 << 26, &server) == SMB_OK);
    int adopted = smb_server_adopt_segment(server, fuzz_path("segment"), &info);
    MUST(adopted != SMB_OK || (info.data_bytes == BYTES && info.chunk_bytes == CHUNK) || info.file_bytes == segment_bytes);
    MUST(smb_server_open_journal(server, fuzz_path("journal"), &recovery) == SMB_OK);
    MUST(recovery.finished <= 1 && recovery.torn_chunks <= 1);
    if (talk && adopted == SMB_OK && info.id == ID && info.epoch == EPOCH)
        use(server);
    smb_server_destroy(server);
    return 0;
}
