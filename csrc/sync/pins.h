/* pins.h: the pins of one segment: which session keeps which version from being overwritten, and
 * until when. In the daemon only. This module has no lock and no clock; sync.c has both. Each call
 * takes logarithmic time, plus the pins that it frees. */
#ifndef SMB_PINS_H
#define SMB_PINS_H

#include <stdbool.h>

#include "base/tree.h"

enum { SESSION_PINS_MAX = 1024 };

struct pin {
    struct tree_node by_name, by_end, by_version; /* keys: session, name; expires_ns; version */
    uint64_t session, name, version, expires_ns;
};

/* All zeros except `weights` (tree_random): no pins. */
struct pins {
    struct tree names, ends, versions;
    uint64_t weights;
};

/* NULL: not found. */
struct pin *pins_find(const struct pins *pins, uint64_t session, uint64_t name);
/* The session's pin with the lowest name; NULL: it has none. */
struct pin *pins_of(const struct pins *pins, uint64_t session);
/* Adds a pin under a name that is not in use. NULL: out of memory, or the session has
 * SESSION_PINS_MAX pins. */
struct pin *pins_add(struct pins *pins, uint64_t session, uint64_t name, uint64_t version,
                     uint64_t expires_ns);
void pins_renew(struct pins *pins, struct pin *pin, uint64_t expires_ns);
void pins_drop(struct pins *pins, struct pin *pin);
void pins_drop_session(struct pins *pins, uint64_t session);
void pins_drop_version(struct pins *pins, uint64_t version);
void pins_drop_expired(struct pins *pins, uint64_t now_ns);
/* A pin on that version; NULL: none. */
const struct pin *pins_on(const struct pins *pins, uint64_t version);
/* When the first pin expires; UINT64_MAX without pins. */
uint64_t pins_first_end_ns(const struct pins *pins);

#endif
