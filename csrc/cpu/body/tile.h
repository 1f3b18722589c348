/* A tile to and from float or double. Expanded by cpu/expand.h. */
static void
CT_NAME(widen)(const void *data, size_t from, size_t n, ct_tile *to, bool wide)
{
    const ct_elem *restrict x = (const ct_elem *)data + from;
    if (wide) {
        for (size_t i = 0; i < n; i++) {
            to->f64[i] = (double)CT_LOAD(x[i]);
        }
    }
    else {
        for (size_t i = 0; i < n; i++) {
            to->f32[i] = (float)CT_LOAD(x[i]);
        }
    }
}

static void
CT_NAME(narrow)(const ct_tile *from, bool wide, void *data, size_t to, size_t n)
{
    ct_elem *restrict x = (ct_elem *)data + to;
    if (wide) {
        for (size_t i = 0; i < n; i++) {
            x[i] = CT_STORE_F64(from->f64[i]);
        }
    }
    else {
        for (size_t i = 0; i < n; i++) {
            x[i] = CT_STORE(from->f32[i]);
        }
    }
}
