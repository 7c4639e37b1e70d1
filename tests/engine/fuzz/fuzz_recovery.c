/* What a killed daemon left, changed at will: segment header, sync words, completion records,
 * marks, journal. Recovery takes what is sound or refuses it. Whatever it finds, chunks that were
 * not marked keep their bytes, no chunk stays marked, and the server works afterwards. A change
 * whose journal is as it was left is made exactly once; any other touches at most what it names.
 * The chunks' locks are left alone: those of a C library can't be checked, and only the daemon's
 * own user can write them. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "fuzz.h"
#include "memory/journal.h"
#include "server/server.h"
#include "smb/client.h"

enum {
    ID = 0x77,
    EPOCH = 3,
    BYTES = 65536,
    CHUNK = 16384,
    CHUNKS = BYTES / CHUNK,
    PATCHES = 24,
    SESSION = 9,
    SEQUENCE = 5,
    AT = CHUNK + 64,
    BLOCKS = 3,
    CHANGED = (BLOCKS - 1) * JOURNAL_BLOCK_BYTES + 808
};
/* Where things lie, of the files' own formats: checked by make_templates. */
enum {
    SYNC_AT = 2048,
    CHUNKS_AT = 4096,
    MARK_AT = 44,
    RECORDS_AT = 8192,
    DATA_AT = RECORDS_AT + RECORDS_MIN * RECORD_BYTES,
    READY_AT = 4096,
    SLOT_AT = READY_AT + 4 * JOURNAL_SLOTS_MAX,
    WORDS_AT = SLOT_AT + 4096,
    PAYLOAD_AT = WORDS_AT + 4096,
    JOURNAL_HEAD = PAYLOAD_AT + CHUNK
};
static const uint64_t JOURNAL_BYTES = SLOT_AT +
                                      (uint64_t)JOURNAL_SLOTS_MAX * (8192 + SMB_CHUNK_BYTES_MAX);

static uint8_t *segment_template, *journal_template, *segment, *journal;
static uint64_t segment_bytes;

/* The changes that may have been under way. */
static const struct smb_change CHANGES[] = {
    {.opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = 3.0, .offset = AT, .bytes = CHANGED},
    {.opcode = SMB_FETCH_ADD, .offset = AT, .bytes = 8, .argument = 1000},
    {.opcode = SMB_COMPARE_SWAP, .offset = AT, .bytes = 8, .argument = 1000},
};
enum { CHANGE_COUNT = sizeof CHANGES / sizeof *CHANGES };

static int64_t content(uint64_t element)
{
    return (int64_t)(element % 251 * 1000 + 7);
}

static int64_t delta(uint64_t element)
{
    return (int64_t)(element % 241 + 1);
}

static void read_whole(const char *name, uint8_t *bytes, size_t count)
{
    int fd = open(fuzz_path(name), O_RDONLY | O_CLOEXEC);
    MUST(fd >= 0 && pread(fd, bytes, count, 0) == (ssize_t)count);
    close(fd);
}

static void write_file(const char *name, const uint8_t *bytes, size_t count, uint64_t whole)
{
    int fd = open(fuzz_path(name), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    MUST(fd >= 0 && pwrite(fd, bytes, count, 0) == (ssize_t)count &&
         ftruncate(fd, (off_t)whole) == 0);
    close(fd);
}

static void make_templates(void)
{
    struct smb_server *server;
    struct smb_recovery recovery;
    struct slot slot;
    struct record *record;
    uint32_t hint = 0;
    segment_bytes = smb_segment_file_bytes(BYTES, CHUNK);
    MUST((segment_template = malloc(segment_bytes)) && (segment = malloc(segment_bytes)));
    MUST((journal_template = calloc(1, JOURNAL_HEAD)) && (journal = malloc(JOURNAL_HEAD)));
    MUST(smb_server_create(1, 1, 1 << 26, &server) == SMB_OK);
    MUST(smb_server_create_segment(server, fuzz_path("segment"), ID, EPOCH, SMB_INT64, BYTES,
                                   CHUNK) == SMB_OK);
    MUST(smb_server_open_journal(server, fuzz_path("journal"), &recovery) == SMB_OK);
    struct smb_segment *made = server_find(server, ID);
    int64_t *data = smb_segment_data(made);
    for (uint64_t i = 0; i < BYTES / 8; i++)
        data[i] = content(i);
    MUST(records_take(served_of(made)->records, SESSION, 0, SEQUENCE - 1, false, &hint, &record) ==
         SMB_OK);
    record_note(record, SEQUENCE - 1, false, 0);
    records_release(served_of(made)->records, record);
    MUST(journal_take_slot(server->journal, &slot) == SMB_OK && slot.number == 0);
    MUST(journal_reserve(server->journal, &slot, CHUNK) == SMB_OK);
    for (uint64_t i = 0; i < CHUNK / 8; i++)
        ((int64_t *)(void *)slot.payload)[i] = delta(i);
    smb_segment_mark(made, AT, 1);
    read_whole("segment", segment_template, segment_bytes);
    read_whole("journal", journal_template, JOURNAL_HEAD);
    MUST(smb_load64(segment_template + DATA_AT) == (uint64_t)content(0) &&
         smb_segment_data_offset(made) == DATA_AT);
    MUST(segment_template[CHUNKS_AT + AT / CHUNK * 64 + MARK_AT] == 1);
    MUST(smb_load64(segment_template + RECORDS_AT + hint * RECORD_BYTES) == SESSION);
    MUST(smb_load64(journal_template + PAYLOAD_AT) == (uint64_t)delta(0));
    smb_segment_mark(made, AT, 0);
    smb_segment_release(made);
    smb_server_destroy(server);
}

/* As if the daemon had been killed in this block of the change (or after the last), before it was
 * changed, or in its middle. */
static void stop_in_block(const struct smb_change *change, uint64_t block, bool dirty)
{
    bool whole = change->opcode != SMB_ACCUMULATE;
    uint64_t blocks = whole ? 1 : BLOCKS;
    uint8_t *data = segment + DATA_AT + change->offset, *words = journal + WORDS_AT;
    block %= blocks + 1;
    dirty = dirty && block < blocks;
    /* blocks whose undo was taken */
    uint64_t last = block + dirty < blocks ? block + dirty : blocks;
    for (uint64_t b = 0; b < last; b++) {
        uint64_t from = b * JOURNAL_BLOCK_BYTES, left = change->bytes - from;
        uint64_t bytes = left < JOURNAL_BLOCK_BYTES ? left : JOURNAL_BLOCK_BYTES;
        memcpy(journal + SLOT_AT, data + from, bytes);
        uint64_t done = b < block ? bytes : bytes / 16 * 8; /* in the middle: half of it */
        for (uint64_t i = from; i < from + done; i += 8)
            smb_store64(data + i, whole ? smb_load64(data + i) + 1000
                                        : smb_load64(data + i) + 3 * (uint64_t)delta(i / 8));
    }
    smb_store64(words, (uint64_t)SEQUENCE << 18 | block << 2 | 2 | dirty);
    const uint64_t names[] = {ID,
                              SESSION,
                              SEQUENCE,
                              0,
                              change->offset,
                              change->bytes,
                              change->argument,
                              change->expected,
                              smb_bits_of(change->scale),
                              (uint64_t)(uint32_t)change->op << 32 | (uint32_t)change->opcode};
    for (int i = 0; i < 10; i++)
        smb_store64(words + 8 + 8 * i, names[i]);
    segment[CHUNKS_AT + AT / CHUNK * 64 + MARK_AT - 4] |= 1; /* the sequence count is odd */
}

/* Some kinds of place only, often few of them: a change elsewhere hides what these do. true: the
 * change's own journal, its chunk's mark and its segment's name are as they were. */
static bool patch(struct input *input)
{
    bool as_left = true;
    uint64_t kinds = take(input, 1), patches = take(input, 1) % PATCHES;
    while (patches-- > 0 && input->at < input->end) {
        uint64_t kind = take(input, 1) % 8, at = take(input, 1), value = take(input, 1);
        if (!(kinds & 1U << kind))
            continue;
        as_left = as_left && kind >= 6;
        switch (kind) {
        case 0: segment[at % 160] = (uint8_t)value; break;
        case 1: segment[CHUNKS_AT + at % CHUNKS * 64 + MARK_AT] = value % 4; break;
        case 2: journal[at % 32] = (uint8_t)value; break;
        case 3: journal[READY_AT + at % 64] = (uint8_t)value; break;
        case 4: journal[WORDS_AT + at % 8] = (uint8_t)value; break;
        case 5: journal[WORDS_AT + 8 + at % 80] = (uint8_t)value; break;
        case 6: segment[SYNC_AT + at % 256] = (uint8_t)value; break;
        default:
            segment[RECORDS_AT + (at + take(input, 1) * 64) % (DATA_AT - RECORDS_AT)] = (uint8_t)
                value;
            break;
        }
    }
    return as_left;
}

static bool was_marked(uint64_t chunk)
{
    return segment[CHUNKS_AT + chunk * 64 + MARK_AT] != 0;
}

/* Element i of the change's range, after it was made once. */
static int64_t made_once(const struct smb_change *change, uint64_t i)
{
    int64_t old = content(change->offset / 8 + i);
    return change->opcode == SMB_ACCUMULATE  ? old + 3 * delta(i)
           : change->opcode == SMB_FETCH_ADD ? old + 1000
                                             : 1000 + old;
}

/* What the journal names as being under way, as patched: it may begin within an element. */
static bool is_named(uint64_t i)
{
    uint64_t offset = smb_load64(journal + WORDS_AT + 40),
             bytes = smb_load64(journal + WORDS_AT + 48);
    return 8 * i < offset ? offset - 8 * i < 8 && bytes > 0 : 8 * i - offset < bytes;
}

static void check_data(struct smb_segment *found, const struct smb_change *made)
{
    const int64_t *data = smb_segment_data(found);
    for (uint64_t i = 0; i < BYTES / 8; i++) {
        int64_t left = (int64_t)smb_load64(segment + DATA_AT + 8 * i);
        if (made && i >= made->offset / 8 && i < (made->offset + made->bytes) / 8)
            MUST(data[i] == made_once(made, i - made->offset / 8));
        else if (made || !was_marked(8 * i / CHUNK) || !is_named(i))
            MUST(data[i] == left);
    }
    for (uint64_t chunk = 0; chunk < CHUNKS; chunk++)
        MUST(smb_segment_marked(found, chunk * CHUNK) == 0 &&
             !(was_marked(chunk) && smb_segment_changing(found, chunk * CHUNK)));
}

/* The first frames of a client: everything that recovery left is used. */
static void use(struct smb_server *server)
{
    uint16_t port;
    uint64_t instance;
    struct smb_client *client;
    struct smb_link *link;
    MUST(smb_server_listen_tcp(server, "127.0.0.1", 0, &port) == SMB_OK);
    MUST(smb_client_create(SESSION, &client) == SMB_OK);
    MUST(smb_client_connect_tcp(client, "127.0.0.1", port, 0, 5000, &link, &instance) == SMB_OK);
    static const int opcodes[] = {SMB_LOCK,  SMB_ARRIVE,  SMB_AWAIT_VERSION, SMB_PIN,
                                  SMB_FENCE, SMB_PUBLISH, SMB_UNLOCK};
    for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) {
        struct smb_ask ask = {.opcode = opcodes[i],
                              .segment = ID,
                              .epoch = EPOCH,
                              .words = {opcodes[i] == SMB_LOCK ? 1000 : 1, 0, 0, 0}};
        struct smb_pending *pending;
        struct smb_reply reply;
        MUST(smb_ask_start(link, &ask, &pending) == SMB_OK);
        MUST(smb_ask_wait(pending, 5000, &reply) != SMB_BUSY);
        smb_ask_end(&pending);
    }
    smb_link_close(link);
    smb_client_destroy(client);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!segment_template)
        make_templates();
    memcpy(segment, segment_template, segment_bytes);
    memcpy(journal, journal_template, JOURNAL_HEAD);
    struct input input = {data, data + size};
    uint64_t how = take(&input, 1), where = take(&input, 1);
    bool whole = how % 16 != 0, talk = how / 16 % 8 == 0;
    struct smb_change change = CHANGES[where % CHANGE_COUNT];
    if (change.opcode == SMB_COMPARE_SWAP) {
        change.expected = (uint64_t)content(AT / 8);
        change.argument = change.expected + 1000;
    }
    stop_in_block(&change, where / 4, where & 128);
    bool as_left = patch(&input) && whole;
    write_file("segment", segment, segment_bytes, whole ? segment_bytes : take(&input, 2) * 64);
    write_file("journal", journal, JOURNAL_HEAD, JOURNAL_BYTES);

    struct smb_server *server;
    struct smb_segment_info info;
    struct smb_recovery recovery = {0};
    MUST(smb_server_create(2, 1, 1 << 26, &server) == SMB_OK);
    int adopted = smb_server_adopt_segment(server, fuzz_path("segment"), &info);
    MUST(smb_server_open_journal(server, fuzz_path("journal"), &recovery) == SMB_OK);
    MUST(recovery.finished <= 1 && recovery.torn_chunks <= CHUNKS);
    MUST(!as_left || (adopted == SMB_OK && recovery.finished == 1 && recovery.torn_chunks == 0));
    if (adopted == SMB_OK) {
        MUST(info.file_bytes == segment_bytes);
        struct smb_segment *found = server_find(server, info.id);
        MUST(found != NULL);
        /* another form may have the same size */
        if (info.data_bytes == BYTES && info.chunk_bytes == CHUNK)
            check_data(found, as_left ? &change : NULL);
        smb_segment_release(found);
    }
    if (talk && adopted == SMB_OK && info.id == ID && info.epoch == EPOCH)
        use(server);
    smb_server_destroy(server);
    return 0;
}
