/* One piece times a factor, within a limit. Expanded by cpu/expand.h. */
static void
CT_NAME(scale)(void *data, size_t from, size_t n, double factor, double limit)
{
    const ct_real f = (ct_real)factor, most = (ct_real)limit;
    ct_elem *restrict x = (ct_elem *)data + from;
    for (size_t i = 0; i < n; i++) {
        x[i] = CT_STORE(CT_REAL(ct_scale_apply)(CT_LOAD(x[i]), f, most));
    }
}
