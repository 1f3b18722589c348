/* Scratch memory of the CPU's kernels; not in device.c, so that kernels do not depend
 * on the table of all kernels. */
#include "cpu/kernels.h"

#include "core/base/alloc.h"

ct_status
ct_cpu_scratch_grow(ct_scratch *scratch, size_t bytes, ct_error *err)
{
    return ct_grow(&scratch->data, &scratch->bytes, bytes, 1, err);
}
