/* One block of 8-bit state. Expanded by cpu/expand.h for float and double. */
static void
CT_NAME(dequantise)(const uint8_t *restrict codes, const float *restrict map,
                    float absmax, void *to, size_t n)
{
    ct_real *restrict x = to;
    for (size_t i = 0; i < n; i++) {
        x[i] = (ct_real)(map[codes[i]] * absmax);
    }
}

static float
CT_NAME(quantise)(const void *from, const ct_quant_search *search,
                  uint8_t *restrict codes, size_t n)
{
    const ct_real *restrict x = from;
    float unit[CT_QUANT_BLOCK];
    int32_t bucket[CT_QUANT_BLOCK];
    int32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const int32_t magnitude = (int32_t)ct_quant_magnitude((float)x[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    const float absmax = ct_quant_absmax((uint32_t)largest);
    const float scale = ct_quant_scale(absmax);
    for (size_t i = 0; i < n; i++) {
        unit[i] = ct_quant_unit((float)x[i], scale);
        bucket[i] = bucket_of(unit[i]);
    }
    for (size_t i = 0; i < n; i++) {
        const uint32_t first = search->first[bucket[i]];
        codes[i] = (uint8_t)(first + (unit[i] > search->middles[first]));
    }
    for (int more = 1; more < search->most; more++) {
        for (size_t i = 0; i < n; i++) {
            codes[i] = (uint8_t)(codes[i] + (unit[i] > search->middles[codes[i]]));
        }
    }
    return absmax;
}
