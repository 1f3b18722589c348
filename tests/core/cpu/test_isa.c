#define _GNU_SOURCE /* setenv */
#include "core/device/device.h"
#include "ct_test.h"

#include <string.h>

static void
test_the_default_is_the_best_that_the_processor_has(void)
{
    CHECK(unsetenv("CTRAINER_ISA") == 0);
    CHECK(ct_cpu_set_isa(NULL, NULL) == CT_OK);
    const char *expected = "base";
#ifdef __x86_64__
    expected = __builtin_cpu_supports("x86-64-v4")   ? "v4"
               : __builtin_cpu_supports("x86-64-v3") ? "v3"
                                                     : "base";
#endif
    CHECK(strcmp(ct_cpu_isa(), expected) == 0);
}

static void
test_the_environment_forces_one(void)
{
    CHECK(setenv("CTRAINER_ISA", "base", 1) == 0);
    CHECK(ct_cpu_set_isa(NULL, NULL) == CT_OK && strcmp(ct_cpu_isa(), "base") == 0);
    CHECK(setenv("CTRAINER_ISA", "", 1) == 0);
    CHECK(ct_cpu_set_isa(NULL, NULL) == CT_OK);
}

static void
test_a_wrong_name_is_told_and_changes_nothing(void)
{
    ct_error err;
    CHECK(ct_cpu_set_isa("base", NULL) == CT_OK);
    CHECK(ct_cpu_set_isa("avx2", &err) == CT_EINVAL);
    CHECK(strstr(err.message, "'avx2'") != NULL && strstr(err.message, "'v3'") != NULL);
    CHECK(strcmp(ct_cpu_isa(), "base") == 0);
}

static void
test_a_wrong_environment_fails_every_kernel_until_it_is_put_right(void)
{
    float x = 2.0f;
    ct_error err;
    const ct_span span = {&x, 1, CT_F32};
    CHECK(setenv("CTRAINER_ISA", "v9", 1) == 0);
    CHECK(ct_cpu_set_isa(NULL, &err) == CT_EINVAL && strstr(err.message, "v9"));
    CHECK(ct_cpu_isa() == NULL);
    CHECK(ct_device_cpu.scale(NULL, 2.0, INFINITY, &span, 1, &err) == CT_EINVAL &&
          x == 2.0f);
    CHECK(unsetenv("CTRAINER_ISA") == 0);
    CHECK(ct_device_cpu.scale(NULL, 2.0, INFINITY, &span, 1, &err) == CT_OK &&
          x == 4.0f);
    CHECK(ct_cpu_isa() != NULL);
}

int
main(void)
{
    test_the_default_is_the_best_that_the_processor_has();
    test_the_environment_forces_one();
    test_a_wrong_name_is_told_and_changes_nothing();
    test_a_wrong_environment_fails_every_kernel_until_it_is_put_right();
    return 0;
}
