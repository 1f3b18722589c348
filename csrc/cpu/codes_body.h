/* Blocks of values to codes and back. Expanded by cpu/expand.h; `from` and `n` are
 * those of ct_piece: whole blocks but for the last. */
static uint32_t
CT_NAME(gather_block)(const ct_elem *restrict values, const float *restrict residual,
                      float *restrict x, size_t n)
{
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)CT_LOAD(values[i]) + residual[i];
        const uint32_t magnitude = ct_quant_magnitude(x[i]);
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

static void
CT_NAME(encode)(const ct_encoding *e, size_t from, size_t n)
{
    for (size_t at = from; at < from + n; at += CT_CODES_BLOCK) {
        const size_t left = from + n - at;
        const size_t count = left < CT_CODES_BLOCK ? left : CT_CODES_BLOCK;
        float x[CT_CODES_BLOCK], *restrict residual = e->residual + at;
        int8_t *restrict codes = e->codes + at;
        const float scale = ct_codes_scale(CT_NAME(gather_block)(
            (const ct_elem *)e->values.data + at, residual, x, count));
        const bool bad = !(scale == scale);
        const float inverse = ct_quant_scale(scale);
        e->scales[at / CT_CODES_BLOCK] = scale;
        for (size_t i = 0; i < count; i++) {
            const int8_t nearest = ct_codes_nearest(x[i], inverse);
            codes[i] = (int8_t)(bad ? 0 : nearest);
            residual[i] = bad ? residual[i] : x[i] - (float)codes[i] * scale;
        }
    }
}

static void
CT_NAME(decode)(const ct_decoding *d, size_t from, size_t n)
{
    for (size_t at = from; at < from + n; at += CT_CODES_BLOCK) {
        const size_t left = from + n - at;
        const size_t count = left < CT_CODES_BLOCK ? left : CT_CODES_BLOCK;
        float sum[CT_CODES_BLOCK] = {0};
        for (size_t part = 0; part < d->parts; part++) {
            const size_t skip = part * d->part_bytes;
            const int8_t *restrict codes = d->codes + skip + at;
            const void *there = (const char *)(d->scales + at / CT_CODES_BLOCK) + skip;
            const float scale = *(const float *)there;
            for (size_t i = 0; i < count; i++) {
                sum[i] += (float)codes[i] * scale;
            }
        }
        ct_elem *restrict values = (ct_elem *)d->values.data + at;
        for (size_t i = 0; i < count; i++) {
            values[i] = CT_STORE((ct_real)(sum[i] * d->factor));
        }
    }
}
