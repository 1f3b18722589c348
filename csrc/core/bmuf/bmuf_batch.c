#include "core/bmuf/bmuf_batch.h"

#include <stdint.h>

ct_bmuf_batch
ct_bmuf_first_batch(const ct_bmuf_list *list, ct_dtype dtype, size_t bytes)
{
    return (ct_bmuf_batch){
        .list = list,
        .dtype = dtype,
        .most = bytes == 0 ? SIZE_MAX : bytes / ct_dtype_size(dtype),
    };
}

static ct_span
part_of(const ct_span *span, size_t at, size_t n)
{
    const size_t bytes = at * ct_dtype_size(span->dtype);
    return (ct_span){.data = span->data == NULL ? NULL : (char *)span->data + bytes,
                     .n = n,
                     .dtype = span->dtype};
}

static void
add_piece(ct_bmuf_batch *s, ct_bmuf_piece *pieces, const ct_bmuf_tensor *t)
{
    const size_t left = t->span.n - s->offset, room = s->most - s->n;
    const size_t n = left < room ? left : room;
    pieces[s->n_pieces++] = (ct_bmuf_piece){
        .span = part_of(&t->span, s->offset, n),
        .copy = part_of(&t->copy, s->offset, n),
        .at = s->at,
    };
    s->n += n;
    s->at += n;
    s->offset += n;
}

bool
ct_bmuf_next_batch(ct_bmuf_batch *s, ct_bmuf_piece *pieces)
{
    s->n = s->n_pieces = 0;
    s->start = s->at;
    while (s->tensor < s->list->n && s->n < s->most) {
        const ct_bmuf_tensor *t = &s->list->tensors[s->tensor];
        const bool fits = ct_bmuf_dtype(t->span.dtype) == s->dtype;
        if (fits && s->offset < t->span.n) {
            add_piece(s, pieces, t);
        }
        if (!fits || s->offset == t->span.n) {
            s->tensor++;
            s->offset = 0;
        }
    }
    return s->n != 0;
}
