/* One piece times a factor. Expanded by cpu/expand.h. */
static void
CT_NAME(scale)(void *data, size_t from, size_t n, double factor)
{
    const ct_real f = (ct_real)factor;
    ct_elem *restrict x = (ct_elem *)data + from;
    for (size_t i = 0; i < n; i++) {
        x[i] = CT_STORE(CT_LOAD(x[i]) * f);
    }
}
