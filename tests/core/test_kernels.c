/* Random lists of spans through every elementwise kernel: the memory afterwards, gaps
 * between the spans included, must equal byte for byte what plain loops over the
 * formulas leave, whatever the instruction set and the number of threads. */
#include "core/ct_alloc.h"
#include "ct_kernels.h"
#include "ct_random.h"

#include <string.h>

enum {
    MOST_SPANS = 40,
    ROLES = 4, /* grad, param, first state, second state */
    N_COEFS = 3
};

typedef struct slot {
    size_t at[ROLES]; /* bytes into the arena of each role */
    size_t n;
    ct_dtype dtype;
    uint32_t coef;
    bool has_state;
} slot;

typedef struct list {
    slot slots[MOST_SPANS];
    size_t n_slots, bytes;
    char *start[ROLES]; /* what every run begins with */
    char *expected[ROLES];
    char *memory[ROLES]; /* of the run */
    ct_adamw_coef adamw[N_COEFS];
    ct_sgd_coef sgd[N_COEFS];
    bool zero_grads;
} list;

static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_F16};

static size_t
random_length(ct_random *r)
{
    static const size_t edges[] = {0, 0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 1023};
    const size_t kind = ct_random_below(r, 20);
    if (kind < 13) {
        return edges[kind];
    }
    return ct_random_below(r, kind == 19 ? 200000 : 3000);
}

/* Lays the spans out one after another with gaps, aligned to their element and to
 * nothing more; the roles get different gaps. */
static void
lay_out(list *l, ct_random *r)
{
    size_t end[ROLES] = {0};
    l->n_slots = 1 + ct_random_below(r, MOST_SPANS);
    for (size_t i = 0; i < l->n_slots; i++) {
        slot *s = &l->slots[i];
        s->n = random_length(r);
        s->dtype = dtypes[ct_random_below(r, 4)];
        s->coef = (uint32_t)ct_random_below(r, N_COEFS);
        s->has_state = ct_random_below(r, 2) != 0;
        const size_t size = ct_dtype_size(s->dtype);
        for (int k = 0; k < ROLES; k++) {
            s->at[k] = (end[k] / size + 1 + ct_random_below(r, 5)) * size;
            end[k] = s->at[k] + s->n * size;
        }
    }
    l->bytes = 0;
    for (int k = 0; k < ROLES; k++) {
        l->bytes = end[k] > l->bytes ? end[k] : l->bytes;
    }
    l->bytes += 64;
}

static void
fill(list *l, ct_random *r)
{
    for (int k = 0; k < ROLES; k++) {
        l->start[k] = ct_alloc(l->bytes);
        l->expected[k] = ct_alloc(l->bytes);
        l->memory[k] = ct_alloc(l->bytes);
        memset(l->start[k], 0x5a, l->bytes);
        for (size_t i = 0; i < l->n_slots; i++) {
            const slot *s = &l->slots[i];
            for (size_t e = 0; e < s->n; e++) {
                const double x = ct_random_unit(r);
                ct_store(s->dtype, l->start[k] + s->at[k], e, k == 3 ? x * x : x);
            }
        }
    }
}

static list
list_make(ct_random *r)
{
    list l = {.zero_grads = ct_random_below(r, 2) != 0};
    lay_out(&l, r);
    fill(&l, r);
    for (size_t c = 0; c < N_COEFS; c++) {
        const ct_adamw_config adamw = {
            .lr = 1e-3 * (double)(c + 1),
            .beta1 = c == 1 ? 0.3 : 0.9,
            .beta2 = 0.99,
            .eps = 1e-6,
            .weight_decay = 0.1 * (double)c,
        };
        const ct_sgd_config sgd = {
            .lr = 0.1,
            .momentum = 0.9,
            .dampening = c == 1 ? 0.5 : 0.0,
            .weight_decay = 0.1 * (double)c,
            .nesterov = c == 2,
        };
        CHECK(ct_adamw_coef_init(&l.adamw[c], &adamw, c + 1, 0.7, NULL) == CT_OK);
        CHECK(ct_sgd_coef_init(&l.sgd[c], &sgd, c == 0, 0.7, NULL) == CT_OK);
    }
    return l;
}

static void
list_free(list *l)
{
    for (int k = 0; k < ROLES; k++) {
        ct_free(l->start[k]);
        ct_free(l->expected[k]);
        ct_free(l->memory[k]);
    }
}

static void
reset(list *l, char *const *memory)
{
    for (int k = 0; k < ROLES; k++) {
        memcpy(memory[k], l->start[k], l->bytes);
    }
}

static void
check_equals_expected(const list *l)
{
    for (int k = 0; k < ROLES; k++) {
        CHECK(memcmp(l->memory[k], l->expected[k], l->bytes) == 0);
    }
}

static void
expect_adamw(list *l)
{
    reset(l, l->expected);
    for (size_t i = 0; i < l->n_slots; i++) {
        const slot *s = &l->slots[i];
        const ct_adamw_coef_f32 c32 = ct_adamw_round_f32(&l->adamw[s->coef]);
        const ct_adamw_coef_f64 c64 = ct_adamw_round_f64(&l->adamw[s->coef]);
        for (size_t e = 0; e < s->n; e++) {
            double x[ROLES];
            for (int k = 0; k < ROLES; k++) {
                x[k] = ct_load(s->dtype, l->expected[k] + s->at[k], e);
            }
            if (s->dtype == CT_F64) {
                ct_adamw_apply_f64(&c64, x[0], &x[1], &x[2], &x[3]);
            }
            else {
                float param = (float)x[1], m = (float)x[2], v = (float)x[3];
                ct_adamw_apply_f32(&c32, (float)x[0], &param, &m, &v);
                x[1] = param;
                x[2] = m;
                x[3] = v;
            }
            x[0] = l->zero_grads ? 0.0 : x[0];
            for (int k = 0; k < ROLES; k++) {
                ct_store(s->dtype, l->expected[k] + s->at[k], e, x[k]);
            }
        }
    }
}

static void
check_adamw(void *arg)
{
    list *l = arg;
    ct_adamw_span spans[MOST_SPANS];
    reset(l, l->memory);
    for (size_t i = 0; i < l->n_slots; i++) {
        const slot *s = &l->slots[i];
        spans[i] = (ct_adamw_span){
            .grad = l->memory[0] + s->at[0],
            .param = l->memory[1] + s->at[1],
            .m = l->memory[2] + s->at[2],
            .v = l->memory[3] + s->at[3],
            .n = s->n,
            .dtype = s->dtype,
            .coef = s->coef,
        };
    }
    CHECK(ct_device_cpu.adamw(NULL, l->adamw, spans, l->n_slots, l->zero_grads, NULL) ==
          CT_OK);
    check_equals_expected(l);
}

static void
expect_sgd(list *l)
{
    reset(l, l->expected);
    for (size_t i = 0; i < l->n_slots; i++) {
        const slot *s = &l->slots[i];
        const ct_sgd_coef_f32 c32 = ct_sgd_round_f32(&l->sgd[s->coef]);
        const ct_sgd_coef_f64 c64 = ct_sgd_round_f64(&l->sgd[s->coef]);
        for (size_t e = 0; e < s->n; e++) {
            const double grad = ct_load(s->dtype, l->expected[0] + s->at[0], e);
            double param = ct_load(s->dtype, l->expected[1] + s->at[1], e);
            double buf = ct_load(s->dtype, l->expected[2] + s->at[2], e);
            float param32 = (float)param, buf32 = (float)buf;
            if (s->has_state) {
                ct_sgd_momentum_f64(&c64, grad, &param, &buf);
                ct_sgd_momentum_f32(&c32, (float)grad, &param32, &buf32);
            }
            else {
                ct_sgd_plain_f64(&c64, grad, &param);
                ct_sgd_plain_f32(&c32, (float)grad, &param32);
            }
            const bool wide = s->dtype == CT_F64;
            ct_store(s->dtype, l->expected[1] + s->at[1], e, wide ? param : param32);
            ct_store(s->dtype, l->expected[2] + s->at[2], e, wide ? buf : buf32);
            ct_store(s->dtype, l->expected[0] + s->at[0], e,
                     l->zero_grads ? 0.0 : grad);
        }
    }
}

static void
check_sgd(void *arg)
{
    list *l = arg;
    ct_sgd_span spans[MOST_SPANS];
    reset(l, l->memory);
    for (size_t i = 0; i < l->n_slots; i++) {
        const slot *s = &l->slots[i];
        spans[i] = (ct_sgd_span){
            .grad = l->memory[0] + s->at[0],
            .param = l->memory[1] + s->at[1],
            .momentum = s->has_state ? l->memory[2] + s->at[2] : NULL,
            .n = s->n,
            .dtype = s->dtype,
            .coef = s->coef,
        };
    }
    CHECK(ct_device_cpu.sgd(NULL, l->sgd, spans, l->n_slots, l->zero_grads, NULL) ==
          CT_OK);
    check_equals_expected(l);
}

static void
spans_of(const list *l, int role, ct_span *spans)
{
    for (size_t i = 0; i < l->n_slots; i++) {
        const slot *s = &l->slots[i];
        spans[i] = (ct_span){l->memory[role] + s->at[role], s->n, s->dtype};
    }
}

/* Scales role 0 and zeroes role 1. */
static void
expect_scale_and_zero(list *l)
{
    reset(l, l->expected);
    for (size_t i = 0; i < l->n_slots; i++) {
        const slot *s = &l->slots[i];
        for (size_t e = 0; e < s->n; e++) {
            const double x = ct_load(s->dtype, l->expected[0] + s->at[0], e);
            const float product32 = (float)x * (float)0.3;
            ct_store(s->dtype, l->expected[0] + s->at[0], e,
                     s->dtype == CT_F64 ? x * 0.3 : product32);
            ct_store(s->dtype, l->expected[1] + s->at[1], e, 0.0);
        }
    }
}

static void
check_scale_and_zero(void *arg)
{
    list *l = arg;
    ct_span spans[MOST_SPANS];
    reset(l, l->memory);
    spans_of(l, 0, spans);
    CHECK(ct_device_cpu.scale(NULL, 0.3, spans, l->n_slots, NULL) == CT_OK);
    spans_of(l, 1, spans);
    CHECK(ct_device_cpu.zero(NULL, spans, l->n_slots, NULL) == CT_OK);
    check_equals_expected(l);
}

static void
test_random_lists_equal_plain_loops_over_the_formulas(void)
{
    ct_random r = {2024};
    for (int round = 0; round < 25; round++) {
        list l = list_make(&r);
        expect_adamw(&l);
        ct_for_each_setting(check_adamw, &l);
        expect_sgd(&l);
        ct_for_each_setting(check_sgd, &l);
        expect_scale_and_zero(&l);
        ct_for_each_setting(check_scale_and_zero, &l);
        list_free(&l);
    }
}

static void
test_an_empty_list_is_no_work(void)
{
    CHECK(ct_device_cpu.adamw(NULL, NULL, NULL, 0, true, NULL) == CT_OK);
    CHECK(ct_device_cpu.sgd(NULL, NULL, NULL, 0, true, NULL) == CT_OK);
    CHECK(ct_device_cpu.scale(NULL, 2.0, NULL, 0, NULL) == CT_OK);
    CHECK(ct_device_cpu.zero(NULL, NULL, 0, NULL) == CT_OK);
    CHECK(ct_device_cpu.copy(NULL, NULL, NULL, 0, NULL) == CT_OK);
}

static void
test_dtypes_that_are_no_floats_are_refused_and_named(void)
{
    int64_t x[2] = {1, 2};
    ct_error err;
    const ct_adamw_span adamw = {x, x, x, x, 2, CT_I64, 0};
    const ct_sgd_span sgd = {x, x, NULL, 2, CT_I64, 0};
    const ct_span spans[2] = {
        {NULL, 0, CT_F32},
        {x,    2, CT_I64}
    };
    CHECK(ct_device_cpu.adamw(NULL, NULL, &adamw, 1, true, &err) == CT_EINVAL);
    CHECK(strcmp(err.message, "adamw: span 0 is int64, and only float dtypes work") ==
          0);
    CHECK(ct_device_cpu.sgd(NULL, NULL, &sgd, 1, true, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "sgd: span 0 is int64") != NULL);
    CHECK(ct_device_cpu.scale(NULL, 2.0, spans, 2, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "scale: span 1 is int64") != NULL);
    CHECK(x[0] == 1 && x[1] == 2);
    CHECK(ct_device_cpu.zero(NULL, spans, 2, &err) == CT_OK);
    CHECK(x[0] == 0 && x[1] == 0);
}

int
main(void)
{
    test_random_lists_equal_plain_loops_over_the_formulas();
    test_an_empty_list_is_no_work();
    test_dtypes_that_are_no_floats_are_refused_and_named();
    return 0;
}
