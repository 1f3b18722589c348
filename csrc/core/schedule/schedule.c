/* Schedules of all families: finding a kind, setting and checking the options; and
 * transformers' family, whose names have no prefix.
 *
 * Every value is a double in a slot, NaN for a missing value: one test for NaN
 * finds an option that was not set, and the formulas read slots without a lookup. */
#include "core/schedule/family.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const double MOST_EXACT = 9007199254740992.0; /* 2^53 */

static const ct_schedule_family transformers;

/* Longer prefixes first: every name begins with "". */
static const ct_schedule_family *const families[] = {
    &ct_schedule_deepspeed,
    &ct_schedule_fairseq,
    &transformers,
};
static const size_t LAST_FAMILY = sizeof families / sizeof families[0] - 1;

/* ---- lists for messages ---------------------------------------------------------- */

typedef struct word_list {
    char text[300];
    size_t length;
} word_list;

/* A list that is full drops words: a message need not be complete. */
static void
word_list_add(word_list *list, const char *prefix, const char *word)
{
    const char *comma = list->length == 0 ? "" : ", ";
    const size_t room = sizeof list->text - list->length;
    int n = snprintf(list->text + list->length, room, "%s%s%s", comma, prefix, word);
    if (n > 0 && (size_t)n < room) {
        list->length += (size_t)n;
    }
}

static ct_status
reject_name(const ct_schedule_family *family, const char *name, ct_error *err)
{
    word_list known = {.length = 0};
    for (size_t k = 0; k < family->n_kinds; k++) {
        word_list_add(&known, family->prefix, family->kinds[k].name);
    }
    return ct_fail(err, CT_EINVAL, "name is '%.60s'; expected one of %s", name,
                   known.text);
}

/* ---- misspelt names -------------------------------------------------------------- */

enum {
    LONGEST = 40 /* letters of an option's name at most */
};

/* Options of the command line may have dashes and capitals. */
static int
differ(char one, char other)
{
    return (one == '-' ? '_' : tolower((unsigned char)one)) != other;
}

/* Levenshtein's: letters to insert, to delete and to replace. */
static size_t
distance(const char *given, const char *name)
{
    size_t row[LONGEST + 1];
    const size_t n = strlen(name);
    for (size_t j = 0; j <= n; j++) {
        row[j] = j;
    }
    for (; *given != '\0'; given++) {
        size_t diagonal = row[0]++;
        for (size_t j = 1; j <= n; j++) {
            size_t best = diagonal + (size_t)differ(*given, name[j - 1]);
            diagonal = row[j];
            best = best < row[j] + 1 ? best : row[j] + 1;
            row[j] = best < row[j - 1] + 1 ? best : row[j - 1] + 1;
        }
    }
    return row[n];
}

int
ct_schedule_takes(const ct_schedule *schedule, size_t i)
{
    return (schedule->kind->takes & CT_BIT(i)) != 0;
}

/* The option meant by a misspelt name: at most a letter in four wrong, and one more.
 * Options that the kind does not read are no help. */
static const char *
nearest_option(const ct_schedule *schedule, const char *name)
{
    const char *nearest = NULL;
    size_t least = SIZE_MAX;
    for (size_t i = 0; i < schedule->family->n_options; i++) {
        const char *option = schedule->family->options[i].name;
        if (ct_schedule_takes(schedule, i) && strlen(option) <= LONGEST) {
            const size_t far = distance(name, option);
            if (far < least && far <= 1 + strlen(option) / 4) {
                least = far;
                nearest = option;
            }
        }
    }
    return nearest;
}

static ct_status
reject_option(const ct_schedule *schedule, const char *name, ct_error *err)
{
    const char *nearest = nearest_option(schedule, name);
    if (nearest != NULL) {
        return ct_fail(err, CT_EINVAL,
                       "schedule '%s' has no option '%.60s'; did you mean '%s'?",
                       schedule->kind->name, name, nearest);
    }
    word_list taken = {.length = 0};
    for (size_t i = 0; i < schedule->family->n_options; i++) {
        if (ct_schedule_takes(schedule, i)) {
            word_list_add(&taken, "", schedule->family->options[i].name);
        }
    }
    return ct_fail(err, CT_EINVAL, "schedule '%s' has no option '%.60s'; it takes %s",
                   schedule->kind->name, name, taken.length ? taken.text : "none");
}

static ct_status
reject_word(const ct_schedule_option *option, const char *word, ct_error *err)
{
    word_list known = {.length = 0};
    for (size_t w = 0; option->words[w] != NULL; w++) {
        word_list_add(&known, "", option->words[w]);
    }
    return ct_fail(err, CT_EINVAL, "%s is '%.60s'; expected one of %s", option->name,
                   word, known.text);
}

/* ---- kinds ----------------------------------------------------------------------- */

static const ct_schedule_family *
family_of(const char *name)
{
    size_t f = 0;
    while (f < LAST_FAMILY &&
           strncmp(name, families[f]->prefix, strlen(families[f]->prefix)) != 0) {
        f++;
    }
    return families[f];
}

ct_status
ct_schedule_init(ct_schedule *schedule, const char *name, ct_error *err)
{
    const ct_schedule_family *family = family_of(name);
    const char *own = name + strlen(family->prefix);
    size_t k = 0;
    while (k < family->n_kinds && strcmp(family->kinds[k].name, own) != 0) {
        k++;
    }
    if (k == family->n_kinds) {
        return reject_name(family, name, err);
    }
    schedule->family = family;
    schedule->kind = &family->kinds[k];
    for (size_t i = 0; i < CT_SCHEDULE_SLOTS; i++) {
        schedule->slots[i] =
            i < family->n_options ? family->options[i].initial : (double)NAN;
    }
    return CT_OK;
}

const char *
ct_schedule_name(const ct_schedule *schedule)
{
    return schedule->kind->name;
}

const char *
ct_schedule_prefix(const ct_schedule *schedule)
{
    return schedule->family->prefix;
}

/* ---- options --------------------------------------------------------------------- */

const ct_schedule_option *
ct_schedule_option_at(const ct_schedule *schedule, size_t i)
{
    return i < schedule->family->n_options ? &schedule->family->options[i] : NULL;
}

int
ct_schedule_find(const ct_schedule *schedule, const char *name)
{
    for (size_t i = 0; i < schedule->family->n_options; i++) {
        if (strcmp(schedule->family->options[i].name, name) == 0) {
            return (int)i;
        }
    }
    return -1;
}

static ct_status
check_value(const ct_schedule_option *option, double value, ct_error *err)
{
    const char *what = "a finite number";
    int fits = isfinite(value) != 0;
    if (option->form == CT_OPTION_WORD) {
        return ct_fail(err, CT_EINVAL, "%s is a number; expected a word such as '%s'",
                       option->name, option->words[0]);
    }
    if (option->form == CT_OPTION_INTEGER) {
        what = "a whole number of at most 2**53";
        /* Beyond 2^53 the original's integers and these doubles would divide
         * differently. */
        fits = fits && floor(value) == value && fabs(value) <= MOST_EXACT;
    }
    else if (option->form == CT_OPTION_FLAG) {
        what = "True or False";
        fits = value == 0.0 || value == 1.0;
    }
    if (!fits) {
        return ct_fail(err, CT_EINVAL, "%s must be %s, got %g", option->name, what,
                       value);
    }
    if (option->above ? !(value > option->low) : !(value >= option->low)) {
        return ct_fail(err, CT_EINVAL, "%s must be %s %g, got %g", option->name,
                       option->above ? ">" : ">=", option->low, value);
    }
    return CT_OK;
}

/* *i: the number of an option that the kind reads. */
static ct_status
look_up(const ct_schedule *schedule, const char *name, size_t *i, ct_error *err)
{
    const int found = ct_schedule_find(schedule, name);
    if (found < 0 || !ct_schedule_takes(schedule, (size_t)found)) {
        return reject_option(schedule, name, err);
    }
    *i = (size_t)found;
    return CT_OK;
}

ct_status
ct_schedule_set(ct_schedule *schedule, const char *name, double value, ct_error *err)
{
    size_t i = 0;
    ct_status status = look_up(schedule, name, &i, err);
    if (status == CT_OK) {
        status = check_value(&schedule->family->options[i], value, err);
    }
    if (status == CT_OK) {
        schedule->slots[i] = value;
    }
    return status;
}

/* Apart from numbers, as True would pass for a count of 1. */
ct_status
ct_schedule_set_flag(ct_schedule *schedule, const char *name, int value, ct_error *err)
{
    size_t i = 0;
    ct_status status = look_up(schedule, name, &i, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_option_form form = schedule->family->options[i].form;
    if (form != CT_OPTION_FLAG) {
        return ct_fail(err, CT_EINVAL, "%s is %s; expected a %s", name,
                       value ? "True" : "False",
                       form == CT_OPTION_WORD ? "word" : "number");
    }
    schedule->slots[i] = value ? 1.0 : 0.0;
    return CT_OK;
}

ct_status
ct_schedule_set_word(ct_schedule *schedule, const char *name, const char *word,
                     ct_error *err)
{
    size_t i = 0;
    ct_status status = look_up(schedule, name, &i, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_schedule_option *option = &schedule->family->options[i];
    if (option->form != CT_OPTION_WORD) {
        return ct_fail(err, CT_EINVAL, "%s is '%.60s'; expected a number", name, word);
    }
    for (size_t w = 0; option->words[w] != NULL; w++) {
        if (strcmp(option->words[w], word) == 0) {
            schedule->slots[i] = (double)w;
            return CT_OK;
        }
    }
    return reject_word(option, word, err);
}

/* Once, after all options: the order in which callers set options does not matter. */
ct_status
ct_schedule_finish(ct_schedule *schedule, ct_error *err)
{
    for (size_t i = 0; i < schedule->family->n_options; i++) {
        if ((schedule->kind->needs & CT_BIT(i)) && isnan(schedule->slots[i])) {
            return ct_fail(err, CT_EINVAL, "schedule '%s' needs %s, which is not given",
                           schedule->kind->name, schedule->family->options[i].name);
        }
    }
    return schedule->kind->prepare == NULL
               ? CT_OK
               : schedule->kind->prepare(schedule->slots, err);
}

double
ct_schedule_value(const ct_schedule *schedule, int64_t step)
{
    return schedule->kind->value(schedule->slots, (double)step);
}

/* ---- transformers' family -------------------------------------------------------- */

/* The factor of the base learning rate after `step` updates.
 *
 * Source: transformers 5.17, optimization.py; the polynomial one goes back to BERT's
 * code, inverse_sqrt to big_vision's, warmup_stable_decay to Hu et al., "MiniCPM",
 * 2024. Operations are in the original's order, so that results are the same bits. */
enum option {
    WARMUP,   /* updates over which the factor rises to 1 */
    TRAINING, /* updates of the whole run */
    CYCLES,
    POWER,
    LR_END,
    LR_INIT, /* the optimizer's default learning rate, the divisor of learning rates */
    TIMESCALE,
    MIN_LR,
    MIN_LR_RATE,
    WARMUP_LR_RATE,
    STABLE,
    DECAY,
    WARMUP_TYPE,
    DECAY_TYPE,
    MIN_LR_RATIO,
    N_OPTIONS,
    FLOOR = N_OPTIONS /* derived: MIN_LR_RATE, or MIN_LR in units of LR_INIT */
};

enum shape {
    SHAPE_LINEAR,
    SHAPE_COSINE,
    SHAPE_SQRT
};
static const char *const shapes[] = {"linear", "cosine", "1-sqrt", NULL};

static const ct_schedule_option options[N_OPTIONS] = {
    [WARMUP] = CT_COUNT("num_warmup_steps", 0.0, CT_NONE),
    [TRAINING] = CT_COUNT("num_training_steps", 0.0, CT_NONE),
    [CYCLES] = CT_REAL("num_cycles", -(double)INFINITY, CT_NONE),
    [POWER] = CT_REAL("power", 0.0, 1.0),
    [LR_END] = CT_REAL("lr_end", 0.0, 1e-7),
    [LR_INIT] = CT_REAL("lr_init", 0.0, CT_NONE),
    [TIMESCALE] = CT_POSITIVE("timescale", CT_NONE),
    [MIN_LR] = CT_REAL("min_lr", 0.0, CT_NONE),
    [MIN_LR_RATE] = CT_REAL("min_lr_rate", 0.0, CT_NONE),
    [WARMUP_LR_RATE] = CT_REAL("warmup_lr_rate", 0.0, CT_NONE),
    [STABLE] = CT_COUNT("num_stable_steps", 0.0, CT_NONE),
    [DECAY] = CT_COUNT("num_decay_steps", 0.0, CT_NONE),
    [WARMUP_TYPE] = CT_WORD("warmup_type", shapes, SHAPE_LINEAR),
    [DECAY_TYPE] = CT_WORD("decay_type", shapes, SHAPE_COSINE),
    [MIN_LR_RATIO] = CT_REAL("min_lr_ratio", 0.0, 0.0),
};

/* Python's max(1, x), the originals' guard against dividing by zero. */
static double
at_least_one(double x)
{
    return x > 1.0 ? x : 1.0;
}

static double
or_else(double x, double otherwise)
{
    return isnan(x) ? otherwise : x;
}

static double
warmup(const double *o, double step)
{
    return step / at_least_one(o[WARMUP]);
}

/* From 0 at the end of the warm-up to 1 at the end of the run, and beyond. */
static double
progress(const double *o, double step)
{
    return (step - o[WARMUP]) / at_least_one(o[TRAINING] - o[WARMUP]);
}

static double wave(double cycles, double at);

static double
rising(enum shape shape, double at)
{
    switch (shape) {
    case SHAPE_COSINE:
        return 0.5 * (1.0 - cos(CT_PI * at));
    case SHAPE_SQRT:
        return 1.0 - sqrt(1.0 - at);
    case SHAPE_LINEAR:
        break;
    }
    return at;
}

static double
falling(enum shape shape, double cycles, double at)
{
    switch (shape) {
    case SHAPE_COSINE:
        return wave(cycles, at);
    case SHAPE_SQRT:
        return 1.0 - sqrt(at);
    case SHAPE_LINEAR:
        break;
    }
    return 1.0 - at;
}

static double
wave(double cycles, double at)
{
    return 0.5 * (1.0 + cos(CT_PI * cycles * 2.0 * at));
}

static double
above_floor(double factor, double least)
{
    return factor * (1.0 - least) + least;
}

/* ---- its kinds ------------------------------------------------------------------- */

static double
constant(const double *o, double step)
{
    (void)o;
    (void)step;
    return 1.0;
}

static double
constant_with_warmup(const double *o, double step)
{
    return step < o[WARMUP] ? warmup(o, step) : 1.0;
}

static double
linear(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    return ct_at_least_zero((o[TRAINING] - step) /
                            at_least_one(o[TRAINING] - o[WARMUP]));
}

static double
cosine(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    return ct_at_least_zero(wave(or_else(o[CYCLES], 0.5), progress(o, step)));
}

static double
cosine_with_restarts(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    const double at = progress(o, step);
    /* The wave would begin anew after the end of the run. */
    if (at >= 1.0) {
        return 0.0;
    }
    double phase = fmod(or_else(o[CYCLES], 1.0) * at, 1.0);
    phase = phase < 0.0 ? phase + 1.0 : phase; /* Python's %, for negative cycles */
    return ct_at_least_zero(0.5 * (1.0 + cos(CT_PI * phase)));
}

static ct_status
prepare_polynomial(double *o, ct_error *err)
{
    if (!(o[LR_INIT] > o[LR_END])) {
        return ct_fail(err, CT_EINVAL,
                       "lr_end must be below the optimizer's learning rate, %g, got %g",
                       o[LR_INIT], o[LR_END]);
    }
    return CT_OK;
}

/* If the warm-up fills the run the original divides by zero; here the decay is then
 * over as soon as it begins. */
static double
polynomial(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    const double decay_steps = o[TRAINING] - o[WARMUP];
    if (step > o[TRAINING] || decay_steps == 0.0) {
        return o[LR_END] / o[LR_INIT];
    }
    const double range = o[LR_INIT] - o[LR_END];
    const double remaining = 1.0 - (step - o[WARMUP]) / decay_steps;
    return (range * pow(remaining, o[POWER]) + o[LR_END]) / o[LR_INIT];
}

static double
inverse_sqrt(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    const double scale = or_else(o[TIMESCALE], o[WARMUP] > 0.0 ? o[WARMUP] : 10000.0);
    const double shift = scale - o[WARMUP];
    return 1.0 / sqrt((step + shift) / scale);
}

/* A floor in units of the learning rate becomes a factor once, as the formulas work
 * with factors. */
static ct_status
prepare_floor(double *o, ct_error *err)
{
    if (isnan(o[MIN_LR]) == isnan(o[MIN_LR_RATE])) {
        return ct_fail(err, CT_EINVAL,
                       "exactly one of min_lr and min_lr_rate is "
                       "needed; %s",
                       isnan(o[MIN_LR]) ? "neither is given" : "both are given");
    }
    if (isnan(o[MIN_LR_RATE]) && !(o[LR_INIT] > 0.0)) {
        return ct_fail(err, CT_EINVAL,
                       "min_lr needs an optimizer whose learning rate is > 0, got %g: "
                       "set "
                       "min_lr_rate instead",
                       o[LR_INIT]);
    }
    o[FLOOR] = or_else(o[MIN_LR_RATE], o[MIN_LR] / o[LR_INIT]);
    return CT_OK;
}

static double
cosine_with_min_lr(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    double factor = wave(or_else(o[CYCLES], 0.5), progress(o, step));
    return ct_at_least_zero(above_floor(factor, o[FLOOR]));
}

/* This warm-up begins above 0: a step ahead of the other schedules throughout. */
static double
cosine_warmup_with_min_lr(const double *o, double step)
{
    const double start = o[WARMUP_LR_RATE];
    if (step < o[WARMUP]) {
        return isnan(start)
                   ? (step + 1.0) / at_least_one(o[WARMUP])
                   : start + (1.0 - start) * step / at_least_one(o[WARMUP] - 1.0);
    }
    const double at = (step - o[WARMUP] + 1.0) / at_least_one(o[TRAINING] - o[WARMUP]);
    double factor = wave(or_else(o[CYCLES], 0.5), at);
    return ct_at_least_zero(above_floor(factor, o[FLOOR]));
}

static ct_status
prepare_warmup_stable_decay(double *o, ct_error *err)
{
    if (isnan(o[TRAINING]) && isnan(o[STABLE])) {
        return ct_fail(err, CT_EINVAL,
                       "schedule 'warmup_stable_decay' needs "
                       "num_training_steps or num_stable_steps; neither is given");
    }
    return CT_OK;
}

static double
warmup_stable_decay(const double *o, double step)
{
    const double least = o[MIN_LR_RATIO];
    const double stable = or_else(o[STABLE], o[TRAINING] - o[WARMUP] - o[DECAY]);
    if (step < o[WARMUP]) {
        double up = rising((enum shape)o[WARMUP_TYPE], warmup(o, step));
        return ct_at_least_zero(above_floor(up, least));
    }
    if (step < o[WARMUP] + stable) {
        return 1.0;
    }
    if (step < o[WARMUP] + stable + o[DECAY]) {
        double at = (step - o[WARMUP] - stable) / at_least_one(o[DECAY]);
        double down = falling((enum shape)o[DECAY_TYPE], or_else(o[CYCLES], 0.5), at);
        return ct_at_least_zero(above_floor(down, least));
    }
    return least;
}

enum {
    RUN = CT_BIT(WARMUP) | CT_BIT(TRAINING),
    WAVES = RUN | CT_BIT(CYCLES),
    ENDS = RUN | CT_BIT(POWER) | CT_BIT(LR_END) | CT_BIT(LR_INIT),
    FLOORS = WAVES | CT_BIT(MIN_LR) | CT_BIT(MIN_LR_RATE) | CT_BIT(LR_INIT),
    STAGES = WAVES | CT_BIT(STABLE) | CT_BIT(DECAY) | CT_BIT(WARMUP_TYPE) |
             CT_BIT(DECAY_TYPE) | CT_BIT(MIN_LR_RATIO)
};

static const ct_schedule_kind kinds[] = {
    CT_KIND("constant", 0, 0, NULL, constant),
    CT_KIND("constant_with_warmup", CT_BIT(WARMUP), CT_BIT(WARMUP), NULL,
            constant_with_warmup),
    CT_KIND("linear", RUN, RUN, NULL, linear),
    CT_KIND("cosine", WAVES, RUN, NULL, cosine),
    CT_KIND("cosine_with_restarts", WAVES, RUN, NULL, cosine_with_restarts),
    CT_KIND("polynomial", ENDS, RUN | CT_BIT(LR_INIT), prepare_polynomial, polynomial),
    CT_KIND("inverse_sqrt", CT_BIT(WARMUP) | CT_BIT(TIMESCALE), CT_BIT(WARMUP), NULL,
            inverse_sqrt),
    CT_KIND("cosine_with_min_lr", FLOORS, RUN, prepare_floor, cosine_with_min_lr),
    CT_KIND("cosine_warmup_with_min_lr", FLOORS | CT_BIT(WARMUP_LR_RATE), RUN,
            prepare_floor, cosine_warmup_with_min_lr),
    CT_KIND("warmup_stable_decay", STAGES, CT_BIT(WARMUP) | CT_BIT(DECAY),
            prepare_warmup_stable_decay, warmup_stable_decay),
};

static const ct_schedule_family transformers = {
    .prefix = "",
    .options = options,
    .kinds = kinds,
    .n_options = N_OPTIONS,
    .n_kinds = sizeof kinds / sizeof *kinds,
};
