/* How ranks come to have one global model, and know it. */
#include "core/bmuf/bmuf.h"

#include "core/base/alloc.h"
#include "core/bmuf/bmuf_pass.h"
#include "core/base/crc32c.h"

typedef ct_bmuf_batch batch;

static ct_status
broadcast_batch(ct_bmuf *b, ct_comm *comm, int root, const batch *s, ct_error *err)
{
    const ct_request from_root = {
        .what = CT_BROADCAST, .root = root, .in = ct_bmuf_shares(s)};
    ct_status status = ct_bmuf_copy_params(b, s, false, err);
    if (status == CT_OK) {
        status = ct_comm_run(comm, &from_root, err);
    }
    return status == CT_OK ? ct_bmuf_copy_params(b, s, true, err) : status;
}

static ct_status
broadcast_all(ct_bmuf *b, ct_comm *comm, int root, const ct_bmuf_list *list,
              ct_error *err)
{
    ct_status status = ct_bmuf_reserve_operands(b, list->n, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        batch s = ct_bmuf_first_batch(list, (ct_dtype)d, comm->ops->batch_bytes);
        while (status == CT_OK && ct_bmuf_next_batch(&s, b->pieces)) {
            status = ct_bmuf_reserve_shares(b, &s, err);
            if (status == CT_OK) {
                status = broadcast_batch(b, comm, root, &s, err);
            }
        }
    }
    return status;
}

ct_status
ct_bmuf_take_over(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
                  const ct_bmuf_list *list, ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    if (status == CT_OK) {
        status = broadcast_all(b, comm, 0, list, err);
    }
    if (status == CT_OK) {
        status = ct_bmuf_start(b, config, list, err);
    }
    b->alike = status == CT_OK;
    return status;
}

/* ---- whether all go on from the same ------------------------------------------------
 */

static int64_t
sum_model(const ct_bmuf *b)
{
    uint32_t sum = 0;
    for (int d = 0; d < CT_BMUF_DTYPES; d++) {
        sum = ct_crc32c(sum, b->global.memory[d].data,
                        b->n[d] * ct_dtype_size((ct_dtype)d));
    }
    return sum;
}

static ct_status
compare_sums(const int64_t *sums, int world_size, ct_error *err)
{
    for (int rank = 1; rank < world_size; rank++) {
        if (sums[rank] != sums[0]) {
            return ct_fail(err, CT_EINVAL,
                           "the block of rank %d began with other parameters than that "
                           "of rank 0: load the same on all ranks, or have "
                           "warmup_iterations, after which all take over rank 0's",
                           rank);
        }
    }
    return CT_OK;
}

/* The first block after a start or a load; the sums are compared, not the models. */
ct_status
ct_bmuf_check_alike(ct_bmuf *b, ct_comm *comm, ct_error *err)
{
    int64_t own = sum_model(b);
    int64_t *sums = ct_calloc((size_t)comm->world_size, sizeof *sums);
    if (sums == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %d sums", comm->world_size);
    }
    const ct_request gather = {
        .what = CT_ALL_GATHER,
        .in = {&own, 1,                        CT_I64},
        .out = {sums, (size_t)comm->world_size, CT_I64}
    };
    ct_status status = ct_comm_run(comm, &gather, err);
    if (status == CT_OK) {
        status = compare_sums(sums, comm->world_size, err);
    }
    b->alike = status == CT_OK;
    ct_free(sums);
    return status;
}

/* ---- a new group --------------------------------------------------------------------
 */

static ct_status
broadcast_momentum(ct_bmuf *b, ct_comm *comm, int root, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        const ct_request from_root = {
            .what = CT_BROADCAST,
            .root = root,
            .in = {b->momentum.memory[d].data, b->n[d], (ct_dtype)d}
        };
        status = ct_comm_run(comm, &from_root, err);
    }
    return status;
}

/* The root's momentum stays, that of the others begins to be overwritten with it. */
ct_status
ct_bmuf_adopt(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm, int root,
              const ct_bmuf_list *list, ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    if (status == CT_OK) {
        status = broadcast_all(b, comm, root, list, err);
    }
    if (status != CT_OK || config->momentum == 0.0) {
        return status;
    }
    status = comm->rank == root ? ct_bmuf_load(b, &b->global, list, err)
                                : ct_bmuf_start(b, config, list, err);
    if (status == CT_OK) {
        status = broadcast_momentum(b, comm, root, err);
    }
    b->alike = status == CT_OK;
    return status;
}
