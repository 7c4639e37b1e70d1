/* failpoint.h: named places where a test may have the process killed. Nothing at all in what users
 * install. */
#ifndef SMB_FAILPOINT_H
#define SMB_FAILPOINT_H

#ifdef SMB_FAILPOINTS
/* Kills the process, with SIGKILL, at the count-th time that the armed name is reached. */
void failpoint_reach(const char *name);
/* Arms one, or with NULL none. The environment does so too: SMB_ENGINE_FAILPOINT=NAME or
 * NAME:COUNT. */
void failpoint_arm(const char *name, long count);
#define FAILPOINT(name) failpoint_reach(name)
#else
#define FAILPOINT(name) ((void)0)
#endif

#endif
