/* rig.h: two servers in this process, and buffers over both of them, reached in every way. */
#ifndef RIG_H
#define RIG_H

#include "check.h"
#include "smb/client.h"

enum { RIG_SERVERS = 2, RIG_SEGMENTS_MAX = 8, RIG_EPOCH = 3, RIG_TIMEOUT_MS = 20000 };

/* Another process may have a copy of this, to reach the servers. */
struct rig {
    struct smb_server *servers[RIG_SERVERS]; /* valid in this process only */
    uint16_t ports[RIG_SERVERS];
    char sockets[RIG_SERVERS][128];
    struct smb_layout layout;
    int dtype;
};

/* Segment i of buffer `number` is on server i % 2, with this id and file. */
uint64_t rig_segment_id(int number, uint32_t index);
const char *rig_segment_path(int number, uint32_t index);

/* Starts the servers with buffer 0 of that layout. rig_stop does not unlink files. */
void rig_start(struct rig *rig, struct smb_layout layout, int dtype);
void rig_add_buffer(struct rig *rig, int number);
void rig_stop(struct rig *rig);

enum way {
    BY_TCP,
    BY_UNIX,
    BY_MAPPING,
    BY_BOTH /* every other segment mapped, the others over TCP */,
    BY_REFERENCE,
    WAYS
};

struct reach {
    struct smb_client *client;
    struct smb_link *links[RIG_SERVERS];
    struct smb_segment *segments[RIG_SEGMENTS_MAX]; /* the mapped segments */
    struct smb_buffer *buffer;
    struct pump *pumps[RIG_SERVERS]; /* for BY_REFERENCE */
};

void reach_make(struct reach *reach, struct rig *rig, enum way way, uint64_t session);
/* Makes another buffer over the same links. */
struct smb_buffer *reach_buffer(struct reach *reach, struct rig *rig, enum way way, int number);
void reach_end(struct reach *reach);

/* Makes one call, which must succeed and account for all its bytes. */
struct smb_outcome must(struct smb_buffer *buffer, struct smb_request request);
int reach_try(struct smb_buffer *buffer, struct smb_request request);

/* Connects a blocking socket to a port of 127.0.0.1. */
int raw_connect(uint16_t port);

#endif
