/* sync_version.h: versions that are published, those who wait for one, and pins. */
#ifndef SMB_SYNC_VERSION_H
#define SMB_SYNC_VERSION_H

#include "memory/sync_state.h"

struct sync_answer version_answer(const struct sync *sync, int status);
/* The slot for the next version of a buffer that has so many: the oldest that is not the latest
 * and not pinned. -1: all are. `overtake`: never mind the pins. */
int version_oldest_slot(const struct sync *sync, int slots, bool overtake);
/* From now on the next version is being written there. Pins on what is there are gone. */
void version_begin(struct sync *sync, int slot);
/* State of an earlier run: the words of versions. */
void version_mend_words(struct sync_words *words);
/* Requests; see sync.h. */
int version_ask_await(struct sync *sync, struct waiter *waiter, uint64_t now_ns,
                      struct sync_answer *reply, struct news *news);
int version_ask_publish(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                        struct sync_answer *reply, struct news *news);
int version_ask_pin(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                    struct sync_answer *reply, struct news *news);
void version_unpin(struct sync *sync, uint64_t session, uint64_t name, uint64_t now_ns);

#endif
