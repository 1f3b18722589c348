#include "core/ct_pool.h"

void
ct_pool_run(ct_pool_fn *fn, void *arg, size_t n_batches)
{
    for (size_t batch = 0; batch < n_batches; batch++) {
        fn(arg, batch);
    }
}

ct_status
ct_pool_set_threads(size_t n, ct_error *err)
{
    if (n != 1) {
        return ct_fail(err, CT_EINVAL, "this build works on 1 thread, got %zu", n);
    }
    return CT_OK;
}

size_t
ct_pool_threads(void)
{
    return 1;
}
