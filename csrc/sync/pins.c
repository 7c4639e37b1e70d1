#include "sync/pins.h"

#include <stdlib.h>

#include "base/assert.h"

struct pin *pins_find(const struct pins *pins, uint64_t session, uint64_t name)
{
    return TREE_OWNER(tree_find(&pins->names, session, name), struct pin, by_name);
}

struct pin *pins_of(const struct pins *pins, uint64_t session)
{
    struct pin *pin = TREE_OWNER(tree_from(&pins->names, session, 0), struct pin, by_name);
    return pin && pin->session == session ? pin : NULL;
}

static bool has_most(const struct pins *pins, uint64_t session)
{
    uint64_t count = 0;
    const struct pin *pin = pins_of(pins, session);
    while (pin && pin->session == session && ++count < SESSION_PINS_MAX)
        pin = TREE_OWNER(tree_next(&pin->by_name), struct pin, by_name);
    return count == SESSION_PINS_MAX;
}

struct pin *pins_add(struct pins *pins, uint64_t session, uint64_t name, uint64_t version,
                     uint64_t expires_ns)
{
    SMB_ASSERT(!pins_find(pins, session, name));
    struct pin *pin = has_most(pins, session) ? NULL : calloc(1, sizeof *pin);
    if (!pin)
        return NULL;
    pin->session = session;
    pin->name = name;
    pin->version = version;
    pin->expires_ns = expires_ns;
    tree_add(&pins->names, &pin->by_name, session, name, &pins->weights);
    tree_add(&pins->ends, &pin->by_end, expires_ns, 0, &pins->weights);
    tree_add(&pins->versions, &pin->by_version, version, 0, &pins->weights);
    return pin;
}

void pins_renew(struct pins *pins, struct pin *pin, uint64_t expires_ns)
{
    tree_take(&pins->ends, &pin->by_end);
    pin->expires_ns = expires_ns;
    tree_add(&pins->ends, &pin->by_end, expires_ns, 0, &pins->weights);
}

void pins_drop(struct pins *pins, struct pin *pin)
{
    tree_take(&pins->names, &pin->by_name);
    tree_take(&pins->ends, &pin->by_end);
    tree_take(&pins->versions, &pin->by_version);
    free(pin);
}

void pins_drop_session(struct pins *pins, uint64_t session)
{
    for (struct pin *pin = pins_of(pins, session); pin; pin = pins_of(pins, session))
        pins_drop(pins, pin);
}

static struct pin *on_version(const struct pins *pins, uint64_t version)
{
    return TREE_OWNER(tree_find(&pins->versions, version, 0), struct pin, by_version);
}

void pins_drop_version(struct pins *pins, uint64_t version)
{
    for (struct pin *pin = on_version(pins, version); pin; pin = on_version(pins, version))
        pins_drop(pins, pin);
}

static struct pin *first_to_end(const struct pins *pins)
{
    return TREE_OWNER(tree_first(&pins->ends), struct pin, by_end);
}

void pins_drop_expired(struct pins *pins, uint64_t now_ns)
{
    for (struct pin *pin = first_to_end(pins); pin && pin->expires_ns <= now_ns;
         pin = first_to_end(pins))
        pins_drop(pins, pin);
}

const struct pin *pins_on(const struct pins *pins, uint64_t version)
{
    return on_version(pins, version);
}

uint64_t pins_first_end_ns(const struct pins *pins)
{
    const struct pin *first = first_to_end(pins);
    return first ? first->expires_ns : UINT64_MAX;
}
