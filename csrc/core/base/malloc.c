#include "core/base/malloc.h"

#include <stdlib.h>

#ifdef __GLIBC__

#include <limits.h>
#include <malloc.h>

enum {
    OLD_MOST = 32 << 20, /* what releases before 2.35 accept for a block */
    LITTLE = 4 << 20     /* not worth the look at every free block */
};

static int
within_int(size_t bytes)
{
    return bytes < INT_MAX ? (int)bytes : INT_MAX;
}

bool
ct_malloc_keep(size_t longest, size_t end)
{
    if (getenv("MALLOC_MMAP_THRESHOLD_") != NULL ||
        getenv("MALLOC_TRIM_THRESHOLD_") != NULL) {
        return false;
    }
    return (mallopt(M_MMAP_THRESHOLD, within_int(longest)) == 1 ||
            mallopt(M_MMAP_THRESHOLD, OLD_MOST) == 1) &&
           mallopt(M_TRIM_THRESHOLD, within_int(end)) == 1;
}

static size_t
free_bytes(void)
{
#if __GLIBC_PREREQ(2, 33)
    return mallinfo2().fordblks;
#else
    return LITTLE;
#endif
}

void
ct_malloc_trim(void)
{
    if (free_bytes() >= LITTLE) {
        (void)malloc_trim(0);
    }
}

#else

bool
ct_malloc_keep(size_t longest, size_t end)
{
    (void)longest;
    (void)end;
    return false;
}

void
ct_malloc_trim(void)
{
}

#endif
