/* Internal errors of the engine are detected in every build, and nothing else is taken for one. */
#define NDEBUG /* as Python's builds have it */
#include "base/assert.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "base/layout.h"
#include "check.h"

/* Runs `work` in a child with stderr in `said`; returns how the child ended. */
static int run_apart(void (*work)(void), char *said, size_t room)
{
    int ends[2], status;
    CHECK_EQ(pipe(ends), 0);
    pid_t child = check_fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        work();
        _exit(0);
    }
    close(ends[1]);
    size_t have = 0;
    for (ssize_t n = 1; n > 0; have += (size_t)n)
        n = read(ends[0], said + have, room - 1 - have);
    said[have] = '\0';
    close(ends[0]);
    CHECK_EQ(waitpid(child, &status, 0), child);
    return status;
}

static const struct smb_layout layout = {1 << 20, 1 << 18, 1 << 18, 2};

static void on_a_segment_that_is_not_there(void)
{
    smb_cursor_make(&layout, 2, 0, 1);
}

static void at_the_end(void)
{
    struct smb_cursor cursor = smb_cursor_make(&layout, 1, (1 << 20) - 1, 1);
    struct smb_piece piece;
    CHECK(smb_cursor_next(&cursor, &piece) && !smb_cursor_next(&cursor, &piece));
}

/* A cursor past the layout ends the process, and prints the file and the condition; a cursor on the
 * last byte does not. */
static void ends_the_process(void)
{
    char said[512];
    int status = run_apart(on_a_segment_that_is_not_there, said, sizeof said);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(strstr(said, "layout.c:") && strstr(said, "segment < layout->segment_count"));
    status = run_apart(at_the_end, said, sizeof said);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQ(strlen(said), 0);
}

int main(void)
{
    const struct test tests[] = {TEST(ends_the_process)};
    return RUN_TESTS(tests);
}
