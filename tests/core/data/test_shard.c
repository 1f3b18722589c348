#include "core/data/batches.h"
#include "ct_test.h"

#include <string.h>

static int
is_rejected(ct_shard shard, const char *words)
{
    ct_error err;
    return ct_shard_check(&shard, &err) == CT_EINVAL &&
           strstr(err.message, words) != NULL;
}

static void
test_a_shard_that_makes_no_sense_is_rejected(void)
{
    CHECK(is_rejected((ct_shard){.rank = 2, .world_size = 2}, "in [0, 2)"));
    CHECK(is_rejected((ct_shard){.rank = -1, .world_size = 2}, "in [0, 2)"));
    CHECK(is_rejected((ct_shard){.world_size = 2, .split = true}, "has 0 items"));
    CHECK(is_rejected((ct_shard){.world_size = 2, .batch_size = 3, .split = true},
                      "has 3 items"));
}

static void
test_a_whole_round_gives_every_rank_its_batch(void)
{
    for (int rank = 0; rank < 3; rank++) {
        const ct_shard shard = {.rank = rank, .world_size = 3, .batch_size = 4};
        const ct_shard_part part = ct_shard_take(&shard, 3, 4, true);
        CHECK(part.whole && !part.none && part.batch == (size_t)rank);
    }
}

static void
test_filling_up_goes_on_where_the_rank_before_ended(void)
{
    ct_shard shard = {.world_size = 3, .batch_size = 4, .even = true};
    CHECK(ct_shard_beginning(&shard) == 3);
    ct_shard_part part = ct_shard_take(&shard, 1, 3, true);
    CHECK(part.batch == 0 && part.to == 3 && part.fill_from == 0 && part.fill == 1);
    shard.rank = 1;
    part = ct_shard_take(&shard, 1, 3, true);
    CHECK(part.from == part.to && part.fill_from == 1 && part.fill == 4);
    shard.rank = 2;
    part = ct_shard_take(&shard, 1, 3, true);
    CHECK(part.from == part.to && part.fill_from == 5 && part.fill == 4);
    shard.even = false;
    CHECK(ct_shard_take(&shard, 1, 3, true).none);
}

static void
test_a_short_batch_is_split_as_far_as_it_goes(void)
{
    ct_shard shard = {.rank = 1, .world_size = 2, .batch_size = 6, .split = true};
    ct_shard_part part = ct_shard_take(&shard, 1, 5, true);
    CHECK(part.from == 3 && part.to == 5 && part.fill == 0 && !part.none);
    CHECK(ct_shard_take(&shard, 1, 3, true).none);
    shard.even = true;
    part = ct_shard_take(&shard, 1, 1, true);
    CHECK(part.from == part.to && part.fill_from == 2 && part.fill == 3);
    shard.drop_last = true;
    CHECK(ct_shard_take(&shard, 1, 1, true).none);
    CHECK(ct_shard_beginning(&shard) == 0);
}

static void
test_counts_are_those_of_the_parts(void)
{
    ct_shard shard = {.rank = 1, .world_size = 3, .batch_size = 2, .even = true};
    CHECK(ct_shard_count(&shard, 6) == 2 && ct_shard_count(&shard, 7) == 3);
    shard.even = false;
    CHECK(ct_shard_count(&shard, 7) == 2 && ct_shard_count(&shard, 8) == 3);
    shard.drop_last = true;
    CHECK(ct_shard_count(&shard, 8) == 2);
}

int
main(void)
{
    test_a_shard_that_makes_no_sense_is_rejected();
    test_a_whole_round_gives_every_rank_its_batch();
    test_filling_up_goes_on_where_the_rank_before_ended();
    test_a_short_batch_is_split_as_far_as_it_goes();
    test_counts_are_those_of_the_parts();
    return 0;
}
