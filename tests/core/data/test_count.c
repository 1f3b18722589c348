#include "core/data/targets.h"
#include "ct_test.h"

static const int64_t labels[] = {1, -100, 3, -100, 5, 6, -100, -100};

static void
test_ignored_labels_are_not_targets(void)
{
    CHECK(ct_count_targets(labels, 8, 4, false) == 4);
    CHECK(ct_count_targets(labels, 0, 0, false) == 0);
}

static void
test_the_first_of_a_row_is_no_target_when_shifted(void)
{
    CHECK(ct_count_targets(labels, 8, 4, true) == 2); /* 3 and 6: 1 and 5 come first */
    CHECK(ct_count_targets(labels, 8, 2, true) == 1); /* 6 alone */
    CHECK(ct_count_targets(labels, 8, 0, true) == 4); /* no rows: nothing to shift */
}

int
main(void)
{
    test_ignored_labels_are_not_targets();
    test_the_first_of_a_row_is_no_target_when_shifted();
    return 0;
}
