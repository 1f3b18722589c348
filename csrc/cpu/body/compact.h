/* Compact state and master weights, to and from floats. Expanded by cpu/expand.h for
 * float alone. A function for a group is inlined for 32 elements, so that its loops are
 * of whole vectors, and for the rest of an array. */

static CT_ALWAYS_INLINE uint32_t
CT_NAME(largest_of_group)(const float *x, size_t n)
{
    int32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const int32_t magnitude = (int32_t)ct_compact_magnitude(x[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint32_t)largest;
}

static CT_ALWAYS_INLINE void
CT_NAME(load_group)(size_t k, const uint8_t *restrict from, const uint16_t *scale,
                    float *restrict to, size_t n)
{
    const float largest = ct_f32_from_f16(*scale), unit = ct_compact_unit(largest);
    for (size_t i = 0; i < n; i++) {
        to[i] = k == 0 ? ct_compact_momentum((int8_t)from[i], largest)
                       : ct_compact_variance(from[i], unit);
    }
}

static CT_ALWAYS_INLINE void
CT_NAME(store_group)(size_t k, const float *restrict from, uint8_t *restrict to,
                     uint16_t *scale, size_t n)
{
    const uint32_t largest = CT_NAME(largest_of_group)(from, n);
    *scale =
        k == 0 ? ct_compact_momentum_scale(largest) : ct_compact_root_scale(largest);
    const float stored = ct_f32_from_f16(*scale), inverse = ct_compact_inverse(stored);
    for (size_t i = 0; i < n; i++) {
        to[i] = k == 0 ? (uint8_t)ct_compact_from_momentum(from[i], stored)
                       : ct_compact_from_variance(from[i], inverse);
    }
}

/* State k, from its quantized values and scales. */
static void
CT_NAME(compact_load)(size_t k, const uint8_t *from, const uint16_t *scales, float *to,
                      size_t n)
{
    size_t i = 0;
    for (; n - i >= CT_COMPACT_GROUP; i += CT_COMPACT_GROUP) {
        if (k == 0) {
            CT_NAME(load_group)(0, from + i, scales++, to + i, CT_COMPACT_GROUP);
        }
        else {
            CT_NAME(load_group)(1, from + i, scales++, to + i, CT_COMPACT_GROUP);
        }
    }
    if (i < n) {
        CT_NAME(load_group)(k, from + i, scales, to + i, n - i);
    }
}

/* And back. */
static void
CT_NAME(compact_store)(size_t k, const float *from, uint8_t *to, uint16_t *scales,
                       size_t n)
{
    size_t i = 0;
    for (; n - i >= CT_COMPACT_GROUP; i += CT_COMPACT_GROUP) {
        if (k == 0) {
            CT_NAME(store_group)(0, from + i, to + i, scales++, CT_COMPACT_GROUP);
        }
        else {
            CT_NAME(store_group)(1, from + i, to + i, scales++, CT_COMPACT_GROUP);
        }
    }
    if (i < n) {
        CT_NAME(store_group)(k, from + i, to + i, scales, n - i);
    }
}

/* Master weights, from parameters and corrections. */
static void
CT_NAME(master_load)(const uint16_t *restrict param, const int8_t *restrict correction,
                     float *restrict to, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        to[i] = ct_compact_master(param[i], correction[i]);
    }
}

/* And back. */
static void
CT_NAME(master_store)(const float *restrict from, uint16_t *restrict param,
                      int8_t *restrict correction, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        param[i] = ct_bf16_from_f32(from[i]);
        correction[i] = ct_compact_correction(from[i], param[i]);
    }
}
