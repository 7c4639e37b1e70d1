/* segment.h: a mapped segment: its life, its identity, its counters. In the daemon and in clients.
 *
 * Namespaces. A robust lock holds its owner's thread id as its PID namespace has it. The kernel
 * tells a dead owner by that id alone. So the header names the namespace of the locks, and no
 * process of another namespace maps the segment. A daemon that starts in a new namespace takes its
 * segments along. Clients of the old one get SMB_NAMESPACE from their next operation.
 * docs/decisions.md, 0019.
 *
 * Trust. Bounds come from a private copy of the header, checked against the file's size at mapping.
 * Nothing that another process writes later can make us leave the mapping. A process that may map a
 * segment can write anything into it, locks included. So only processes of the daemon's own user
 * may map.
 */
#ifndef SMB_SEGMENT_H
#define SMB_SEGMENT_H

#include "memory/records.h"
#include "smb/segment.h"

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
/* As smb_segment_open, for the daemon: one that an earlier run left, in another PID namespace
 * maybe, or in the format before. */
int smb_segment_take_over(const char *path, struct smb_segment **segment);
/* It has, or had, a copy on another server, and moves with the segments of that bundle; 0: alone.
 * Its file says so: after a restart it is served by nobody before its role is known. */
void smb_segment_mark_replicated(struct smb_segment *segment, uint64_t bundle);
bool smb_segment_replicated(const struct smb_segment *segment);
/* Its daemon was given a role in that epoch. A copy that is still being made is not whole. The file
 * says so after a restart: of two copies the whole one of the later epoch has every change that was
 * acknowledged. */
void smb_segment_note_copy(struct smb_segment *segment, uint32_t epoch, bool whole);
/* *epoch: of that role; of a segment without one, in which it was made. */
enum smb_copy smb_segment_copy(const struct smb_segment *segment, uint32_t *epoch);
/* Its own id: a bundle of its own. */
uint64_t smb_segment_bundle(const struct smb_segment *segment);
/* By its daemon, of a segment that clients may have mapped: from here on they get SMB_STALE_EPOCH,
 * and it is one that may have a copy. A change that holds its chunk's lock by now is still made.
 * false: it was deleted. */
bool smb_segment_gate(struct smb_segment *segment);
/* It may move from here on: smb_segment_bind the other way round. SMB_BUSY: it stays. */
int smb_segment_let_move(struct smb_segment *segment);
/* Whether that was done: smb_segment_bind fails. */
bool smb_segment_moves(const struct smb_segment *segment);
bool smb_segment_deleted(const struct smb_segment *segment);
uint64_t smb_segment_id(const struct smb_segment *segment);
uint32_t smb_segment_epoch(const struct smb_segment *segment);
int smb_segment_dtype(const struct smb_segment *segment);

#endif
