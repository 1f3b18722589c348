#include "core/base/span.h"
#include "ct_test.h"

#include <string.h>

typedef struct row {
    ct_dtype dtype;
    size_t size;
    const char *name;
    const char *tag;
    bool is_float;
} row;

/* Names as torch and NumPy print them, tags as the safetensors format has them. */
static const row rows[] = {
    {CT_F32,  4, "float32",  "F32",  true },
    {CT_F64,  8, "float64",  "F64",  true },
    {CT_BF16, 2, "bfloat16", "BF16", true },
    {CT_F16,  2, "float16",  "F16",  true },
    {CT_I64,  8, "int64",    "I64",  false},
    {CT_I32,  4, "int32",    "I32",  false},
    {CT_I16,  2, "int16",    "I16",  false},
    {CT_I8,   1, "int8",     "I8",   false},
    {CT_U8,   1, "uint8",    "U8",   false},
    {CT_BOOL, 1, "bool",     "BOOL", false},
};

static void
test_every_dtype_has_its_size_and_names(void)
{
    CHECK(sizeof rows / sizeof *rows == CT_DTYPE_COUNT);
    for (size_t i = 0; i < CT_DTYPE_COUNT; i++) {
        const row *r = &rows[i];
        CHECK(ct_dtype_size(r->dtype) == r->size);
        CHECK(strcmp(ct_dtype_name(r->dtype), r->name) == 0);
        CHECK(strcmp(ct_dtype_tag(r->dtype), r->tag) == 0);
        CHECK(ct_dtype_is_float(r->dtype) == r->is_float);
    }
}

int
main(void)
{
    test_every_dtype_has_its_size_and_names();
    return 0;
}
