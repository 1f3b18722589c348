#define _GNU_SOURCE /* SYS_fsync; /proc/self/fd */
#include "core/base/alloc.h"
#include "core/checkpoint/writer.h"
#include "ct_test.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char root[] = "/tmp/ct_staging_XXXXXX";

/* ---- what the core asks the system for, in order ------------------------------------
 *
 * Definitions here come before the C library's. */

static char calls[64][256];
static int n_calls;

/* What happens at the next sync of a folder, once. */
static enum {
    NOTHING,
    FAIL,
    LATE_FILE
} at_sync;

static void
note(const char *what, const char *path)
{
    const size_t skipped = strncmp(path, root, strlen(root)) == 0 ? strlen(root) : 0;
    CHECK(n_calls < 64);
    (void)snprintf(calls[n_calls++], sizeof calls[0], "%s %s", what, path + skipped);
}

static char *
below(const char *name)
{
    static char path[sizeof root + 64];
    (void)snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

/* Another program writes a file of its name's text under the final name. */
static void
write_beside(const char *name)
{
    char path[64];
    (void)snprintf(path, sizeof path, "adopted/%s", name);
    FILE *out = fopen(below(path), "w");
    CHECK(out != NULL && fputs(name, out) >= 0 && fclose(out) == 0);
}

static bool
is_beside(const char *name)
{
    char path[64], text[64] = {0};
    (void)snprintf(path, sizeof path, "adopted/%s", name);
    FILE *in = fopen(below(path), "r");
    const bool whole =
        in != NULL && fgets(text, sizeof text, in) != NULL && strcmp(text, name) == 0;
    if (in != NULL) {
        (void)fclose(in);
    }
    return whole;
}

int
fsync(int fd)
{
    char link[64], path[4096] = {0};
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    CHECK(readlink(link, path, sizeof path - 1) > 0);
    note("sync", path);
    const int action = at_sync;
    at_sync = NOTHING;
    if (action == FAIL) {
        errno = EIO;
        return -1;
    }
    if (action == LATE_FILE) {
        write_beside("late");
    }
    return (int)syscall(SYS_fsync, fd);
}

int
rename(const char *from, const char *to)
{
    note("rename to", to);
    return (int)syscall(SYS_renameat2, -100, from, -100, to, 0);
}

/* ---- tests ----------------------------------------------------------------------- */

static ct_status
save(ct_writer *writer)
{
    CHECK(ct_writer_commit(writer, NULL) == CT_OK);
    return ct_writer_wait(writer, NULL);
}

static void
publish(const char *path)
{
    ct_writer *writer = ct_writer_new();
    CHECK(writer != NULL && ct_writer_begin(writer, path, NULL) == CT_OK);
    n_calls = 0;
    CHECK(save(writer) == CT_OK);
    ct_writer_free(writer);
}

/* A name that a crash may take back would lose the folder that it replaced. */
static void
test_the_parent_is_put_on_the_disk_after_the_rename(void)
{
    char path[sizeof root + 32];
    struct stat info;
    (void)snprintf(path, sizeof path, "%s/run/checkpoint-1", root);
    for (int again = 0; again < 2; again++) { /* a new name, and one that is replaced */
        publish(path);
        CHECK(stat(path, &info) == 0 && S_ISDIR(info.st_mode));
        CHECK(n_calls >= 2);
        CHECK(strcmp(calls[n_calls - 2], "rename to /run/checkpoint-1") == 0);
        CHECK(strcmp(calls[n_calls - 1], "sync /run") == 0);
    }
    CHECK(chdir(root) == 0);
    publish("alone");
    CHECK(strcmp(calls[n_calls - 2], "rename to alone") == 0);
    CHECK(strcmp(calls[n_calls - 1], "sync ") == 0);
}

/* A save, and another program that makes the final folder meanwhile. */
static void
begin_beside_another(ct_writer *writer)
{
    n_calls = 0;
    CHECK(ct_writer_begin(writer, below("adopted"), NULL) == CT_OK);
    CHECK(mkdir(below("adopted"), 0777) == 0 && mkdir(below("adopted/own"), 0777) == 0);
    write_beside("file");
    write_beside("own/file");
}

static void
check_and_remove(void)
{
    CHECK(is_beside("file") && is_beside("own/file"));
    CHECK(unlink(below("adopted/file")) == 0 && unlink(below("adopted/own/file")) == 0);
    CHECK(rmdir(below("adopted/own")) == 0);
}

/* What others wrote under the final name meanwhile is taken over, or stays there. */
static void
test_files_of_others_survive_each_failed_allocation(void)
{
    ct_writer *writer = ct_writer_new();
    ct_status status = CT_ENOMEM;
    size_t n = 0;
    CHECK(writer != NULL);
    while (status != CT_OK) {
        begin_beside_another(writer);
        ct_alloc_fail_after(++n);
        status = save(writer);
        ct_alloc_fail_after(0);
        CHECK(status == CT_OK || status == CT_ENOMEM);
        check_and_remove();
        CHECK(status == CT_OK || rmdir(below("adopted")) == 0);
    }
    CHECK(n > 8); /* paths, the manifest, its text */
    CHECK(unlink(below("adopted/ctrainer_manifest.json")) == 0);
    CHECK(rmdir(below("adopted")) == 0);
    ct_writer_free(writer);
}

static void
test_files_of_others_survive_a_failed_sync_and_come_late(void)
{
    ct_writer *writer = ct_writer_new();
    CHECK(writer != NULL);
    begin_beside_another(writer);
    at_sync = FAIL;
    CHECK(save(writer) == CT_EIO && at_sync == NOTHING);
    check_and_remove();
    CHECK(rmdir(below("adopted")) == 0);
    begin_beside_another(writer);
    at_sync = LATE_FILE;
    CHECK(save(writer) == CT_OK && at_sync == NOTHING);
    check_and_remove();
    CHECK(is_beside("late"));
    ct_writer_free(writer);
}

int
main(void)
{
    CHECK(mkdtemp(root) != NULL);
    test_the_parent_is_put_on_the_disk_after_the_rename();
    test_files_of_others_survive_each_failed_allocation();
    test_files_of_others_survive_a_failed_sync_and_come_late();
    char command[sizeof root + 16];
    (void)snprintf(command, sizeof command, "rm -r %s", root);
    CHECK(system(command) == 0);
    return 0;
}
