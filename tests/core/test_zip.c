/* torch's archives: alignment, verification, and damage of every kind. */
#define _GNU_SOURCE
#include "core/ct_io.h"
#include "core/ct_zip.h"
#include "ct_test.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static char folder[] = "/tmp/ct_zip_XXXXXX";
static char path[64];

static void
test_data_is_aligned_and_verifies(void)
{
    ct_plan plan = {0};
    ct_error err;
    const ct_zip_record records[] = {
        {.name = "a/data.pkl", .data = "abc", .bytes = 3},
        {.name = "a/data/0", .data = "0123456789ab", .bytes = 12},
        {.name = "a/data/1"},
        {.name = "a/version", .data = "3\n", .bytes = 2},
    };
    CHECK(ct_zip_plan(&plan, records, 4, &err) == CT_OK);
    ct_plan_seal(&plan);
    uint64_t at = 0;
    for (size_t i = 0; i + 1 < plan.n_pieces; i += 2) {
        at += plan.pieces[i].n;
        CHECK(at % 64 == 0);
        at += plan.pieces[i + 1].n;
    }
    CHECK(ct_plan_write(&plan, path, &err) == CT_OK);
    CHECK(ct_zip_verify(path, NULL, &err) == CT_OK);
    ct_plan_fini(&plan);
}

static void
spill(const void *data, size_t n)
{
    ct_piece piece = {data, n};
    (void)unlink(path);
    CHECK(ct_write_file(path, &piece, 1, NULL) == CT_OK);
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

/* Needs the file that the test before wrote. */
static void
test_every_flipped_byte_of_data_and_every_cut_is_found(void)
{
    char bytes[4096], changed[4096];
    size_t n = slurp(bytes, sizeof bytes);
    ct_error err;
    for (size_t at = 0; at < n; at++) {
        memcpy(changed, bytes, n);
        changed[at] = (char)(changed[at] ^ 0x55);
        spill(changed, n);
        bool is_data = (at >= 64 && at < 67) || (at >= 128 && at < 140);
        CHECK(ct_zip_verify(path, NULL, &err) != CT_OK || !is_data);
        spill(bytes, at);
        CHECK(ct_zip_verify(path, NULL, &err) == CT_EINVAL);
        CHECK(strstr(err.message, path) != NULL);
    }
    CHECK(ct_zip_verify("/nonexistent/x", NULL, &err) == CT_EIO);
}

int
main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    (void)snprintf(path, sizeof path, "%s/f", folder);
    test_data_is_aligned_and_verifies();
    test_every_flipped_byte_of_data_and_every_cut_is_found();
    CHECK(ct_remove_tree(folder, NULL) == CT_OK);
    return 0;
}
