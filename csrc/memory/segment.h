/* segment.h: a mapped segment: its life, its identity, its counters. In the daemon and in clients.
 *
 * Namespaces. A robust lock holds its owner's thread id in the owner's PID namespace, and the
 * kernel identifies a dead owner by that id alone. So the header names the namespace of the locks,
 * and no process of another namespace maps the segment. A daemon that starts in a new namespace
 * takes its segments over. Clients in the old namespace get SMB_NAMESPACE from their next
 * operation. docs/decisions.md, 0019.
 *
 * Trust. Bounds come from a private copy of the header, which is checked against the file's size at
 * mapping. Nothing that another process writes later can make this process leave the mapping. A
 * process that may map a segment can write anything into it, locks included. So only processes of
 * the daemon's own user may map it. */
#ifndef SMB_SEGMENT_H
#define SMB_SEGMENT_H

#include "memory/records.h"
#include "smb/segment.h"

struct sync_words;

struct record_table smb_segment_records(struct smb_segment *segment);
struct sync_words *smb_segment_sync_words(struct smb_segment *segment);
uint64_t smb_segment_data_bytes(const struct smb_segment *segment);
/* Keeps an object beside the segment and frees it with the last reference. */
void smb_segment_keep(struct smb_segment *segment, void *companion, void (*free_companion)(void *));
void *smb_segment_companion(const struct smb_segment *segment);

struct smb_segment *smb_segment_retain(struct smb_segment *segment);
/* Counts an operation of a local client where the daemon can read it. */
void smb_segment_count(struct smb_segment *segment, int opcode, uint64_t bytes);
/* Whether [offset, offset + bytes) lies in the segment and within one of its chunks. */
bool smb_segment_holds(const struct smb_segment *segment, uint64_t offset, uint64_t bytes);
/* smb_segment_open for the daemon: accepts a segment of an earlier run, which may have been in
 * another PID namespace or have used the previous format. */
int smb_segment_take_over(const char *path, struct smb_segment **segment);
/* Notes in the file that the segment has, or had, a copy on another server, and moves with that
 * bundle (0: alone). After a restart the daemon refuses requests for it until its role is known. */
void smb_segment_mark_replicated(struct smb_segment *segment, uint64_t bundle);
bool smb_segment_replicated(const struct smb_segment *segment);
/* Notes in the file that the daemon was given a role in that epoch, and whether the copy is whole.
 * A copy that is still being made is not. After a restart, of two copies the whole one with the
 * later epoch has every acknowledged change. */
void smb_segment_note_copy(struct smb_segment *segment, uint32_t epoch, bool whole);
/* *epoch: the epoch of that role; without a role, the epoch in which the segment was created. */
enum smb_copy smb_segment_copy(const struct smb_segment *segment, uint32_t *epoch);
/* The id of its bundle; its own id if it is a bundle of one. */
uint64_t smb_segment_bundle(const struct smb_segment *segment);
/* For the daemon, on a segment that clients may have mapped: from here on they get SMB_STALE_EPOCH,
 * and the segment may get a copy. A change that already holds its chunk's lock is still made.
 * False: the segment was deleted. */
bool smb_segment_gate(struct smb_segment *segment);
/* Allows the segment to move, the opposite of smb_segment_bind. SMB_BUSY: it is bound. */
int smb_segment_let_move(struct smb_segment *segment);
/* Whether smb_segment_let_move was called, so that smb_segment_bind fails. */
bool smb_segment_moves(const struct smb_segment *segment);
bool smb_segment_deleted(const struct smb_segment *segment);
uint64_t smb_segment_id(const struct smb_segment *segment);
uint32_t smb_segment_epoch(const struct smb_segment *segment);
int smb_segment_dtype(const struct smb_segment *segment);

#endif
