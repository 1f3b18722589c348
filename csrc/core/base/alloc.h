/* The core's allocator: malloc that fails on request, and aligned blocks.
 *
 * Tests set a countdown so that every out-of-memory branch runs; in normal use the
 * countdown is off and costs one relaxed load an allocation. */
#ifndef CT_ALLOC_H
#define CT_ALLOC_H

#include "core/base/status.h"

#include <stddef.h>

CT_BEGIN_DECLS

/* Each returns memory that ct_free releases, or NULL. Blocks are aligned to 64 bytes,
 * a cache line and the widest vector. n * size is checked for overflow. */
void *ct_alloc(size_t bytes);
void *ct_calloc(size_t n, size_t size);

/* Grows *block to hold n items of `size` bytes, keeping its content and at least
 * doubling, and updates *capacity. CT_ENOMEM leaves both unchanged. */
CT_NODISCARD ct_status ct_grow(void **block, size_t *capacity, size_t n, size_t size,
                               ct_error *err);

void ct_free(void *block); /* NULL is fine */

/* Lets the n-th allocation from now fail, and all later; 0 turns the countdown off. */
void ct_alloc_fail_after(size_t n);

CT_END_DECLS

#endif
