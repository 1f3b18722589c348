/* What works over any backend: the group of one rank, smaller groups, memory, and
 * collectives that are made of others.
 *
 * The made collectives run the same collectives on every rank whatever the data:
 * lengths and dtypes are gathered first, so that all ranks accept the operands or none
 * does, and all ranks know of a difference before they search for it.
 *
 * Not in comm.c: CUDA's plugin links that file, and needs nothing of this one. */
#include "core/comm/collectives.h"

#include "core/base/alloc.h"
#include "core/base/crc.h"
#include "core/base/pages.h"

#include <string.h>

/* ---- the group of one rank, and memory ------------------------------------------- */

static ct_status
copy_own(const ct_span *out, const ct_span *in, ct_error *err)
{
    if (out->n != in->n || out->dtype != in->dtype) {
        return ct_fail(err, CT_EINVAL,
                       "in a group of one rank out must be like in, %zu of %s, got %zu "
                       "of %s",
                       in->n, ct_dtype_name(in->dtype), out->n,
                       ct_dtype_name(out->dtype));
    }
    if (in->n != 0 && out->data != in->data) {
        memmove(out->data, in->data, in->n * ct_dtype_size(in->dtype));
    }
    return CT_OK;
}

/* Sum, mean, max and min of one value are that value. */
static ct_status
self_run(ct_comm *comm, const ct_request *r, ct_error *err)
{
    (void)comm;
    switch (r->what) {
    case CT_ALL_GATHER:
    case CT_REDUCE_SCATTER:
    case CT_ALL_TO_ALL:
        return copy_own(&r->out, &r->in, err);
    case CT_BROADCAST:
    case CT_REDUCE:
        return r->root == 0
                   ? CT_OK
                   : ct_fail(err, CT_EINVAL,
                             "root must be 0 in a group of one rank, got %d", r->root);
    case CT_ALL_REDUCE:
    case CT_BARRIER:
        break;
    }
    return CT_OK;
}

static void
self_free(ct_comm *comm)
{
    ct_free(comm);
}

static const ct_comm_ops self_ops = {
    .name = "self",
    .run = self_run,
    .free = self_free,
};

ct_comm *
ct_comm_self_new(void)
{
    ct_comm *comm = ct_alloc(sizeof *comm);
    if (comm != NULL) {
        *comm = ct_comm_made(&self_ops, 0, 1);
    }
    return comm;
}

ct_status
ct_comm_memory(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err)
{
    return comm->ops->memory != NULL ? comm->ops->memory(comm, bytes, memory, err)
                                     : ct_pages_new(memory, bytes, err);
}

/* ---- smaller groups -------------------------------------------------------------- */

/* Every rank gathers all colors and keys and computes the members of the new group; the
 * backend then makes the group. */

/* The color and the key of a rank. */
typedef struct wish {
    int64_t color, key;
} wish;

/* Inserts `rank`, later than the ranks before it, behind all keys up to its own. */
static void
insert_member(ct_members *m, const wish *wishes, int rank)
{
    int at = m->n++;
    while (at > 0 && wishes[m->ranks[at - 1]].key > wishes[rank].key) {
        m->ranks[at] = m->ranks[at - 1];
        at--;
    }
    m->ranks[at] = rank;
}

static void
choose(const ct_comm *comm, const wish *wishes, ct_members *m)
{
    const int64_t color = wishes[comm->rank].color;
    for (int rank = 0; color >= 0 && rank < comm->world_size; rank++) {
        if (wishes[rank].color == color) {
            insert_member(m, wishes, rank);
        }
    }
    for (int i = 0; i < m->n; i++) {
        m->index = m->ranks[i] == comm->rank ? i : m->index;
    }
}

static ct_status
gather_wishes(ct_comm *comm, wish own, wish *all, ct_error *err)
{
    const ct_span in = {&own, 2, CT_I64};
    const ct_span out = {all, 2 * (size_t)comm->world_size, CT_I64};
    return ct_comm_all_gather(comm, &out, &in, err);
}

static ct_status
make_group(ct_comm *comm, const ct_members *members, ct_comm **made, ct_error *err)
{
    if (comm->ops->group != NULL) {
        ct_status status = comm->ops->group(comm, members, made, err);
        if (status != CT_OK) {
            return status;
        }
    }
    else if (comm->world_size > 1) {
        return ct_fail(err, CT_EINVAL, "a group of the %s backend cannot be split",
                       comm->ops->name);
    }
    if (members->n == 1) {
        *made = ct_comm_self_new();
    }
    return members->n > 0 && *made == NULL
               ? ct_fail(err, CT_ENOMEM, "no memory for a smaller group")
               : CT_OK;
}

static ct_status
split(ct_comm *comm, wish own, wish *wishes, int *ranks, ct_comm **made, ct_error *err)
{
    ct_members members = {.ranks = ranks, .serial = ++comm->splits};
    ct_status status = gather_wishes(comm, own, wishes, err);
    if (status != CT_OK) {
        return status;
    }
    choose(comm, wishes, &members);
    return make_group(comm, &members, made, err);
}

ct_status
ct_comm_split(ct_comm *comm, int64_t color, int64_t key, ct_comm **made, ct_error *err)
{
    const size_t n = (size_t)comm->world_size;
    wish *wishes = ct_calloc(n, sizeof *wishes);
    int *ranks = ct_calloc(n, sizeof *ranks);
    *made = NULL;
    ct_status status =
        wishes == NULL || ranks == NULL
            ? ct_fail(err, CT_ENOMEM, "no memory to split a group of %zu ranks", n)
            : split(comm, (wish){color, key}, wishes, ranks, made, err);
    ct_free(ranks);
    ct_free(wishes);
    return status;
}

/* ---- parts of different lengths -------------------------------------------------- */

/* The description of a rank's operands. */
enum {
    LENGTH,
    PART,
    DTYPE,
    OUT_DTYPE,
    FIELDS
};

static ct_status
check_rank(const int64_t *first, const int64_t *one, int rank, ct_error *err)
{
    if (one[DTYPE] != one[OUT_DTYPE] || one[DTYPE] != first[DTYPE]) {
        return ct_fail(err, CT_EINVAL,
                       "rank %d gathers %s into %s, rank 0 gathers %s: expected one "
                       "dtype",
                       rank, ct_dtype_name((ct_dtype)one[DTYPE]),
                       ct_dtype_name((ct_dtype)one[OUT_DTYPE]),
                       ct_dtype_name((ct_dtype)first[DTYPE]));
    }
    if (one[PART] < 0 || one[PART] != first[PART]) {
        return ct_fail(err, CT_EINVAL,
                       "out of rank %d has no part for every rank as long as out of "
                       "rank 0 has",
                       rank);
    }
    if (one[LENGTH] > one[PART]) {
        return ct_fail(err, CT_EINVAL,
                       "rank %d gives %lld elements; a part of out has %lld", rank,
                       (long long)one[LENGTH], (long long)one[PART]);
    }
    return CT_OK;
}

/* Gathers and checks the descriptions of all ranks. */
static ct_status
compare_operands(ct_comm *comm, const ct_span *out, const ct_span *in, int64_t *table,
                 ct_error *err)
{
    const size_t ranks = (size_t)comm->world_size;
    int64_t mine[FIELDS] = {
        [LENGTH] = (int64_t)in->n,
        [PART] = out->n % ranks == 0 ? (int64_t)(out->n / ranks) : -1,
        [DTYPE] = (int64_t)in->dtype,
        [OUT_DTYPE] = (int64_t)out->dtype,
    };
    const ct_span from = {mine, FIELDS, CT_I64}, to = {table, FIELDS * ranks, CT_I64};
    ct_status status = ct_comm_all_gather(comm, &to, &from, err);
    for (int r = 0; status == CT_OK && r < comm->world_size; r++) {
        status = check_rank(table, table + (size_t)r * FIELDS, r, err);
    }
    return status;
}

/* all_gather of parts that are padded with zeros to one length. */
static ct_status
gather(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    const size_t part = out->n / (size_t)comm->world_size;
    if (part == 0 || in->n == part) {
        return part == 0 ? CT_OK : ct_comm_all_gather(comm, out, in, err);
    }
    const size_t size = ct_dtype_size(in->dtype);
    ct_span padded = {ct_calloc(part, size), part, in->dtype};
    if (padded.data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu elements", part);
    }
    if (in->n > 0) {
        memcpy(padded.data, in->data, in->n * size);
    }
    const ct_status status = ct_comm_all_gather(comm, out, &padded, err);
    ct_free(padded.data);
    return status;
}

ct_status
ct_comm_gather_padded(ct_comm *comm, const ct_span *out, const ct_span *in,
                      int64_t *lengths, ct_error *err)
{
    int64_t *table = ct_calloc((size_t)comm->world_size, FIELDS * sizeof *table);
    if (table == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %d ranks", comm->world_size);
    }
    ct_status status = compare_operands(comm, out, in, table, err);
    if (status == CT_OK) {
        status = gather(comm, out, in, err);
    }
    for (int r = 0; status == CT_OK && r < comm->world_size; r++) {
        lengths[r] = table[(size_t)r * FIELDS + LENGTH];
    }
    ct_free(table);
    return status;
}

/* ---- bytes of different lengths -------------------------------------------------- */

void
ct_gathered_fini(ct_gathered *gathered)
{
    ct_free(gathered->data);
    ct_free(gathered->n);
    *gathered = (ct_gathered){0};
}

static ct_status
gather_lengths(ct_comm *comm, size_t n, ct_gathered *out, ct_error *err)
{
    int64_t mine = (int64_t)n;
    const size_t ranks = (size_t)comm->world_size;
    const ct_span in = {&mine, 1, CT_I64}, all = {out->n, ranks, CT_I64};
    ct_status status = ct_comm_all_gather(comm, &all, &in, err);
    for (size_t r = 0; status == CT_OK && r < ranks; r++) {
        out->stride = (size_t)out->n[r] > out->stride ? (size_t)out->n[r] : out->stride;
    }
    return status;
}

/* Room for every rank's bytes, and behind it for this rank's own, padded. */
static ct_status
gather_padded(ct_comm *comm, const void *data, size_t n, ct_gathered *out,
              ct_error *err)
{
    const size_t ranks = (size_t)comm->world_size;
    out->data = ct_calloc(ranks + 1, out->stride);
    if (out->data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu times %zu bytes", ranks + 1,
                       out->stride);
    }
    unsigned char *own = out->data + ranks * out->stride;
    if (n > 0) {
        memcpy(own, data, n);
    }
    const ct_span in = {own, out->stride, CT_U8};
    const ct_span all = {out->data, ranks * out->stride, CT_U8};
    return ct_comm_all_gather(comm, &all, &in, err);
}

ct_status
ct_comm_gather_bytes(ct_comm *comm, const void *data, size_t n, ct_gathered *out,
                     ct_error *err)
{
    *out = (ct_gathered){.n = ct_calloc((size_t)comm->world_size, sizeof *out->n)};
    ct_status status =
        out->n == NULL
            ? ct_fail(err, CT_ENOMEM, "no memory for %d lengths", comm->world_size)
            : gather_lengths(comm, n, out, err);
    if (status == CT_OK && out->stride > 0) {
        status = gather_padded(comm, data, n, out, err);
    }
    if (status != CT_OK) {
        ct_gathered_fini(out);
    }
    return status;
}

/* ---- spans of one rank for all --------------------------------------------------- */

enum {
    PACK_BYTES = 1 << 20, /* of a pack; longer spans are sent alone */
    LONGEST_LINE = 120    /* in messages */
};

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
move_spans(const ct_span *spans, size_t n, char *pack, bool into_pack)
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
        move_spans(spans + at, n, pack, true);
        status = broadcast(comm, pack, bytes, root, err);
        if (status == CT_OK) {
            move_spans(spans + at, n, pack, false);
        }
        at += n;
    }
    ct_free(pack);
    return status;
}

/* ---- whether all have the same lines --------------------------------------------- */

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
find_different_line(ct_comm *comm, const char *what, const char *lines, size_t n,
                    ct_error *err)
{
    ct_gathered all;
    ct_status status = ct_comm_gather_bytes(comm, lines, n, &all, err);
    for (int r = 1; status == CT_OK && all.data != NULL && r < comm->world_size; r++) {
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
    return find_different_line(comm, what, lines, n, err);
}

/* ---- histories ------------------------------------------------------------------- */

/* Ranks compare hashes by a reduction together with other numbers, as parts so short
 * that the reduction is exact. Only after a mismatch are the records themselves
 * exchanged. */

enum {
    MOST_KEPT = 4096, /* later collectives are in the hash alone */
    CARRIED = 4,      /* numbers that carry the hash */
    FEW = 64          /* numbers that need no allocation */
};

typedef struct note {
    ct_label label;
    ct_collective what;
    uint64_t hash; /* of the history up to here */
} note;

struct ct_history {
    note *notes; /* the first n since the last comparison */
    size_t n, room;
    uint64_t seen, hash; /* of all collectives since then */
};

ct_history *
ct_history_new(void)
{
    return ct_calloc(1, sizeof(ct_history));
}

void
ct_history_free(ct_history *h)
{
    if (h != NULL) {
        ct_free(h->notes);
        ct_free(h);
    }
}

/* ---- the recording of histories -------------------------------------------------- */

static uint64_t
mixed(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Without memory for a note only a name is lost: the hash has the rest. */
static void
take_note(ct_history *h, const ct_label *label, ct_collective what)
{
    h->hash = mixed(mixed(mixed(h->hash, label->tag), label->call), 1 + what);
    if (h->n == h->seen++ && h->n < MOST_KEPT &&
        ct_grow((void **)&h->notes, &h->room, h->n + 1, sizeof *h->notes, NULL) ==
            CT_OK) {
        h->notes[h->n++] = (note){*label, what, h->hash};
    }
}

void
ct_comm_label(ct_comm *comm, const ct_label *label, ct_collective what)
{
    comm->label = label;
    if (comm->history != NULL) {
        take_note(comm->history, label, what);
    }
}

void
ct_comm_unlabel(ct_comm *comm)
{
    comm->label = NULL;
}

/* ---- hashes of histories as numbers that are reduced ----------------------------- */

/* The bits of a part: sums of squares over all ranks have to be exact. */
static unsigned
part_bits(int world_size)
{
    unsigned bits = 20;
    while (bits > 1 &&
           (double)world_size * (double)(UINT64_C(1) << 2 * bits) > 0x1p53) {
        bits--;
    }
    return bits;
}

/* Writes two parts of the hash, each with the square for a sum, with the negative for a
 * max or min: all parts are equal exactly if largest and smallest are. */
static void
write_hash(uint64_t hash, int world_size, ct_reduce_op op, double *to)
{
    const unsigned bits = part_bits(world_size);
    for (int i = 0; i < CARRIED; i += 2, hash >>= bits) {
        const double part = (double)(hash & ((UINT64_C(1) << bits) - 1));
        to[i] = part;
        to[i + 1] = op == CT_REDUCE_SUM ? part * part : -part;
    }
}

/* For a given sum, the sum of squares of n numbers is least, n times the square of the
 * mean, exactly where all numbers are equal. */
static bool
is_one_hash(const double *reduced, int world_size, ct_reduce_op op)
{
    bool one = true;
    for (int i = 0; i < CARRIED; i += 2) {
        const double mean = reduced[i] / world_size;
        one = one && (op == CT_REDUCE_SUM ? reduced[i + 1] == mean * mean * world_size
                                          : reduced[i] == -reduced[i + 1]);
    }
    return one;
}

/* ---- the first difference of histories ------------------------------------------- */

static ct_status
count_notes(ct_comm *comm, const ct_history *h, size_t *most, ct_error *err)
{
    int64_t n = (int64_t)h->n;
    const ct_span span = {&n, 1, CT_I64};
    const ct_status status = ct_comm_all_reduce(comm, &span, CT_REDUCE_MAX, err);
    *most = (size_t)n;
    return status;
}

/* The first of `n` places where the ranks' hashes differ, or n. */
static size_t
first_difference(const int64_t *all, size_t n, size_t ranks)
{
    size_t at = 0;
    for (bool same = true; same && at < n; at += same) {
        for (size_t r = 1; same && r < ranks; r++) {
            same = all[r * n + at] == all[at];
        }
    }
    return at;
}

static ct_status
find_different_note(ct_comm *comm, const ct_history *h, size_t n, size_t *at,
                    ct_error *err)
{
    const size_t ranks = (size_t)comm->world_size;
    int64_t *own = ct_calloc(n + 1, sizeof *own);
    int64_t *all = ct_calloc(n * ranks + 1, sizeof *all);
    ct_status status = CT_OK;
    if (own == NULL || all == NULL) {
        status = ct_fail(err, CT_ENOMEM, "no memory to compare %zu collectives", n);
    }
    else {
        for (size_t i = 0; i < h->n; i++) {
            own[i] = (int64_t)h->notes[i].hash;
        }
        const ct_span in = {own, n, CT_I64}, out = {all, n * ranks, CT_I64};
        status = ct_comm_all_gather(comm, &out, &in, err);
        *at = first_difference(all, n, ranks);
    }
    ct_free(all);
    ct_free(own);
    return status;
}

/* Called by all ranks after their hashes differed: always fails. */
static ct_status
fail_different(ct_comm *comm, const ct_history *h, size_t numbers, ct_error *err)
{
    size_t most = 0, at = 0;
    ct_status status = count_notes(comm, h, &most, err);
    if (status == CT_OK) {
        status = find_different_note(comm, h, most, &at, err);
    }
    if (status == CT_OK) {
        ct_request own = {
            .what = CT_ALL_REDUCE, .in = {NULL, numbers, CT_F64}
        };
        if (at < h->n) {
            own = (ct_request){.what = h->notes[at].what, .label = h->notes[at].label};
        }
        status = ct_requests_exchange(comm, &own, err);
    }
    return status != CT_OK
               ? status
               : ct_fail(err, CT_EINVAL,
                         "ranks use different units, or in different orders, after %zu "
                         "collectives that were alike; CTRAINER_CHECK_COLLECTIVES=1 "
                         "names them",
                         most);
}

/* ---- numbers of all ranks, with their histories ---------------------------------- */

static ct_status
reduce_with_hash(ct_comm *comm, double *all, size_t n, ct_reduce_op op, ct_error *err)
{
    ct_history *h = comm->history;
    const ct_span span = {all, n + CARRIED, CT_F64};
    write_hash(h->hash, comm->world_size, op, all + n);
    ct_status status = ct_comm_all_reduce(comm, &span, op, err);
    if (status == CT_OK && !is_one_hash(all + n, comm->world_size, op)) {
        comm->label = NULL; /* the report is a collective without a label */
        status = fail_different(comm, h, n, err);
    }
    h->n = 0;
    h->seen = h->hash = 0;
    return status;
}

ct_status
ct_comm_reduce_numbers(ct_comm *comm, double *numbers, size_t n, ct_reduce_op op,
                       ct_error *err)
{
    double few[FEW + CARRIED];
    if (comm->history == NULL) {
        const ct_span span = {numbers, n, CT_F64};
        return ct_comm_all_reduce(comm, &span, op, err);
    }
    double *all = n <= FEW ? few : ct_alloc((n + CARRIED) * sizeof *all);
    if (all == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to reduce %zu numbers", n);
    }
    memcpy(all, numbers, n * sizeof *all);
    const ct_status status = reduce_with_hash(comm, all, n, op, err);
    if (status == CT_OK) {
        memcpy(numbers, all, n * sizeof *all);
    }
    if (all != few) {
        ct_free(all);
    }
    return status;
}
