#include "base/assert.h"

#include <stdio.h>
#include <stdlib.h>

__attribute__((cold)) void smb_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "smb: %s:%d: an error of the engine: not so: %s\n", file, line, condition);
    abort();
}
