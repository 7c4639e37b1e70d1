/* GCC 12's ThreadSanitizer does not know pthread_mutex_clocklock: it would miss the lock and report
 * the unlock. Under it, in the tests only, the same wait is made with pthread_mutex_trylock, which
 * it knows, including a holder's death. */
#if defined(__SANITIZE_THREAD__)
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <time.h>

int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock,
                            const struct timespec *deadline)
{
    static const struct timespec pause = {.tv_nsec = 50000};
    for (;;) {
        int failure = pthread_mutex_trylock(mutex);
        if (failure != EBUSY)
            return failure;
        struct timespec now;
        clock_gettime(clock, &now);
        bool late = now.tv_sec > deadline->tv_sec ||
                    (now.tv_sec == deadline->tv_sec && now.tv_nsec >= deadline->tv_nsec);
        if (late)
            return ETIMEDOUT;
        nanosleep(&pause, NULL);
    }
}
#endif
