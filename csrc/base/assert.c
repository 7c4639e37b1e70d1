#include "base/assert.h"

#include <stdio.h>
#include <stdlib.h>

__attribute__((cold)) void smb_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "smb: %s:%d: internal error of the engine: this should hold: %s\n", file, line,
            condition);
    abort();
}
