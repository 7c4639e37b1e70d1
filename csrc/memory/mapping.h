/* mapping.h: the struct of a mapped segment, for segment.c, chunk.c and change.c alone: no other code touches shared memory. */
#ifndef SMB_MAPPING_H
#define SMB_MAPPING_H

#include "base/assert.h"
#include "memory/format.h"

struct smb_segment {
    _Atomic uint32_t references;
    int fd;
    struct header *header; /* shared; the copies below are what is relied on */
    struct chunk_state *chunks;
    struct record *records;
    uint32_t record_count;
    uint8_t *data;
    void *companion; /* what the daemon keeps beside it */
    void (*free_companion)(void *);
    uint64_t id;
    uint64_t data_bytes;
    uint64_t data_offset;
    uint64_t file_bytes;
    uint32_t epoch;
    uint32_t dtype;
    uint32_t chunk_bytes;
    uint32_t pid_namespace; /* this process's */
};

static inline struct chunk_state *chunk_at(const struct smb_segment *segment, uint64_t offset)
{
    SMB_ASSERT(offset < segment->data_bytes);
    return &segment->chunks[offset / segment->chunk_bytes];
}

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
