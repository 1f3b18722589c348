/* Memory that a kernel of the CPU needs while it runs; apart from the table, which has
 * every kernel, so that kernels do not depend on it. */
#include "cpu/kernels.h"

#include "core/base/alloc.h"

ct_status
ct_cpu_scratch_grow(ct_scratch *scratch, size_t bytes, ct_error *err)
{
    return ct_grow(&scratch->data, &scratch->bytes, bytes, 1, err);
}
