/* safetensors: round trip, checksum, and headers that lie. */
#define _GNU_SOURCE
#include "core/base/io.h"
#include "core/checkpoint/safetensors.h"
#include "ct_test.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static char folder[] = "/tmp/ct_safetensors_XXXXXX";
static char path[64];

static ct_text
text(const char *s)
{
    return (ct_text){s, strlen(s)};
}

static const float weight[6] = {1, 2, 3, 4, 5, 6};
static const int64_t count[1] = {42};
static const uint64_t weight_shape[2] = {2, 3}, empty_shape[2] = {0, 5};

static ct_status
plan_sample(ct_plan *plan, ct_error *err)
{
    ct_st_entry entries[] = {
        {.name = text("b\"\\\n"),
         .tag = "F32",
         .shape = weight_shape,
         .ndim = 2,
         .data = weight,
         .bytes = sizeof weight},
        {.name = text("a"), .tag = "I64", .data = count, .bytes = sizeof count},
        {.name = text("none"), .tag = "F32", .shape = empty_shape, .ndim = 2},
    };
    ct_st_pair pair = {text("format"), text("pt")};
    return ct_st_plan(plan, entries, 3, &pair, 1, err);
}

static void
write_sample(void)
{
    ct_plan plan = {0};
    ct_error err;
    CHECK(plan_sample(&plan, &err) == CT_OK);
    CHECK(ct_plan_write(&plan, path, &err) == CT_OK);
    ct_expected found;
    CHECK(ct_checksum_file(path, NULL, &found, &err) == CT_OK);
    CHECK(found.crc32c == plan.crc32c && found.bytes == plan.bytes);
    ct_plan_fini(&plan);
}

static size_t
slurp(char *buffer, size_t limit)
{
    int fd = open(path, O_RDONLY);
    ssize_t n = read(fd, buffer, limit);
    CHECK(fd >= 0 && n > 0);
    (void)close(fd);
    return (size_t)n;
}

static void
spill(const void *data, size_t n)
{
    (void)unlink(path);
    CHECK(ct_write_file(path, data, n, NULL) == CT_OK);
}

static void
test_round_trip(void)
{
    ct_st_file *file = NULL;
    ct_error err;
    size_t n;
    float back[6] = {0};
    int64_t back_count = 0;
    write_sample();
    CHECK(ct_st_open(&file, path, NULL, &err) == CT_OK);
    const ct_st_tensor *tensors = ct_st_tensors_borrow(file, &n);
    CHECK(n == 3 && ct_text_is(tensors[0].name, "a")); /* the wider dtype comes first */
    CHECK(ct_text_is(tensors[1].name, "b\"\\\n") && tensors[1].shape[1] == 3);
    CHECK(ct_st_find_borrow(file, text("none")) == &tensors[2]);
    CHECK(ct_st_find_borrow(file, text("nobody")) == NULL);
    CHECK(tensors[0].begin % 8 == 0);
    void *targets[3] = {&back_count, back, NULL};
    CHECK(ct_st_read(file, targets, true, NULL, &err) == CT_OK);
    CHECK(memcmp(back, weight, sizeof weight) == 0 && back_count == 42);
    ct_st_close(file);
}

static void
test_damaged_data_is_found_also_where_it_is_not_read(void)
{
    char bytes[4096];
    ct_st_file *file = NULL;
    ct_error err;
    void *targets[3] = {NULL, NULL, NULL};
    write_sample();
    size_t n = slurp(bytes, sizeof bytes);
    bytes[n - 1] ^= 1;
    spill(bytes, n);
    CHECK(ct_st_open(&file, path, NULL, &err) == CT_OK);
    CHECK(ct_st_read(file, targets, false, NULL, &err) == CT_OK);
    CHECK(ct_st_read(file, targets, true, NULL, &err) == CT_EINVAL);
    CHECK(strstr(err.message, path) != NULL && strstr(err.message, "damaged") != NULL);
    ct_st_close(file);
}

static void
expect_rejected(const char *header, size_t data_bytes, const char *reason)
{
    unsigned char bytes[4096] = {0};
    ct_st_file *file = NULL;
    ct_error err = {0};
    size_t n = strlen(header);
    ct_store_le64(bytes, n);
    memcpy(bytes + 8, header, n);
    spill(bytes, 8 + n + data_bytes);
    CHECK(ct_st_open(&file, path, NULL, &err) == CT_EINVAL);
    if (strstr(err.message, reason) == NULL) {
        fprintf(stderr, "'%s' does not say '%s'\n", err.message, reason);
    }
    CHECK(strstr(err.message, reason) != NULL && strstr(err.message, path) != NULL);
}

#define TENSOR(name, shape, begin, end)                                                \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" begin     \
    "," end "]}"

static void
test_lying_headers_are_rejected_by_name(void)
{
    expect_rejected("{", 0, "bad JSON");
    expect_rejected("{}x", 0, "after the end");
    expect_rejected("{} ", 4, "holds 4 bytes");
    expect_rejected("{" TENSOR("w", "[2]", "0", "8") "}", 4, "cut short");
    expect_rejected("{" TENSOR("w", "[2]", "0", "4") "}", 4, "do not fit its shape");
    expect_rejected("{" TENSOR("w", "[1]", "4", "0") "}", 4, "do not fit its shape");
    expect_rejected(
        "{" TENSOR("w", "[1]", "0", "4") "," TENSOR("v", "[1]", "0", "4") "}", 4,
        "overlaps");
    expect_rejected("{" TENSOR("w", "[1]", "4", "8") "}", 8, "gap");
    expect_rejected(
        "{" TENSOR("w", "[1]", "0", "4") "," TENSOR("w", "[1]", "4", "8") "}", 8,
        "twice");
    expect_rejected("{" TENSOR("w", "[4294967296,4294967296]", "0", "4") "}", 4,
                    "overflows");
    expect_rejected("{" TENSOR("w", "[18446744073709551616]", "0", "4") "}", 4,
                    "too large");
    expect_rejected("{" TENSOR("w", "[-1]", "0", "4") "}", 4, "whole number");
    expect_rejected("{\"w\":{\"dtype\":\"F32\"}}", 0, "lacks dtype");
    expect_rejected("{\"w\":{\"dtype\":\"X7\",\"shape\":[],\"data_offsets\":[0,4]}}", 4,
                    "dtype that this reader lacks");
    expect_rejected("{\"w\":7}", 0, "expected {");
    expect_rejected("{\"\xff\":{}}", 0, "UTF-8");
    expect_rejected("{\"__metadata__\":{\"a\":1}}", 0, "expected a string");
}

static void
test_short_and_absent_files(void)
{
    ct_st_file *file = NULL;
    ct_error err;
    for (size_t n = 0; n < 8; n++) {
        char expected[128];
        (void)snprintf(expected, sizeof expected, "%s: %zu bytes are no safetensors",
                       path, n);
        spill("\x00\x00\x00\x00\x00\x00\x00", n);
        CHECK(ct_st_open(&file, path, NULL, &err) == CT_EINVAL);
        CHECK(strstr(err.message, expected) == err.message);
    }
    spill("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    CHECK(ct_st_open(&file, path, NULL, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "does not fit") != NULL);
    (void)unlink(path);
    CHECK(ct_st_open(&file, path, NULL, &err) == CT_EIO && err.os_error != 0);
}

/* Every byte of the header set to a few values, and random cuts: whatever the verdict,
 * no crash, no leak and no wild read (run under a sanitizer). */
static void
test_mutations(void)
{
    char bytes[4096], changed[4096];
    const char values[] = {0, '"', '{', '}', '[', ']', ',', ':', '9', '\\', -1, 'u'};
    size_t opened = 0;
    write_sample();
    size_t n = slurp(bytes, sizeof bytes);
    for (size_t at = 0; at < n; at++) {
        for (size_t v = 0; v <= sizeof values; v++) {
            ct_st_file *file = NULL;
            size_t length = v == sizeof values ? at + 1 : n;
            memcpy(changed, bytes, n);
            if (v < sizeof values) {
                changed[at] = values[v];
            }
            spill(changed, length);
            if (ct_st_open(&file, path, NULL, NULL) == CT_OK) {
                void *targets[3] = {NULL, NULL, NULL};
                size_t tensors;
                opened++;
                (void)ct_st_tensors_borrow(file, &tensors);
                CHECK(tensors <= 3);
                (void)!ct_st_read(file, targets, true, NULL, NULL);
                ct_st_close(file);
            }
        }
    }
    CHECK(opened > 0);
}

static void
test_bad_entries_are_rejected(void)
{
    ct_plan plan = {0};
    ct_error err;
    ct_st_entry entry = {.name = text("w"),
                         .tag = "F32",
                         .shape = weight_shape,
                         .ndim = 2,
                         .data = weight,
                         .bytes = 20};
    CHECK(ct_st_plan(&plan, &entry, 1, NULL, 0, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "'w'") != NULL);
    entry.tag = "complex";
    CHECK(ct_st_plan(&plan, &entry, 1, NULL, 0, &err) == CT_EINVAL);
    CHECK(ct_plan_set_name(&plan, "../x", &err) == CT_EINVAL);
    CHECK(ct_plan_set_name(&plan, "/x", &err) == CT_EINVAL);
    CHECK(ct_plan_set_name(&plan, "a/..", &err) == CT_EINVAL);
    CHECK(ct_plan_set_name(&plan, "a..b/c", &err) == CT_OK);
    ct_plan_fini(&plan);
}

int
main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    (void)snprintf(path, sizeof path, "%s/f", folder);
    test_round_trip();
    test_damaged_data_is_found_also_where_it_is_not_read();
    test_lying_headers_are_rejected_by_name();
    test_short_and_absent_files();
    test_mutations();
    test_bad_entries_are_rejected();
    CHECK(ct_remove_tree(folder, NULL) == CT_OK);
    return 0;
}
