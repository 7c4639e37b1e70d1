/* bundle.h: segments that move together: one primary, one backup, one order of changes, one feed.
 * docs/decisions.md, 0038. A segment that moves alone is a bundle of one.
 *
 * Threads. See replica.h. */
#ifndef SMB_BUNDLE_H
#define SMB_BUNDLE_H

enum { BUNDLE_BUCKETS = 256, BUNDLE_MEMBERS_MAX = 16 };

#endif
