/* Files where the system does not do what it mostly does: writes of nothing, renames
 * that fail half-way, names that are not files. The calls are replaced by ones of this
 * test. */
#define _GNU_SOURCE
#include "core/base/io.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/source.h"
#include "core/checkpoint/staging.h"
#include "core/checkpoint/writer.h"
#include "ct_random.h"
#include "ct_test.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/ct_files_XXXXXX";

static struct {
    bool write_nothing, no_exchange;
    size_t most_written;          /* bytes in one call; 0: any number */
    int fail_rename, exit_rename; /* the number of the rename, from 1; 0: none */
    int renames;
    char synced[16][PATH_MAX];
    int n_synced;
} faults;

ssize_t
pwrite(int fd, const void *data, size_t n, off_t offset)
{
    n = faults.most_written > 0 && n > faults.most_written ? faults.most_written : n;
    return faults.write_nothing ? 0
                                : (ssize_t)syscall(SYS_pwrite64, fd, data, n, offset);
}

int
renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    if (faults.no_exchange) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_renameat2, from_fd, from, to_fd, to, flags);
}

int
rename(const char *from, const char *to)
{
    faults.renames++;
    if (faults.renames == faults.exit_rename) {
        _exit(7);
    }
    if (faults.renames == faults.fail_rename) {
        errno = EDQUOT;
        return -1;
    }
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int
fsync(int fd)
{
    char link[64];
    if (faults.n_synced < 16) {
        (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        char *to = faults.synced[faults.n_synced++];
        ssize_t n = readlink(link, to, PATH_MAX - 1);
        to[n < 0 ? 0 : n] = '\0';
    }
    return (int)syscall(SYS_fsync, fd);
}

static char *
below(const char *name)
{
    static char paths[4][PATH_MAX];
    static int next;
    char *path = paths[next++ % 4];
    (void)snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return path;
}

static void
spill(const char *path, const char *text)
{
    (void)unlink(path);
    CHECK(ct_write_file(path, text, strlen(text), NULL) == CT_OK);
}

static bool
holds(const char *path, const char *text)
{
    char found[64] = {0};
    int fd = open(path, O_RDONLY);
    ssize_t n = fd < 0 ? -1 : read(fd, found, sizeof found - 1);
    if (fd >= 0) {
        (void)close(fd);
    }
    return n >= 0 && strcmp(found, text) == 0;
}

static void
test_a_write_of_nothing_is_an_error(void)
{
    ct_error err;
    faults.write_nothing = true;
    CHECK(ct_write_file(below("w"), "abc", 3, &err) == CT_EIO && err.os_error == EIO);
    int fd = open(below("w"), O_WRONLY);
    CHECK(ct_write_at(fd, "abc", 3, 0, "w", &err) == CT_EIO && err.os_error == EIO);
    (void)close(fd);
    faults.write_nothing = false;
}

static void
test_a_file_is_whole_after_calls_that_write_a_part(void)
{
    static char data[100], found[sizeof data + 1];
    ct_random random = {.state = 5};
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = (char)ct_random_bits(&random);
    }
    faults.most_written = 3;
    for (size_t n = 0; n <= sizeof data; n++) {
        (void)unlink(below("parts"));
        CHECK(ct_write_file(below("parts"), data, n, NULL) == CT_OK);
        int fd = open(below("parts"), O_RDONLY);
        CHECK(read(fd, found, sizeof found) == (ssize_t)n);
        CHECK(memcmp(found, data, n) == 0);
        (void)close(fd);
    }
    faults.most_written = 0;
}

static void
test_only_regular_files_are_read(void)
{
    ct_error err;
    ct_source source;
    CHECK(mkfifo(below("pipe"), 0600) == 0);
    CHECK(symlink("/dev/zero", below("zero")) == 0);
    const char *const names[] = {"pipe", "zero"};
    for (size_t i = 0; i < 2; i++) {
        const char *path = below(names[i]);
        CHECK(ct_source_open(&source, path, NULL, &err) == CT_EINVAL);
        CHECK(strstr(err.message, path) != NULL);
        CHECK(ct_source_open(&source, path, NULL, NULL) == CT_EINVAL);
    }
    CHECK(ct_source_open(&source, folder, NULL, &err) == CT_EIO &&
          err.os_error == EISDIR);
    spill(below("plain"), "abc");
    const ct_expected longer = {.bytes = 4};
    CHECK(ct_source_open(&source, below("plain"), &longer, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "3 bytes long, was written as 4") != NULL);
}

static bool
was_synced(const char *path)
{
    char real[PATH_MAX];
    CHECK(realpath(path, real) != NULL);
    for (int i = 0; i < faults.n_synced; i++) {
        if (strcmp(faults.synced[i], real) == 0) {
            return true;
        }
    }
    return false;
}

static void
test_the_folder_above_a_new_one_is_synchronised(void)
{
    faults.n_synced = 0;
    CHECK(ct_make_folders(below("a/b"), NULL) == CT_OK);
    CHECK(was_synced(folder) && was_synced(below("a")));
    faults.n_synced = 0;
    CHECK(ct_make_folders(below("a/b"), NULL) == CT_OK && faults.n_synced == 0);
}

static ct_status
save(ct_writer *writer, const char *text, ct_error *err)
{
    char path[PATH_MAX];
    CHECK(ct_writer_begin(writer, below("out/ck"), NULL) == CT_OK);
    (void)snprintf(path, sizeof path, "%s/x", ct_writer_folder_borrow(writer));
    spill(path, text);
    faults.renames = 0;
    CHECK(ct_writer_commit(writer, NULL) == CT_OK);
    return ct_writer_wait(writer, err);
}

/* Renames: that to final, which finds the old one there; old away; new in; old back. */
static void
test_a_replacement_that_fails_half_way_leaves_the_old_folder(void)
{
    ct_error err;
    ct_writer *writer = ct_writer_new();
    CHECK(writer != NULL && save(writer, "old", NULL) == CT_OK);
    faults.no_exchange = true;
    for (int fail = 1; fail <= 3; fail++) {
        faults.fail_rename = fail;
        CHECK(save(writer, "new", &err) == CT_EIO && err.os_error == EDQUOT);
        faults.fail_rename = 0;
        CHECK(holds(below("out/ck/x"), "old"));
    }
    CHECK(save(writer, "new", NULL) == CT_OK);
    CHECK(holds(below("out/ck/x"), "new"));
    faults.no_exchange = false;
    ct_writer_free(writer);
}

static void
test_one_that_was_killed_half_way_gets_its_name_back(void)
{
    int status;
    faults.no_exchange = true;
    pid_t child = fork();
    if (child == 0) {
        ct_writer *writer = ct_writer_new();
        faults.exit_rename = 3; /* the old one is away, the new one not in */
        CHECK(writer != NULL);
        (void)!save(writer, "newer", NULL);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
    CHECK(access(below("out/ck"), F_OK) < 0);
    ct_staging_recover(below("out"));
    CHECK(holds(below("out/ck/x"), "newer"));
    faults.no_exchange = false;
}

static ct_status
tell_nothing(void *arg, const char *problem, ct_error *err)
{
    (void)arg, (void)problem, (void)err;
    return CT_OK;
}

static void
test_a_manifest_lists_files_of_its_folder_only(void)
{
    static const char *const texts[] = {
        "{\"version\":1,\"files\":{}}",
        "{\"version\":1,\"files\":{\"/etc/"
        "passwd\":{\"bytes\":1,\"crc32c\":\"00000000\"}}}",
        "{\"version\":1,\"files\":{\"../x\":{\"bytes\":1,\"crc32c\":\"00000000\"}}}",
        "{\"version\":1,\"files\":{\"a/../../"
        "x\":{\"bytes\":1,\"crc32c\":\"00000000\"}}}",
        "{\"version\":1,\"files\":{\"a//x\":{\"bytes\":1,\"crc32c\":\"00000000\"}}}",
        "{\"version\":1,\"files\":{\"plain\\u0000x\":{\"bytes\":3,\"crc32c\":"
        "\"00000000\"}}}",
        "{\"version\":1,\"files\":{\"out/ck/x\":{\"bytes\":1,\"crc32c\":\"00000000\"},"
        "\"out/ck/x\":{\"bytes\":1,\"crc32c\":\"00000000\"}}}",
        "{\"version\":1,\"files\":{\"linked/"
        "x\":{\"bytes\":1,\"crc32c\":\"00000000\"}}}",
        "{\"version\":1,\"files\":{\"x\":{\"bytes\":1,\"bytes\":2,\"crc32c\":"
        "\"00000000\"}}}",
    };
    CHECK(symlink("/tmp", below("linked")) == 0);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        ct_error err;
        ct_manifest manifest = {0};
        spill(below(CT_MANIFEST_NAME), texts[i]);
        CHECK(ct_manifest_read(&manifest, folder, &err) == CT_EINVAL);
        CHECK(strstr(err.message, CT_MANIFEST_NAME) != NULL);
        CHECK(ct_manifest_verify(folder, tell_nothing, NULL, &err) == CT_EINVAL);
        ct_manifest_fini(&manifest);
    }
}

int
main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    test_a_write_of_nothing_is_an_error();
    test_a_file_is_whole_after_calls_that_write_a_part();
    test_only_regular_files_are_read();
    test_the_folder_above_a_new_one_is_synchronised();
    test_a_replacement_that_fails_half_way_leaves_the_old_folder();
    test_one_that_was_killed_half_way_gets_its_name_back();
    test_a_manifest_lists_files_of_its_folder_only();
    CHECK(ct_remove_tree(folder, NULL) == CT_OK);
    return 0;
}
