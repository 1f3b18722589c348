/* Quantized values of 8 or 4 bits for other ranks, on the CPU. Mirrors
 * cuda/quantized.cu. */

#include "cpu/kernels.h"

#include "math/quantized.h"

#define CT_BODY "cpu/body/quantized.h"
#include "cpu/expand.h"

typedef void encode_body(const ct_encoding *e, size_t from, size_t n);
typedef void decode_body(const ct_decoding *d, size_t from, size_t n);

static encode_body *const encode_bodies[CT_ISA_COUNT][CT_FLOAT_DTYPES] =
    CT_BODIES(encode);
static decode_body *const decode_bodies[CT_ISA_COUNT][CT_FLOAT_DTYPES] =
    CT_BODIES(decode);

_Static_assert(CT_PARTITION_ALIGN % CT_QUANTIZED_BLOCK == 0,
               "a piece has whole blocks");

typedef struct quantized_job {
    const ct_encoding *encoding; /* or NULL: decode */
    const ct_decoding *decoding;
    ct_isa isa;
} quantized_job;

static void
run_piece(const void *arg, const ct_piece *piece)
{
    const quantized_job *job = arg;
    if (job->encoding != NULL) {
        const ct_dtype dtype = job->encoding->values.dtype;
        encode_bodies[job->isa][dtype](job->encoding, piece->offset, piece->n);
    }
    else {
        const ct_dtype dtype = job->decoding->values.dtype;
        decode_bodies[job->isa][dtype](job->decoding, piece->offset, piece->n);
    }
}

static ct_status
run(quantized_job *job, const ct_span *values, const char *kernel, ct_error *err)
{
    ct_status status = ct_isa_get(&job->isa, err);
    if (status == CT_OK) {
        status = ct_check_float(kernel, 0, values->dtype, err);
    }
    if (status == CT_OK) {
        ct_for_pieces(values, 1, run_piece, job);
    }
    return status;
}

ct_status
ct_cpu_encode(void *stream, const ct_encoding *e, ct_error *err)
{
    quantized_job job = {.encoding = e};
    (void)stream;
    return run(&job, &e->values, "encode", err);
}

ct_status
ct_cpu_decode(void *stream, const ct_decoding *d, ct_error *err)
{
    quantized_job job = {.decoding = d};
    (void)stream;
    return run(&job, &d->values, "decode", err);
}
