/* sync_place.h: a segment's sync words and seats without a segment, and requests to them at a given
 * time. */
#ifndef SYNC_PLACE_H
#define SYNC_PLACE_H

#include "check.h"
#include "sync/sync.h"

enum { PAGE = 4096, SEATS_BYTES = 1024, CAPACITY = SEATS_BYTES / SYNC_SEAT_BYTES / 2 };
static const uint64_t MS = 1000000U, SECOND = 1000000000U, FOREVER = UINT64_MAX;

struct asked {
    struct waiter waiter;
    struct sync_answer answer;
    _Atomic int answers;
};

/* In memory shared with child processes. The words use the first half of a page, a test may use the
 * second. */
struct place {
    struct sync_words *words;
    uint8_t *seats;
    struct sync *sync;
    uint64_t now;
};

void place_make(struct place *place);
void place_restart(struct place *place);
void place_end(struct place *place);

int ask(struct place *place, struct asked *asked, int opcode, uint64_t session, uint64_t sequence,
        uint64_t argument, uint64_t a, uint64_t b, uint64_t c);
/* Asks for the user's lock, for a second. */
int lock(struct place *place, struct asked *asked, uint64_t session, uint64_t sequence,
         uint64_t timeout, uint64_t age);
/* Makes a request that must not be deferred. */
int quick(struct place *place, int opcode, uint64_t argument, uint64_t a, uint64_t b);
/* Takes the publisher's lock and publishes that version. */
void publish(struct place *place, uint64_t version);
void pass(struct place *place, uint64_t ns);

#endif
