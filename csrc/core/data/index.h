/* The table of a memory-mapped data set: the place of each item in the data file.
 *
 * n sizes, int32, in elements, and n offsets, int64, in bytes, both little-endian and
 * at any alignment, as in fairseq's files. */
#ifndef CT_INDEX_H
#define CT_INDEX_H

#include "core/base/status.h"

#include <stddef.h>

CT_BEGIN_DECLS

/* CT_EINVAL, naming the first such item, if a size or an offset is negative, an
 * offset no multiple of an element's bytes, or an item not wholly within data_bytes.
 * After CT_OK every item can be read without a further check. */
CT_NODISCARD ct_status ct_index_check(const void *sizes, const void *offsets, size_t n,
                                      size_t element_bytes, size_t data_bytes,
                                      ct_error *err);

CT_END_DECLS

#endif
