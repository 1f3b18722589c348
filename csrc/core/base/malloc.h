/* What the C library keeps of memory that was freed. glibc's; elsewhere nothing is set
 * and nothing given back. All of it holds for the whole process. */
#ifndef CT_MALLOC_H
#define CT_MALLOC_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Blocks of more bytes than `longest` go back to the system when they are freed, if
 * they did not fit among what was free; so does the end of the heap from `end` bytes
 * on. Where the user has set MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ nothing
 * is changed. Returns whether it is so now. */
bool ct_malloc_keep(size_t longest, size_t end);

/* Gives back whole pages of what is free, unless that is little. */
void ct_malloc_trim(void);

#ifdef __cplusplus
}
#endif

#endif
