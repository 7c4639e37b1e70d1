/* segment.h: a segment, mapped: its life, who it is, what is counted. In the daemon and in clients.
 *
 * Namespaces. A robust lock holds the thread id that its owner has in its PID namespace, and the kernel tells a dead owner by that
 * alone. So the header says in which namespace the locks hold: no process of another one maps the segment. A daemon that is
 * started in another one than its earlier run takes its segments along; clients of the old one, mapped as they are, get
 * SMB_NAMESPACE from their next operation. docs/decisions/0019.
 *
 * Trust. Bounds come from a private copy of the header, checked against the file's size when it is mapped; nothing that
 * another process writes later can make us leave the mapping. A process that may map a segment can write anything into it,
 * locks included: mapping is given to processes of the daemon's own user only.
 */
#ifndef SMB_SEGMENT_H
#define SMB_SEGMENT_H

#include "memory/records.h"
#include "smb.h"

struct sync_words;

struct record_table smb_segment_records(struct smb_segment *segment);
struct sync_words *smb_segment_sync_words(struct smb_segment *segment);
uint64_t smb_segment_data_bytes(const struct smb_segment *segment);
/* Keeps something beside it, freed with the last reference. */
void smb_segment_keep(struct smb_segment *segment, void *companion, void (*free_companion)(void *));
void *smb_segment_companion(const struct smb_segment *segment);

struct smb_segment *smb_segment_retain(struct smb_segment *segment);
/* Counts an operation of a local client where the daemon can read it. */
void smb_segment_count(struct smb_segment *segment, int opcode, uint64_t bytes);
/* Whether [offset, offset + bytes) lies in the segment and within one of its chunks. */
bool smb_segment_holds(const struct smb_segment *segment, uint64_t offset, uint64_t bytes);
/* As smb_segment_open, for the daemon: one that an earlier run left, in another PID namespace maybe, or in the format before. */
int smb_segment_take_over(const char *path, struct smb_segment **segment);
bool smb_segment_deleted(const struct smb_segment *segment);
uint64_t smb_segment_id(const struct smb_segment *segment);
uint32_t smb_segment_epoch(const struct smb_segment *segment);
int smb_segment_dtype(const struct smb_segment *segment);

#endif
