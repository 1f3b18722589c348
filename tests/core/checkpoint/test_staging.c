#define _GNU_SOURCE /* SYS_fsync; /proc/self/fd */
#include "core/base/alloc.h"
#include "core/checkpoint/writer.h"
#include "ct_test.h"

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

static char calls[32][256];
static int n_calls;

static void
note(const char *what, const char *path)
{
    const size_t skipped = strncmp(path, root, strlen(root)) == 0 ? strlen(root) : 0;
    CHECK(n_calls < 32);
    (void)snprintf(calls[n_calls++], sizeof calls[0], "%s %s", what, path + skipped);
}

int
fsync(int fd)
{
    char link[64], path[4096] = {0};
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    CHECK(readlink(link, path, sizeof path - 1) > 0);
    note("sync", path);
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

static char *
below(const char *name)
{
    static char path[sizeof root + 64];
    (void)snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

/* Folders that another program makes under the final name during a save. */
static void
begin_beside_another(ct_writer *writer)
{
    CHECK(ct_writer_begin(writer, below("adopted"), NULL) == CT_OK);
    CHECK(mkdir(below("adopted"), 0777) == 0 && mkdir(below("adopted/own"), 0777) == 0);
}

/* What others wrote under the final name meanwhile is taken over, or stays there. */
static void
test_adopting_survives_failed_allocations(void)
{
    enum {
        OF_ADOPTING = 2 /* allocations, for the two paths of an entry */
    };
    ct_writer *writer = ct_writer_new();
    CHECK(writer != NULL);
    for (size_t n = 1; n <= OF_ADOPTING; n++) {
        begin_beside_another(writer);
        ct_alloc_fail_after(n);
        CHECK(save(writer) == CT_ENOMEM);
        ct_alloc_fail_after(0);
        CHECK(rmdir(below("adopted/own")) == 0 && rmdir(below("adopted")) == 0);
        n_calls = 0;
    }
    begin_beside_another(writer);
    CHECK(save(writer) == CT_OK && access(below("adopted/own"), F_OK) == 0);
    ct_writer_free(writer);
}

int
main(void)
{
    CHECK(mkdtemp(root) != NULL);
    test_the_parent_is_put_on_the_disk_after_the_rename();
    n_calls = 0;
    test_adopting_survives_failed_allocations();
    char command[sizeof root + 16];
    (void)snprintf(command, sizeof command, "rm -r %s", root);
    CHECK(system(command) == 0);
    return 0;
}
