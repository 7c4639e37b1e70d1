/* assert.h: assertions, checked in every build, also with NDEBUG, which Python's builds define.
 * Only a programmer's error may break an assertion. What a peer, a file, a caller's argument or
 * another process can cause is a status instead. Nothing in shared memory is asserted, because any
 * process that maps a segment can write anything into it. */
#ifndef SMB_ASSERT_H
#define SMB_ASSERT_H

/* Prints the condition and its place on stderr, then aborts. */
_Noreturn void smb_assert_failed(const char *condition, const char *file, int line);

#define SMB_ASSERT(condition)                                                              \
    (__builtin_expect(!(condition), 0) ? smb_assert_failed(#condition, __FILE__, __LINE__) \
                                       : (void)0)

#endif
