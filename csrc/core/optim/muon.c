#include "core/optim/muon.h"

#include "core/base/check.h"

static ct_status
config_check(const ct_muon_config *c, ct_error *err)
{
    ct_status status = ct_check_least("lr", c->lr, 0.0, err);
    if (status == CT_OK) {
        status = ct_check_least("weight_decay", c->weight_decay, 0.0, err);
    }
    if (status == CT_OK && !(c->momentum >= 0.0 && c->momentum <= 1.0)) {
        return ct_fail(err, CT_EINVAL, "momentum must be in [0, 1], got %g",
                       c->momentum);
    }
    for (int i = 0; status == CT_OK && i < 3; i++) {
        if (!isfinite(c->coefficients[i])) {
            return ct_fail(err, CT_EINVAL, "ns_coefficients[%d] must be finite, got %g",
                           i, c->coefficients[i]);
        }
    }
    if (status == CT_OK) {
        status = ct_check_positive("eps", c->eps, err);
    }
    if (status == CT_OK &&
        !(c->steps >= 0.0 && c->steps < 100.0 && floor(c->steps) == c->steps)) {
        return ct_fail(err, CT_EINVAL,
                       "ns_steps must be a whole number in [0, 100), got %g", c->steps);
    }
    return status;
}

ct_status
ct_muon_coef_init(ct_muon_coef *coef, const ct_muon_config *c, double grad_scale,
                  ct_error *err)
{
    ct_status status = config_check(c, err);
    if (status != CT_OK) {
        return status;
    }
    *coef = (ct_muon_coef){
        .grad_scale = grad_scale,
        .momentum = c->momentum,
        .one_minus_momentum = 1.0 - c->momentum,
        .eps = c->eps,
        .nesterov = c->nesterov,
        .from_grad = c->momentum < 0.5,
        .lr = c->lr,
        .weight_decay = c->weight_decay,
        .a = c->coefficients[0],
        .b = c->coefficients[1],
        .c = c->coefficients[2],
        .n_steps = (int)c->steps,
        .adjust = (int)c->adjust,
    };
    return CT_OK;
}

double
ct_muon_rate_factor(ct_muon_adjust adjust, size_t rows, size_t cols)
{
    const double m = (double)rows, n = (double)cols;
    if (adjust == CT_MUON_MATCH_RMS_ADAMW) {
        return 0.2 * sqrt(m > n ? m : n);
    }
    return m > n ? sqrt(m / n) : 1.0;
}

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
        .next = at + n * size,
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
