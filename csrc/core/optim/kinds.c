/* The table of optimizers: which rule and which state arrays the options of a group ask
 * for, and the constants of a step. A kind that works element by element is one entry.
 */
#include "core/optim/kinds.h"

#include <math.h>
#include <string.h>

/* The kinds whose rules look at a whole parameter. */

/* ct_optim_<kind>_rule and the other functions of a ct_optim_ops. */
#define CT_OPTIM_FUNCTIONS(kind)                                                       \
    ct_rule ct_optim_##kind##_rule(const ct_optim_group *group);                       \
    unsigned ct_optim_##kind##_states(const ct_optim_group *group);                    \
    uint64_t ct_optim_##kind##_key(const ct_optim_param *param);                       \
    ct_status ct_optim_##kind##_coef_init(ct_rule_coef *coef,                          \
                                          const ct_optim_group *group, uint64_t key,   \
                                          double grad_scale, ct_error *err)

CT_OPTIM_FUNCTIONS(adafactor);
CT_OPTIM_FUNCTIONS(lamb);
CT_OPTIM_FUNCTIONS(lars);
CT_OPTIM_FUNCTIONS(muon);

#define CT_OPTIM_WHOLE(kind)                                                           \
    .name = #kind, .rule = ct_optim_##kind##_rule, .states = ct_optim_##kind##_states, \
    .key = ct_optim_##kind##_key, .coef_init = ct_optim_##kind##_coef_init

/* Constants that no parameter's own count enters. */
static uint64_t
key_of_none(const ct_optim_param *param)
{
    (void)param;
    return 0;
}

/* Constants that depend on the number of the update. */
static uint64_t
key_of_step(const ct_optim_param *param)
{
    return param->step + 1;
}

/* Constants that differ at a parameter's first update alone. */
static uint64_t
key_of_first(const ct_optim_param *param)
{
    return param->step == 0;
}

/* The functions of a kind that has one rule with all of its state arrays. */
#define ONE_RULE(kind, states_of)                                                      \
    static ct_rule kind##_rule(const ct_optim_group *group)                            \
    {                                                                                  \
        (void)group;                                                                   \
        return CT_RULE_##kind;                                                         \
    }                                                                                  \
    static unsigned kind##_states(const ct_optim_group *group)                         \
    {                                                                                  \
        (void)group;                                                                   \
        return states_of;                                                              \
    }

/* ---- Adam and its kin -------------------------------------------------------------
 */

static ct_rule
adam_rule(const ct_optim_group *group)
{
    const bool decays_grad =
        !group->adamw.decoupled && group->adamw.weight_decay != 0.0;
    if (group->adamw.amsgrad) {
        return decays_grad ? CT_RULE_adam_amsgrad : CT_RULE_adamw_amsgrad;
    }
    return decays_grad ? CT_RULE_adam : CT_RULE_adamw;
}

static ct_rule
fairseq_adam_rule(const ct_optim_group *group)
{
    return group->adamw.amsgrad ? CT_RULE_adamw_amsgrad : CT_RULE_adamw;
}

static unsigned
adam_states(const ct_optim_group *group)
{
    return group->adamw.amsgrad ? 7 : 3;
}

static ct_status
adam_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
               double grad_scale, ct_error *err)
{
    return ct_adamw_coef_init(&coef->adamw, &group->adamw, key, grad_scale, err);
}

static ct_status
fairseq_adam_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                       double grad_scale, ct_error *err)
{
    return ct_fairseq_adam_coef_init(&coef->adamw, &group->adamw, key, grad_scale, err);
}

static ct_status
radam_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                double grad_scale, ct_error *err)
{
    return ct_radam_coef_init(&coef->adamw, &group->adamw, key, grad_scale, err);
}

ONE_RULE(adamax, 3)

static ct_status
adamax_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                 double grad_scale, ct_error *err)
{
    return ct_adamax_coef_init(&coef->adamax, &group->adamax, key, grad_scale, err);
}

static ct_status
fairseq_adamax_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                         double grad_scale, ct_error *err)
{
    return ct_fairseq_adamax_coef_init(&coef->adamax, &group->adamax, key, grad_scale,
                                       err);
}

ONE_RULE(ademamix, 7)

static ct_status
ademamix_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                   double grad_scale, ct_error *err)
{
    return ct_ademamix_coef_init(&coef->ademamix, &group->ademamix, key, grad_scale,
                                 err);
}

/* ---- SGD and NAG ------------------------------------------------------------------
 */

static ct_rule
sgd_rule(const ct_optim_group *group)
{
    return group->sgd.momentum != 0.0 ? CT_RULE_sgd_momentum : CT_RULE_sgd;
}

static unsigned
sgd_states(const ct_optim_group *group)
{
    return group->sgd.momentum != 0.0 ? 1 : 0;
}

static ct_status
sgd_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
              double grad_scale, ct_error *err)
{
    return ct_sgd_coef_init(&coef->sgd, &group->sgd, key != 0, grad_scale, err);
}

ONE_RULE(nadam, 3)

static ct_status
nadam_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                double grad_scale, ct_error *err)
{
    return ct_nadam_coef_init(&coef->nadam, &group->nadam, key, grad_scale, err);
}

static double
nadam_product(const ct_optim_param *param)
{
    return param->product_dtype == CT_F64 ? *(const double *)param->product
                                          : (double)*(const float *)param->product;
}

/* After the update that is under way, rounded as it is kept. */
static double
nadam_next_product(const ct_optim_group *group, const ct_optim_param *param)
{
    const double momentum = ct_nadam_momentum(&group->nadam, param->step + 1);
    const double product = nadam_product(param);
    return param->product_dtype == CT_F64 ? product * momentum
                                          : (double)((float)product * (float)momentum);
}

static void
nadam_complete(ct_rule_coef *coef, const ct_optim_group *group,
               const ct_optim_param *param)
{
    ct_nadam_coef_complete(&coef->nadam, &group->nadam, param->step + 1,
                           nadam_next_product(group, param));
}

static void
nadam_count(const ct_optim_group *group, const ct_optim_param *param)
{
    const double product = nadam_next_product(group, param);
    if (param->product_dtype == CT_F64) {
        *(double *)param->product = product;
    }
    else {
        *(float *)param->product = (float)product;
    }
}

static ct_status
nadam_check(const ct_optim_param *param, size_t i, ct_error *err)
{
    const double product = param->product == NULL ? NAN : nadam_product(param);
    return product >= 0.0 && product <= 1.0
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "parameter %zu: the product of its momenta must be in [0, 1], "
                         "got %g",
                         i, product);
}

ONE_RULE(nag, 1)

static ct_status
nag_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
              double grad_scale, ct_error *err)
{
    (void)key;
    return ct_nag_coef_init(&coef->nag, &group->nag, grad_scale, err);
}

static void
nag_advance(ct_optim_group *group)
{
    ct_nag_advance(&group->nag);
}

/* ---- Adagrad, Adadelta, RMSprop, Lion ---------------------------------------------
 */

ONE_RULE(adagrad, 1)

static ct_status
adagrad_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                  double grad_scale, ct_error *err)
{
    return ct_adagrad_coef_init(&coef->adagrad, &group->adagrad, key, grad_scale, err);
}

ONE_RULE(adadelta, 3)

static ct_status
adadelta_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                   double grad_scale, ct_error *err)
{
    (void)key;
    return ct_adadelta_coef_init(&coef->adadelta, &group->adadelta, grad_scale, err);
}

static ct_rule
rmsprop_rule(const ct_optim_group *group)
{
    if (group->rmsprop.momentum != 0.0) {
        return group->rmsprop.centered ? CT_RULE_rmsprop_centered_momentum
                                       : CT_RULE_rmsprop_momentum;
    }
    return group->rmsprop.centered ? CT_RULE_rmsprop_centered : CT_RULE_rmsprop;
}

/* The average of squares, the momentum buffer, the average of gradients. */
static unsigned
rmsprop_states(const ct_optim_group *group)
{
    return 1u | (group->rmsprop.momentum != 0.0 ? 2u : 0u) |
           (group->rmsprop.centered ? 4u : 0u);
}

static ct_status
rmsprop_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                  double grad_scale, ct_error *err)
{
    (void)key;
    return ct_rmsprop_coef_init(&coef->rmsprop, &group->rmsprop, grad_scale, err);
}

ONE_RULE(lion, 1)

static ct_status
lion_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
               double grad_scale, ct_error *err)
{
    (void)key;
    return ct_lion_coef_init(&coef->lion, &group->lion, grad_scale, err);
}

/* ---- schedule-free ----------------------------------------------------------------
 */

ONE_RULE(schedule_free_adamw, 3)
ONE_RULE(schedule_free_sgd, 1)

static ct_status
schedule_free_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                        double grad_scale, ct_error *err)
{
    (void)key;
    return ct_schedule_free_coef_init(&coef->schedule_free_adamw, &group->schedule_free,
                                      grad_scale, err);
}

static ct_status
schedule_free_radam_coef_init(ct_rule_coef *coef, const ct_optim_group *group,
                              uint64_t key, double grad_scale, ct_error *err)
{
    (void)key;
    return ct_schedule_free_radam_coef_init(&coef->schedule_free_adamw,
                                            &group->schedule_free, grad_scale, err);
}

static void
schedule_free_advance(ct_optim_group *group)
{
    ct_schedule_free_advance(&group->schedule_free);
}

static void
schedule_free_radam_advance(ct_optim_group *group)
{
    ct_schedule_free_radam_advance(&group->schedule_free);
}

static bool
has_average(const ct_optim_group *group)
{
    return !isnan(group->adafactor.beta1);
}

unsigned
ct_optim_adafactor_states(const ct_optim_group *group)
{
    return 1u << CT_ADAFACTOR_SQ | (has_average(group) ? 1u << CT_ADAFACTOR_AVG : 0u);
}

static bool
is_factored(const ct_optim_param *param)
{
    return param->ndim >= 2;
}

static unsigned
ct_optim_adafactor_arrays(const ct_optim_group *group, const ct_optim_param *param)
{
    const unsigned square = is_factored(param)
                                ? 1u << CT_ADAFACTOR_ROW | 1u << CT_ADAFACTOR_COL
                                : 1u << CT_ADAFACTOR_SQ;
    return square | 1u << CT_ADAFACTOR_RMS |
           (ct_optim_adafactor_states(group) & 1u << CT_ADAFACTOR_AVG);
}

static ct_status
ct_optim_muon_check(const ct_optim_param *param, size_t i, ct_error *err)
{
    return param->ndim == 2
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "parameter %zu has %zu dimensions, and Muon is for "
                         "matrices: give it to another optimizer",
                         i, param->ndim);
}

#define OPS(its_name, of_rule, of_states, of_key, of_coef, of_advance)                 \
    {.name = (its_name),                                                               \
     .rule = of_rule##_rule,                                                           \
     .states = of_states##_states,                                                     \
     .key = key_of_##of_key,                                                           \
     .coef_init = of_coef##_coef_init,                                                 \
     .advance = (of_advance)}
const ct_optim_ops ct_optim_kinds[CT_OPTIM_KIND_COUNT] = {
    [CT_OPTIM_ADADELTA] = OPS("adadelta", adadelta, adadelta, none, adadelta, NULL),
    [CT_OPTIM_ADAGRAD] = OPS("adagrad", adagrad, adagrad, step, adagrad, NULL),
    [CT_OPTIM_ADAM] = OPS("adam", adam, adam, step, adam, NULL),
    [CT_OPTIM_ADAMAX] = OPS("adamax", adamax, adamax, step, adamax, NULL),
    [CT_OPTIM_ADAMW] = OPS("adamw", adam, adam, step, adam, NULL),
    [CT_OPTIM_ADEMAMIX] = OPS("ademamix", ademamix, ademamix, step, ademamix, NULL),
    [CT_OPTIM_FAIRSEQ_ADAM] =
        OPS("fairseq_adam", fairseq_adam, adam, step, fairseq_adam, NULL),
    [CT_OPTIM_FAIRSEQ_ADAMAX] =
        OPS("fairseq_adamax", adamax, adamax, step, fairseq_adamax, NULL),
    [CT_OPTIM_LION] = OPS("lion", lion, lion, none, lion, NULL),
    [CT_OPTIM_NADAM] = {.name = "nadam",
                        .rule = nadam_rule,
                        .states = nadam_states,
                        .key = key_of_step,
                        .coef_init = nadam_coef_init,
                        .complete = nadam_complete,
                        .count = nadam_count,
                        .check = nadam_check},
    [CT_OPTIM_NAG] = OPS("nag", nag, nag, none, nag, nag_advance),
    [CT_OPTIM_RADAM] = OPS("radam", adam, adam, step, radam, NULL),
    [CT_OPTIM_RMSPROP] = OPS("rmsprop", rmsprop, rmsprop, none, rmsprop, NULL),
    [CT_OPTIM_SCHEDULE_FREE_ADAMW] =
        OPS("schedule_free_adamw", schedule_free_adamw, schedule_free_adamw, none,
            schedule_free, schedule_free_advance),
    [CT_OPTIM_SCHEDULE_FREE_RADAM] =
        OPS("schedule_free_radam", schedule_free_adamw, schedule_free_adamw, none,
            schedule_free_radam, schedule_free_radam_advance),
    [CT_OPTIM_SCHEDULE_FREE_SGD] =
        OPS("schedule_free_sgd", schedule_free_sgd, schedule_free_sgd, none,
            schedule_free, schedule_free_advance),
    [CT_OPTIM_SGD] = OPS("sgd", sgd, sgd, first, sgd, NULL),
    [CT_OPTIM_ADAMW_8BIT] = OPS("adamw_8bit", adam, adam, step, adam, NULL),
    [CT_OPTIM_ADEMAMIX_8BIT] =
        OPS("ademamix_8bit", ademamix, ademamix, step, ademamix, NULL),
    [CT_OPTIM_LION_8BIT] = OPS("lion_8bit", lion, lion, none, lion, NULL),
    [CT_OPTIM_ADAFACTOR] = {CT_OPTIM_WHOLE(adafactor),
                        .arrays = ct_optim_adafactor_arrays},
    [CT_OPTIM_LAMB] = {CT_OPTIM_WHOLE(lamb)},
    [CT_OPTIM_LARS] = {CT_OPTIM_WHOLE(lars)},
    [CT_OPTIM_MUON] = {CT_OPTIM_WHOLE(muon), .check = ct_optim_muon_check},
};

/* ---- what the table says ----------------------------------------------------------
 */

const char *
ct_optim_kind_name(ct_optim_kind kind)
{
    return ct_optim_kinds[kind].name;
}

ct_optim_kind
ct_optim_kind_from_name(const char *name)
{
    int kind = 0;
    while (kind < CT_OPTIM_KIND_COUNT && strcmp(ct_optim_kinds[kind].name, name) != 0) {
        kind++;
    }
    return (ct_optim_kind)kind;
}

ct_status
ct_optim_check_group(const ct_optim_group *group, ct_error *err)
{
    ct_rule_coef coef;
    return ct_optim_kinds[group->kind].coef_init(&coef, group, 1, 1.0, err);
}

unsigned
ct_optim_states(const ct_optim_group *group)
{
    return ct_optim_kinds[group->kind].states(group);
}

unsigned
ct_optim_arrays(const ct_optim_group *group, const ct_optim_param *param)
{
    const ct_optim_ops *ops = &ct_optim_kinds[group->kind];
    return ops->arrays != NULL ? ops->arrays(group, param) : ops->states(group);
}

/* ---- Adafactor --------------------------------------------------------------------
 */

ct_rule
ct_optim_adafactor_rule(const ct_optim_group *group)
{
    return has_average(group) ? CT_RULE_adafactor_momentum : CT_RULE_adafactor;
}

uint64_t
ct_optim_adafactor_key(const ct_optim_param *param)
{
    return 2 * (param->step + 1) + is_factored(param);
}

ct_status
ct_optim_adafactor_coef_init(ct_rule_coef *coef, const ct_optim_group *group,
                             uint64_t key, double grad_scale, ct_error *err)
{
    return ct_adafactor_coef_init(&coef->adafactor, &group->adafactor, key / 2,
                                  key % 2 != 0, grad_scale, err);
}

/* ---- LAMB -------------------------------------------------------------------------
 */

ct_rule
ct_optim_lamb_rule(const ct_optim_group *group)
{
    (void)group;
    return CT_RULE_lamb;
}

unsigned
ct_optim_lamb_states(const ct_optim_group *group)
{
    (void)group;
    return 3;
}

uint64_t
ct_optim_lamb_key(const ct_optim_param *param)
{
    return param->step + 1;
}

ct_status
ct_optim_lamb_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                        double grad_scale, ct_error *err)
{
    return ct_lamb_coef_init(&coef->lamb, &group->lamb, key, grad_scale, err);
}

/* ---- LARS -------------------------------------------------------------------------
 */

ct_rule
ct_optim_lars_rule(const ct_optim_group *group)
{
    return group->lars.momentum != 0.0 ? CT_RULE_lars_momentum : CT_RULE_lars;
}

unsigned
ct_optim_lars_states(const ct_optim_group *group)
{
    return group->lars.momentum != 0.0 ? 1 : 0;
}

uint64_t
ct_optim_lars_key(const ct_optim_param *param)
{
    return param->step == 0;
}

ct_status
ct_optim_lars_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                        double grad_scale, ct_error *err)
{
    return ct_lars_coef_init(&coef->lars, &group->lars, key != 0, grad_scale, err);
}

/* ---- Muon -------------------------------------------------------------------------
 */

ct_rule
ct_optim_muon_rule(const ct_optim_group *group)
{
    (void)group;
    return CT_RULE_muon;
}

unsigned
ct_optim_muon_states(const ct_optim_group *group)
{
    (void)group;
    return 1;
}

uint64_t
ct_optim_muon_key(const ct_optim_param *param)
{
    (void)param;
    return 0;
}

ct_status
ct_optim_muon_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                        double grad_scale, ct_error *err)
{
    (void)key;
    return ct_muon_coef_init(&coef->muon, &group->muon, grad_scale, err);
}

/* ---- all of them -------------------------------------------------------------------
 */

bool
ct_optim_group_is_whole(const ct_optim_group *group)
{
    return ct_rule_is_measured(ct_optim_kinds[group->kind].rule(group)) != 0;
}
