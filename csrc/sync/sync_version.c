#include "sync/sync_version.h"

#include "base/failpoint.h"
#include "sync/sync_lock.h"
#include "sync/sync_queue.h"

struct sync_answer version_answer(const struct sync *sync, int status)
{
    return (struct sync_answer){status, word_get(&sync->words->version),
                                word_get(&sync->words->writing)};
}

static bool is_pinned(const struct sync *sync, int slot)
{
    uint64_t version = word_get(&sync->words->slots[slot]);
    return pins_on(&sync->pins, version) && sync_find_slot(sync->words, version) == slot;
}

int version_oldest_slot(const struct sync *sync, int slots, bool overtake)
{
    uint64_t published = word_get(&sync->words->version), lowest = UINT64_MAX;
    int latest = sync_find_slot(sync->words, published), oldest = -1;
    for (int slot = 0; slot < slots; slot++) {
        uint64_t version = word_get(&sync->words->slots[slot]);
        if (version > published)
            return slot; /* a publisher began to write there and died */
        if (slot == latest || version > lowest || (!overtake && is_pinned(sync, slot)))
            continue;
        /* if several slots were never written, the last of them: the first one holds version 0 */
        oldest = slot;
        lowest = version;
    }
    return slots == 1 ? 0 : oldest;
}

void version_begin(struct sync *sync, int slot)
{
    struct sync_words *words = sync->words;
    uint64_t next = word_get(&words->version) + 1;
    /* The readers learn of it when they next renew their pins. */
    if (is_pinned(sync, slot))
        pins_drop_version(&sync->pins, word_get(&words->slots[slot]));
    sync->pinned_ns = UINT64_MAX;
    word_put(&words->slots[slot], SYNC_BEGUN | next);
    FAILPOINT("sync.begun");
    word_put(&words->writing, next);
}

/* Before the table existed, a version's number decided which of two slots it used. */
void version_mend_words(struct sync_words *words)
{
    uint64_t version = word_get(&words->version), writing = word_get(&words->writing);
    if (writing != version && writing != version + 1) {
        writing = version + 1; /* garbage: this version may have begun */
        word_put(&words->writing, writing);
    }
    if (sync_find_slot(words, version) < 0) {
        word_put(&words->slots[version % 2], version);
        if (writing == version && version > 0)
            word_put(&words->slots[(version - 1) % 2], version - 1);
    }
    if (writing == version + 1 && sync_find_slot(words, SYNC_BEGUN | writing) < 0 &&
        sync_find_slot(words, writing) < 0 && sync_find_slot(words, version) != (int)(writing % 2))
        word_put(&words->slots[writing % 2], SYNC_BEGUN | writing);
}

int version_ask_await(struct sync *sync, struct waiter *waiter, uint64_t now_ns,
                      struct sync_answer *reply, struct news *news)
{
    *reply = version_answer(sync, SMB_OK);
    uint64_t sought = waiter->request.words[2];
    if (sought)
        reply->b = (uint64_t)(1 + sync_find_slot(sync->words,
                                                 sought == UINT64_MAX ? reply->a : sought - 1));
    if (reply->a >= waiter->request.words[0])
        return SMB_OK;
    if (waiter->request.words[1] == 0)
        return SMB_TIMEOUT;
    queue_keep(sync, waiter, waiter->request.words[0], waiter->request.words[1], now_ns, news);
    return SMB_DEFERRED;
}

int version_ask_publish(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                        struct sync_answer *reply, struct news *news)
{
    struct sync_lock_words *lock = &sync->words->locks[SYNC_PUBLISHER];
    uint64_t token = request->words[0], version = request->words[1],
             published = word_get(&sync->words->version), begun = version;
    bool holds = lock_is_holder(lock, token, now_ns);
    if (request
            ->words[2]) /* a mirror's versions have the numbers of its source, and may skip some */
        version = request->words[2];
    reply->a = version;
    if (!holds)
        return published >= version && version > 0 &&
                       lock_ask_unlock(
                           sync,
                           &(struct sync_request){.argument = SYNC_PUBLISHER, .words = {token}},
                           now_ns, news) == SMB_OK
                   ? SMB_OK
                   : SMB_LOCK_LOST;
    /* 0: after garbage the count may wrap */
    if (begun == 0 || begun != published + 1 || version < begun || version >> SYNC_VERSION_BITS)
        return SMB_INVALID;
    int slot = sync_find_slot(sync->words, SYNC_BEGUN | begun);
    /* otherwise the publisher was killed after this and asks again, or all words are garbage */
    if (slot >= 0)
        word_put(&sync->words->slots[slot], version);
    FAILPOINT("sync.placed");
    word_put(&sync->words->writing, version);
    word_put(&sync->words->version, version);
    FAILPOINT("sync.published");
    word_put(&lock->released, word_get(&lock->released) | lock_released_bit(token));
    struct waiter *waiter = queue_first(&sync->versions);
    for (; waiter && waiter->request.words[0] <= version; waiter = queue_first(&sync->versions))
        queue_answer(sync, waiter, version_answer(sync, SMB_OK), news);
    lock_let_go(sync, SYNC_PUBLISHER, now_ns, news);
    return SMB_OK;
}

int version_ask_pin(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                    struct sync_answer *reply, struct news *news)
{
    uint64_t ttl_ms = request->words[0] ? request->words[0] : SYNC_PIN_MS,
             expires_ns = clock_later(now_ns, ttl_ms);
    uint64_t name = request->words[1] ? request->words[1] : request->sequence;
    if (ttl_ms > SYNC_PIN_MS)
        return SMB_INVALID;
    struct pin *pin = pins_find(&sync->pins, request->session, name);
    if (request->words[1]) {
        /* a renewal; a pin that is gone was overtaken by a publisher */
        if (!pin)
            return SMB_LOCK_LOST;
        pins_renew(&sync->pins, pin, expires_ns);
        news_due(news, expires_ns);
    }
    if (!pin) {
        uint64_t published = word_get(&sync->words->version),
                 version = request->words[2] ? request->words[2] - 1 : published;
        if (version > published || sync_find_slot(sync->words, version) < 0)
            return SMB_LOCK_LOST;
        /* A pin on an older version may be what delays a publisher. */
        if (!sync->pins.names.count)
            sync->pinned_ns = UINT64_MAX;
        pin = pins_add(&sync->pins, request->session, name, version, expires_ns);
        if (!pin)
            return SMB_OUT_OF_MEMORY;
        news_due(news, expires_ns);
    }
    reply->a = pin->version;
    reply->b = pin->name;
    return SMB_OK;
}

void version_unpin(struct sync *sync, uint64_t session, uint64_t name, uint64_t now_ns)
{
    pins_drop_expired(&sync->pins, now_ns);
    struct pin *pin = pins_find(&sync->pins, session, name);
    if (pin)
        pins_drop(&sync->pins, pin);
}
