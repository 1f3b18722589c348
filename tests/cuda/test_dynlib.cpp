/* Libraries found at run time, with those that every Linux has in the role of NVIDIA's,
 * and the emulation's in a wheel's folder. */
#include "cuda_test.h"

#include "../../cuda/cublas.h"
#include "../../cuda/dynlib.h"
#include "core/base/alloc.h"

static bool
has(const char *text, const char *part)
{
    return strstr(text, part) != NULL;
}

static void
test_a_missing_library_is_explained()
{
    const ct_dynlib_spec spec = {"libct_absent.so.1", "nvidia/absent/lib", "absent>=1"};
    const char *folders[] = {"/nowhere", "/nowhere/either", ""};
    ct_error err;
    CHECK(ct_dynlib_set_path(folders, 3, &err) == CT_OK);
    CHECK(ct_dynlib_load(&spec, NULL, 0, NULL, &err) == CT_EDEVICE);
    CHECK(has(err.message, "libct_absent.so.1"));
    CHECK(has(err.message, "nvidia/absent/lib of 3 folders of sys.path"));
    CHECK(has(err.message, "pip install 'absent>=1'"));
}

static void
test_a_missing_function_clears_what_was_found()
{
    const ct_dynlib_spec spec = {"libm.so.6", "none", "libm"};
    struct {
        double (*cosine)(double);
        double (*absent)(double);
    } table = {};
    const ct_dynlib_symbol symbols[] = {
        {"cos",        0             },
        {"ct_no_such", sizeof(void *)}
    };
    ct_error err;
    CHECK(ct_dynlib_load(&spec, symbols, 1, &table, &err) == CT_OK);
    CHECK(table.cosine(0.0) == 1.0);
    CHECK(ct_dynlib_load(&spec, symbols, 2, &table, &err) == CT_EDEVICE);
    CHECK(has(err.message, "libm.so.6 has no function ct_no_such"));
    CHECK(table.cosine == NULL && table.absent == NULL);
}

static void
test_no_memory_for_the_path_keeps_the_old_one()
{
    const char *folder = CT_EMUL_WHEELS;
    ct_error err;
    CHECK(ct_dynlib_set_path(&folder, 1, &err) == CT_OK);
    ct_alloc_fail_after(1);
    CHECK(ct_dynlib_set_path(NULL, 0, &err) == CT_ENOMEM);
    ct_alloc_fail_after(0);
}

static void
test_a_wheel_below_the_path_is_found()
{
    const char *folders[] = {"/nowhere", CT_EMUL_WHEELS};
    ct_error err;
    int version = 0;
    CHECK(ct_dynlib_set_path(folders, 2, &err) == CT_OK);
    check_ok(ct_cublas_version(&version, &err), err);
    CHECK(version == 130100);
}

int
main()
{
    test_a_missing_library_is_explained();
    test_a_missing_function_clears_what_was_found();
    test_no_memory_for_the_path_keeps_the_old_one();
    test_a_wheel_below_the_path_is_found();
    return 0;
}
