#include "core/engine/average.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

enum {
    UPDATES = 60
};

/* Runs UPDATES updates; keeps[u] is the decay at update u + 1, or -1 where none was
 * due. */
static ct_average
run(ct_average_config config, double *keeps)
{
    ct_average average;
    CHECK(ct_average_init(&average, &config, NULL) == CT_OK);
    for (int u = 0; u < UPDATES; u++) {
        double decay = NAN;
        const bool due = ct_average_due(&average, &decay);
        keeps[u] = due ? decay : -1.0;
        ct_average_count(&average, due);
    }
    CHECK(average.num_updates == UPDATES);
    return average;
}

static void
test_an_exponential_average_copies_until_its_start(void)
{
    double keeps[UPDATES];
    const ct_average end = run((ct_average_config){CT_AVERAGE_EMA, 0.9, 10, 1}, keeps);
    CHECK(end.n_averaged == UPDATES);
    for (int u = 0; u < UPDATES; u++) {
        CHECK(keeps[u] == (u + 1 < 10 ? 0.0 : 0.9));
    }
}

static void
test_an_average_is_due_every_so_many_updates(void)
{
    double keeps[UPDATES];
    const ct_average end = run((ct_average_config){CT_AVERAGE_EMA, 0.5, 0, 4}, keeps);
    CHECK(end.n_averaged == UPDATES / 4);
    for (int u = 0; u < UPDATES; u++) {
        CHECK(keeps[u] == ((u + 1) % 4 == 0 ? 0.5 : -1.0));
    }
}

/* The weights that the decays of n states give to each: all 1 / n. */
static void
test_an_equal_average_counts_all_states_since_its_start_alike(void)
{
    double keeps[UPDATES], weight[UPDATES] = {0.0};
    const ct_average end = run((ct_average_config){CT_AVERAGE_SWA, 0.0, 20, 5}, keeps);
    CHECK(end.n_averaged == 9); /* updates 20, 25, ... 60 */
    for (int u = 0; u < UPDATES; u++) {
        CHECK((keeps[u] >= 0.0) == (u + 1 >= 20 && (u + 1) % 5 == 0));
        for (int past = 0; keeps[u] >= 0.0 && past < u; past++) {
            weight[past] *= keeps[u];
        }
        weight[u] = keeps[u] >= 0.0 ? 1.0 - keeps[u] : 0.0;
    }
    for (int u = 0; u < UPDATES; u++) {
        const double expected = keeps[u] >= 0.0 ? 1.0 / 9.0 : 0.0;
        CHECK(fabs(weight[u] - expected) < 1e-15);
    }
}

static void
check_rejected(ct_average_config config, const char *field)
{
    ct_error err;
    ct_average average;
    CHECK(ct_average_init(&average, &config, &err) == CT_EINVAL);
    CHECK(strstr(err.message, field) != NULL);
}

static void
test_a_bad_option_is_named(void)
{
    check_rejected((ct_average_config){CT_AVERAGE_EMA, 1.5, 0, 1}, "decay");
    check_rejected((ct_average_config){CT_AVERAGE_EMA, NAN, 0, 1}, "decay");
    check_rejected((ct_average_config){CT_AVERAGE_EMA, 0.5, -1, 1}, "start");
    check_rejected((ct_average_config){CT_AVERAGE_SWA, 0.5, 0, 0}, "every");
}

int
main(void)
{
    test_an_exponential_average_copies_until_its_start();
    test_an_average_is_due_every_so_many_updates();
    test_an_equal_average_counts_all_states_since_its_start_alike();
    test_a_bad_option_is_named();
    return 0;
}
