/* The ranks' lengths and dtypes are gathered first, so that all ranks accept the
 * operands or none does. */
#include "core/comm/padded.h"

#include "core/base/alloc.h"
#include "core/base/span.h"

#include <string.h>

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
compare(ct_comm *comm, const ct_span *out, const ct_span *in, int64_t *table,
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
    ct_status status = compare(comm, out, in, table, err);
    if (status == CT_OK) {
        status = gather(comm, out, in, err);
    }
    for (int r = 0; status == CT_OK && r < comm->world_size; r++) {
        lengths[r] = table[(size_t)r * FIELDS + LENGTH];
    }
    ct_free(table);
    return status;
}
