/* Schedules of all families: finding a kind, setting and checking the options. */
#include "core/schedule/schedule.h"

#include "core/schedule/family.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const double MOST_EXACT = 9007199254740992.0; /* 2^53 */

/* Longer prefixes first: every name begins with "". */
static const ct_schedule_family *const families[] = {
    &ct_schedule_deepspeed,
    &ct_schedule_fairseq,
    &ct_schedule_transformers,
};
static const size_t LAST_FAMILY = sizeof families / sizeof families[0] - 1;

/* ---- lists for messages ---------------------------------------------------------- */

typedef struct word_list {
    char text[300];
    size_t length;
} word_list;

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

/* The option meant by a misspelt name: at most a letter in four wrong, and one more. */
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
