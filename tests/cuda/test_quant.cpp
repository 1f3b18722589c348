/* Updates of state of 8 bits give the CPU's values and scales: equality is memcmp. */
#include "../core/ct_rule_examples.h"
#include "cuda_test.h"

#include <algorithm>

enum {
    GRAD,
    PARAM,
    EMA,
    STATE,
    ABSMAX = STATE + CT_RULE_MAX_STATES,
    ARRAYS = ABSMAX + CT_RULE_MAX_STATES
};

struct coded_fixture {
    std::vector<twin> maps;   /* one for each state */
    std::vector<twin> arrays; /* ARRAYS of each span */
    std::vector<ct_update_span> host, device;
    update_table table;

    explicit coded_fixture(random_numbers numbers)
    {
        /* around a block of values and a chunk: each block of values waits for all its
         * threads, which takes its time in the emulation */
        const std::vector<size_t> all = {1, 0, 31, 255, 256, 257, 8193, 600};
        maps.reserve(CT_RULE_MAX_STATES);
        arrays.reserve(all.size() * ARRAYS);
        for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
            maps.emplace_back(CT_F32, CT_QUANT_MAP_SIZE, 0);
            maps.back().fill(&numbers, k == 1 ? 0.0 : -1.0, 1.0);
            float *map = (float *)(void *)maps.back().host.data();
            std::sort(map, map + CT_QUANT_MAP_SIZE);
            maps.back().upload();
        }
        for (size_t s = 0; s < all.size(); s++) {
            add_arrays(&numbers, all[s], float_dtypes[s % 4], float_dtypes[s / 2 % 4]);
            host.push_back(span_of(&arrays[s * ARRAYS], true));
            device.push_back(span_of(&arrays[s * ARRAYS], false));
        }
    }

    void add_arrays(random_numbers *numbers, size_t n, ct_dtype dtype, ct_dtype other)
    {
        const size_t n_blocks = (n + CT_QUANT_BLOCK - 1) / CT_QUANT_BLOCK;
        for (int a = 0; a < ARRAYS; a++) {
            const bool scales = a >= ABSMAX;
            const ct_dtype of = scales       ? CT_F32
                                : a >= STATE ? CT_U8
                                : a == PARAM ? dtype
                                             : other;
            arrays.emplace_back(of, scales ? n_blocks : n, 0);
            if (of == CT_U8) {
                for (unsigned char &value : arrays.back().host) {
                    value = (unsigned char)(191 + 64 * numbers->next());
                }
                arrays.back().upload();
            }
            else {
                arrays.back().fill(numbers, 0.0, 1.0);
            }
        }
        spoil(&arrays[arrays.size() - ARRAYS]);
    }

    /* A block of zeros, and one with a NaN. */
    static void spoil(twin *x)
    {
        for (size_t i = 256; x[GRAD].n > 8192 && i < 512; i++) {
            put(x[GRAD].dtype, x[GRAD].host.data(), i, 0.0);
        }
        if (x[GRAD].n > 8192) {
            put(x[GRAD].dtype, x[GRAD].host.data(), 700, NAN);
            for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
                put(CT_F32, x[ABSMAX + k].host.data(), 1, 0.0);
                x[ABSMAX + k].upload();
            }
            x[GRAD].upload();
        }
    }

    ct_update_span span_of(twin *x, bool on_host)
    {
        const auto at = [=](twin &of) {
            return on_host ? (void *)of.host.data() : of.device();
        };
        ct_update_span span = {};
        span.n = x[GRAD].n;
        span.grad = at(x[GRAD]);
        span.param = at(x[PARAM]);
        span.ema = at(x[EMA]);
        for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
            span.state[k] = at(x[STATE + k]);
            span.quant[k] = {(const float *)at(maps[(size_t)k]),
                             (float *)at(x[ABSMAX + k])};
        }
        span.dtype = x[PARAM].dtype;
        span.grad_dtype = span.ema_dtype = x[GRAD].dtype;
        span.state_dtype = CT_U8;
        span.coef = (uint32_t)(x[GRAD].n % CT_RULE_VARIANTS);
        return span;
    }
};

/* A NaN that is computed has another sign or payload on another machine: parameters
 * that hold one agree where both do. */
static void
check_array(const twin &it, int role)
{
    const std::vector<unsigned char> back = it.download();
    for (size_t i = 0; i < it.n; i++) {
        const bool nan = role < STATE && isnan(get(it.dtype, it.host.data(), i));
        CHECK(nan ? isnan(get(it.dtype, back.data(), i))
                  : memcmp(&back[i * it.element], &it.host[i * it.element],
                           it.element) == 0);
    }
}

static void
check_rule(ct_rule rule)
{
    coded_fixture f({42});
    ct_error err;
    ct_rule_coef coefs[CT_RULE_VARIANTS];
    for (size_t c = 0; c < CT_RULE_VARIANTS; c++) {
        coefs[c] = ct_rule_example(rule, c);
    }
    for (int step = 0; step < 2; step++) {
        ct_update update = {rule,      coefs, f.host.data(), f.host.size(),
                            step == 1, 0.75,  NULL};
        check_ok(ct_device_cpu.update(NULL, NULL, &update, &err), err);
        update.spans = f.device.data();
        check_ok(ct_device_cuda.update(stream(), &f.table.of, &update, &err), err);
        for (size_t a = 0; a < f.arrays.size(); a++) {
            check_array(f.arrays[a], (int)(a % ARRAYS));
        }
    }
}

static void
test_every_rule_that_can_have_codes_equals_the_cpu()
{
    for (int rule = 0; rule < CT_RULE_COUNT; rule++) {
        if (!ct_rule_is_measured((ct_rule)rule) &&
            ct_rule_n_states((ct_rule)rule) != 0) {
            check_rule((ct_rule)rule);
        }
    }
}

int
main()
{
    skip_without_device();
    in_two_orders(test_every_rule_that_can_have_codes_equals_the_cpu);
    return 0;
}
