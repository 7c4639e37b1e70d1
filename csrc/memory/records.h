/* records.h: completion records: how far each lane of each session has come on a segment.
 * docs/decisions/0008.
 *
 * The table lies in the segment's file and survives the daemon. Only the daemon writes it. One
 * thread at a time writes a record's watermark: a lane has one connection, and its changes are in
 * order. Under the mutex, a record that nobody uses may get another lane.
 *
 * The daemon may be killed between any two stores, and the next one reads the table. As with the
 * journal (journal.h), the order of the program is what counts. Release stores and compiler fences
 * keep it.
 */
#ifndef SMB_RECORDS_H
#define SMB_RECORDS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* At most as many fetch_add and compare_swap of a lane may be unanswered at any time. */
enum {
    RECORD_RESULTS = 4,
    RECORD_REFUSAL_WORDS = 2,
    RECORD_REFUSALS = 63 * RECORD_REFUSAL_WORDS, /* sequence numbers; a client has 64 unanswered */
    RECORD_BYTES = 128,
    RECORDS_MIN = 128,
    RECORDS_MIN_BEFORE = 32,
    RECORDS_MAX = 1024
};

struct record {
    _Atomic uint64_t session; /* 0: empty */
    _Atomic uint64_t lane;
    _Atomic uint64_t watermark; /* changes up to this sequence number were applied; written last */
    _Atomic uint64_t used_ns;   /* CLOCK_BOOTTIME; 0: its session has ended */
    struct {
        uint64_t sequence, result;
    } results[RECORD_RESULTS]; /* of fetch_add and compare_swap */
    /* Changes that were refused although later ones were applied: the watermark does not speak for
     * them. A bit for each of the last RECORD_REFUSALS sequence numbers up to `refused_top`, at its
     * remainder. The highest bit of each of these words is set. In records of earlier releases it
     * is not: they have three sequence numbers there. Those releases take all such words for
     * sequence numbers that never come, and everything for forgotten: unknown, not made twice. */
    uint64_t refused[RECORD_REFUSAL_WORDS];
    uint64_t refused_top;
    /* up to here there may be others, which are forgotten: unknown; REFUSED_FELL */
    uint64_t refused_floor;
};
_Static_assert(sizeof(struct record) == RECORD_BYTES, "two cache lines");

/* Their places in a mapped segment. */
struct record_table {
    struct record *records;
    uint32_t count;
    /* of sessions that may come back: whether a repeated change is a new one is then unknown */
    _Atomic uint64_t *evictions;
    _Atomic uint64_t *ended_evictions; /* of sessions that had ended */
};

struct records;

/* How many a segment of data_bytes has: about 1.6 % of it. */
uint32_t records_count_for(uint64_t data_bytes);
/* And how many those of format 2 have. */
uint32_t records_count_before(uint64_t data_bytes);
/* `ended_are_known`, which lives as long: every session that has ended is known to have, and not
 * let in. While it is not set, evictions of ended sessions count as the others do. */
int records_create(struct record_table table, const _Atomic bool *ended_are_known,
                   struct records **records);
void records_destroy(struct records *records);

/* The record of a lane, kept from eviction until released. A new one is made if there is none. With
 * `retry` (the frame was sent before) that is SMB_EVICTED if the table ever evicted a record of a
 * session that may come back. *hint: where it was the last time. */
int records_take(struct records *records, uint64_t session, uint16_t lane, uint64_t sequence,
                 bool retry, uint32_t *hint, struct record **record);
void records_release(struct records *records, struct record *record);
/* Read only: SMB_OK and the watermark, 0 if there is no record and never was; SMB_EVICTED if
 * there may have been. */
int records_watermark(struct records *records, uint64_t session, uint16_t lane, uint64_t *watermark,
                      uint64_t *refused);
/* It sends nothing more. Its records are the first to be evicted. */
void records_end_session(struct records *records, uint64_t session);

/* For a copy of the segment elsewhere. The indices of all records, first those that were not used
 * for longest; returns how many. `indices` has room for the table. */
uint32_t records_indices(struct records *records, uint32_t *indices);
/* Called with a record's image. */
typedef void (*records_see)(void *argument, const uint8_t bytes[RECORD_BYTES]);
/* The record at that index, as bytes, while nobody changes it: `see` is called under the mutex.
 * SMB_BUSY: a request has it. SMB_NOT_FOUND: there is none. */
int records_image(struct records *records, uint32_t index, records_see see, void *argument);
/* At the copy: the lane's record is as that image says. SMB_INVALID: it is none. */
int records_install(struct records *records, const uint8_t bytes[RECORD_BYTES]);
/* How many records were evicted; at a copy, at least so many. */
void records_evicted(const struct records *records, uint64_t *evictions, uint64_t *ended);
void records_have_evicted(struct records *records, uint64_t evictions, uint64_t ended);

/* SMB_OK: the change was not made. SMB_EXISTS: it was. SMB_EVICTED: that is forgotten. */
int record_judge(const struct record *record, uint64_t sequence);
/* The change was refused. */
void record_refuse(struct record *record, uint64_t sequence);
/* The change has been made. `with_result`: a repetition must get the same result. */
void record_note(struct record *record, uint64_t sequence, bool with_result, uint64_t result);
bool record_result(const struct record *record, uint64_t sequence, uint64_t *result);

#endif
