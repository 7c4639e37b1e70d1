#include "memory/sync_version.h"

#include "base/failpoint.h"
#include "memory/sync_lock.h"
#include "memory/sync_queue.h"

struct sync_answer version_answer(const struct sync *sync, int status)
{
    return (struct sync_answer){status, word_get(&sync->words->version),
                                word_get(&sync->words->writing)};
}

int version_ask_await(struct sync *sync, struct waiter *waiter, uint64_t now_ns,
                      struct sync_answer *reply, struct news *news)
{
    *reply = version_answer(sync, SMB_OK);
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
             published = word_get(&sync->words->version);
    bool holds = lock_is_holder(lock, token, now_ns);
    reply->a = version;
    if (!holds)
        return published >= version && version > 0 &&
                       lock_ask_unlock(
                           sync,
                           &(struct sync_request){.argument = SYNC_PUBLISHER, .words = {token}},
                           now_ns, news) == SMB_OK
                   ? SMB_OK
                   : SMB_LOCK_LOST;
    if (version == 0 || version != published + 1) /* 0: after garbage the count may wrap */
        return SMB_INVALID;
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
        /* renewed; one that is not there any more was overtaken by a publisher */
        if (!pin)
            return SMB_LOCK_LOST;
        pins_renew(&sync->pins, pin, expires_ns);
        news_due(news, expires_ns);
    }
    if (!pin) {
        pin = pins_add(&sync->pins, request->session, name, word_get(&sync->words->version),
                       expires_ns);
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
