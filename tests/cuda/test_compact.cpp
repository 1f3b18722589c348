/* Updates of compact state and of master weights of 24 bits give the CPU's bits:
 * equality is memcmp. */
#include "../core/ct_rule_examples.h"
#include "cuda_test.h"
#include "math/compact.h"

enum {
    GRAD,
    PARAM,
    COPY,
    EMA,
    CORRECTION,
    STATE,
    SCALES = STATE + CT_COMPACT_STATES,
    ARRAYS = SCALES + CT_COMPACT_STATES
};

static ct_dtype
dtype_of(int array, ct_dtype param, ct_dtype grad)
{
    switch (array) {
    case GRAD:
        return grad;
    case PARAM:
        return param;
    case COPY:
    case EMA:
        return CT_BF16;
    case CORRECTION:
    case STATE:
        return CT_I8;
    case STATE + 1:
        return CT_U8;
    default:
        return CT_F16;
    }
}

struct compact_fixture {
    std::vector<twin> arrays; /* ARRAYS of each span */
    std::vector<ct_update_span> host, device;
    update_table table;

    /* Lengths around a group, a warp, a row of vectors and a chunk; arrays that begin
     * `shift` elements into their memory are no vectors. */
    compact_fixture(random_numbers numbers, size_t shift)
    {
        const std::vector<size_t> all = {1, 0, 31, 33, 2048, 2049, 8192, 8193, 10321};
        const ct_dtype params[] = {CT_BF16, CT_F32, CT_F16};
        const ct_dtype grads[] = {CT_BF16, CT_BF16, CT_F32, CT_F16, CT_F64};
        arrays.reserve(2 * all.size() * ARRAYS);
        for (size_t s = 0; s < 2 * all.size(); s++) {
            const bool bf16 = s < all.size();
            const size_t n = all[s % all.size()];
            add_arrays(&numbers, n, shift, bf16 ? CT_BF16 : params[s % 3],
                       bf16 ? CT_BF16 : grads[s % 5]);
            const bool more = s % 4 == 3, corrected = s % 5 != 0;
            host.push_back(span_of(&arrays[s * ARRAYS], true, more, corrected));
            device.push_back(span_of(&arrays[s * ARRAYS], false, more, corrected));
        }
    }

    void add_arrays(random_numbers *numbers, size_t n, size_t shift, ct_dtype param,
                    ct_dtype grad)
    {
        const size_t n_groups = (n + CT_COMPACT_GROUP - 1) / CT_COMPACT_GROUP;
        for (int a = 0; a < ARRAYS; a++) {
            const ct_dtype dtype = dtype_of(a, param, grad);
            arrays.emplace_back(dtype, a >= SCALES ? n_groups : n, shift);
            if (ct_dtype_is_float(dtype)) {
                arrays.back().fill(numbers, a >= SCALES ? 0.0 : -1.0, 1.0);
                continue;
            }
            for (unsigned char &value : arrays.back().host) {
                value = (unsigned char)(int)(127 * numbers->next());
            }
            arrays.back().upload();
        }
        spoil(&arrays[arrays.size() - ARRAYS], n);
    }

    /* Groups of zeros, of tiny and of huge gradients, and with a NaN. */
    static void spoil(twin *x, size_t n)
    {
        const double sizes[] = {0.0, 1e-20, 1e-6, 6e4};
        for (size_t i = 64; n > 2047 && i < 64 + 128; i++) {
            twin &grad = x[GRAD];
            put(grad.dtype, grad.host.data(), i,
                sizes[i / 32 - 2] * get(grad.dtype, grad.host.data(), i));
            for (int k = 0; k < CT_COMPACT_STATES; k++) {
                put(CT_F16, x[SCALES + k].host.data(), i / 32, sizes[i / 32 - 2]);
            }
        }
        if (n > 2047) {
            put(x[GRAD].dtype, x[GRAD].host.data(), 400, NAN);
            put(x[GRAD].dtype, x[GRAD].host.data(), n - 1, INFINITY);
            x[GRAD].upload();
            x[SCALES].upload();
            x[SCALES + 1].upload();
        }
    }

    static ct_update_span span_of(twin *x, bool on_host, bool more, bool corrected)
    {
        const auto at = [=](twin &of) {
            return on_host ? (void *)of.host.data() : of.device();
        };
        ct_update_span span = {};
        span.n = x[GRAD].n;
        span.grad = at(x[GRAD]);
        span.param = at(x[PARAM]);
        span.dtype = x[PARAM].dtype;
        span.grad_dtype = x[GRAD].dtype;
        span.state_dtype = CT_I8;
        for (int k = 0; k < CT_COMPACT_STATES; k++) {
            span.state[k] = at(x[STATE + k]);
            span.quant[k].scales = (uint16_t *)at(x[SCALES + k]);
        }
        if (corrected && span.dtype == CT_BF16) {
            span.correction = (int8_t *)at(x[CORRECTION]);
        }
        if (more) {
            span.copy = at(x[COPY]);
            span.ema = at(x[EMA]);
            span.copy_dtype = span.ema_dtype = CT_BF16;
        }
        span.coef = (uint32_t)(span.n % CT_RULE_VARIANTS);
        return span;
    }
};

static void
update_both(compact_fixture &f, ct_rule rule, const ct_rule_coef *coefs, bool zero,
            const outcome_twin *outcome)
{
    ct_error err;
    ct_update update = {rule,
                        coefs,
                        f.host.data(),
                        f.host.size(),
                        zero,
                        0.75,
                        outcome == NULL ? NULL : &outcome->host};
    check_ok(ct_device_cpu.update(NULL, NULL, &update, &err), err);
    update.spans = f.device.data();
    update.clip = outcome == NULL ? NULL : outcome->device;
    check_ok(ct_device_cuda.update(stream(), &f.table.of, &update, &err), err);
    for (const twin &array : f.arrays) {
        CHECK(array.agree());
    }
}

static void
check_rule(ct_rule rule, size_t shift)
{
    const outcome_twin clipped(0.3, 0), skipped(0.3, 1);
    compact_fixture f({42}, shift);
    ct_rule_coef coefs[CT_RULE_VARIANTS];
    for (size_t c = 0; c < CT_RULE_VARIANTS; c++) {
        coefs[c] = ct_rule_example(rule, c);
    }
    update_both(f, rule, coefs, false, NULL);
    update_both(f, rule, coefs, false, &clipped);
    std::vector<std::vector<unsigned char>> before;
    for (const twin &array : f.arrays) {
        before.push_back(array.host);
    }
    update_both(f, rule, coefs, true, &skipped);
    for (size_t a = 0; a < before.size(); a++) {
        CHECK(f.arrays[a].host == before[a]);
    }
    update_both(f, rule, coefs, true, NULL);
}

static void
test_every_rule_that_can_be_compact_equals_the_cpu()
{
    static const ct_rule all[] = {
#define CT_COMPACT(rule, n_states) CT_RULE_##rule,
#include "math/compact.def"
#undef CT_COMPACT
    };
    for (const ct_rule rule : all) {
        check_rule(rule, 0);
        check_rule(rule, 1);
    }
}

int
main()
{
    skip_without_device();
    in_two_orders(test_every_rule_that_can_be_compact_equals_the_cpu);
    return 0;
}
