#include "core/ct_greedy.h"
#include "core/ct_plateau.h"

#include "core/ct_alloc.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

/* ---- plateau -----------------------------------------------------------------------
 */

static void
test_a_rate_falls_after_more_than_patience_evaluations(void)
{
    ct_plateau p = ct_plateau_defaults();
    double rate = 1.0;
    const double least = 0.0;
    p.patience = 2;
    ct_plateau_step(&p, 5.0, &rate, &least, 1);
    for (int i = 0; i < 2; i++) {
        ct_plateau_step(&p, 5.0, &rate, &least, 1);
        CHECK(rate == 1.0);
    }
    ct_plateau_step(&p, 5.0, &rate, &least, 1);
    CHECK(rate == p.factor && p.num_bad_epochs == 0 && p.best == 5.0);
}

static void
test_cooldown_bears_bad_evaluations(void)
{
    ct_plateau p = ct_plateau_defaults();
    double rate = 1.0;
    const double least = 0.0;
    p.patience = 0;
    p.cooldown = 3;
    p.factor = 0.5;
    ct_plateau_step(&p, 1.0, &rate, &least, 1);
    ct_plateau_step(&p, 1.0, &rate, &least, 1);
    for (int i = 0; i < 3; i++) {
        ct_plateau_step(&p, 2.0, &rate, &least, 1);
        CHECK(rate == 0.5);
    }
    ct_plateau_step(&p, 2.0, &rate, &least, 1);
    CHECK(rate == 0.25);
}

static void
test_no_rate_falls_below_its_least_or_by_less_than_eps(void)
{
    ct_plateau p = ct_plateau_defaults();
    double rates[3] = {1.0, 1.0, 1.0};
    const double least[3] = {0.0, 0.5, 1.0 - 1e-9};
    p.patience = 0;
    ct_plateau_step(&p, NAN, rates, least, 3);
    CHECK(rates[0] == p.factor && rates[1] == 0.5 && rates[2] == 1.0);
}

static void
test_what_is_better_depends_on_both_modes(void)
{
    const struct {
        int maximise, absolute;
        double metric;
        int better;
    } table[] = {
        {0, 0, 7.9,  1},
        {0, 0, 8.0,  0},
        {0, 1, 9.7,  1},
        {0, 1, 9.8,  0},
        {1, 0, 12.1, 1},
        {1, 0, 12.0, 0},
        {1, 1, 10.3, 1},
        {1, 1, 10.2, 0},
        {0, 0, NAN,  0},
        {1, 1, NAN,  0},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const ct_metric_rule rule = {table[i].maximise, table[i].absolute, 0.2};
        CHECK(ct_metric_is_better(&rule, table[i].metric, 10.0) == table[i].better);
        CHECK(ct_metric_is_better(&rule, 1e300, ct_metric_worst(&rule)));
    }
}

static void
test_a_bad_setting_is_named(void)
{
    ct_error err;
#define REFUSED(type, member, value)                                                   \
    do {                                                                               \
        ct_##type bad = ct_##type##_defaults();                                        \
        const char *name = strrchr("." #member, '.') + 1;                              \
        bad.member = value;                                                            \
        CHECK(ct_##type##_check(&bad, &err) == CT_EINVAL);                             \
        CHECK(strstr(err.message, name) == err.message);                               \
    } while (0)
    REFUSED(plateau, factor, 1.0);
    REFUSED(plateau, factor, NAN);
    REFUSED(plateau, factor, -0.1);
    REFUSED(plateau, eps, NAN);
    REFUSED(plateau, rule.threshold, INFINITY);
    REFUSED(plateau, patience, -1);
    REFUSED(plateau, cooldown, -1);
    REFUSED(greedy, factor, 0.0);
    REFUSED(greedy, factor, 1.0);
    REFUSED(greedy, eps, -1.0);
    REFUSED(greedy, rule.threshold, NAN);
    REFUSED(greedy, patience, -1);
    REFUSED(greedy, cooldown, -1);
    REFUSED(greedy, warmup, -1);
#undef REFUSED
}

/* ---- greedy ------------------------------------------------------------------------
 */

static void
test_the_window_is_a_running_mean(void)
{
    ct_window window = {.values = NULL};
    CHECK(ct_window_init(&window, 3, NULL) == CT_OK);
    CHECK(ct_window_mean(&window, 3.0) == 3.0);
    CHECK(ct_window_mean(&window, 5.0) == 4.0);
    CHECK(ct_window_mean(&window, 1.0) == 3.0);
    CHECK(ct_window_mean(&window, 9.0) == 5.0);
    CHECK(ct_window_at(&window, 0) == 5.0 && ct_window_at(&window, 2) == 9.0);
    ct_window_fini(&window);
}

static void
test_a_window_without_size_or_memory_is_refused(void)
{
    ct_error err;
    ct_window window = {.values = NULL};
    CHECK(ct_window_init(&window, 0, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "window_size") != NULL);
    ct_alloc_fail_after(1);
    CHECK(ct_window_init(&window, 8, &err) == CT_ENOMEM);
    ct_alloc_fail_after(0);
    CHECK(window.values == NULL);
}

static void
test_rates_rise_with_progress_and_stop_at_their_most(void)
{
    ct_greedy g = ct_greedy_defaults();
    double now[2] = {0.4, 0.4};
    const double least[2] = {0.0, 0.0}, most[2] = {0.5, 10.0}, initial[2] = {0.4, 0.4};
    const ct_greedy_rates rates = {now, least, most, initial, 2};
    g.patience = 1;
    g.factor = 0.5;
    CHECK(ct_greedy_step(&g, 9.0, &rates) == 0);
    CHECK(now[0] == 0.4);
    CHECK(ct_greedy_step(&g, 8.0, &rates) == 0);
    CHECK(now[0] == 0.5 && now[1] == 0.8 && g.num_good_epochs == 0);
}

static void
test_long_at_the_least_rate_everything_starts_anew(void)
{
    ct_greedy g = ct_greedy_defaults();
    double now = 1.0;
    const double least = 0.5, most = 2.0, initial = 1.0;
    const ct_greedy_rates rates = {&now, &least, &most, &initial, 1};
    g.patience = 0;
    g.factor = 0.5;
    g.cooldown = 1;
    g.reset_start = g.reset_start_original = 2;
    CHECK(ct_greedy_step(&g, 1.0, &rates) == 0); /* an improvement: 1 -> 2 */
    CHECK(now == 2.0);
    int resets = 0, steps = 0;
    while (resets == 0 && steps < 20) {
        resets += ct_greedy_step(&g, 1.0, &rates);
        steps++;
    }
    /* 2 -> 1, wait, 1 -> 0.5 (one is left), wait, anew */
    CHECK(steps == 5 && now == 1.0 && g.reset_start == 2);
    CHECK(g.best == INFINITY && g.cooldown_counter == 1);
}

int
main(void)
{
    test_a_rate_falls_after_more_than_patience_evaluations();
    test_cooldown_bears_bad_evaluations();
    test_no_rate_falls_below_its_least_or_by_less_than_eps();
    test_what_is_better_depends_on_both_modes();
    test_a_bad_setting_is_named();
    test_the_window_is_a_running_mean();
    test_a_window_without_size_or_memory_is_refused();
    test_rates_rise_with_progress_and_stop_at_their_most();
    test_long_at_the_least_rate_everything_starts_anew();
    return 0;
}
