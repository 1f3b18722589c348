/* torch's archives: alignment, verification, and damage of every kind. */
#define _GNU_SOURCE
#include "core/base/io.h"
#include "core/checkpoint/zip.h"
#include "ct_random.h"
#include "ct_test.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static char folder[] = "/tmp/ct_zip_XXXXXX";
static char path[64];

/* Compares all data of the archive with its checksums. */
static ct_status
verify(const char *at, ct_error *err)
{
    ct_source source;
    ct_zip_index index = {0};
    ct_status status = ct_source_open(&source, at, NULL, err);
    if (status != CT_OK) {
        return status;
    }
    status = ct_zip_index_read(&index, &source, err);
    if (status == CT_OK) {
        status = ct_zip_read(&index, &source, NULL, NULL, err);
    }
    ct_zip_index_fini(&index);
    ct_source_close(&source);
    return status;
}

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
    uint64_t at = 0;
    for (size_t i = 0; i + 1 < plan.n_pieces; i += 2) {
        at += plan.pieces[i].n;
        CHECK(at % 64 == 0);
        at += plan.pieces[i + 1].n;
    }
    CHECK(ct_plan_write(&plan, path, &err) == CT_OK);
    CHECK(verify(path, &err) == CT_OK);
    ct_plan_fini(&plan);
}

static void
spill(const void *data, size_t n)
{
    (void)unlink(path);
    CHECK(ct_write_file(path, data, n, NULL) == CT_OK);
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
        CHECK(verify(path, &err) != CT_OK || !is_data);
        spill(bytes, at);
        CHECK(verify(path, &err) == CT_EINVAL);
        CHECK(strstr(err.message, path) != NULL);
    }
    CHECK(verify("/nonexistent/x", &err) == CT_EIO);
}

enum {
    RECORDS = 9,
    MOST = 300
};

/* Random records; the file's length and checksum. */
static ct_expected
write_archive(ct_random *r, ct_zip_record *records, size_t n)
{
    static char names[RECORDS][16], data[RECORDS][MOST];
    ct_plan plan = {0};
    ct_expected e;
    for (size_t i = 0; i < n; i++) {
        (void)snprintf(names[i], sizeof names[i], "a/data/%zu", i);
        records[i] = (ct_zip_record){
            .name = names[i], .data = data[i], .bytes = ct_random_below(r, MOST)};
        for (size_t k = 0; k < records[i].bytes; k++) {
            data[i][k] = (char)ct_random_below(r, 256);
        }
    }
    (void)unlink(path);
    CHECK(ct_zip_plan(&plan, records, n, NULL) == CT_OK);
    CHECK(ct_plan_write(&plan, path, NULL) == CT_OK);
    ct_plan_fini(&plan);
    CHECK(ct_checksum_file(path, NULL, &e, NULL) == CT_OK);
    return e;
}

/* Reads every record but `skipped`. */
static ct_status
read_archive(const ct_zip_record *records, size_t n, const ct_expected *expected,
             size_t skipped, ct_error *err)
{
    static char read[RECORDS][MOST];
    void *targets[RECORDS];
    ct_source source;
    ct_zip_index index = {0};
    CHECK(ct_source_open(&source, path, expected, NULL) == CT_OK);
    ct_status status = ct_zip_index_read(&index, &source, err);
    if (status == CT_OK) {
        CHECK(index.n == n);
        for (size_t i = 0; i < n; i++) {
            targets[i] = i == skipped ? NULL : read[i];
        }
        status = ct_zip_read(&index, &source, targets, expected, err);
    }
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        CHECK(index.entries[i].bytes == records[i].bytes);
        CHECK(i == skipped || memcmp(read[i], records[i].data, records[i].bytes) == 0);
    }
    ct_zip_index_fini(&index);
    ct_source_close(&source);
    return status;
}

static void
test_records_are_read_and_compared_with_their_sums_or_the_files(void)
{
    static char bytes[RECORDS * (MOST + 400)];
    ct_random r = {11};
    for (int draw = 0; draw < 60; draw++) {
        ct_zip_record records[RECORDS];
        ct_error err;
        const size_t n = 1 + ct_random_below(&r, RECORDS);
        const size_t skipped = ct_random_below(&r, 2 * RECORDS);
        const ct_expected e = write_archive(&r, records, n);
        CHECK(read_archive(records, n, &e, skipped, &err) == CT_OK);
        CHECK(read_archive(records, n, NULL, skipped, &err) == CT_OK);
        const size_t size = slurp(bytes, sizeof bytes);
        CHECK(size == e.bytes);
        bytes[ct_random_below(&r, size)] ^= 0x10;
        spill(bytes, size);
        CHECK(read_archive(records, n, &e, skipped, &err) == CT_EINVAL);
        CHECK(strstr(err.message, path) != NULL);
    }
}

static void
test_an_archive_is_known_by_its_first_four_bytes(void)
{
    static const char bytes[] = "PK\x03\x04 and more";
    for (size_t n = 0; n < sizeof bytes; n++) {
        ct_source source;
        spill(bytes, n);
        CHECK(ct_source_open(&source, path, NULL, NULL) == CT_OK);
        CHECK(ct_zip_is(&source) == (n >= 4));
        ct_source_close(&source);
    }
}

int
main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    (void)snprintf(path, sizeof path, "%s/f", folder);
    test_data_is_aligned_and_verifies();
    test_every_flipped_byte_of_data_and_every_cut_is_found();
    test_records_are_read_and_compared_with_their_sums_or_the_files();
    test_an_archive_is_known_by_its_first_four_bytes();
    CHECK(ct_remove_tree(folder, NULL) == CT_OK);
    return 0;
}
