/* assert.h: what only a programmer's error can break, checked in every build.
 *
 * Never for what a peer, a file, a caller's argument or another process can do: that is a status.
 * Nothing in shared memory is asserted: any process that maps a segment can write anything into it.
 * NDEBUG, which Python's builds define, changes nothing.
 */
#ifndef SMB_ASSERT_H
#define SMB_ASSERT_H

/* Says which one and where on stderr, then aborts. */
_Noreturn void smb_assert_failed(const char *condition, const char *file, int line);

#define SMB_ASSERT(condition)                                                              \
    (__builtin_expect(!(condition), 0) ? smb_assert_failed(#condition, __FILE__, __LINE__) \
                                       : (void)0)

#endif
