/* Files put together from memory and from other files, in one pass. */
#define _GNU_SOURCE
#include "core/base/alloc.h"
#include "core/base/io.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/zip.h"
#include "ct_test.h"

#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SOURCE_BYTES = (5 << 20) + 12 /* several blocks and a rest */
};

static char folder[] = "/tmp/ct_plan_XXXXXX";
static char source[64], path[64], other[64];
static unsigned char source_bytes[SOURCE_BYTES];

static size_t
slurp(const char *from, unsigned char *to, size_t limit)
{
    ct_error err;
    uint64_t bytes;
    int fd = ct_open_read(from, &bytes, &err);
    CHECK(fd >= 0 && bytes <= limit);
    CHECK(ct_read_at(fd, to, (size_t)bytes, 0, from, &err) == CT_OK);
    (void)close(fd);
    return (size_t)bytes;
}

/* A tensor of the source's 12 last bytes, four zeros, and the source without them. */
static const ct_excerpt excerpts[] = {
    {source, SOURCE_BYTES - 12, 12               },
    {NULL,   0,                 4                },
    {source, 0,                 SOURCE_BYTES - 12},
};

static ct_status
plan_tensor(ct_plan *plan, ct_error *err)
{
    static const uint64_t shape[] = {(SOURCE_BYTES + 4) / 4};
    ct_st_entry entry = {
        .name = {"x", 1},
        .tag = "F32",
        .shape = shape,
        .ndim = 1,
        .excerpts = excerpts,
        .n_excerpts = 3,
        .bytes = SOURCE_BYTES + 4
    };
    return ct_st_plan(plan, &entry, 1, NULL, 0, err);
}

static void
test_excerpts_and_zeros_become_one_tensor_with_its_checksum(void)
{
    static unsigned char got[SOURCE_BYTES + 4];
    const unsigned char zeros[4] = {0};
    void *target = got;
    ct_plan plan = {0};
    ct_st_file *file = NULL;
    ct_error err;
    CHECK(plan_tensor(&plan, &err) == CT_OK);
    CHECK(ct_plan_publish(&plan, path, &err) == CT_OK);
    CHECK(ct_st_open(&file, path, NULL, &err) == CT_OK);
    CHECK(ct_st_read(file, &target, true, NULL, &err) == CT_OK);
    CHECK(memcmp(got, source_bytes + SOURCE_BYTES - 12, 12) == 0);
    CHECK(memcmp(got + 12, zeros, 4) == 0);
    CHECK(memcmp(got + 16, source_bytes, SOURCE_BYTES - 12) == 0);
    ct_st_close(file);
    ct_plan_fini(&plan);
}

static void
test_a_published_plan_is_the_file_that_writing_makes(void)
{
    static unsigned char a[SOURCE_BYTES + 4096], b[sizeof a];
    const ct_zip_record records[] = {
        {.name = "a/data/0", .data = source_bytes, .bytes = SOURCE_BYTES},
        {.name = "a/data/1"},
        {.name = "a/version", .data = "3\n", .bytes = 2},
    };
    ct_plan written = {0}, published = {0};
    ct_error err;
    CHECK(ct_zip_plan(&written, records, 3, &err) == CT_OK);
    CHECK(ct_zip_plan(&published, records, 3, &err) == CT_OK);
    CHECK(ct_plan_write(&written, other, &err) == CT_OK);
    CHECK(ct_plan_publish(&published, path, &err) == CT_OK);
    size_t n = slurp(other, a, sizeof a);
    CHECK(slurp(path, b, sizeof b) == n && memcmp(a, b, n) == 0);
    CHECK(written.crc32c == published.crc32c);
    ct_plan_fini(&published);
    ct_plan_fini(&written);
}

/* The path has to hold what it held, and nothing may lie beside it. */
static void
check_untouched(const char *held)
{
    static unsigned char bytes[SOURCE_BYTES + 4096];
    char beside[96];
    struct stat info;
    (void)snprintf(beside, sizeof beside, "%s.ctrainer-saving", path);
    CHECK(stat(beside, &info) < 0);
    size_t n = slurp(path, bytes, sizeof bytes);
    CHECK(n == strlen(held) && memcmp(bytes, held, n) == 0);
}

static void
hold(const char *text)
{
    (void)unlink(path);
    CHECK(ct_write_file(path, text, strlen(text), NULL) == CT_OK);
}

static void
check_failure(const ct_excerpt *excerpt, ct_status expected, const char *said)
{
    ct_zip_record record = {
        .name = "a", .excerpts = excerpt, .n_excerpts = 1, .bytes = excerpt->n};
    ct_plan plan = {0};
    ct_error err;
    hold("earlier");
    CHECK(ct_zip_plan(&plan, &record, 1, &err) == CT_OK);
    CHECK(ct_plan_publish(&plan, path, &err) == expected);
    CHECK(strstr(err.message, said) != NULL);
    check_untouched("earlier");
    ct_plan_fini(&plan);
}

static void
test_a_source_that_ends_too_soon_or_is_gone_leaves_the_file_alone(void)
{
    const ct_excerpt beyond = {source, SOURCE_BYTES - 2, 4};
    const ct_excerpt gone = {"/nonexistent/x", 0, 4};
    check_failure(&beyond, CT_EINVAL, source);
    check_failure(&gone, CT_EIO, "/nonexistent/x");
}

/* A limit on the size of files stands for a full disk: write fails half way. */
static void
test_a_full_disk_leaves_the_file_alone(void)
{
    const ct_excerpt all = {source, 0, SOURCE_BYTES};
    struct rlimit before, small;
    (void)signal(SIGXFSZ, SIG_IGN);
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    small = before;
    small.rlim_cur = 3 << 20;
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    check_failure(&all, CT_EIO, "cannot write");
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
}

static void
test_every_allocation_may_fail(void)
{
    ct_status status = CT_ENOMEM;
    for (size_t n = 1; status != CT_OK; n++) {
        ct_plan plan = {0};
        ct_error err;
        hold("earlier");
        ct_alloc_fail_after(n);
        status = plan_tensor(&plan, &err);
        if (status == CT_OK) {
            status = ct_plan_publish(&plan, path, &err);
        }
        ct_alloc_fail_after(0);
        CHECK(status == CT_OK || status == CT_ENOMEM);
        if (status != CT_OK) {
            check_untouched("earlier");
        }
        ct_plan_fini(&plan);
    }
}

int
main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    (void)snprintf(source, sizeof source, "%s/source", folder);
    (void)snprintf(path, sizeof path, "%s/f", folder);
    (void)snprintf(other, sizeof other, "%s/g", folder);
    for (size_t i = 0; i < SOURCE_BYTES; i++) {
        source_bytes[i] = (unsigned char)(i * 2654435761u >> 13);
    }
    CHECK(ct_write_file(source, source_bytes, SOURCE_BYTES, NULL) == CT_OK);
    test_excerpts_and_zeros_become_one_tensor_with_its_checksum();
    test_a_published_plan_is_the_file_that_writing_makes();
    test_a_source_that_ends_too_soon_or_is_gone_leaves_the_file_alone();
    test_a_full_disk_leaves_the_file_alone();
    test_every_allocation_may_fail();
    CHECK(ct_remove_tree(folder, NULL) == CT_OK);
    return 0;
}
