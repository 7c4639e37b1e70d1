/* group.h: segments that move together: one primary, one backup, one order of changes, one feed.
 * docs/decisions/0038. A segment that moves alone is a group of one.
 *
 * Threads. As replica.h says.
 */
#ifndef SMB_GROUP_H
#define SMB_GROUP_H

enum { GROUP_BUCKETS = 256, GROUP_MEMBERS_MAX = 16 };

#endif
