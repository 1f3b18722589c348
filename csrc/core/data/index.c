/* The check of a data set's table before the first read.
 *
 * The file may be cut short or come from anywhere: once checked, an item is read
 * without a bound of its own. Sums and products are compared by subtraction and in 64
 * bits, so that no entry overflows past the check. */
#include "core/data/index.h"

#include <inttypes.h>
#include <stdint.h>
#include <string.h>

static ct_status
fail_item(size_t i, int32_t size, int64_t offset, size_t element_bytes,
          size_t data_bytes, ct_error *err)
{
    if (size < 0 || offset < 0) {
        return ct_fail(err, CT_EINVAL,
                       "item %zu has size %" PRId32 " at offset %" PRId64
                       ": neither may be negative",
                       i, size, offset);
    }
    if (offset % (int64_t)element_bytes != 0) {
        return ct_fail(err, CT_EINVAL,
                       "item %zu begins at byte %" PRId64
                       ", which is no multiple of the %zu bytes of an element",
                       i, offset, element_bytes);
    }
    return ct_fail(err, CT_EINVAL,
                   "item %zu has %" PRId32 " elements of %zu bytes at offset %" PRId64
                   ", which end beyond the %zu bytes of the data file",
                   i, size, element_bytes, offset, data_bytes);
}

ct_status
ct_index_check(const void *sizes, const void *offsets, size_t n, size_t element_bytes,
               size_t data_bytes, ct_error *err)
{
    const unsigned char *size_at = sizes, *offset_at = offsets;
    for (size_t i = 0; i < n; i++) {
        int32_t size;
        int64_t offset;
        memcpy(&size, size_at + i * sizeof size, sizeof size);
        memcpy(&offset, offset_at + i * sizeof offset, sizeof offset);
        if (size < 0 || offset < 0 || (uint64_t)offset % element_bytes != 0 ||
            (uint64_t)offset > data_bytes ||
            (uint64_t)size * element_bytes > data_bytes - (uint64_t)offset) {
            return fail_item(i, size, offset, element_bytes, data_bytes, err);
        }
    }
    return CT_OK;
}
