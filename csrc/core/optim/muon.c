/* Newton-Schulz works in four matrices of one block of memory: X, the next X, the Gram
 * matrix of the smaller side and its polynomial; X and the next X swap places. */
#include "core/optim/muon.h"

static size_t
smaller(const ct_orthogonal *o)
{
    return o->rows < o->cols ? o->rows : o->cols;
}

size_t
ct_orthogonal_bytes(const ct_orthogonal *o)
{
    const size_t side = smaller(o);
    return 2 * (o->rows * o->cols + side * side) * ct_dtype_size(o->dtype);
}

void *
ct_orthogonal_waiting(const ct_orthogonal *o, void *memory)
{
    return (char *)memory + o->rows * o->cols * ct_dtype_size(o->dtype);
}

typedef struct matrices {
    ct_scratch *scratch;
    void *x, *next;    /* rows x cols */
    void *gram, *poly; /* of the smaller side */
} matrices;

static ct_status
copy(const ct_device *device, void *stream, ct_dtype dtype, void *to, void *from,
     size_t n, ct_error *err)
{
    const ct_span target = {to, n, dtype}, source = {from, n, dtype};
    return device->copy(stream, &target, &source, 1, err);
}

/* X X' or X' X, whichever is smaller, times itself. */
static ct_status
polynomial(const ct_device *device, void *stream, const ct_orthogonal *o,
           const matrices *m, ct_error *err)
{
    const bool tall = o->rows > o->cols;
    const size_t side = smaller(o);
    const ct_gemm gram = {
        .dtype = o->dtype,
        .trans_a = tall,
        .trans_b = !tall,
        .m = side,
        .n = side,
        .k = tall ? o->rows : o->cols,
        .alpha = 1.0,
        .a = m->x,
        .b = m->x,
        .c = m->gram,
        .lda = o->cols,
        .ldb = o->cols,
        .ldc = side,
    };
    const ct_gemm square = {
        .dtype = o->dtype,
        .m = side,
        .n = side,
        .k = side,
        .alpha = o->c,
        .beta = o->b,
        .a = m->gram,
        .b = m->gram,
        .c = m->poly,
        .lda = side,
        .ldb = side,
        .ldc = side,
    };
    ct_status status = device->gemm(stream, m->scratch, &gram, err);
    if (status == CT_OK) {
        status = copy(device, stream, o->dtype, m->poly, m->gram, side * side, err);
    }
    return status == CT_OK ? device->gemm(stream, m->scratch, &square, err) : status;
}

/* next = a X + poly X, or a X + X poly. */
static ct_status
combine(const ct_device *device, void *stream, const ct_orthogonal *o,
        const matrices *m, ct_error *err)
{
    const bool tall = o->rows > o->cols;
    const size_t side = smaller(o);
    const ct_gemm product = {
        .dtype = o->dtype,
        .m = o->rows,
        .n = o->cols,
        .k = side,
        .alpha = 1.0,
        .beta = o->a,
        .a = tall ? m->x : m->poly,
        .b = tall ? m->poly : m->x,
        .c = m->next,
        .lda = tall ? o->cols : side,
        .ldb = tall ? side : o->cols,
        .ldc = o->cols,
    };
    ct_status status =
        copy(device, stream, o->dtype, m->next, m->x, o->rows * o->cols, err);
    return status == CT_OK ? device->gemm(stream, m->scratch, &product, err) : status;
}

ct_status
ct_orthogonal_run(const ct_device *device, void *stream, ct_scratch *scratch,
                  const ct_orthogonal *o, void *memory, void **result, ct_error *err)
{
    const size_t size = ct_dtype_size(o->dtype);
    const size_t n = o->rows * o->cols, side = smaller(o);
    char *at = memory;
    matrices m = {
        .scratch = scratch,
        .x = at,
        .next = ct_orthogonal_waiting(o, memory),
        .gram = at + 2 * n * size,
        .poly = at + (2 * n + side * side) * size,
    };
    ct_status status = CT_OK;
    for (int i = 0; status == CT_OK && i < o->n_steps; i++) {
        status = polynomial(device, stream, o, &m, err);
        if (status == CT_OK) {
            status = combine(device, stream, o, &m, err);
        }
        void *const last = m.x;
        m.x = m.next;
        m.next = last;
    }
    *result = m.x;
    return status;
}
