/* Blocks whose average is taken some updates after they have ended. */
#include "core/bmuf/bmuf.h"

#include "core/bmuf/bmuf_pass.h"

typedef ct_bmuf_batch batch;

static ct_status
reserve(ct_bmuf *b, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        const size_t bytes = b->n[d] * ct_dtype_size((ct_dtype)d);
        status = b->device->scratch_grow(&b->left.memory[d], bytes, err);
        if (status == CT_OK) {
            status = b->device->scratch_grow(&b->sums.memory[d], bytes, err);
        }
    }
    return status;
}

ct_status
ct_bmuf_load_left(ct_bmuf *b, const ct_bmuf_list *from, ct_error *err)
{
    ct_status status = reserve(b, err);
    if (status == CT_OK) {
        status = ct_bmuf_load(b, &b->left, from, err);
    }
    b->is_away = status == CT_OK;
    return status;
}

/* Shares of the distance that the parameters had when the ranks met, on their way. */
static ct_status
begin_sum(ct_bmuf *b, ct_comm *comm, ct_dtype dtype, ct_error *err)
{
    const ct_rule_coef coef = {.block_share = ct_block_share_of(comm->world_size)};
    const ct_update_span span = {
        .n = b->n[dtype],
        .grad = b->left.memory[dtype].data,
        .param = b->sums.memory[dtype].data,
        .state = {b->global.memory[dtype].data},
        .dtype = dtype,
        .grad_dtype = dtype,
        .state_dtype = dtype,
    };
    const ct_update update = {
        .rule = CT_RULE_block_delta, .coefs = &coef, .spans = &span, .n_spans = 1};
    const ct_request sum = {
        .what = CT_ALL_REDUCE, .op = CT_REDUCE_SUM, .in = {span.param, span.n, dtype}
    };
    ct_status status = b->device->update(b->stream, &update, err);
    return status == CT_OK ? ct_comm_start(comm, &sum, &b->work[dtype], err) : status;
}

/* Waits for all, in the order in which they began; the first failure counts. */
static ct_status
wait_for_sums(ct_bmuf *b, ct_comm *comm, int n_begun, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; d < n_begun; d++) {
        ct_error *told = status == CT_OK ? err : NULL;
        if (b->n[d] != 0) {
            const ct_status ended = ct_comm_wait(comm, b->work[d], told);
            status = status == CT_OK ? ended : status;
        }
        b->work[d] = NULL;
    }
    b->is_under_way = false;
    return status;
}

/* Nobody wants to know how they ended. */
static void
forget_sums(ct_bmuf *b, ct_comm *comm, int n_begun)
{
    const ct_status ignored = wait_for_sums(b, comm, n_begun, NULL);
    (void)ignored;
}

static ct_status
begin_sums(ct_bmuf *b, ct_comm *comm, ct_error *err)
{
    ct_status status = CT_OK;
    int d = 0;
    while (status == CT_OK && d < CT_BMUF_DTYPES) {
        status = b->n[d] == 0 ? CT_OK : begin_sum(b, comm, (ct_dtype)d, err);
        d += status == CT_OK;
    }
    b->is_under_way = status == CT_OK;
    if (status != CT_OK) {
        forget_sums(b, comm, d);
    }
    return status;
}

ct_status
ct_bmuf_depart(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    ct_status status = ct_bmuf_check_unchanged(b, list, err);
    if (status == CT_OK && !b->alike) {
        status = ct_bmuf_check_alike(b, comm, err);
    }
    if (status == CT_OK) {
        status = ct_bmuf_load_left(b, list, err);
    }
    if (status == CT_OK) {
        status = begin_sums(b, comm, err);
    }
    b->is_away = status == CT_OK;
    return status;
}

static ct_status
rejoin(ct_bmuf *b, const ct_bmuf_config *config, const ct_bmuf_list *list,
       ct_dtype dtype, ct_error *err)
{
    batch s = ct_bmuf_first_batch(list, dtype, 0);
    ct_status status = CT_OK;
    while (status == CT_OK && ct_bmuf_next_batch(&s, b->pieces)) {
        s.shares = ct_bmuf_flat_at(&b->sums, dtype, s.start);
        status = ct_bmuf_move_model(b, config, &s, err);
    }
    return status;
}

ct_status
ct_bmuf_arrive(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
               const ct_bmuf_list *list, ct_error *err)
{
    ct_status status = ct_bmuf_check_unchanged(b, list, err);
    if (status == CT_OK) {
        status = ct_bmuf_reserve_operands(b, list->n, err);
    }
    if (status == CT_OK && !b->is_under_way) {
        status = begin_sums(b, comm, err);
    }
    if (status == CT_OK) {
        status = wait_for_sums(b, comm, CT_BMUF_DTYPES, err);
    }
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        status = rejoin(b, config, list, (ct_dtype)d, err);
    }
    b->is_away = status != CT_OK;
    return status;
}

void
ct_bmuf_land(ct_bmuf *b, ct_comm *comm)
{
    if (b->is_under_way) {
        forget_sums(b, comm, CT_BMUF_DTYPES);
    }
    b->is_away = false;
}
