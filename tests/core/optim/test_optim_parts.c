/* Optimizers that look at whole parameters, of which ranks have parts: against the same
 * optimizer of the whole ones. */
#include "core/base/alloc.h"
#include "ct_comm_local.h"
#include "core/optim/optim.h"
#include "ct_kernels.h"
#include "ct_random.h"
#include "ct_ranks.h"
#include "ct_streamed.h"

#include <math.h>
#include <string.h>

enum {
    STEPS = 4,
    MOST = 700 /* elements of a parameter, and of its state */
};

/* The last two sides count as rows and columns. */
static const size_t shapes[][3] = {
    {1, 7,  5 },
    {1, 30, 17},
    {1, 1,  1 },
    {1, 17, 40},
    {3, 5,  4 },
    {1, 1,  33}
};
static const size_t dimensions[] = {2, 2, 2, 2, 3, 1};

enum {
    PARAMS = sizeof shapes / sizeof *shapes
};

/* Parameters with gradients and state, of whole ones or of one rank's parts. */
typedef struct model {
    double param[PARAMS][MOST], grad[PARAMS][MOST];
    double state[CT_OPTIM_MAX_STATES][PARAMS][MOST];
} model;

typedef struct setting {
    const ct_optim_group *group;
    ct_dtype dtype;
    bool even; /* every rank has as much of a parameter; else as it comes */
    size_t n_params;
    model *ranks[MAX_RANKS];
} setting;

static size_t
whole_of(size_t p)
{
    return shapes[p][0] * shapes[p][1] * shapes[p][2];
}

/* Where rank r's part of a parameter begins; some ranks have nothing. */
static size_t
cut(const setting *s, size_t p, int rank, int world_size)
{
    const size_t n = whole_of(p), r = (size_t)rank, ranks = (size_t)world_size;
    if (rank == 0 || rank == world_size) {
        return rank == 0 ? 0 : n;
    }
    return s->even ? (n * r) / ranks : p % 3 == 0 ? 0 : n - n / (r + p % 3);
}

static void
fill(const setting *s, ct_random *r, size_t n, double *to)
{
    for (size_t i = 0; i < n; i++) {
        ct_store(s->dtype, to, i, ct_random_unit(r));
    }
}

/* Elements [begin, begin + n) of random ones that all ranks draw alike. */
static void
fill_part(const setting *s, ct_random *r, size_t p, size_t begin, size_t n, double *to)
{
    double all[MOST];
    const size_t size = ct_dtype_size(s->dtype);
    fill(s, r, whole_of(p), all);
    memcpy(to, (const char *)all + begin * size, n * size);
}

static ct_optim *
optimizer(const setting *s, model *m, ct_comm *comm)
{
    ct_optim *optim = ct_optim_new(&ct_device_streamed);
    ct_random r = {5};
    CHECK(optim != NULL && ct_optim_resize(optim, 1, s->n_params, NULL) == CT_OK);
    ct_optim_groups_borrow(optim)[0] = *s->group;
    memset(m, 0, sizeof *m);
    for (size_t p = 0; p < s->n_params; p++) {
        ct_optim_param *to = &ct_optim_params_borrow(optim)[p];
        *to = (ct_optim_param){
            .param = m->param[p],
            .grad = m->grad[p],
            .n = whole_of(p),
            .ndim = dimensions[p],
            .rows = shapes[p][1],
            .cols = shapes[p][2],
            .dtype = s->dtype,
            .grad_dtype = s->dtype,
            .state_dtype = s->dtype,
        };
        for (size_t k = 0; k < CT_OPTIM_MAX_STATES; k++) {
            to->state[k] = m->state[k][p];
        }
        if (comm != NULL) {
            const size_t begin = cut(s, p, comm->rank, comm->world_size);
            to->n = cut(s, p, comm->rank + 1, comm->world_size) - begin;
            to->part = (ct_part){comm, begin, whole_of(p), NULL};
        }
        fill_part(s, &r, p, to->part.begin, to->n, m->param[p]);
    }
    return optim;
}

static void
train(const setting *s, model *m, ct_comm *comm)
{
    const ct_optim_pass pass = {.grad_scale = 0.5, .zero_grads = true};
    ct_optim *optim = optimizer(s, m, comm);
    ct_random r = {19};
    for (int step = 0; step < STEPS; step++) {
        for (size_t p = 0; p < s->n_params; p++) {
            const ct_optim_param *to = &ct_optim_params_borrow(optim)[p];
            fill_part(s, &r, p, to->part.begin, to->n, m->grad[p]);
        }
        CHECK(ct_optim_update(optim, &ct_the_stream, &pass, NULL) == CT_OK);
    }
    ct_optim_free(optim);
}

static void
train_rank(ct_comm *comm, void *arg)
{
    const setting *s = arg;
    const ct_comm_ops *own = comm->ops;
    ct_comm_ops reaching = *own; /* the memory of any device */
    reaching.takes_device_memory = true;
    comm->ops = &reaching;
    train(s, s->ranks[comm->rank], comm);
    comm->ops = own;
}

/* A part against its place in the whole: alike for one rank, else to a bound. */
static void
check_elements(const setting *s, const double *part, size_t n, const double *whole,
               size_t begin, double bound)
{
    const size_t size = ct_dtype_size(s->dtype);
    if (bound == 0.0) {
        CHECK(memcmp(part, (const char *)whole + begin * size, n * size) == 0);
    }
    for (size_t i = 0; i < n; i++) {
        const double expected = ct_load(s->dtype, whole, begin + i);
        CHECK(fabs(ct_load(s->dtype, part, i) - expected) <= bound);
    }
}

static void
check_rank(const setting *s, const model *whole, int rank, int world_size, double bound)
{
    const model *m = s->ranks[rank];
    for (size_t p = 0; p < s->n_params; p++) {
        const size_t begin = cut(s, p, rank, world_size);
        const size_t n = cut(s, p, rank + 1, world_size) - begin;
        check_elements(s, m->param[p], n, whole->param[p], begin, bound);
        for (size_t i = 0; i < n; i++) {
            CHECK(ct_load(s->dtype, m->grad[p], i) == 0.0);
        }
        /* What is of the whole parameter has the same bits on all ranks. */
        for (size_t k = CT_ADAFACTOR_ROW;
             s->group->kind == CT_OPTIM_ADAFACTOR && k <= CT_ADAFACTOR_RMS; k++) {
            CHECK(memcmp(m->state[k][p], s->ranks[0]->state[k][p],
                         sizeof m->state[k][p]) == 0);
        }
    }
}

/* Rounding: a settled constant differs by few units in the last place where sums are
 * added in another order, 2^-24 of a step in float. Muon adds up whole matrices. */
static void
check_kind(const ct_optim_group *group, size_t n_params)
{
    const bool muon = group->kind == CT_OPTIM_MUON;
    model *whole = ct_alloc(sizeof *whole);
    setting s = {.group = group, .n_params = n_params};
    CHECK(whole != NULL);
    for (int rank = 0; rank < MAX_RANKS; rank++) {
        s.ranks[rank] = ct_alloc(sizeof(model));
        CHECK(s.ranks[rank] != NULL);
    }
    for (int turn = 0; turn < 16; turn++) {
        const int world_size = turn % 4 + 1;
        s.dtype = turn / 4 % 2 != 0 ? CT_F64 : CT_F32;
        s.even = turn / 8 != 0;
        const double near = muon ? 0.0 : s.dtype == CT_F64 ? 1e-12 : 1e-6;
        train(&s, whole, NULL);
        run_ranks(world_size, 30.0, train_rank, &s);
        for (int rank = 0; rank < world_size; rank++) {
            check_rank(&s, whole, rank, world_size, world_size == 1 ? 0.0 : near);
        }
    }
    for (int rank = 0; rank < MAX_RANKS; rank++) {
        ct_free(s.ranks[rank]);
    }
    ct_free(whole);
}

static const ct_optim_group lamb = {
    .kind = CT_OPTIM_LAMB,
    .lamb = {.lr = 1e-2,
             .beta1 = 0.9,
             .beta2 = 0.999,
             .eps = 1e-6,
             .weight_decay = 0.01,
             .max_grad_norm = 1.0,
             .bias_correction = true,
             .grad_averaging = true,
             .decoupled = true},
};

static void
test_lamb_and_lars_of_parts_have_the_norms_of_whole_parameters(void)
{
    const ct_optim_group lars = {
        .kind = CT_OPTIM_LARS,
        .lars = {.lr = 0.1,
                 .momentum = 0.9,
                 .weight_decay = 0.1,
                 .trust = 0.02,
                 .eps = 1e-8},
    };
    check_kind(&lamb, PARAMS);
    check_kind(&lars, PARAMS);
}

static void
test_adafactor_of_parts_has_whole_rows_and_columns(void)
{
    ct_optim_group group = {
        .kind = CT_OPTIM_ADAFACTOR,
        .adafactor = {.lr = NAN,
                      .eps = 1e-30,
                      .eps2 = 1e-3,
                      .clip_threshold = 1.0,
                      .decay_rate = -0.8,
                      .beta1 = 0.9,
                      .weight_decay = 0.01,
                      .scale_parameter = true,
                      .relative_step = true},
    };
    check_kind(&group, PARAMS);
    group.adafactor.beta1 = NAN;
    check_kind(&group, PARAMS);
}

static void
test_muon_of_parts_makes_whole_matrices_orthogonal(void)
{
    const ct_optim_group group = {
        .kind = CT_OPTIM_MUON,
        .muon = {.lr = 0.02,
                 .weight_decay = 0.1,
                 .momentum = 0.95,
                 .coefficients = {3.4445, -4.7750, 2.0315},
                 .eps = 1e-7,
                 .steps = 5,
                 .nesterov = true},
    };
    check_kind(&group, 4);
}

/* ---- ranks that do not fit each other -------------------------------------------- */

typedef struct misfit {
    size_t skipped;  /* the parameter that rank 1 has no gradient of */
    size_t begin, n; /* rank 1's part of a parameter of 20 */
    const char *expected;
} misfit;

static void
update_misfit(ct_comm *comm, void *arg)
{
    const misfit *odd = arg;
    const bool second = comm->rank == 1;
    float param[4][20] = {{0}}, grad[20] = {1.0f}, first[4][20] = {{0}};
    float before[4][20], state[4][20] = {{0}};
    ct_error err;
    ct_optim *optim = ct_optim_new(&ct_device_streamed);
    const ct_optim_pass pass = {.grad_scale = 1.0};
    CHECK(optim != NULL && ct_optim_resize(optim, 1, 4, NULL) == CT_OK);
    ct_optim_groups_borrow(optim)[0] = lamb;
    for (size_t p = 0; p < 4; p++) {
        param[p][0] = 1.0f;
        const bool skipped = p == (second ? odd->skipped : 2);
        ct_optim_params_borrow(optim)[p] = (ct_optim_param){
            .param = param[p],
            .grad = skipped ? NULL : grad,
            .state = {first[p], state[p]},
            .n = second ? odd->n : 10,
            .part = {comm, second ? odd->begin : 0, 20},
        };
    }
    memcpy(before, param, sizeof before);
    CHECK(ct_optim_update(optim, &ct_the_stream, &pass, &err) == CT_EINVAL);
    CHECK(strstr(err.message, odd->expected) != NULL);
    CHECK(memcmp(before, param, sizeof before) == 0);
    CHECK(first[0][0] == 0.0f);
    ct_optim_free(optim);
}

static void
test_parts_that_do_not_fit_are_rejected_on_all_ranks_and_nothing_changes(void)
{
    static misfit cases[] = {
        {2, 11, 9,  "the part of rank 1 begins at element 11, and the ranks before"},
        {2, 10, 9,  "the parts of all ranks have 19 elements, and it has 20"       },
        {3, 10, 10, "rank 1 has a gradient of parameter 2 of 20 elements where"    },
        {9, 10, 10, "all_gather"                                                   },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_ranks(2, 30.0, update_misfit, &cases[i]);
    }
}

int
main(void)
{
    test_lamb_and_lars_of_parts_have_the_norms_of_whole_parameters();
    test_adafactor_of_parts_has_whole_rows_and_columns();
    test_muon_of_parts_makes_whole_matrices_orthogonal();
    test_parts_that_do_not_fit_are_rejected_on_all_ranks_and_nothing_changes();
    return 0;
}
