/* buffer.h: a client's buffer: its layout, and how each segment is reached. */
#ifndef SMB_BUFFER_H
#define SMB_BUFFER_H

#include "client/client.h"
#include "client/link.h"
#include "smb/client.h"

struct path {
    uint64_t segment_id;
    uint32_t epoch;
    struct smb_link *link; /* either link or segment is set */
    struct smb_segment *segment;
    /* more links to the same server: chunks use whichever lanes have room */
    uint32_t further_count;
    struct smb_link *further[SMB_LANES_FURTHER_MAX];
};

/* Complete before the first call and never changed afterwards, so that calls of many threads read
 * it without a lock. */
struct smb_buffer {
    struct smb_client *client;
    struct smb_layout layout;
    int dtype;
    /* 1, 2, 4 or 8, so multiples are found without a division, which would slow small calls */
    uint32_t element_bytes;
    uint32_t further_count; /* the sum over all paths */
    struct path paths[];
};

static inline bool path_is_set(const struct path *path)
{
    return path->link || path->segment;
}

/* The link of lane 0, 1 and so on to further_count. */
static inline struct smb_link *path_link(const struct path *path, uint32_t lane)
{
    return lane == 0 ? path->link : path->further[lane - 1];
}

#endif
