/* check.h: a small test framework for C. Each test runs in its own process, so that a crash, a hang
 * or a sanitizer's stop is a failure of that test only, and leaves no file behind. */
#ifndef CHECK_H
#define CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Ends the test, from whichever thread or child process it is called in. */
#define CHECK(condition) \
    ((condition) ? (void)0 : check_failed(__FILE__, __LINE__, #condition, 0, 1))
#define CHECK_EQ(found, expected)                                                         \
    do {                                                                                  \
        long long found_ = (long long)(found), expected_ = (long long)(expected);         \
        if (found_ != expected_)                                                          \
            check_failed(__FILE__, __LINE__, #found " == " #expected, found_, expected_); \
    } while (0)
/* Waits, by polling, until the condition is true, for what another thread or process does. */
#define WAIT_UNTIL(condition)                              \
    do {                                                   \
        uint64_t end_ns_ = check_now_ns() + 20000000000U;  \
        while (!(condition)) {                             \
            CHECK(check_now_ns() < end_ns_ && #condition); \
            usleep(200);                                   \
        }                                                  \
    } while (0)

void check_failed(const char *file, int line, const char *what, long long found, long long expected)
    __attribute__((noreturn));
/* fork, but the child does not outlive its parent: a stopped child would keep the test's output
 * open. */
pid_t check_fork(void);
/* Monotonic nanoseconds. */
uint64_t check_now_ns(void);

struct test {
    const char *name;
    void (*run)(void);
};
#define TEST(function) {#function, function}
#define RUN_TESTS(tests) run_tests(__FILE__, tests, sizeof(tests) / sizeof *(tests))
int run_tests(const char *suite, const struct test *tests, size_t count);

/* "<directory>/<name>" in a tmpfs directory of this test. Call it from the test's main thread. */
const char *scratch_path(const char *name);
/* The number of files in that directory. */
int scratch_files(void);

/* Says which steps of a long test to do: every one (1), or every fourth (4) under thread checks,
 * where each step takes 10 to 30 times as long. With SMB_LONG=1 it is 1 there, too. */
int check_thinned(void);

#endif
