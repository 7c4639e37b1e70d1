/* sync_version.h: published versions, requests that wait for a version, and pins. */
#ifndef SMB_SYNC_VERSION_H
#define SMB_SYNC_VERSION_H

#include "sync/sync_state.h"

struct sync_answer version_answer(const struct sync *sync, int status);
/* The slot for the next version of a buffer with `slots` slots: the oldest that is neither the
 * latest nor pinned; -1: none. `overtake`: ignore pins. */
int version_oldest_slot(const struct sync *sync, int slots, bool overtake);
/* Notes that the next version is being written to this slot, and ends pins on the slot's
 * content. */
void version_begin(struct sync *sync, int slot);
/* Checks the words of versions that an earlier run left. */
void version_mend_words(struct sync_words *words);
/* Requests: see sync.h. */
int version_ask_await(struct sync *sync, struct waiter *waiter, uint64_t now_ns,
                      struct sync_answer *reply, struct news *news);
int version_ask_publish(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                        struct sync_answer *reply, struct news *news);
int version_ask_pin(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                    struct sync_answer *reply, struct news *news);
void version_unpin(struct sync *sync, uint64_t session, uint64_t name, uint64_t now_ns);

#endif
