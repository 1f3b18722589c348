/* A save that several processes write: parts that end, fail, die and are late. */
#define _GNU_SOURCE
#include "core/base/alloc.h"
#include "core/base/io.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/writer.h"
#include "ct_test.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char root[] = "/tmp/ct_parts_XXXXXX";

#include "ct_saves.h"

static unsigned char payload[3 << 20];

/* Whether the file system has locks; the definition here comes before the C library's.
 */
static bool has_locks = true;

int
flock(int fd, int operation)
{
    if (!has_locks) {
        errno = ENOLCK;
        return -1;
    }
    return (int)syscall(SYS_flock, fd, operation);
}

static bool
is_there(const char *name)
{
    return access(below(name), F_OK) == 0;
}

static size_t
listed_in(const char *name)
{
    ct_manifest manifest = {0};
    CHECK(ct_manifest_read(&manifest, below(name), NULL) == CT_OK);
    const size_t n = manifest.n;
    ct_manifest_fini(&manifest);
    return n;
}

static ct_status
add(ct_writer *writer, const char *name, const void *data, size_t n, bool copy)
{
    ct_plan plan = {0};
    CHECK(ct_plan_set_name(&plan, name, NULL) == CT_OK);
    CHECK(ct_plan_add_data(&plan, data, n, (ct_place){0}, NULL) == CT_OK);
    return ct_writer_add(writer, &plan, copy, NULL);
}

/* Two writers of one save, with a file each. */
typedef struct pair {
    ct_writer *publisher, *part;
} pair;

enum {
    NUMBER = 3,
    SMALL = 1000
};

static pair
begin(const char *name, double seconds)
{
    const int number = NUMBER;
    const pair p = {ct_writer_new(), ct_writer_new()};
    CHECK(ct_writer_begin(p.publisher, below(name), NULL) == CT_OK);
    const char *folder = ct_writer_folder_borrow(p.publisher);
    CHECK(ct_writer_join(p.part, folder, NUMBER, NULL) == CT_OK);
    CHECK(strcmp(ct_writer_folder_borrow(p.part), folder) == 0);
    CHECK(add(p.publisher, "own.bin", payload, SMALL, true) == CT_OK);
    CHECK(add(p.part, "sub/other.bin", payload, sizeof payload, true) == CT_OK);
    CHECK(ct_writer_expect(p.publisher, &number, 1, seconds, NULL) == CT_OK);
    return p;
}

static void
end(pair p)
{
    ct_writer_free(p.part);
    ct_writer_free(p.publisher);
}

static ct_status
commit(ct_writer *writer)
{
    return ct_writer_commit(writer, NULL);
}

static void
test_the_folder_appears_when_all_parts_have_ended(void)
{
    const pair p = begin("checkpoint-1", 60.0);
    CHECK(commit(p.publisher) == CT_OK);
    for (int i = 0; i < 20; i++) {
        (void)usleep(1000);
        CHECK(!is_there("checkpoint-1") && ct_writer_pending(p.publisher));
    }
    CHECK(commit(p.part) == CT_OK && ct_writer_wait(p.part, NULL) == CT_OK);
    CHECK(ct_writer_wait(p.publisher, NULL) == CT_OK);
    CHECK(problems_of("checkpoint-1") == 0 && listed_in("checkpoint-1") == 2);
    CHECK(is_there("checkpoint-1/own.bin") && is_there("checkpoint-1/sub/other.bin"));
    CHECK(!is_there("checkpoint-1/.part-3") && entries_in_root() == 1);
    /* Both may be used again, with places changed. */
    CHECK(ct_writer_begin(p.part, below("checkpoint-1"), NULL) == CT_OK);
    const char *folder = ct_writer_folder_borrow(p.part);
    CHECK(ct_writer_join(p.publisher, folder, 0, NULL) == CT_OK);
    const int zero = 0;
    CHECK(ct_writer_expect(p.part, &zero, 1, 60.0, NULL) == CT_OK);
    CHECK(commit(p.publisher) == CT_OK && commit(p.part) == CT_OK);
    CHECK(ct_writer_wait(p.part, NULL) == CT_OK && entries_in_root() == 1);
    end(p);
}

/* What the part has told of a file holds for the file as it was then. */
static void
test_files_that_change_after_their_part_has_ended_are_summed_again(void)
{
    const pair p = begin("checkpoint-2", 60.0);
    char path[256];
    (void)snprintf(path, sizeof path, "%s/sub/other.bin",
                   ct_writer_folder_borrow(p.publisher));
    CHECK(commit(p.part) == CT_OK && ct_writer_wait(p.part, NULL) == CT_OK);
    (void)usleep(20000); /* more than the grain of a file's time */
    FILE *file = fopen(path, "r+");
    CHECK(file != NULL && fputs("changed", file) >= 0 && fclose(file) == 0);
    CHECK(commit(p.publisher) == CT_OK && ct_writer_wait(p.publisher, NULL) == CT_OK);
    CHECK(problems_of("checkpoint-2") == 0 && listed_in("checkpoint-2") == 2);
    end(p);
}

/* A file that an override removes, or adds, is no failure of the part. */
static void
test_a_parts_flushed_files_may_be_changed_by_others(void)
{
    const pair p = begin("checkpoint-3", 60.0);
    char path[256];
    CHECK(ct_writer_flush(p.part, NULL) == CT_OK);
    CHECK(ct_writer_show(p.part, NULL) == CT_OK && !is_there("checkpoint-3"));
    (void)snprintf(path, sizeof path, "%s/sub/other.bin",
                   ct_writer_folder_borrow(p.part));
    CHECK(unlink(path) == 0);
    (void)snprintf(path, sizeof path, "%s/more", ct_writer_folder_borrow(p.part));
    CHECK(ct_write_file(path, "more", 4, NULL) == CT_OK);
    CHECK(commit(p.part) == CT_OK && ct_writer_wait(p.part, NULL) == CT_OK);
    CHECK(commit(p.publisher) == CT_OK && ct_writer_wait(p.publisher, NULL) == CT_OK);
    CHECK(problems_of("checkpoint-3") == 0 && listed_in("checkpoint-3") == 2);
    CHECK(is_there("checkpoint-3/more") && !is_there("checkpoint-3/sub/other.bin"));
    end(p);
}

/* RLIMIT_FSIZE stands for a full disk. */
static void
test_a_part_that_fails_fails_the_save_with_its_reason(void)
{
    const size_t entries = entries_in_root();
    const pair p = begin("checkpoint-4", 60.0);
    struct rlimit before, small = {1 << 20, 1 << 20};
    ct_error err = {0};
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    small.rlim_max = before.rlim_max;
    (void)signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK(commit(p.publisher) == CT_OK && commit(p.part) == CT_OK);
    CHECK(ct_writer_wait(p.part, &err) == CT_EIO && err.os_error == EFBIG);
    CHECK(ct_writer_wait(p.publisher, &err) == CT_EIO && err.os_error == EFBIG);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(strstr(err.message, "rank 3 could not write") != NULL);
    CHECK(strstr(err.message, "other.bin") != NULL);
    CHECK(ct_writer_wait(p.part, NULL) == CT_OK);
    CHECK(ct_writer_wait(p.publisher, NULL) == CT_OK);
    CHECK(!is_there("checkpoint-4") && entries_in_root() == entries);
    end(p);
}

static void
test_a_part_of_a_process_that_dies_fails_the_save(void)
{
    const size_t entries = entries_in_root();
    const int number = NUMBER;
    int ready[2], how = 0;
    char go = 0;
    ct_error err = {0};
    ct_writer *w = ct_writer_new();
    CHECK(pipe(ready) == 0);
    CHECK(ct_writer_begin(w, below("checkpoint-5"), NULL) == CT_OK);
    char folder[256];
    (void)snprintf(folder, sizeof folder, "%s", ct_writer_folder_borrow(w));
    const pid_t child = fork();
    if (child == 0) {
        ct_writer *part = ct_writer_new();
        CHECK(ct_writer_join(part, folder, NUMBER, NULL) == CT_OK);
        CHECK(write(ready[1], "x", 1) == 1);
        (void)pause();
    }
    CHECK(read(ready[0], &go, 1) == 1);
    CHECK(ct_writer_expect(w, &number, 1, 60.0, NULL) == CT_OK && commit(w) == CT_OK);
    (void)usleep(5000);
    CHECK(ct_writer_pending(w));
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &how, 0) == child);
    CHECK(ct_writer_wait(w, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "rank 3 ended before") != NULL);
    CHECK(!is_there("checkpoint-5") && entries_in_root() == entries);
    (void)close(ready[0]);
    (void)close(ready[1]);
    ct_writer_free(w);
}

static void
test_a_part_that_is_dropped_or_late_fails_the_save(void)
{
    const size_t entries = entries_in_root();
    ct_error err = {0};
    pair p = begin("checkpoint-6", 60.0);
    CHECK(commit(p.publisher) == CT_OK);
    ct_writer_abort(p.part);
    CHECK(ct_writer_wait(p.publisher, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "ended before") != NULL);
    end(p);
    p = begin("checkpoint-6", 0.02);
    CHECK(commit(p.publisher) == CT_OK);
    CHECK(ct_writer_wait(p.publisher, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "in time") != NULL);
    /* The folder is gone by now. */
    CHECK(commit(p.part) == CT_OK && ct_writer_wait(p.part, &err) == CT_EIO);
    CHECK(!is_there("checkpoint-6") && entries_in_root() == entries);
    end(p);
}

/* Network file systems may have no locks, or keep them on each machine: what is told in
 * the end counts then, and only the time-out ends the wait for a dead process. */
static void
test_without_locks_a_living_part_is_not_taken_for_dead(void)
{
    ct_error err = {0};
    has_locks = false;
    pair p = begin("checkpoint-7", 60.0);
    CHECK(commit(p.publisher) == CT_OK);
    (void)usleep(5000);
    CHECK(ct_writer_pending(p.publisher));
    CHECK(commit(p.part) == CT_OK && ct_writer_wait(p.publisher, NULL) == CT_OK);
    CHECK(problems_of("checkpoint-7") == 0);
    end(p);
    p = begin("checkpoint-8", 0.02);
    CHECK(commit(p.publisher) == CT_OK);
    ct_writer_abort(p.part);
    CHECK(ct_writer_wait(p.publisher, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "in time") != NULL);
    end(p);
    has_locks = true;
}

static void
test_shared_data_is_written_from_its_file_without_a_copy(void)
{
    static const size_t n = 1 << 20;
    ct_writer *w = ct_writer_new();
    ct_error err;
    const int fd = ct_open_unnamed(root);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)n) == 0);
    unsigned char *data = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(data != MAP_FAILED);
    memset(data, 5, n);
    CHECK(ct_writer_share(w, fd, data, n, &err) == CT_EINVAL);
    CHECK(ct_writer_begin(w, below("checkpoint-9"), NULL) == CT_OK);
    CHECK(ct_writer_share(w, -1, data, n, &err) == CT_EIO);
    CHECK(ct_writer_share(w, fd, payload, sizeof payload / 2, NULL) == CT_OK);
    CHECK(ct_writer_share(w, fd, data, n, NULL) == CT_OK);
    CHECK(add(w, "all.bin", data, n, true) == CT_OK);
    CHECK(add(w, "end.bin", data + n - 10, 10, true) == CT_OK);
    CHECK(ct_writer_snapshot_bytes(w) == 0);
    CHECK(add(w, "copied.bin", payload + sizeof payload / 2 - 5, 10, true) == CT_OK);
    CHECK(ct_writer_snapshot_bytes(w) > 0);
    CHECK(munmap(data, n) == 0 && close(fd) == 0);
    CHECK(commit(w) == CT_OK && ct_writer_wait(w, NULL) == CT_OK);
    CHECK(problems_of("checkpoint-9") == 0 && listed_in("checkpoint-9") == 3);
    FILE *file = fopen(below("checkpoint-9/all.bin"), "r");
    CHECK(file != NULL && fread(payload, 1, n, file) == n && fclose(file) == 0);
    for (size_t i = 0; i < n; i++) {
        CHECK(payload[i] == 5);
    }
    /* Another save begins without. */
    CHECK(ct_writer_begin(w, below("checkpoint-9"), NULL) == CT_OK);
    CHECK(ct_writer_share(w, -1, data, n, &err) == CT_EIO);
    ct_writer_free(w);
}

static void
test_misuse_is_rejected(void)
{
    const int other = 4;
    ct_error err;
    const size_t entries = entries_in_root();
    const pair p = begin("checkpoint-10", 60.0);
    ct_writer *third = ct_writer_new();
    const char *folder = ct_writer_folder_borrow(p.publisher);
    CHECK(ct_writer_join(p.part, folder, 5, &err) == CT_EINVAL);
    CHECK(ct_writer_begin(p.part, below("checkpoint-11"), &err) == CT_EINVAL);
    CHECK(ct_writer_join(third, folder, NUMBER, &err) == CT_EIO);
    CHECK(err.os_error == EEXIST);
    CHECK(ct_writer_join(third, below("none/checkpoint-10"), 5, &err) == CT_EIO);
    CHECK(ct_writer_folder_borrow(third) == NULL);
    CHECK(ct_writer_expect(third, &other, 1, 1.0, &err) == CT_EINVAL);
    CHECK(ct_writer_expect(p.part, &other, 1, 1.0, &err) == CT_EINVAL);
    CHECK(ct_writer_expect(p.publisher, &other, 1, 1.0, &err) == CT_EIO);
    CHECK(ct_writer_remove_after(p.part, below("checkpoint-1"), &err) == CT_EINVAL);
    ct_writer_free(third);
    end(p);
    CHECK(!is_there("checkpoint-10") && entries_in_root() == entries);
}

/* Fails the n-th allocation of a save of two, for every n. */
static void
test_survives_every_failed_allocation(void)
{
    bool done = false;
    const int number = NUMBER;
    for (size_t n = 1; n < 400 && !done; n++) {
        ct_writer *w = ct_writer_new(), *part = ct_writer_new();
        ct_plan plan = {0};
        CHECK(ct_plan_set_name(&plan, "a.bin", NULL) == CT_OK);
        CHECK(ct_plan_add_data(&plan, payload, 100, (ct_place){0}, NULL) == CT_OK);
        CHECK(ct_writer_begin(w, below("checkpoint-12"), NULL) == CT_OK);
        ct_alloc_fail_after(n);
        done = ct_writer_join(part, ct_writer_folder_borrow(w), NUMBER, NULL) == CT_OK;
        done = done && ct_writer_add(part, &plan, true, NULL) == CT_OK &&
               ct_writer_expect(w, &number, 1, 60.0, NULL) == CT_OK &&
               commit(part) == CT_OK;
        done = ct_writer_wait(part, NULL) == CT_OK && done;
        done = done && commit(w) == CT_OK && ct_writer_wait(w, NULL) == CT_OK;
        ct_alloc_fail_after(0);
        ct_plan_fini(&plan);
        ct_writer_free(part);
        ct_writer_free(w);
        CHECK(done == is_there("checkpoint-12"));
    }
    CHECK(done && problems_of("checkpoint-12") == 0);
}

int
main(void)
{
    CHECK(mkdtemp(root) != NULL);
    test_the_folder_appears_when_all_parts_have_ended();
    test_files_that_change_after_their_part_has_ended_are_summed_again();
    test_a_parts_flushed_files_may_be_changed_by_others();
    test_a_part_that_fails_fails_the_save_with_its_reason();
    test_a_part_of_a_process_that_dies_fails_the_save();
    test_a_part_that_is_dropped_or_late_fails_the_save();
    test_without_locks_a_living_part_is_not_taken_for_dead();
    test_shared_data_is_written_from_its_file_without_a_copy();
    test_misuse_is_rejected();
    test_survives_every_failed_allocation();
    CHECK(ct_remove_tree(root, NULL) == CT_OK);
    return 0;
}
