/* Both functions run the same collectives on every rank whatever the data: packs depend
 * on lengths alone, and all ranks know of a difference before the search. */
#include "core/comm/sync.h"

#include "core/base/alloc.h"
#include "core/comm/bytes.h"
#include "core/base/crc.h"

#include <stdbool.h>
#include <string.h>

enum {
    PACK_BYTES = 1 << 20, /* of a pack; longer spans are sent alone */
    LONGEST_LINE = 120    /* in messages */
};

/* ---- spans of one rank for all --------------------------------------------------- */

static size_t
bytes_of(const ct_span *span)
{
    return span->n * ct_dtype_size(span->dtype);
}

static ct_status
broadcast(ct_comm *comm, void *data, size_t n, int root, ct_error *err)
{
    const ct_span bytes = {data, n, CT_U8};
    return n == 0 ? CT_OK : ct_comm_broadcast(comm, &bytes, root, err);
}

/* Copies spans[0..n) one behind the other into pack, or out of it. */
static void
move(const ct_span *spans, size_t n, char *pack, bool into_pack)
{
    for (size_t i = 0; i < n; i++) {
        const size_t bytes = bytes_of(&spans[i]);
        if (bytes > 0) {
            (void)memcpy(into_pack ? pack : spans[i].data,
                         into_pack ? spans[i].data : pack, bytes);
        }
        pack += bytes;
    }
}

/* The number of spans that fit a pack, and their bytes. */
static size_t
count_fitting(const ct_span *spans, size_t n_spans, size_t *bytes)
{
    size_t n = 0;
    *bytes = 0;
    while (n < n_spans && *bytes + bytes_of(&spans[n]) <= PACK_BYTES) {
        *bytes += bytes_of(&spans[n++]);
    }
    return n;
}

ct_status
ct_comm_broadcast_spans(ct_comm *comm, const ct_span *spans, size_t n_spans, int root,
                        ct_error *err)
{
    ct_status status = CT_OK;
    char *pack = ct_alloc(PACK_BYTES);
    if (pack == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to broadcast %zu tensors", n_spans);
    }
    for (size_t at = 0; status == CT_OK && at < n_spans;) {
        size_t bytes;
        const size_t n = count_fitting(spans + at, n_spans - at, &bytes);
        if (n < 2) {
            status = broadcast(comm, spans[at].data, bytes_of(&spans[at]), root, err);
            at++;
            continue;
        }
        move(spans + at, n, pack, true);
        status = broadcast(comm, pack, bytes, root, err);
        if (status == CT_OK) {
            move(spans + at, n, pack, false);
        }
        at += n;
    }
    ct_free(pack);
    return status;
}

/* ---- whether all have the same --------------------------------------------------- */

typedef struct line {
    const char *text;
    size_t n;
} line;

static line
next_line(const char **at, const char *end)
{
    const char *from = *at;
    const char *stop = from == end ? NULL : memchr(from, '\n', (size_t)(end - from));
    const size_t n = stop == NULL ? (size_t)(end - from) : (size_t)(stop - from);
    *at = stop == NULL ? end : stop + 1;
    return (line){from, n};
}

static int
shown(line l)
{
    return l.n > LONGEST_LINE ? LONGEST_LINE : (int)l.n;
}

/* Names the first line of rank r that differs from rank 0's. */
static ct_status
fail_at_line(const ct_gathered *all, int r, const char *what, ct_error *err)
{
    const char *a = (const char *)all->data;
    const char *b = (const char *)all->data + (size_t)r * all->stride;
    const char *end_a = a + all->n[0], *end_b = b + all->n[r];
    for (size_t i = 0;; i++) {
        const bool ended_a = a == end_a, ended_b = b == end_b;
        const line x = next_line(&a, end_a), y = next_line(&b, end_b);
        if (ended_a || ended_b || x.n != y.n || memcmp(x.text, y.text, x.n) != 0) {
            return ct_fail(err, CT_EINVAL,
                           "the ranks differ: %s %zu is '%.*s' on rank 0 and '%.*s' on "
                           "rank %d; all ranks must have the same, in the same order",
                           what, i, ended_a ? 4 : shown(x), ended_a ? "none" : x.text,
                           ended_b ? 4 : shown(y), ended_b ? "none" : y.text, r);
        }
    }
}

static ct_status
find_difference(ct_comm *comm, const char *what, const char *lines, size_t n,
                ct_error *err)
{
    ct_gathered all;
    ct_status status = ct_comm_gather_bytes(comm, lines, n, &all, err);
    for (int r = 1; status == CT_OK && r < comm->world_size; r++) {
        if (all.n[r] != all.n[0] || memcmp(all.data, all.data + (size_t)r * all.stride,
                                           (size_t)all.n[0]) != 0) {
            status = fail_at_line(&all, r, what, err);
        }
    }
    ct_gathered_fini(&all);
    return status;
}

ct_status
ct_comm_check_lines(ct_comm *comm, const char *what, const char *lines, size_t n,
                    ct_error *err)
{
    /* All values are equal exactly if the maxima of value and negative are opposite.
     */
    const int64_t sum = ct_crc32c(0, lines, n), length = (int64_t)n;
    int64_t seen[4] = {sum, -sum, length, -length};
    const ct_span span = {seen, 4, CT_I64};
    const ct_status status = ct_comm_all_reduce(comm, &span, CT_REDUCE_MAX, err);
    if (status != CT_OK || (seen[0] == -seen[1] && seen[2] == -seen[3])) {
        return status;
    }
    return find_difference(comm, what, lines, n, err);
}
