/* One block of 8-bit state. Expanded by cpu/expand.h for float and double. */
static void
CT_NAME(dequantise)(const uint8_t *restrict quantized, const float *restrict map,
                    float absmax, void *to, size_t from, size_t n)
{
    ct_real *restrict x = to;
    for (size_t i = from; i < n; i++) {
        x[i] = (ct_real)(map[quantized[i]] * absmax);
    }
}

/* By the entries of a direct search; n > 0. */
static void
CT_NAME(look_up)(ct_isa isa, const ct_real *restrict x, float scale,
                 const uint32_t *entries, uint8_t *restrict quantized, size_t n)
{
    int32_t keys[CT_QUANT_BLOCK];
    size_t i = 0;
    do {
        keys[i] = quant_key_of(ct_quant_unit((float)x[i], scale));
    } while (++i < n);
    for (i = gather_quantized(isa, keys, entries, quantized, n); i < n; i++) {
        const uint32_t entry = entries[(keys[i] >> 16) + QUANT_BUCKETS];
        quantized[i] = (uint8_t)(entry + (((uint32_t)keys[i] & 0xffff) > entry >> 8));
    }
}

/* Returns absmax. */
static float
CT_NAME(quantise)(ct_isa isa, const void *from, const quant_search *search,
                  uint8_t *restrict quantized, size_t n)
{
    const ct_real *restrict x = from;
    int32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const int32_t magnitude = (int32_t)ct_quant_magnitude((float)x[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    const float absmax = ct_quant_absmax((uint32_t)largest);
    const float scale = ct_quant_scale(absmax);
    if (search->direct) {
        CT_NAME(look_up)(isa, x, scale, search->entries, quantized, n);
        return absmax;
    }
    for (size_t i = 0; i < n; i++) {
        const float unit = ct_quant_unit((float)x[i], scale);
        quantized[i] = (uint8_t)ct_quant_nearest(search->middles, unit);
    }
    return absmax;
}
