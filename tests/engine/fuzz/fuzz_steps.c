/* What a killed daemon left of an optimizer's step over three segments, with marks, journal and
 * states changed at will. A step whose journal and marks are as they were left is made exactly once
 * in all three; where some marks are missing it is let go or was over. Chunks that are not marked
 * keep their bytes, no chunk stays marked, and the numbers that are found are checked before they
 * are used. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "fuzz.h"
#include "memory/journal.h"
#include "server/server.h"

enum {
    TARGETS = SMB_TARGETS_MAX,
    EPOCH = 3,
    CHUNK = 8192,
    CHUNKS = 3,
    BYTES = CHUNKS * CHUNK,
    COUNT = BYTES / 4,
    AT = CHUNK + 64,
    CHANGED = 5000,
    SESSION = 9,
    SEQUENCE = 5,
    BLOCK = JOURNAL_BLOCK_BYTES / 4,
    BLOCKS = (CHANGED + BLOCK - 1) / BLOCK,
    SLOT_AT = 4096 + 4 * JOURNAL_SLOTS_MAX,
    WORDS_AT = SLOT_AT + 4096,
    WORDS_BYTES = 184
};
static const struct smb_hyper HYPER = {.lr = 0.25,
                                       .scale = 1,
                                       .weight_decay = 0.5,
                                       .beta1 = 0.5,
                                       .beta2 = 0.75,
                                       .eps = 0.125,
                                       .step = 2};
static const char *const NAMES[TARGETS] = {"weights", "first", "second"};

static float content(int target, uint64_t i)
{
    return (float)(i % 61) / 8 + (float)target;
}

static float gradient(uint64_t i)
{
    return (float)(i % 53) / 16 - 1;
}

static void patch_file(const char *name, off_t at, const void *bytes, size_t count)
{
    int fd = open(fuzz_path(name), O_RDWR | O_CLOEXEC);
    MUST(fd >= 0 && pwrite(fd, bytes, count, at) == (ssize_t)count);
    close(fd);
}

static struct smb_server *serve(struct smb_recovery *recovery, struct smb_segment **segments)
{
    struct smb_server *server;
    struct smb_segment_info info;
    MUST(smb_server_create(1, 1, 1 << 26, &server) == SMB_OK);
    for (int t = 0; t < TARGETS; t++) {
        if (recovery == NULL)
            MUST(smb_server_create_segment(server, fuzz_path(NAMES[t]), 1 + (uint64_t)t, EPOCH,
                                           SMB_FLOAT32, BYTES, CHUNK) == SMB_OK);
        else if (access(fuzz_path(NAMES[t]), F_OK) == 0)
            MUST(smb_server_adopt_segment(server, fuzz_path(NAMES[t]), &info) == SMB_OK);
        segments[t] = server_find(server, 1 + (uint64_t)t);
    }
    struct smb_recovery first;
    MUST(smb_server_open_journal(server, fuzz_path("journal"), recovery ? recovery : &first) ==
         SMB_OK);
    return server;
}

/* As if killed in this block (or after the last), before it was changed or in its middle. */
static void leave_step(struct smb_server *server, struct smb_segment **segments, uint64_t block,
                       bool dirty)
{
    struct slot slot;
    struct smb_change change = {.opcode = SMB_APPLY,
                                .op = SMB_RULE_ADAM,
                                .offset = AT,
                                .bytes = CHANGED,
                                .states = {segments[1], segments[2]},
                                .hyper = HYPER};
    struct change_name name = {.session = SESSION, .sequence = SEQUENCE};
    MUST(journal_take_slot(server->journal, &slot) == SMB_OK && slot.number == 0);
    MUST(journal_reserve(server->journal, &slot, CHUNK) == SMB_OK);
    for (uint64_t i = 0; i < CHANGED / 4; i++)
        ((float *)(void *)slot.payload)[i] = gradient(i);
    slot_describe(server->journal, &slot, segments[0], &change, &name);
    slot_begin(server->journal, &slot, segments[0], &change);
    float *at[TARGETS];
    for (int t = 0; t < TARGETS; t++)
        at[t] = (float *)smb_segment_data(segments[t]) + AT / 4;
    uint64_t done = block * BLOCK / 4 < CHANGED / 4 ? block * BLOCK / 4 : CHANGED / 4;
    smb_kernel_step(change.op, at[0], (const float *)(const void *)slot.payload, at[1], at[2], done,
                    &HYPER);
    if (dirty) {
        uint64_t left = CHANGED / 4 - done, count = left < BLOCK / 4 ? left : BLOCK / 4;
        for (int t = 0; t < TARGETS; t++)
            patch_file("journal", SLOT_AT + t * BLOCK, at[t] + done, count * 4);
        smb_kernel_step(change.op, at[0] + done, (const float *)(const void *)slot.payload + done,
                        at[1] + done, at[2] + done, count / 2, &HYPER);
        at[0][done] = 99; /* a kernel's stores need not be in order */
    }
    uint64_t word = (uint64_t)SEQUENCE << 18 | block << 2 | 2 | dirty;
    patch_file("journal", WORDS_AT, &word, sizeof word);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static float before[TARGETS][COUNT], once[TARGETS][COUNT], step[COUNT];
    struct input input = {data, data + size};
    struct smb_segment *segments[TARGETS];
    struct smb_recovery recovery;
    uint32_t marks[TARGETS][CHUNKS];
    unlink(fuzz_path("journal"));
    for (int t = 0; t < TARGETS; t++)
        unlink(fuzz_path(NAMES[t]));
    struct smb_server *server = serve(NULL, segments);
    for (int t = 0; t < TARGETS; t++)
        for (uint64_t i = 0; i < COUNT; i++)
            once[t][i] = ((float *)smb_segment_data(segments[t]))[i] = content(t, i);
    for (uint64_t i = 0; i < CHANGED / 4; i++)
        step[i] = gradient(i);
    smb_kernel_step(SMB_RULE_ADAM, once[0] + AT / 4, step, once[1] + AT / 4, once[2] + AT / 4,
                    CHANGED / 4, &HYPER);
    uint64_t how = take(&input, 1), block = take(&input, 1) % (BLOCKS + 1);
    bool dirty = how & 1 && block < BLOCKS, as_left = true, marked = true;
    leave_step(server, segments, block, dirty);
    for (uint64_t left = how & 2 ? take(&input, 1) % 4 : 0; left > 0; left--) {
        /* marks of chunks, taken away or others */
        uint64_t t = take(&input, 1) % TARGETS, chunk = take(&input, 1) % CHUNKS;
        smb_segment_mark(segments[t], chunk * CHUNK, (uint32_t)take(&input, 1) % 3);
    }
    for (uint64_t left = how & 4 ? take(&input, 1) % 6 : 0; left > 0; left--, as_left = false) {
        uint8_t value = (uint8_t)take(&input, 1);
        patch_file("journal", WORDS_AT + (off_t)(take(&input, 1) % WORDS_BYTES), &value, 1);
    }
    int gone = how % 32 == 31 ? 1 + (int)(how / 32) % (TARGETS - 1) : 0;
    int here = 0;
    for (int t = 0; t < TARGETS; t++) {
        memcpy(before[t], smb_segment_data(segments[t]), BYTES);
        for (uint64_t chunk = 0; chunk < CHUNKS; chunk++)
            marks[t][chunk] = smb_segment_marked(segments[t], chunk * CHUNK);
        here += marks[t][AT / CHUNK] == 1;
        smb_segment_release(segments[t]);
    }
    smb_server_destroy(server);
    if (gone)
        MUST(unlink(fuzz_path(NAMES[gone])) == 0);
    marked = here == TARGETS && !gone;

    server = serve(&recovery, segments);
    MUST(recovery.finished <= 1 && recovery.torn_chunks <= TARGETS * CHUNKS);
    if (as_left && marked)
        MUST(recovery.finished == 1);
    if (as_left && here < TARGETS && block < BLOCKS)
        MUST(recovery.finished == 0);
    for (int t = 0; t < TARGETS; t++) {
        if (!segments[t]) {
            MUST(t == gone);
            continue;
        }
        const float *found = smb_segment_data(segments[t]);
        for (uint64_t chunk = 0; chunk < CHUNKS; chunk++) {
            const float *now = found + chunk * CHUNK / 4;
            MUST(smb_segment_marked(segments[t], chunk * CHUNK) == 0);
            MUST(!(marks[t][chunk] && smb_segment_changing(segments[t], chunk * CHUNK)));
            if (marks[t][chunk] != 1)
                MUST(memcmp(now, before[t] + chunk * CHUNK / 4, CHUNK) == 0);
        }
        if (as_left && marked)
            MUST(memcmp(found + AT / 4, once[t] + AT / 4, CHANGED) == 0);
        smb_segment_release(segments[t]);
    }
    smb_server_destroy(server);
    return 0;
}
