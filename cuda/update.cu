/* The update on a CUDA device. Mirrors csrc/cpu/update.c. */
#include "compact.cuh"
#include "element.cuh"
#include "kernels.h"
#include "quant.cuh"
#include "reduce.cuh"
#include "update.cuh"

#include "core/base/alloc.h"
#include "math/philox.h"

enum {
    N_KINDS = 5, /* of kernels: in float or double, with 8-bit state or not; compact */
    COMPACT = 4
};

/* What holds for every span of an update, and the key of the span's rounding. */
struct update_options {
    bool zero_grads;
    ct_ema_coef ema;
    const ct_clip_outcome *clip;
    ct_rounding key;
};

/* Has a rule a factor of gradients among its constants? */
template <typename Constants, typename = void> struct scales_grads {
    static const bool value = false;
};
template <typename Constants>
struct scales_grads<Constants, decltype((void)Constants::grad_scale)> {
    static const bool value = true;
};

/* Constants in the type that is computed in. */
template <typename Rule, typename Real>
__device__ static inline auto
rounded(const ct_rule_coef *constants, const ct_clip_outcome *clip)
{
    auto c = Rule::rounded(constants, Real());
    if constexpr (scales_grads<decltype(c)>::value) {
        c.grad_scale = (Real)ct_clip_scaled(clip, constants->grad_scale);
    }
    return c;
}

/* ---- a chunk --------------------------------------------------------------------- */

template <typename Real>
__device__ static inline void
put(Real value, const ct_cuda_update_operand &operand, const ct_rounding &key,
    void *data, ct_dtype dtype, size_t i)
{
    if (operand.rounding != NULL && dtype == CT_BF16) {
        const uint64_t number = operand.first + i;
        uint32_t words[4];
        ct_philox_block(key.seed, key.step, number, words);
        ((uint16_t *)data)[i] =
            ct_bf16_from_f32_stochastic((float)value, ct_philox_half(words, number));
    }
    else {
        ct_store_as(value, data, dtype, i);
    }
}

/* Everything that may follow the rule, for element i. */
template <typename Real>
__device__ static inline void
finish(const ct_cuda_update_operand &operand, const update_options &options, size_t i,
       Real param)
{
    if (operand.copy != NULL) {
        put(param, operand, options.key, operand.copy, operand.copy_dtype, i);
    }
    if (operand.ema != NULL) { /* of the model's weights */
        const Real stored = operand.copy != NULL
                                ? ct_load_as<Real>(operand.copy, operand.copy_dtype, i)
                                : ct_load_as<Real>(operand.param, operand.dtype, i);
        ct_average_element(options.ema, stored, operand.ema, operand.ema_dtype, i);
    }
}

/* An element, of any mixture of dtypes. */
template <typename Rule, typename Real, typename Constants>
__device__ static inline void
update_one(const ct_cuda_update_operand &operand, const update_options &options,
           const Constants &c, size_t i)
{
    Real param = ct_load_as<Real>(operand.param, operand.dtype, i);
    Real state[CT_RULE_MAX_STATES] = {};
    for (int k = 0; k < Rule::n_states; k++) {
        state[k] = ct_load_state<Real>(operand, k, i);
    }
    Rule::apply(&c, ct_load_as<Real>(operand.grad, operand.grad_dtype, i), &param,
                state);
    for (int k = 0; k < Rule::n_states; k++) {
        ct_store_state(state[k], operand, k, i);
    }
    put(param, operand, options.key, operand.param, operand.dtype, i);
    finish(operand, options, i, param);
    if (options.zero_grads) {
        ct_store_as(Real(), operand.grad, operand.grad_dtype, i);
    }
}

/* ---- vectors of elements --------------------------------------------------------- */

__device__ static inline ct_bits
narrowed(const ct_reals<double> &x, const ct_cuda_update_operand &, const ct_rounding &,
         ct_dtype dtype, size_t)
{
    return ct_narrow(x, dtype);
}

__device__ static inline ct_bits
narrowed(const ct_reals<float> &x, const ct_cuda_update_operand &operand,
         const ct_rounding &key, ct_dtype dtype, size_t i)
{
    if (operand.rounding == NULL || dtype != CT_BF16) {
        return ct_narrow(x, dtype);
    }
    const uint64_t number = operand.first + i; /* a multiple of 4 */
    uint32_t words[4];
    uint16_t half[4];
    ct_philox_block(key.seed, key.step, number, words);
    CT_UNROLL
    for (unsigned j = 0; j < 4; j++) {
        half[j] =
            ct_bf16_from_f32_stochastic(x.of[j], ct_philox_half(words, number + j));
    }
    return ct_pack(half);
}

/* What a vector of elements is computed from. */
template <typename Rule, typename Real> struct loaded {
    ct_bits grad, param, state[Rule::n_states + 1];

    __device__ void load(const ct_cuda_update_operand &operand, size_t i)
    {
        grad = ct_load_bits<Real>(operand.grad, operand.grad_dtype, i);
        param = ct_load_bits<Real>(operand.param, operand.dtype, i);
        CT_UNROLL
        for (int k = 0; k < Rule::n_states; k++) {
            if (!Rule::is_factored || k != 0 || operand.row == NULL) {
                state[k] = ct_load_bits<Real>(operand.state[k], operand.state_dtype, i);
            }
        }
    }
};

/* State 0 of elements that may be of several rows. */
template <typename Real>
__device__ static inline ct_reals<Real>
from_factors(const ct_cuda_update_operand &operand, size_t i)
{
    const Real *rows = ct_global((const Real *)operand.row),
               *cols = ct_global((const Real *)operand.col);
    const size_t at = operand.begin + i;
    size_t row = at / operand.cols, col = at % operand.cols;
    size_t first = row / operand.rows * operand.cols; /* column of the row's matrix */
    ct_reals<Real> x;
    CT_UNROLL
    for (unsigned j = 0; j < 16 / sizeof(Real); j++) {
        if (col == operand.cols) {
            col = 0;
            first = ++row / operand.rows * operand.cols;
        }
        x.of[j] = rows[row] * cols[first + col++];
    }
    return x;
}

/* Everything that may follow the rule. */
template <typename Real>
__device__ static inline void
finish_vector(const ct_cuda_update_operand &operand, const update_options &options,
              size_t i, const ct_reals<Real> &param)
{
    ct_bits stored = narrowed(param, operand, options.key, operand.dtype, i);
    ct_dtype dtype = operand.dtype;
    ct_store_bits<Real>(stored, operand.param, dtype, i);
    if (operand.copy != NULL) {
        dtype = operand.copy_dtype;
        stored = narrowed(param, operand, options.key, dtype, i);
        ct_store_bits<Real>(stored, operand.copy, dtype, i);
    }
    if (operand.ema != NULL) { /* of the model's weights */
        const ct_reals<Real> value = ct_widen(stored, dtype, Real());
        ct_reals<Real> average =
            ct_widen(ct_load_bits<Real>(operand.ema, operand.ema_dtype, i),
                     operand.ema_dtype, Real());
        CT_UNROLL
        for (unsigned j = 0; j < 16 / sizeof(Real); j++) {
            average.of[j] = ct_average_of(options.ema, average.of[j], value.of[j]);
        }
        ct_store_bits<Real>(ct_narrow(average, operand.ema_dtype), operand.ema,
                            operand.ema_dtype, i);
    }
    if (options.zero_grads) {
        ct_store_bits<Real>(ct_bits(), operand.grad, operand.grad_dtype, i);
    }
}

/* The values of a vector of elements. */
template <typename Rule, typename Real> struct values {
    ct_reals<Real> grad, param, state[Rule::n_states + 1];

    __device__ values(const ct_cuda_update_operand &operand, size_t i,
                      const loaded<Rule, Real> &from)
    {
        grad = ct_widen(from.grad, operand.grad_dtype, Real());
        param = ct_widen(from.param, operand.dtype, Real());
        CT_UNROLL
        for (int k = 0; k < Rule::n_states; k++) {
            if (Rule::is_factored && k == 0 && operand.row != NULL) {
                state[0] = from_factors<Real>(operand, i);
            }
            else {
                state[k] = ct_widen(from.state[k], operand.state_dtype, Real());
            }
        }
    }

    /* f(grad, param, state) for each element. */
    template <typename F> __device__ void each(F f)
    {
        CT_UNROLL
        for (unsigned j = 0; j < 16 / sizeof(Real); j++) {
            Real of_one[CT_RULE_MAX_STATES] = {};
            CT_UNROLL
            for (int k = 0; k < Rule::n_states; k++) {
                of_one[k] = state[k].of[j];
            }
            f(grad.of[j], &param.of[j], of_one);
            CT_UNROLL
            for (int k = 0; k < Rule::n_states; k++) {
                state[k].of[j] = of_one[k];
            }
        }
    }

    __device__ void store_states(const ct_cuda_update_operand &operand, size_t i)
    {
        CT_UNROLL
        for (int k = 0; k < Rule::n_states; k++) {
            if (k != 0 || operand.row == NULL) {
                ct_store_bits<Real>(ct_narrow(state[k], operand.state_dtype),
                                    operand.state[k], operand.state_dtype, i);
            }
        }
    }
};

/* vector(i, values) for all vectors of a range that can be used as such, one(i) for the
 * elements that are left. */
template <typename Rule, typename Real, typename Vector, typename One>
__device__ static inline void
each_of(const ct_cuda_update_operand &operand, const ct_cuda_range &range,
        Vector vector, One one)
{
    const unsigned n = 16 / sizeof(Real);
    const unsigned ahead = Rule::n_states < 2 ? 2 : 1;
    const bool wide = operand.wide && (Rule::is_factored || operand.row == NULL);
    ct_each_vector<n, ahead>(
        range, wide,
        [&](auto count, size_t i) {
            loaded<Rule, Real> from[decltype(count)::value];
            CT_UNROLL
            for (unsigned a = 0; a < decltype(count)::value; a++) {
                from[a].load(operand, i + a * ct_row<n>::elems);
            }
            CT_UNROLL
            for (unsigned a = 0; a < decltype(count)::value; a++) {
                const size_t at = i + a * ct_row<n>::elems;
                vector(at, values<Rule, Real>(operand, at, from[a]));
            }
        },
        one);
}

template <typename Rule, typename Real>
__device__ static inline void
update(const ct_cuda_update_operand &operand, const ct_rule_coef *constants,
       const ct_cuda_range &range, const update_options &options)
{
    const auto c = rounded<Rule, Real>(constants, options.clip);
    each_of<Rule, Real>(
        operand, range,
        [&](size_t i, values<Rule, Real> x) {
            x.each([&](Real grad, Real *param, Real *state) {
                Rule::apply(&c, grad, param, state);
            });
            if (Rule::is_factored) { /* saves registers */
                x.store_states(operand, i);
            }
            finish_vector(operand, options, i, x.param);
            if (!Rule::is_factored) {
                x.store_states(operand, i);
            }
        },
        [&](size_t i) { update_one<Rule, Real>(operand, options, c, i); });
}

/* 8-bit state: a block at a time, as its elements share a scale. */
template <typename Rule, typename Real>
__device__ static void
update_quantized(const ct_cuda_update_operand &operand, const ct_rule_coef *constants,
                 const ct_cuda_range &range, const update_options &options)
{
    __shared__ float middles[CT_RULE_MAX_STATES][CT_QUANT_MAP_SIZE];
    const auto c = rounded<Rule, Real>(constants, options.clip);
    for (int k = 0; k < Rule::n_states; k++) {
        ct_fill_middles(middles[k], operand, k);
    }
    __syncthreads();
    for (size_t first = range.begin; first < range.end; first += CT_QUANT_BLOCK) {
        const size_t i = first + threadIdx.x;
        const bool inside = i < range.end;
        Real param = Real(), state[CT_RULE_MAX_STATES] = {};
        if (inside) {
            param = ct_load_as<Real>(operand.param, operand.dtype, i);
            for (int k = 0; k < Rule::n_states; k++) {
                state[k] = ct_load_quantized<Real>(operand, k, i);
            }
            Rule::apply(&c, ct_load_as<Real>(operand.grad, operand.grad_dtype, i),
                        &param, state);
        }
        for (int k = 0; k < Rule::n_states; k++) {
            ct_store_quantized(state[k], operand, k, i, inside, middles[k]);
        }
        if (inside) {
            put(param, operand, options.key, operand.param, operand.dtype, i);
            finish(operand, options, i, param);
            if (options.zero_grads) {
                ct_store_as(Real(), operand.grad, operand.grad_dtype, i);
            }
        }
    }
}

/* ---- operands in the device's memory ----------------------------------------------
 */

/* The operands of an update hardly ever change but for the gradients' addresses and the
 * constants: these alone are parameters of the launch. Everything else stays in the
 * device's memory, and the host keeps a copy to know what has changed. Changes reach
 * the device as parameters of a kernel, too: no memory has to outlive the call, and the
 * stream orders the change behind the last update. */

/* Of consecutive spans. */
struct update_constants {
    ct_rule_coef coef;
    ct_rounding key; /* *rounding lies in the host's memory */
};

struct update_batch {
    static const unsigned capacity = 2048;
    static const unsigned most_constants =
        (ct_cuda_param_bytes - 256 - capacity * (sizeof(void *) + sizeof(uint32_t))) /
        sizeof(update_constants);

    uint32_t n_operands, n_chunks;
    uint32_t chunk_end[capacity];               /* chunks of operands 0 .. i together */
    void *grads[capacity];                      /* take the place of operands[i].grad */
    update_constants constants[most_constants]; /* by operands[i].coef */
    const ct_cuda_update_operand *operands;
};

/* Every thread of the block has to come. */
__device__ static inline void
load_operand(ct_cuda_update_operand *to, const update_batch &batch, uint32_t number)
{
    const uint64_t *from = (const uint64_t *)&batch.operands[number];
    const unsigned words = sizeof *to / sizeof *from;
    static_assert(sizeof *to % sizeof *from == 0 && words <= ct_cuda_block_size, "");
    if (threadIdx.x < words) {
        ((uint64_t *)to)[threadIdx.x] =
            threadIdx.x == offsetof(ct_update_span, grad) / sizeof *from
                ? (uint64_t)batch.grads[number]
                : from[threadIdx.x];
    }
    __syncthreads();
}

struct upload_batch {
    uint64_t words[4000];
};

CT_KERNEL
upload_kernel(const upload_batch __grid_constant__ batch, uint64_t *to, uint32_t n)
{
    const uint32_t step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        to[i] = batch.words[i];
    }
}

/* Compact state: a row of vectors at a time, then an element a thread. A group is of
 * adjacent threads of a warp, which all come to the shuffles. */
template <typename Rule, typename Constants>
__device__ static inline void
update_compact_vector(const ct_cuda_update_operand &operand,
                      const update_options &options, const Constants &c,
                      const float *parts, size_t i)
{
    ct_compact_loaded<Rule> from;
    from.load(operand, i);
    ct_compact_values<Rule> x(operand, from, parts);
    x.each([&](float grad, float *param, float *state) {
        Rule::apply(&c, grad, param, state);
    });
    if (operand.copy != NULL || operand.ema != NULL) {
        finish_vector(operand, options, i, x.param[0]);
        finish_vector(operand, options, i + 4, x.param[1]);
    }
    else {
        const ct_compact_bits stored = {
            {narrowed(x.param[0], operand, options.key, operand.dtype, i),
             narrowed(x.param[1], operand, options.key, operand.dtype, i + 4)}
        };
        stored.store(operand.param, operand.dtype, i);
        if (options.zero_grads) {
            ct_compact_bits().store(operand.grad, operand.grad_dtype, i);
        }
    }
    x.store_corrections(operand, i);
    x.store_states(operand, i);
}

template <typename Rule, typename Constants>
__device__ static inline void
update_compact_one(const ct_cuda_update_operand &operand, const update_options &options,
                   const Constants &c, const float *parts, size_t i, bool inside)
{
    float state[CT_RULE_MAX_STATES] = {};
    for (int k = 0; k < Rule::n_states; k++) {
        const ct_compact_reader reader(
            parts, k,
            ct_group_scale<CT_COMPACT_GROUP>(inside ? ct_load_scale(operand, k, i)
                                                    : (uint16_t)0));
        if (inside) {
            state[k] = reader.load(ct_global((const uint8_t *)operand.state[k])[i]);
        }
    }
    if (inside) {
        float param = ct_load_param(operand, i);
        Rule::apply(&c, ct_load_as<float>(operand.grad, operand.grad_dtype, i), &param,
                    state);
        put(param, operand, options.key, operand.param, operand.dtype, i);
        ct_store_correction(param, operand, i);
        finish(operand, options, i, param);
        if (options.zero_grads) {
            ct_store_as(0.0f, operand.grad, operand.grad_dtype, i);
        }
    }
    for (int k = 0; k < Rule::n_states; k++) {
        const ct_compact_writer writer(
            k, ct_largest_of<CT_COMPACT_GROUP>(ct_compact_magnitude(state[k])));
        if (inside) {
            ct_global((uint8_t *)operand.state[k])[i] = writer.store(state[k]);
            writer.store_scale(operand, i);
        }
    }
}

template <typename Rule>
__device__ static inline void
update_compact(const ct_cuda_update_operand &operand, const ct_rule_coef *constants,
               const ct_cuda_range &range, const update_options &options,
               const float *parts)
{
    const auto c = rounded<Rule, float>(constants, options.clip);
    const size_t row = ct_row<CT_COMPACT_ELEMS>::elems;
    size_t first = range.begin;
    for (; operand.wide && first + row <= range.end; first += row) {
        update_compact_vector<Rule>(operand, options, c, parts,
                                    first + CT_COMPACT_ELEMS * threadIdx.x);
    }
    for (; first < range.end; first += ct_cuda_block_size) {
        const size_t i = first + threadIdx.x;
        update_compact_one<Rule>(operand, options, c, parts, i, i < range.end);
    }
}

/* ---- kernels --------------------------------------------------------------------- */

/* f(operand, constants, range, options) for the block's chunks. */
template <typename F>
__device__ static inline void
each_chunk(const update_batch &batch, update_options &options, F f)
{
    __shared__ ct_cuda_update_operand operand;
    if (ct_clip_skips(options.clip)) {
        return;
    }
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const uint32_t number = ct_cuda_operand_at(batch, chunk);
        load_operand(&operand, batch, number);
        const ct_cuda_range range = ct_cuda_range_in(batch, chunk, number, operand.n);
        const update_constants &constants = batch.constants[operand.coef];
        options.key = constants.key;
        f(operand, operand.settled != NULL ? operand.settled : &constants.coef, range,
          options);
        __syncthreads(); /* the operand is free for the next chunk */
    }
}

/* For one type of computation, with 8-bit state or not, as a kernel has the registers
 * of the path that needs most. Where four blocks leave too few: in double the constants
 * alone take up to 22, each array 4; Adafactor finds a row and a column besides. From
 * compute capability 12.0 on, addresses take more of them. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
static constexpr int most_resident = 3;
#else
static constexpr int most_resident = 4;
#endif

template <typename Rule, typename Real>
static constexpr int resident = Rule::n_states == 0 ? 4
                                : sizeof(Real) == 8 ? (Rule::n_states == 3 ? 2 : 3)
                                : Rule::is_factored ? 3
                                                    : most_resident;

template <typename Rule, typename Real, bool Quantized>
CT_KERNEL_BY((resident<Rule, Real>))
update_kernel(const update_batch __grid_constant__ batch, update_options options)
{
    each_chunk(batch, options,
               [&](const ct_cuda_update_operand &operand, const ct_rule_coef *coef,
                   const ct_cuda_range &range, const update_options &of_chunk) {
                   if (Quantized) {
                       update_quantized<Rule, Real>(operand, coef, range, of_chunk);
                   }
                   else {
                       update<Rule, Real>(operand, coef, range, of_chunk);
                   }
               });
}

template <typename Rule>
CT_KERNEL_BY(Rule::n_states == 2 ? 3 : 4) /* eight elements of each array at a time */
compact_kernel(const update_batch __grid_constant__ batch, update_options options)
{
    __shared__ float parts[ct_cuda_block_size];
    ct_fill_parts(parts);
    each_chunk(batch, options,
               [&](const ct_cuda_update_operand &operand, const ct_rule_coef *coef,
                   const ct_cuda_range &range, const update_options &of_chunk) {
                   update_compact<Rule>(operand, coef, range, of_chunk, parts);
               });
}

typedef decltype(&update_kernel<ct_rule_sgd, float, false>) update_kernel_fn;

/* By kind_of(). */
static const update_kernel_fn kernels[CT_RULE_COUNT][COMPACT] = {
#define CT_RULE(rule, constants, n_states)                                             \
    {update_kernel<ct_rule_##rule, float, false>,                                      \
     update_kernel<ct_rule_##rule, double, false>,                                     \
     update_kernel<ct_rule_##rule, float, n_states != 0>,                              \
     update_kernel<ct_rule_##rule, double, n_states != 0>},
#include "math/rules.def"
#undef CT_RULE
};

static update_kernel_fn
kernel_for(ct_rule rule, unsigned kind)
{
    if (kind != COMPACT) {
        return kernels[rule][kind];
    }
    switch (rule) {
#define CT_COMPACT(rule, n_states)                                                     \
    case CT_RULE_##rule:                                                               \
        return compact_kernel<ct_rule_##rule>;
#include "math/compact.def"
#undef CT_COMPACT
    default: /* ct_update_check let no other rule pass */
        return NULL;
    }
}

/* The number of the kernel for a span. */
static unsigned
kind_of(const ct_update &u, const ct_update_span &span)
{
    if (ct_rule_n_states(u.rule) != 0 && span.state_dtype == CT_I8) {
        return COMPACT;
    }
    const bool quantized = ct_rule_n_states(u.rule) != 0 && span.state_dtype == CT_U8;
    return (span.dtype == CT_F64 ? 1 : 0) + (quantized ? 2 : 0);
}

/* Grouped by kind, spans that follow each other with the same constants share them, up
 * to the most that a launch has. */
struct placement {
    uint32_t n_operands, n_constants; /* of the last launch */
    const ct_update_span *constants;  /* the last span whose constants are listed */

    /* Adds a span; returns whether another launch begins with that. */
    bool add(const ct_update_span &span)
    {
        /* Settled constants lie in the device's memory. */
        const bool own =
            constants == NULL ||
            ((span.settled == NULL || span.rounding != NULL) &&
             (span.coef != constants->coef || span.rounding != constants->rounding));
        const bool begins = n_operands == 0 || n_operands == update_batch::capacity ||
                            (own && n_constants == update_batch::most_constants);
        if (begins) {
            n_operands = n_constants = 0;
        }
        if (own || begins) {
            constants = &span;
            n_constants++;
        }
        n_operands++;
        return begins;
    }
};

/* f(span) for all spans of a kind, but for empty ones. */
template <typename F>
static void
each_span(const ct_update &u, unsigned kind, F f)
{
    for (size_t i = 0; i < u.n_spans; i++) {
        if (u.spans[i].n != 0 && kind_of(u, u.spans[i]) == kind) {
            f(u.spans[i]);
        }
    }
}

ct_status
ct_cuda_send(void *stream, void *to, const void *from, size_t bytes, ct_error *err)
{
    const size_t words = bytes / sizeof(uint64_t);
    ct_status status = CT_OK;
    upload_batch batch;
    for (size_t i = 0, end; status == CT_OK && i < words; i = end) {
        const size_t most = sizeof batch.words / sizeof *batch.words;
        end = words - i < most ? words : i + most;
        memcpy(batch.words, (const uint64_t *)from + i,
               (end - i) * sizeof *batch.words);
        CT_LAUNCH(upload_kernel, 16, ct_cuda_block_size, stream, batch,
                  (uint64_t *)to + i, (uint32_t)(end - i));
        status = ct_cuda_launched("launch a copy of numbers to the device", err);
    }
    return status;
}

static_assert(offsetof(ct_update_span, coef) + sizeof(uint32_t) ==
                  offsetof(ct_update_span, settled),
              "no padding: operands are compared byte by byte");

/* Makes the table hold the update's operands, kind by kind. */
static ct_status
fill_table(void *stream, ct_update_table *table, const ct_update &u, ct_error *err)
{
    ct_cuda_update_operand *const known = (ct_cuda_update_operand *)table->host;
    size_t n = 0, first = SIZE_MAX, end = 0;
    for (unsigned kind = 0; kind < N_KINDS; kind++) {
        placement place = {};
        each_span(u, kind, [&](const ct_update_span &span) {
            place.add(span);
            ct_cuda_update_operand operand = ct_cuda_operand_of(u.rule, span);
            operand.grad = NULL;
            operand.coef = place.n_constants - 1;
            if (n >= table->n || memcmp(&known[n], &operand, sizeof operand) != 0) {
                memcpy(&known[n], &operand, sizeof operand);
                first = first < n ? first : n;
                end = n + 1;
            }
            n++;
        });
    }
    ct_status status = CT_OK;
    table->n = n > table->n ? n : table->n;
    if (first < end) {
        status =
            ct_cuda_send(stream, (ct_cuda_update_operand *)table->device.data + first,
                         &known[first], (end - first) * sizeof *known, err);
    }
    if (status != CT_OK) {
        table->n = 0;
    }
    return status;
}

/* Launches the kernel of a kind for its operands; *operands: the kind's, then the next
 * one's. */
static ct_status
launch_kind(void *stream, const ct_cuda_update_operand **operands, const ct_update &u,
            unsigned kind, ct_error *err)
{
    const update_options options = {u.zero_grads, ct_ema_coef_of(u.ema_decay), u.clip,
                                    ct_rounding()};
    const update_kernel_fn kernel = kernel_for(u.rule, kind);
    placement place = {};
    update_batch batch;
    ct_status status = CT_OK;
    batch.n_operands = batch.n_chunks = 0;
    const auto launch = [&] {
        CT_LAUNCH(kernel, ct_cuda_grid_size(batch.n_chunks), ct_cuda_block_size, stream,
                  batch, options);
        *operands += batch.n_operands;
        return ct_cuda_launched("launch update", err);
    };

    each_span(u, kind, [&](const ct_update_span &span) {
        if (place.add(span)) {
            if (status == CT_OK && batch.n_operands != 0) {
                status = launch();
            }
            batch.operands = *operands;
            batch.n_operands = batch.n_chunks = 0;
        }
        batch.constants[place.n_constants - 1] = {u.coefs[place.constants->coef],
                                                  place.constants->rounding == NULL
                                                      ? ct_rounding()
                                                      : *place.constants->rounding};
        batch.n_chunks += (uint32_t)ct_cuda_chunks_of(span.n);
        batch.grads[batch.n_operands] = span.grad;
        batch.chunk_end[batch.n_operands++] = batch.n_chunks;
    });
    return status == CT_OK && batch.n_operands != 0 ? launch() : status;
}

ct_status
ct_cuda_table_reserve(ct_update_table *table, size_t n, ct_error *err)
{
    const size_t size = sizeof(ct_cuda_update_operand);
    const void *const before = table->device.data;
    ct_status status = ct_grow(&table->host, &table->capacity, n, size, err);
    if (status == CT_OK) {
        status = ct_cuda_scratch_grow(&table->device, n * size, err);
    }
    if (table->device.data != before) {
        table->n = 0;
    }
    return status;
}

void
ct_cuda_table_release(ct_update_table *table)
{
    ct_cuda_scratch_release(&table->device);
    ct_free(table->host);
    *table = {};
}

ct_status
ct_cuda_update(void *stream, ct_update_table *table, const ct_update *u, ct_error *err)
{
    ct_status status = ct_update_check(u, err);
    if (status == CT_OK) {
        status = ct_cuda_table_reserve(table, u->n_spans, err);
    }
    if (status == CT_OK) {
        status = fill_table(stream, table, *u, err);
    }
    const ct_cuda_update_operand *next =
        (const ct_cuda_update_operand *)table->device.data;
    for (unsigned kind = 0; status == CT_OK && kind < N_KINDS; kind++) {
        status = launch_kind(stream, &next, *u, kind, err);
    }
    return status;
}

/* ---- measured rules: sums over a parameter --------------------------------------- */

/* A block writes two partial sums of each chunk; then a block for each span folds the
 * sums, and a thread settles the span's constants, so no data goes to the host between
 * the steps. */

/* A measured rule for both types of computation. */
#define CT_MEASURED(rule, constants, n_states)                                         \
    struct measured_##rule : ct_rule_##rule {                                          \
        __device__ static void measure(const ct_##constants##_coef_f32 *c, float grad, \
                                       float param, float *state, float *terms)        \
        {                                                                              \
            ct_##rule##_measure_f32(c, grad, param, state, terms);                     \
        }                                                                              \
        __device__ static void                                                         \
        measure(const ct_##constants##_coef_f64 *c, double grad, double param,         \
                double *state, double *terms)                                          \
        {                                                                              \
            ct_##rule##_measure_f64(c, grad, param, state, terms);                     \
        }                                                                              \
    };
#include "math/measured.def"
#undef CT_MEASURED

struct measure_operand : ct_cuda_update_operand {
    ct_rule_coef constants;
    size_t number;
};

template <typename Rule, typename Real>
__device__ static void
measure_range(const measure_operand &operand, const ct_cuda_range &range,
              const ct_clip_outcome *clip, double *sums)
{
    const auto c = rounded<Rule, Real>(&operand.constants, clip);
    const auto measure = [&](Real grad, Real *param, Real *state) {
        Real terms[CT_MEASURES];
        Rule::measure(&c, grad, *param, state, terms);
        CT_UNROLL
        for (int m = 0; m < CT_MEASURES; m++) {
            sums[m] += (double)terms[m] * (double)terms[m];
        }
    };
    each_of<Rule, Real>(
        operand, range,
        [&](size_t i, values<Rule, Real> x) {
            x.each(measure);
            x.store_states(operand, i);
        },
        [&](size_t i) {
            Real param = ct_load_as<Real>(operand.param, operand.dtype, i);
            Real state[CT_RULE_MAX_STATES] = {};
            for (int k = 0; k < Rule::n_states; k++) {
                state[k] = ct_load_state<Real>(operand, k, i);
            }
            measure(ct_load_as<Real>(operand.grad, operand.grad_dtype, i), &param,
                    state);
            for (int k = 0; k < Rule::n_states; k++) {
                ct_store_state(state[k], operand, k, i);
            }
        });
}

template <typename Rule, typename Real>
CT_KERNEL_BY(sizeof(Real) == 8 ? 2 : 3) /* sums in double, besides */
measure_kernel(const ct_cuda_batch<measure_operand> __grid_constant__ batch,
               const ct_clip_outcome *clip, double *partials)
{
    if (ct_clip_skips(clip)) {
        return;
    }
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const measure_operand &operand = batch.operands[range.operand];
        double sums[CT_MEASURES] = {};
        measure_range<Rule, Real>(operand, range, clip, sums);
        for (int m = 0; m < CT_MEASURES; m++) {
            const double sum = ct_block_sum(CT_NORM_ONE, sums[m]);
            if (threadIdx.x == 0) {
                partials[CT_MEASURES * chunk + m] = sum;
            }
        }
    }
}

CT_KERNEL
fold_kernel(const ct_cuda_batch<measure_operand> __grid_constant__ batch,
            const ct_clip_outcome *clip, const double *partials, double *sums)
{
    if (ct_clip_skips(clip)) {
        return;
    }
    for (uint32_t i = blockIdx.x; i < batch.n_operands; i += gridDim.x) {
        const uint32_t begin = i == 0 ? 0 : batch.chunk_end[i - 1];
        const uint32_t n = batch.chunk_end[i] - begin;
        for (int m = 0; m < CT_MEASURES; m++) {
            const double sum = ct_list_sum(
                CT_NORM_ONE, partials + CT_MEASURES * begin + m, n, CT_MEASURES);
            if (threadIdx.x == 0) {
                sums[CT_MEASURES * batch.operands[i].number + m] = sum;
            }
        }
    }
}

typedef decltype(&measure_kernel<measured_lamb, float>) measure_kernel_fn;

static measure_kernel_fn
kernel_of(ct_rule rule, bool in_double)
{
    switch (rule) {
#define CT_MEASURED(rule, constants, n_states)                                         \
    case CT_RULE_##rule:                                                               \
        return in_double ? measure_kernel<measured_##rule, double>                     \
                         : measure_kernel<measured_##rule, float>;
#include "math/measured.def"
#undef CT_MEASURED
    default: /* ct_measure_check let no other rule pass */
        return NULL;
    }
}

/* Of the spans that are computed in double, or of the others; *next moves behind their
 * partial sums. */
static ct_status
enqueue(void *stream, double **next, const ct_update &u, bool in_double, double *sums,
        ct_error *err)
{
    const measure_kernel_fn kernel = kernel_of(u.rule, in_double);
    return ct_cuda_in_batches<measure_operand>(
        u.n_spans,
        [&](size_t i) {
            return (u.spans[i].dtype == CT_F64) == in_double
                       ? measure_operand{ct_cuda_operand_of(u.rule, u.spans[i]),
                                         u.coefs[u.spans[i].coef], i}
                       : measure_operand();
        },
        [&](const ct_cuda_batch<measure_operand> &batch) {
            CT_LAUNCH(kernel, ct_cuda_grid_size(batch.n_chunks), ct_cuda_block_size,
                      stream, batch, u.clip, *next);
            ct_status status = ct_cuda_launched("launch measure", err);
            if (status == CT_OK) {
                CT_LAUNCH(fold_kernel, ct_cuda_grid_size(batch.n_operands),
                          ct_cuda_block_size, stream, batch, u.clip, *next, sums);
                status = ct_cuda_launched("launch measure's last sums", err);
            }
            *next += (size_t)CT_MEASURES * batch.n_chunks;
            return status;
        });
}

ct_status
ct_cuda_measure(void *stream, ct_scratch *scratch, const ct_update *update,
                double *sums, ct_error *err)
{
    const ct_span all = {sums, CT_MEASURES * update->n_spans, CT_F64};
    ct_status status = ct_measure_check(update, err);
    size_t n_chunks = 0;
    for (size_t i = 0; status == CT_OK && i < update->n_spans; i++) {
        n_chunks += ct_cuda_chunks_of(update->spans[i].n);
    }
    if (status == CT_OK && n_chunks != 0) {
        status =
            ct_cuda_scratch_grow(scratch, CT_MEASURES * n_chunks * sizeof(double), err);
    }
    if (status == CT_OK && update->n_spans != 0) {
        status = ct_cuda_zero(stream, &all, 1, err); /* empty spans are not launched */
    }
    double *next = (double *)scratch->data;
    for (int in_double = 0; status == CT_OK && n_chunks != 0 && in_double < 2;
         in_double++) {
        status = enqueue(stream, &next, *update, in_double != 0, sums, err);
    }
    return status;
}

/* ---- settling: a thread for each span -------------------------------------------- */

struct settle_operand {
    size_t n; /* 1: empty spans are settled, too */
    size_t number, whole;
    void *rms; /* of the type `real` */
    ct_dtype real;
    ct_rule_coef constants;
};

CT_KERNEL
settle_kernel(const ct_cuda_batch<settle_operand> __grid_constant__ batch,
              const double *sums, ct_rule rule, const ct_clip_outcome *clip,
              ct_rule_coef *settled)
{
    const uint32_t step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < batch.n_operands;
         i += step) {
        const settle_operand &operand = batch.operands[i];
        ct_rule_coef coef = operand.constants;
        ct_rule_settle(rule, &coef, sums + CT_MEASURES * operand.number, operand.whole);
        settled[operand.number] = coef;
        if (!ct_clip_skips(clip)) {
            ct_update_keep_rms(operand.rms, operand.real, &coef);
        }
    }
}

ct_status
ct_cuda_settle(void *stream, const ct_update *update, const double *sums,
               ct_rule_coef *settled, ct_error *err)
{
    const ct_update &u = *update;
    ct_status status = ct_measure_check(update, err);
    if (status != CT_OK) {
        return status;
    }
    return ct_cuda_in_batches<settle_operand>(
        u.n_spans,
        [&](size_t i) {
            const ct_update_span &span = u.spans[i];
            return settle_operand{1,
                                  i,
                                  ct_update_whole(&span),
                                  span.rms,
                                  ct_update_real(&span),
                                  u.coefs[span.coef]};
        },
        [&](const ct_cuda_batch<settle_operand> &batch) {
            CT_LAUNCH(settle_kernel, 1, ct_cuda_block_size, stream, batch, sums, u.rule,
                      u.clip, settled);
            return ct_cuda_launched("launch settle", err);
        });
}
