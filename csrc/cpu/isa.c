/* The choice of an instruction set: CTRAINER_ISA, or the processor's best. */
#include "cpu/isa.h"

#include "core/device/device.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    UNSET = -1
};

static atomic_int chosen = UNSET;

static const char *const names[CT_ISA_COUNT] = {
    [CT_ISA_BASE] = "base",
#ifdef CT_HAVE_X86_LEVELS
    [CT_ISA_V3] = "v3",
    [CT_ISA_V4] = "v4",
#endif
};

static bool
supported(ct_isa isa)
{
#ifdef CT_HAVE_X86_LEVELS
    __builtin_cpu_init();
    if (isa == CT_ISA_V3) {
        return __builtin_cpu_supports("x86-64-v3");
    }
    if (isa == CT_ISA_V4) {
        return __builtin_cpu_supports("x86-64-v4");
    }
#endif
    return isa == CT_ISA_BASE;
}

static ct_isa
best(void)
{
    int isa = CT_ISA_COUNT - 1;
    while (!supported((ct_isa)isa)) {
        isa--;
    }
    return (ct_isa)isa;
}

static ct_status
find(const char *name, ct_isa *isa, ct_error *err)
{
    for (int i = 0; i < CT_ISA_COUNT; i++) {
        if (strcmp(name, names[i]) == 0) {
            *isa = (ct_isa)i;
            return supported(*isa) ? CT_OK
                                   : ct_fail(err, CT_EINVAL,
                                             "this processor lacks the instruction set "
                                             "'%s'; the best it has is '%s'",
                                             name, names[best()]);
        }
    }
    return ct_fail(err, CT_EINVAL,
                   "the instruction set (CTRAINER_ISA) must be 'base', 'v3' or 'v4', "
                   "got '%s'",
                   name);
}

ct_status
ct_isa_get(ct_isa *isa, ct_error *err)
{
    const int known = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (known != UNSET) {
        *isa = (ct_isa)known;
        return CT_OK;
    }
    const char *wish = getenv("CTRAINER_ISA");
    *isa = best();
    if (wish != NULL && *wish != '\0') {
        ct_status status = find(wish, isa, err);
        if (status != CT_OK) {
            return status;
        }
    }
    atomic_store_explicit(&chosen, (int)*isa, memory_order_relaxed);
    return CT_OK;
}

const char *
ct_cpu_isa(void)
{
    ct_isa isa;
    return ct_isa_get(&isa, NULL) == CT_OK ? names[isa] : NULL;
}

ct_status
ct_cpu_set_isa(const char *name, ct_error *err)
{
    if (name == NULL) {
        atomic_store_explicit(&chosen, UNSET, memory_order_relaxed);
        ct_isa ignored;
        return ct_isa_get(&ignored, err);
    }
    ct_isa isa;
    ct_status status = find(name, &isa, err);
    if (status == CT_OK) {
        atomic_store_explicit(&chosen, (int)isa, memory_order_relaxed);
    }
    return status;
}

ct_status
ct_check_float(const char *kernel, size_t span, ct_dtype dtype, ct_error *err)
{
    return ct_dtype_is_float(dtype)
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "%s: span %zu is %s, and only float dtypes work", kernel, span,
                         ct_dtype_name(dtype));
}
