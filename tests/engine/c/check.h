/* check.h: what the C tests need of a framework. Each test runs in a process of its own, so that
 * one that crashes, hangs or is stopped by a sanitizer is a failure of that test and of no other,
 * and leaves no file behind. */
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
/* Looks again until it is so; for what another thread or process brings about. */
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
/* fork, of a child that does not outlive its parent: one that is stopped would hold up whoever
 * waits for the test's output. */
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

/* "<directory>/<name>" in a tmpfs directory that this test has for itself. From the test's main
 * thread. */
const char *scratch_path(const char *name);
/* How many files lie there. */
int scratch_files(void);

/* One of so many steps of a long test is done: 1, and 4 under thread checks, which make each step
 * 10 to 30 times as long. SMB_LONG=1: 1 there, too. */
int check_thinned(void);

#endif
