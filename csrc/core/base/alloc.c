/* The allocator over aligned_alloc, with a countdown to failure for tests. */
#include "core/base/alloc.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    ALIGNMENT = 64
};

/* 0: off. k + 1: k more allocations succeed, then all fail. */
static atomic_size_t countdown;

static bool
may_allocate(void)
{
    size_t left = atomic_load_explicit(&countdown, memory_order_relaxed);
    while (left > 1) {
        if (atomic_compare_exchange_weak(&countdown, &left, left - 1)) {
            return true;
        }
    }
    return left == 0;
}

void
ct_alloc_fail_after(size_t n)
{
    atomic_store(&countdown, n);
}

void *
ct_alloc(size_t bytes)
{
    if (bytes > SIZE_MAX - ALIGNMENT || !may_allocate()) {
        return NULL;
    }
    const size_t whole = bytes + (ALIGNMENT - bytes % ALIGNMENT) % ALIGNMENT;
    return aligned_alloc(ALIGNMENT, whole == 0 ? ALIGNMENT : whole);
}

void *
ct_calloc(size_t n, size_t size)
{
    if (size != 0 && n > SIZE_MAX / size) {
        return NULL;
    }
    void *block = ct_alloc(n * size);
    if (block != NULL) {
        memset(block, 0, n * size);
    }
    return block;
}

void
ct_free(void *block)
{
    free(block);
}

ct_status
ct_grow(void **block, size_t *capacity, size_t n, size_t size, ct_error *err)
{
    if (n <= *capacity) {
        return CT_OK;
    }
    size_t wanted = n;
    if (*capacity <= SIZE_MAX / 2 && n < *capacity * 2) {
        wanted = *capacity * 2;
    }
    void *larger = wanted <= SIZE_MAX / size ? ct_alloc(wanted * size) : NULL;
    if (larger == NULL) {
        return ct_fail(err, CT_ENOMEM, "out of memory: %zu items of %zu bytes", wanted,
                       size);
    }
    if (*block != NULL) {
        memcpy(larger, *block, *capacity * size);
    }
    ct_free(*block);
    *block = larger;
    *capacity = wanted;
    return CT_OK;
}
