#include "core/ct_power_sgd.h"

#include "core/ct_alloc.h"
#include "core/ct_low_rank.h"

#include <math.h>
#include <string.h>

/* A stretch of a bucket: a matrix, or with rows 0 what travels whole. */
typedef struct stretch {
    size_t at, n; /* elements of the bucket */
    size_t rows, cols;
    size_t pack_at; /* in what travels first: P, or the stretch itself */
    size_t q_at;
} stretch;

/* What is remembered of a bucket; memory comes when compression begins. */
typedef struct power_bucket {
    stretch *stretches;
    size_t n_stretches;
    size_t n, n_padded, n_pack, n_q;
    float *memory; /* all of those below */
    float *error;  /* what was lost; within a pass half the sum with the gradient */
    float *pack, *q, *product;
    uint64_t passes;
    bool compressed; /* in this pass */
} power_bucket;

typedef struct power_codec {
    ct_codec base; /* first: a ct_codec * of ours is a power_codec * */
    const ct_device *device;
    void *stream;
    ct_power_sgd_config config;
    ct_scratch scratch;
    size_t n_buckets;
    power_bucket buckets[];
} power_codec;

/* ---- memory ------------------------------------------------------------------------
 */

/* Numbers between -1 and 1, the same on every rank: splitmix64 of the position.
 *
 * Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
 * 2014. */
static float
noise(uint64_t at)
{
    uint64_t x = (at + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (float)((double)(x >> 40) * 0x1p-23 - 1.0);
}

static void
start_anew(power_bucket *b)
{
    (void)memset(b->error, 0, b->n_padded * sizeof *b->error);
    for (size_t i = 0; i < b->n_q; i++) {
        b->q[i] = noise(i);
    }
}

static ct_status
give_memory(power_bucket *b, ct_error *err)
{
    const size_t n = 2 * b->n_padded + b->n_pack + b->n_q;
    if (b->memory != NULL) {
        return CT_OK;
    }
    b->memory = ct_calloc(n + 1, sizeof *b->memory);
    if (b->memory == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for PowerSGD: %zu floats", n);
    }
    b->error = b->memory;
    b->product = b->error + b->n_padded;
    b->pack = b->product + b->n_padded;
    b->q = b->pack + b->n_pack;
    start_anew(b);
    return CT_OK;
}

/* ---- steps of a pass ---------------------------------------------------------------
 */

static ct_low_rank
low_rank_of(power_codec *self, const power_bucket *b, const stretch *s)
{
    return (ct_low_rank){
        .device = self->device,
        .stream = self->stream,
        .scratch = &self->scratch,
        .rows = s->rows,
        .cols = s->cols,
        .rank = self->config.rank,
        .matrix = b->error + s->at,
        .p = b->pack + s->pack_at,
        .q = b->q + s->q_at,
    };
}

static ct_status
copy(const power_codec *self, float *to, float *from, size_t n, ct_error *err)
{
    const ct_span target = {to, n, CT_F32}, source = {from, n, CT_F32};
    return self->device->copy(self->stream, &target, &source, 1, err);
}

/* error becomes half its sum with the gradient, which is their average; the factor is
 * exact, and is taken back where the product is written. */
static ct_status
add_gradient(const power_codec *self, const power_bucket *b, const ct_span *flat,
             ct_error *err)
{
    const ct_span sum = {b->error, b->n, CT_F32};
    (void)memset(b->error + b->n, 0, (b->n_padded - b->n) * sizeof *b->error);
    return self->device->average(self->stream, &sum, flat, 1, 0.5, err);
}

static ct_status
fill_pack(power_codec *self, const power_bucket *b, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < b->n_stretches; i++) {
        const stretch *s = &b->stretches[i];
        const ct_low_rank m = low_rank_of(self, b, s);
        status = s->rows == 0
                     ? copy(self, b->pack + s->pack_at, b->error + s->at, s->n, err)
                     : ct_low_rank_project(&m, err);
    }
    return status;
}

/* Whether n floats that are the same on all ranks are numbers. */
static ct_status
check_finite(power_codec *self, float *x, size_t n, bool *finite, ct_error *err)
{
    const ct_span span = {x, n, CT_F32};
    double sum = 0.0, host = 0.0;
    ct_status status =
        self->device->norm(self->stream, &self->scratch, 2.0, &span, 1, &sum, err);
    if (status == CT_OK) {
        status = self->device->read(self->stream, &sum, &host, err);
    }
    *finite = isfinite(host);
    return status;
}

/* Each Q from its P; then the average of all. */
static ct_status
fit(power_codec *self, const power_bucket *b, ct_comm *comm, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < b->n_stretches; i++) {
        const ct_low_rank m = low_rank_of(self, b, &b->stretches[i]);
        if (m.rows > 0) {
            status = ct_low_rank_fit(&m, err);
        }
    }
    const ct_request mean = {
        .what = CT_ALL_REDUCE, .op = CT_REDUCE_MEAN, .in = {b->q, b->n_q, CT_F32}
    };
    return status == CT_OK && b->n_q > 0 ? ct_comm_run(comm, &mean, err) : status;
}

static ct_status
expand_whole(const power_codec *self, const power_bucket *b, const stretch *s,
             ct_error *err)
{
    const ct_span out = {b->product + s->at, s->n, CT_F32};
    const ct_span error = {b->error + s->at, s->n, CT_F32};
    ct_status status = copy(self, b->product + s->at, b->pack + s->pack_at, s->n, err);
    if (status == CT_OK) {
        status = self->device->scale(self->stream, 2.0, (double)INFINITY, &out, 1, err);
    }
    return status == CT_OK ? self->device->zero(self->stream, &error, 1, err) : status;
}

/* Twice the product, the factor that add_gradient has taken, and what it misses. */
static ct_status
expand(power_codec *self, const power_bucket *b, const ct_span *flat, ct_error *err)
{
    const ct_span product = {b->product, b->n, CT_F32};
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < b->n_stretches; i++) {
        const stretch *s = &b->stretches[i];
        const ct_low_rank m = low_rank_of(self, b, s);
        status = s->rows == 0 ? expand_whole(self, b, s, err)
                              : ct_low_rank_expand(&m, 2.0, b->product + s->at, err);
    }
    return status == CT_OK ? self->device->copy(self->stream, flat, &product, 1, err)
                           : status;
}

/* NaN on all ranks, and nothing of it remembered. */
static ct_status
spoil(const power_codec *self, power_bucket *b, const ct_span *flat, ct_error *err)
{
    start_anew(b);
    return self->device->scale(self->stream, (double)NAN, (double)INFINITY, flat, 1,
                               err);
}

/* ---- the codec ---------------------------------------------------------------------
 */

static ct_status
power_start(ct_codec *codec, ct_comm *comm, const ct_parcel *parcel, ct_work **work,
            ct_error *err)
{
    power_codec *self = (power_codec *)codec;
    power_bucket *b = &self->buckets[parcel->bucket];
    b->compressed = b->passes++ >= self->config.start_iter && b->n_q > 0;
    if (!b->compressed) {
        return ct_codec_whole.ops->start(&ct_codec_whole, comm, parcel, work, err);
    }
    ct_status status = give_memory(b, err);
    if (status == CT_OK) {
        status = add_gradient(self, b, &parcel->flat, err);
    }
    if (status == CT_OK) {
        status = fill_pack(self, b, err);
    }
    const ct_request mean = {
        .what = CT_ALL_REDUCE,
        .op = CT_REDUCE_MEAN,
        .in = {b->pack, b->n_pack, CT_F32}
    };
    return status == CT_OK ? ct_comm_start(comm, &mean, work, err) : status;
}

static ct_status
power_finish(ct_codec *codec, ct_comm *comm, const ct_parcel *parcel, ct_error *err)
{
    power_codec *self = (power_codec *)codec;
    power_bucket *b = &self->buckets[parcel->bucket];
    bool finite = true;
    if (!b->compressed) {
        return CT_OK;
    }
    ct_status status = check_finite(self, b->pack, b->n_pack, &finite, err);
    if (status == CT_OK && finite) {
        status = fit(self, b, comm, err);
    }
    if (status == CT_OK && finite) {
        status = check_finite(self, b->q, b->n_q, &finite, err);
    }
    if (status != CT_OK) {
        return status;
    }
    return finite ? expand(self, b, &parcel->flat, err)
                  : spoil(self, b, &parcel->flat, err);
}

static void
power_free(ct_codec *codec)
{
    power_codec *self = (power_codec *)codec;
    for (size_t i = 0; i < self->n_buckets; i++) {
        ct_free(self->buckets[i].memory);
        ct_free(self->buckets[i].stretches);
    }
    self->device->scratch_release(&self->scratch);
    ct_free(self);
}

static const ct_codec_ops power_ops = {.name = "power_sgd",
                                       .start = power_start,
                                       .finish = power_finish,
                                       .free = power_free,
                                       .meets_again = true};
static const ct_codec_ops batched_ops = {.name = "batched_power_sgd",
                                         .start = power_start,
                                         .finish = power_finish,
                                         .free = power_free,
                                         .meets_again = true};

/* ---- making one --------------------------------------------------------------------
 */

ct_power_sgd_config
ct_power_sgd_default(void)
{
    return (ct_power_sgd_config){.rank = 1, .start_iter = 1000, .min_rate = 2.0};
}

static void
add_stretch(const ct_power_sgd_config *c, power_bucket *b, size_t n, size_t rows)
{
    const size_t cols = rows == 0 ? 0 : n / rows;
    const double thin = (double)(rows + cols) * (double)c->rank;
    const bool worth =
        rows > 1 && cols > 1 && (double)n > thin * c->min_rate && rows > c->rank;
    b->stretches[b->n_stretches++] = (stretch){
        .at = b->n_padded,
        .n = n,
        .rows = worth ? rows : 0,
        .cols = worth ? cols : 0,
        .pack_at = b->n_pack,
        .q_at = b->n_q,
    };
    b->n_padded += n;
    b->n_pack += worth ? rows * c->rank : n;
    b->n_q += worth ? cols * c->rank : 0;
}

static ct_status
lay_out(const ct_power_sgd_config *c, power_bucket *b, const ct_bucket_plan *plan,
        const ct_bucket *bucket, const size_t *rows, const size_t *lengths,
        ct_error *err)
{
    b->n = bucket->n;
    b->stretches = ct_calloc(bucket->n_params + 1, sizeof *b->stretches);
    if (b->stretches == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for PowerSGD");
    }
    if (c->batched) {
        const size_t side = (size_t)ceil(sqrt((double)bucket->n));
        add_stretch(c, b, side * side, side);
        return CT_OK;
    }
    for (size_t k = bucket->first; k < bucket->first + bucket->n_params; k++) {
        const uint32_t i = plan->order[k];
        add_stretch(c, b, lengths[i], rows[i]);
    }
    return CT_OK;
}

static ct_status
check_config(const ct_power_sgd_config *c, ct_error *err)
{
    if (c->rank < 1) {
        return ct_fail(err, CT_EINVAL, "PowerSGD's rank is 0; expected 1 or more");
    }
    if (!(c->min_rate > 0.0)) {
        return ct_fail(err, CT_EINVAL,
                       "PowerSGD's min_compression_rate is %g; expected > 0",
                       c->min_rate);
    }
    return CT_OK;
}

ct_status
ct_power_sgd_new(ct_codec **codec, const ct_device *device, void *stream,
                 const ct_power_sgd_config *config, const ct_bucket_plan *plan,
                 const size_t *rows, const size_t *lengths, ct_error *err)
{
    const size_t n = plan->n_buckets;
    ct_status status = check_config(config, err);
    if (status != CT_OK) {
        return status;
    }
    power_codec *made = ct_calloc(1, sizeof *made + (n + 1) * sizeof made->buckets[0]);
    if (made == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for PowerSGD of %zu buckets", n);
    }
    made->base.ops = config->batched ? &batched_ops : &power_ops;
    made->device = device;
    made->stream = stream;
    made->config = *config;
    made->n_buckets = n;
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        status = lay_out(config, &made->buckets[i], plan, &plan->buckets[i], rows,
                         lengths, err);
    }
    if (status != CT_OK) {
        power_free(&made->base);
        return status;
    }
    *codec = &made->base;
    return CT_OK;
}
