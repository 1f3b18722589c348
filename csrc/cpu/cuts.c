#include "cpu/cuts.h"

#include <string.h>

static size_t
length(const ct_cuts *cuts, size_t span)
{
    size_t n;
    memcpy(&n, cuts->lengths + span * cuts->stride, sizeof n);
    return n;
}

static size_t
batch_elems(const ct_cuts *cuts, size_t n_spans)
{
    size_t total = 0;
    for (size_t i = 0; i < n_spans; i++) {
        total += length(cuts, i);
    }
    const size_t share = total / (CT_CUTS_MAX - 1) + CT_CUT_ALIGN;
    return share > CT_BATCH_ELEMS ? share : CT_BATCH_ELEMS;
}

/* A batch ends where it is full: behind the span that fills it, or in the middle of
 * it when more than CT_CUT_ALIGN of its elements are left over. */
void
ct_cuts_init(ct_cuts *cuts, const size_t *lengths, size_t stride, size_t n_spans)
{
    cuts->lengths = (const char *)lengths;
    cuts->stride = stride;
    cuts->n_batches = 0;
    cuts->at[0] = (ct_cut){0, 0};

    const size_t full = batch_elems(cuts, n_spans);
    size_t held = 0; /* elements in the open batch */
    for (size_t i = 0; i < n_spans; i++) {
        const size_t n = length(cuts, i);
        size_t done = 0;
        while (held + (n - done) >= full + CT_CUT_ALIGN) {
            done += full - held + (CT_CUT_ALIGN - 1);
            done -= done % CT_CUT_ALIGN;
            cuts->at[++cuts->n_batches] = (ct_cut){i, done};
            held = 0;
        }
        held += n - done;
    }
    if (held != 0) {
        cuts->at[++cuts->n_batches] = (ct_cut){n_spans, 0};
    }
}

ct_piece
ct_cuts_start(const ct_cuts *cuts, size_t batch)
{
    return (ct_piece){cuts->at[batch].span, cuts->at[batch].offset, 0};
}

bool
ct_cuts_next(const ct_cuts *cuts, size_t batch, ct_piece *piece)
{
    const ct_cut end = cuts->at[batch + 1];
    size_t span = piece->span;
    size_t offset = piece->offset + piece->n;
    while (span < end.span && offset == length(cuts, span)) {
        span++;
        offset = 0;
    }
    const size_t stop = span == end.span ? end.offset : length(cuts, span);
    *piece = (ct_piece){span, offset, stop - offset};
    return stop != offset;
}

void
ct_cuts_fold(const ct_cuts *cuts, const double *partial, size_t width, size_t n_spans,
             double *sums)
{
    for (size_t i = 0; i < n_spans * width; i++) {
        sums[i] = 0.0;
    }
    for (size_t b = 0; b < cuts->n_batches; b++) {
        ct_piece piece = ct_cuts_start(cuts, b);
        while (ct_cuts_next(cuts, b, &piece)) {
            const double *from = partial + ct_cuts_number(b, &piece) * width;
            for (size_t k = 0; k < width; k++) {
                sums[piece.span * width + k] += from[k];
            }
        }
    }
}
