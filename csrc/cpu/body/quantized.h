/* Blocks of values to quantized values and back. Expanded by cpu/expand.h; `from` and
 * `n` as in ct_piece: whole blocks but for the last. */
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

/* Quantizes a block and updates its residual; a block with Inf or NaN becomes zeros and
 * keeps the residual. */
static void
CT_NAME(quantize_block)(const float *restrict x, float *restrict residual,
                        int8_t *restrict quantized, size_t n, float scale, float most)
{
    const bool bad = !(scale == scale);
    const float inverse = ct_quant_scale(scale);
    for (size_t i = 0; i < n; i++) {
        const int8_t nearest = ct_quantized_nearest(x[i], inverse, most);
        quantized[i] = (int8_t)(bad ? 0 : nearest);
        residual[i] = bad ? residual[i] : x[i] - (float)quantized[i] * scale;
    }
}

/* n is even here: an odd length is completed by a 0. */
static void
CT_NAME(pack)(const int8_t *restrict quantized, int8_t *restrict pairs, size_t n)
{
    for (size_t i = 0; i < n / 2; i++) {
        pairs[i] = ct_quantized_pair(quantized[2 * i], quantized[2 * i + 1]);
    }
}

static void
CT_NAME(unpack)(const int8_t *restrict pairs, int8_t *restrict quantized, size_t n)
{
    for (size_t i = 0; i < n / 2; i++) {
        quantized[2 * i] = ct_quantized_first(pairs[i]);
        quantized[2 * i + 1] = ct_quantized_second(pairs[i]);
    }
}

static void
CT_NAME(encode)(const ct_encoding *e, size_t from, size_t n)
{
    const float most = ct_quantized_most(e->bits);
    for (size_t at = from; at < from + n; at += CT_QUANTIZED_BLOCK) {
        const size_t left = from + n - at;
        const size_t count = left < CT_QUANTIZED_BLOCK ? left : CT_QUANTIZED_BLOCK;
        float x[CT_QUANTIZED_BLOCK];
        int8_t single[CT_QUANTIZED_BLOCK] = {0};
        int8_t *quantized = e->quantized + ct_quantized_bytes(at, e->bits);
        const float scale = ct_quantized_scale(
            CT_NAME(gather_block)((const ct_elem *)e->values.data + at,
                                  e->residual + at, x, count),
            most);
        e->scales[at / CT_QUANTIZED_BLOCK] = scale;
        CT_NAME(quantize_block)
        (x, e->residual + at, e->bits == 4 ? single : quantized, count, scale, most);
        if (e->bits == 4) {
            CT_NAME(pack)(single, quantized, count + count % 2);
        }
    }
}

/* Adds a part's values to the sum; 4-bit values come unpacked. */
static void
CT_NAME(add_part)(const int8_t *restrict quantized, float scale, float *restrict sum,
                  size_t n)
{
    for (size_t i = 0; i < n; i++) {
        sum[i] += (float)quantized[i] * scale;
    }
}

static void
CT_NAME(decode)(const ct_decoding *d, size_t from, size_t n)
{
    for (size_t at = from; at < from + n; at += CT_QUANTIZED_BLOCK) {
        const size_t left = from + n - at;
        const size_t count = left < CT_QUANTIZED_BLOCK ? left : CT_QUANTIZED_BLOCK;
        float sum[CT_QUANTIZED_BLOCK] = {0};
        for (size_t part = 0; part < d->parts; part++) {
            const size_t skip = part * d->part_bytes;
            const int8_t *quantized =
                d->quantized + skip + ct_quantized_bytes(at, d->bits);
            const void *there =
                (const char *)(d->scales + at / CT_QUANTIZED_BLOCK) + skip;
            int8_t single[CT_QUANTIZED_BLOCK];
            if (d->bits == 4) {
                CT_NAME(unpack)(quantized, single, count + count % 2);
            }
            CT_NAME(add_part)
            (d->bits == 4 ? single : quantized, *(const float *)there, sum, count);
        }
        ct_elem *restrict values = (ct_elem *)d->values.data + at;
        for (size_t i = 0; i < count; i++) {
            values[i] = CT_STORE((ct_real)(sum[i] * d->factor));
        }
    }
}
