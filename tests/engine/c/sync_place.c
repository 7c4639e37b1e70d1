#include "sync_place.h"

#include <sys/mman.h>

void place_make(struct place *place)
{
    /* Shared memory, so that the work of a killed child is seen. The page after the seats must not
     * be touched. */
    uint8_t *memory = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                           0);
    CHECK(memory != MAP_FAILED);
    CHECK_EQ(mprotect(memory + 2 * PAGE, PAGE, PROT_NONE), 0);
    *place = (struct place){.words = (struct sync_words *)memory,
                            .seats = memory + 2 * PAGE - SEATS_BYTES,
                            .now = 1000 * SECOND};
    CHECK_EQ(sync_create(place->words, place->seats, SEATS_BYTES, false, place->now, &place->sync),
             SMB_OK);
}

void place_restart(struct place *place)
{
    sync_close(place->sync, SMB_DISCONNECTED);
    sync_destroy(place->sync);
    CHECK_EQ(sync_create(place->words, place->seats, SEATS_BYTES, true, place->now, &place->sync),
             SMB_OK);
}

void place_end(struct place *place)
{
    sync_close(place->sync, SMB_NOT_FOUND);
    sync_destroy(place->sync);
    munmap(place->words, 3 * PAGE);
}

static void reply(struct waiter *waiter, struct sync_answer answer)
{
    struct asked *asked = waiter->owner;
    asked->answer = answer;
    asked->answers++;
}

int ask(struct place *place, struct asked *asked, int opcode, uint64_t session, uint64_t sequence,
        uint64_t argument, uint64_t a, uint64_t b, uint64_t c)
{
    struct sync_request request = {.opcode = opcode,
                                   .session = session,
                                   .sequence = sequence,
                                   .argument = argument,
                                   .words = {a, b, c, 0}};
    struct sync_answer answer;
    *asked = (struct asked){.waiter = {.answer = reply, .owner = asked}};
    int status = sync_ask(place->sync, &request, &asked->waiter, place->now, &answer);
    /* a deferred request may have been answered by now, by another thread */
    if (status != SMB_DEFERRED)
        asked->answer = answer;
    return status;
}

int lock(struct place *place, struct asked *asked, uint64_t session, uint64_t sequence,
         uint64_t timeout, uint64_t age)
{
    return ask(place, asked, SMB_LOCK, session, sequence, SYNC_USER, 1000, timeout, age);
}

int quick(struct place *place, int opcode, uint64_t argument, uint64_t a, uint64_t b)
{
    struct asked asked;
    return ask(place, &asked, opcode, 1, 1, argument, a, b, 0);
}

void pass(struct place *place, uint64_t ns)
{
    place->now += ns;
    sync_tick(place->sync, place->now);
}

void publish(struct place *place, uint64_t version)
{
    struct asked turn;
    CHECK_EQ(ask(place, &turn, SMB_LOCK, 1, version, SYNC_PUBLISHER, 1000, 0, 0), SMB_OK);
    CHECK_EQ(quick(place, SMB_PUBLISH, 0, turn.answer.a, version), SMB_OK);
}
