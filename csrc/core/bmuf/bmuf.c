#include "core/bmuf/bmuf.h"

#include "core/base/alloc.h"
#include "core/bmuf/bmuf_batch.h"

typedef ct_bmuf_batch batch;

/* ---- memory ------------------------------------------------------------------------
 */

void
ct_bmuf_init(ct_bmuf *b, const ct_device *device, void *stream)
{
    *b = (ct_bmuf){.device = device, .stream = stream, .residual = {.is_single = true}};
}

static void
free_operands(ct_bmuf *b)
{
    ct_free(b->pieces);
    ct_free(b->spans);
    ct_free(b->to);
    ct_free(b->from);
    b->pieces = NULL;
    b->spans = NULL;
    b->to = b->from = NULL;
    b->room = 0;
}

/* A batch has at most one piece of each tensor. */
ct_status
ct_bmuf_reserve_operands(ct_bmuf *b, size_t n, ct_error *err)
{
    if (n <= b->room) {
        return CT_OK;
    }
    free_operands(b);
    b->pieces = ct_calloc(n, sizeof *b->pieces);
    b->spans = ct_calloc(n, sizeof *b->spans);
    b->to = ct_calloc(n, sizeof *b->to);
    b->from = ct_calloc(n, sizeof *b->from);
    if (b->pieces == NULL || b->spans == NULL || b->to == NULL || b->from == NULL) {
        free_operands(b);
        return ct_fail(err, CT_ENOMEM, "no memory for %zu parameters", n);
    }
    b->room = n;
    return CT_OK;
}

static void
release_flats(ct_bmuf *b)
{
    for (int d = 0; d < CT_BMUF_DTYPES; d++) {
        b->device->scratch_release(&b->global.memory[d]);
        b->device->scratch_release(&b->momentum.memory[d]);
        b->device->scratch_release(&b->residual.memory[d]);
        b->device->scratch_release(&b->left.memory[d]);
        b->device->scratch_release(&b->sums.memory[d]);
        b->n[d] = 0;
    }
}

void
ct_bmuf_fini(ct_bmuf *b)
{
    release_flats(b);
    b->device->scratch_release(&b->shares);
    b->device->scratch_release(&b->wire);
    free_operands(b);
}

ct_status
ct_bmuf_count(const ct_bmuf_list *list, size_t *n, ct_error *err)
{
    for (size_t i = 0; i < list->n; i++) {
        const ct_span *span = &list->tensors[i].span;
        if (!ct_dtype_is_float(span->dtype)) {
            return ct_fail(err, CT_EINVAL,
                           "parameter %zu is %s; only float dtypes can be averaged", i,
                           ct_dtype_name(span->dtype));
        }
        n[ct_bmuf_dtype(span->dtype)] += span->n;
    }
    return CT_OK;
}

ct_status
ct_bmuf_check_unchanged(const ct_bmuf *b, const ct_bmuf_list *list, ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        if (n[d] != b->n[d]) {
            status = ct_fail(err, CT_EINVAL,
                             "the parameters have %zu elements of %s and had %zu when "
                             "the block began",
                             n[d], ct_dtype_name((ct_dtype)d), b->n[d]);
        }
    }
    return status;
}

/* ---- the global model and the momentum ----------------------------------------------
 */

/* Memory for all values of a dtype, which become 0. */
static ct_status
reserve_zeros(ct_bmuf *b, ct_bmuf_flat *flat, ct_dtype dtype, size_t n, ct_error *err)
{
    const ct_dtype of = ct_bmuf_flat_dtype(flat, dtype);
    ct_status status =
        b->device->scratch_grow(&flat->memory[dtype], n * ct_dtype_size(of), err);
    const ct_span all = {flat->memory[dtype].data, n, of};
    return status == CT_OK ? b->device->zero(b->stream, &all, 1, err) : status;
}

/* Memory for the global model, for the momentum and, where it is needed, for what codes
 * miss, which become 0. */
static ct_status
reserve_flats(ct_bmuf *b, const ct_bmuf_config *config, const size_t *n, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        const size_t bytes = n[d] * ct_dtype_size((ct_dtype)d);
        status = b->device->scratch_grow(&b->global.memory[d], bytes, err);
        if (status == CT_OK) {
            status = reserve_zeros(b, &b->momentum, (ct_dtype)d, n[d], err);
        }
        if (status == CT_OK && ct_bmuf_is_coded(config)) {
            status = reserve_zeros(b, &b->residual, (ct_dtype)d, n[d], err);
        }
        b->n[d] = n[d];
    }
    return status;
}

/* The global model, or the momentum, of a batch from spans or to them. */
static ct_status
copy_flat(ct_bmuf *b, const ct_bmuf_flat *flat, const batch *s, bool from_flat,
          ct_error *err)
{
    for (size_t i = 0; i < s->n_pieces; i++) {
        ct_span stored = b->pieces[i].span;
        stored.data = ct_bmuf_flat_at(flat, s->dtype, b->pieces[i].at);
        stored.dtype = ct_bmuf_flat_dtype(flat, s->dtype);
        b->to[i] = from_flat ? b->pieces[i].span : stored;
        b->from[i] = from_flat ? stored : b->pieces[i].span;
    }
    return b->device->copy(b->stream, b->to, b->from, s->n_pieces, err);
}

static ct_status
copy_flats(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *list,
           bool from_flat, ct_error *err)
{
    ct_status status = ct_bmuf_reserve_operands(b, list->n, err);
    if (status == CT_OK) {
        status = ct_bmuf_check_unchanged(b, list, err);
    }
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        batch s = ct_bmuf_first_batch(list, (ct_dtype)d, 0);
        while (status == CT_OK && ct_bmuf_next_batch(&s, b->pieces)) {
            status = copy_flat(b, flat, &s, from_flat, err);
        }
    }
    return status;
}

ct_status
ct_bmuf_start(ct_bmuf *b, const ct_bmuf_config *config, const ct_bmuf_list *list,
              ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    if (config->momentum == 0.0) {
        release_flats(b);
        return status;
    }
    if (status == CT_OK) {
        status = reserve_flats(b, config, n, err);
    }
    b->alike = false;
    return status == CT_OK ? copy_flats(b, &b->global, list, false, err) : status;
}

ct_status
ct_bmuf_save(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *to,
             ct_error *err)
{
    return copy_flats(b, flat, to, true, err);
}

ct_status
ct_bmuf_load(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *from,
             ct_error *err)
{
    b->alike = b->alike && flat != &b->global;
    return copy_flats(b, flat, from, false, err);
}
