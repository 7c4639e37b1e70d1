/* failpoint.h: named places where a test may have the process killed. Compiled to nothing in what
 * users install. */
#ifndef SMB_FAILPOINT_H
#define SMB_FAILPOINT_H

#ifdef SMB_FAILPOINTS
/* Kills the process with SIGKILL when the armed name is reached for the count-th time. */
void failpoint_reach(const char *name);
/* Arms one failpoint, or none if name is NULL. The environment can do the same:
 * SMB_ENGINE_FAILPOINT=NAME or NAME:COUNT. */
void failpoint_arm(const char *name, long count);
#define FAILPOINT(name) failpoint_reach(name)
#else
#define FAILPOINT(name) ((void)0)
#endif

#endif
