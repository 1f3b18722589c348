/* The table of a memory-mapped data set: where each item lies in the data file.
 *
 * n sizes, int32, in elements, and n offsets, int64, in bytes, both little-endian and
 * at any alignment, as fairseq writes them. */
#ifndef CT_INDEX_H
#define CT_INDEX_H

#include "core/base/status.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* CT_EINVAL, naming the first such item, where a size or an offset is negative, an
 * offset no multiple of an element's bytes, or an item not wholly within data_bytes.
 * After CT_OK every item can be read without a further check. */
CT_NODISCARD ct_status ct_index_check(const void *sizes, const void *offsets, size_t n,
                                      size_t element_bytes, size_t data_bytes,
                                      ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
