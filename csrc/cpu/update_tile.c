/* Loads and stores the arrays of an update span, a tile at a time. */
#include "cpu/update_tile.h"

enum {
    IN_CACHE = 4096 /* elements at a time, for further passes */
};

/* An array for the rule: in place, or converted into the tile. */
static void *
ct_update_tile_borrow(const ct_update_tile *s, void *data, ct_dtype dtype,
                      ct_tile *tile)
{
    if (dtype == s->real) {
        return ct_update_tile_element(s, data, dtype);
    }
    ct_tile_load(s->isa, tile, s->real == CT_F64, dtype, data, s->at, s->n);
    return tile;
}

/* Writes a changed tile of borrow() back. */
static void
ct_update_tile_write_back(const ct_update_tile *s, const void *from, void *data,
                          ct_dtype dtype)
{
    if (dtype != s->real) {
        ct_tile_store(s->isa, from, s->real == CT_F64, dtype, data, s->at, s->n);
    }
}

/* Part of a row of row[i] * col[j], from element k of the tile on. */
static void
fill_row(const ct_update_tile *s, ct_tile *tile, size_t k, size_t row, size_t col,
         size_t n)
{
    if (s->real == CT_F64) {
        const double factor = ((const double *)s->span->row)[row];
        const double *cols = (const double *)s->span->col + col;
        for (size_t j = 0; j < n; j++) {
            tile->f64[k + j] = factor * cols[j];
        }
    }
    else {
        const float factor = ((const float *)s->span->row)[row];
        const float *cols = (const float *)s->span->col + col;
        for (size_t j = 0; j < n; j++) {
            tile->f32[k + j] = factor * cols[j];
        }
    }
}

static void *
fill_outer(const ct_update_tile *s, ct_tile *tile)
{
    const size_t rows = s->span->rows, cols = s->span->cols;
    const size_t first = s->span->begin + s->at;
    for (size_t k = 0; k < s->n;) {
        const size_t row = (first + k) / cols, j = (first + k) % cols;
        const size_t left = s->n - k, n = cols - j < left ? cols - j : left;
        fill_row(s, tile, k, row, row / rows * cols + j, n);
        k += n;
    }
    return tile;
}

static void *
borrow_state(const ct_update_tile *s, size_t k, ct_tile *tile)
{
    const ct_update_span *span = s->span;
    if (k == 0 && span->row != NULL) {
        return fill_outer(s, tile);
    }
    if (span->state_dtype == CT_U8) {
        ct_quant_load(s->isa, s->real, tile, span, k, s->at, s->n);
        return tile;
    }
    return ct_update_tile_borrow(s, span->state[k], span->state_dtype, tile);
}

ct_operands
ct_update_tile_operands(const ct_update_tile *s, ct_operand_tiles *tiles)
{
    const ct_update_span *span = s->span;
    ct_operands at = {
        .grad = ct_update_tile_borrow(s, span->grad, span->grad_dtype, &tiles->grad),
        .param = ct_update_tile_borrow(s, span->param, span->dtype, &tiles->param),
    };
    for (size_t k = 0; k < s->n_states; k++) {
        at.state[k] = borrow_state(s, k, &tiles->state[k]);
    }
    return at;
}

void
ct_update_tile_write_states(const ct_update_tile *s, const ct_operands *at)
{
    const ct_update_span *span = s->span;
    for (size_t k = span->row != NULL ? 1 : 0; k < s->n_states; k++) {
        if (span->state_dtype == CT_U8) {
            ct_quant_store(s->isa, s->real, at->state[k], &s->searches->of[k], span, k,
                           s->at, s->n);
        }
        else {
            ct_update_tile_write_back(s, at->state[k], span->state[k],
                                      span->state_dtype);
        }
    }
}

size_t
ct_update_tile_length(const ct_update_span *span, ct_dtype real, size_t n_states,
                      bool again)
{
    const bool direct = span->dtype == real && span->grad_dtype == real &&
                        (n_states == 0 || span->state_dtype == real) &&
                        (span->copy == NULL || span->copy_dtype == real) &&
                        (span->ema == NULL || span->ema_dtype == real) &&
                        span->row == NULL;
    const bool once = !again && span->copy == NULL && span->ema == NULL;
    return !direct ? CT_TILE : once ? SIZE_MAX : IN_CACHE;
}
