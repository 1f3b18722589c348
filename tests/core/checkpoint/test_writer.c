/* The background writer: whole folders, kept errors, reused memory, forked children. */
#define _GNU_SOURCE
#include "core/base/alloc.h"
#include "core/base/io.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/writer.h"
#include "ct_test.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char root[] = "/tmp/ct_writer_XXXXXX";

#include "ct_saves.h"

static unsigned char payload[3 << 20];

static ct_status
add(ct_writer *writer, const char *name, bool copy, ct_error *err)
{
    ct_plan plan = {0};
    CHECK(ct_plan_set_name(&plan, name, NULL) == CT_OK);
    CHECK(ct_plan_add_data(&plan, payload, sizeof payload, (ct_place){0}, NULL) ==
          CT_OK);
    return ct_writer_add(writer, &plan, copy, err);
}

static void
write_text(const char *path, const char *text)
{
    (void)unlink(path);
    CHECK(ct_write_file(path, text, strlen(text), NULL) == CT_OK);
}

static void
test_folder_appears_whole_with_what_others_wrote(void)
{
    ct_writer *w = ct_writer_new();
    char stray[256];
    CHECK(ct_writer_begin(w, below("checkpoint-1"), NULL) == CT_OK);
    CHECK(add(w, "a.bin", true, NULL) == CT_OK &&
          add(w, "sub/b.bin", true, NULL) == CT_OK);
    (void)snprintf(stray, sizeof stray, "%s/stray", ct_writer_folder_borrow(w));
    write_text(stray, "by an override");
    CHECK(access(below("checkpoint-1"), F_OK) < 0);
    memset(payload, 7, sizeof payload); /* after the snapshot: must not be seen */
    CHECK(ct_writer_commit(w, NULL) == CT_OK && ct_writer_wait(w, NULL) == CT_OK);
    CHECK(!ct_writer_pending(w) && ct_writer_folder_borrow(w) == NULL);
    CHECK(problems_of("checkpoint-1") == 0 && entries_in_root() == 1);
    int fd = open(below("checkpoint-1/sub/b.bin"), O_RDONLY);
    unsigned char first = 1;
    CHECK(read(fd, &first, 1) == 1 && first == 0 && close(fd) == 0);
    CHECK(access(below("checkpoint-1/stray"), F_OK) == 0);
    ct_writer_free(w);
}

static void
test_snapshot_memory_is_reused(void)
{
    ct_writer *w = ct_writer_new();
    size_t bytes = 0;
    for (int i = 0; i < 3; i++) {
        CHECK(ct_writer_begin(w, below("checkpoint-1"), NULL) == CT_OK);
        CHECK(add(w, "a.bin", true, NULL) == CT_OK);
        CHECK(ct_writer_commit(w, NULL) == CT_OK && ct_writer_wait(w, NULL) == CT_OK);
        CHECK(i == 0 || ct_writer_snapshot_bytes(w) == bytes);
        bytes = ct_writer_snapshot_bytes(w);
    }
    CHECK(bytes >= sizeof payload);
    CHECK(problems_of("checkpoint-1") == 0 && entries_in_root() == 1);
    CHECK(access(below("checkpoint-1/stray"), F_OK) < 0); /* replaced, not merged */
    ct_writer_release(w);
    CHECK(ct_writer_snapshot_bytes(w) == 0);
    ct_writer_free(w);
}

static void
test_flushed_files_may_be_changed_by_others(void)
{
    ct_writer *w = ct_writer_new();
    char path[256];
    CHECK(ct_writer_begin(w, below("checkpoint-2"), NULL) == CT_OK);
    CHECK(add(w, "a.bin", true, NULL) == CT_OK && ct_writer_flush(w, NULL) == CT_OK);
    (void)snprintf(path, sizeof path, "%s/a.bin", ct_writer_folder_borrow(w));
    write_text(path, "changed");
    CHECK(ct_writer_commit(w, NULL) == CT_OK && ct_writer_wait(w, NULL) == CT_OK);
    CHECK(problems_of("checkpoint-2") == 0);
    ct_writer_free(w);
}

static void
test_what_was_written_to_the_final_folder_meanwhile_is_kept(void)
{
    ct_writer *w = ct_writer_new();
    CHECK(ct_writer_begin(w, below("checkpoint-3"), NULL) == CT_OK);
    CHECK(add(w, "a.bin", false, NULL) == CT_OK);
    CHECK(mkdir(below("checkpoint-3"), 0777) == 0);
    write_text(below("checkpoint-3/note"), "x");
    CHECK(ct_writer_commit(w, NULL) == CT_OK && ct_writer_wait(w, NULL) == CT_OK);
    CHECK(problems_of("checkpoint-3") == 0);
    CHECK(access(below("checkpoint-3/note"), F_OK) == 0);
    ct_writer_free(w);
}

/* RLIMIT_FSIZE stands for a full disk: write() fails in the middle of a file. */
static void
test_failed_write_is_told_once_and_leaves_the_rest(void)
{
    ct_writer *w = ct_writer_new();
    ct_error err = {0};
    struct rlimit before, small = {1 << 20, 1 << 20};
    size_t entries = entries_in_root();
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    small.rlim_max = before.rlim_max;
    (void)signal(SIGXFSZ, SIG_IGN);
    CHECK(ct_writer_begin(w, below("checkpoint-4"), NULL) == CT_OK);
    CHECK(add(w, "a.bin", true, NULL) == CT_OK);
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK(ct_writer_commit(w, NULL) == CT_OK);
    CHECK(ct_writer_wait(w, &err) == CT_EIO && err.os_error == EFBIG);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(strstr(err.message, "a.bin") != NULL);
    CHECK(ct_writer_wait(w, &err) == CT_OK);
    CHECK(entries_in_root() == entries && problems_of("checkpoint-1") == 0);
    ct_writer_free(w);
}

static void
test_begin_sweeps_what_a_killed_process_left(void)
{
    size_t entries = entries_in_root();
    pid_t child = fork();
    int how = 0;
    if (child == 0) {
        ct_writer *w = ct_writer_new();
        CHECK(ct_writer_begin(w, below("checkpoint-5"), NULL) == CT_OK);
        CHECK(add(w, "a.bin", false, NULL) == CT_OK);
        (void)raise(SIGKILL);
    }
    CHECK(waitpid(child, &how, 0) == child && WIFSIGNALED(how));
    CHECK(entries_in_root() == entries + 1 && access(below("checkpoint-5"), F_OK) < 0);
    ct_writer *w = ct_writer_new(), *other = ct_writer_new();
    CHECK(ct_writer_begin(w, below("checkpoint-6"), NULL) == CT_OK);
    CHECK(entries_in_root() == entries + 1);
    CHECK(ct_writer_begin(other, below("checkpoint-7"), NULL) == CT_OK);
    CHECK(entries_in_root() == entries + 2); /* a living one is not swept away */
    ct_writer_abort(w);
    ct_writer_free(other);
    CHECK(entries_in_root() == entries);
    ct_writer_free(w);
}

static void
test_forked_child_leaves_the_save_alone(void)
{
    ct_writer *w = ct_writer_new();
    int how = 0;
    CHECK(ct_writer_begin(w, below("checkpoint-8"), NULL) == CT_OK);
    CHECK(add(w, "a.bin", true, NULL) == CT_OK && ct_writer_commit(w, NULL) == CT_OK);
    pid_t child = fork();
    if (child == 0) {
        int wrong = ct_writer_wait(w, NULL) != CT_OK || ct_writer_pending(w);
        ct_writer_free(w);
        _exit(wrong);
    }
    CHECK(waitpid(child, &how, 0) == child && WIFEXITED(how) && WEXITSTATUS(how) == 0);
    CHECK(ct_writer_wait(w, NULL) == CT_OK && problems_of("checkpoint-8") == 0);
    ct_writer_free(w);
}

static void
test_older_folders_go_once_the_new_one_is_in_place(void)
{
    ct_writer *w = ct_writer_new();
    size_t entries = entries_in_root();
    CHECK(ct_writer_remove_after(w, below("checkpoint-1"), NULL) == CT_EINVAL);
    CHECK(ct_writer_begin(w, below("checkpoint-11"), NULL) == CT_OK);
    CHECK(add(w, "a.bin", true, NULL) == CT_OK);
    CHECK(ct_writer_remove_after(w, below("checkpoint-1"), NULL) == CT_OK);
    CHECK(ct_writer_remove_after(w, below("absent"), NULL) == CT_OK);
    CHECK(problems_of("checkpoint-1") == 0);
    CHECK(ct_writer_commit(w, NULL) == CT_OK && ct_writer_wait(w, NULL) == CT_OK);
    CHECK(access(below("checkpoint-1"), F_OK) < 0 && entries_in_root() == entries);
    ct_writer_free(w);
}

static void
test_reserved_memory_is_what_the_first_save_uses(void)
{
    ct_writer *w = ct_writer_new();
    CHECK(ct_writer_reserve(w, 100u << 20, (ct_place){0}, NULL) == CT_OK &&
          !ct_writer_pending(w));
    CHECK(ct_writer_begin(w, below("checkpoint-12"), NULL) == CT_OK);
    size_t bytes = ct_writer_snapshot_bytes(w);
    CHECK(bytes >= 100u << 20);
    CHECK(ct_writer_reserve(w, 1, (ct_place){0}, NULL) == CT_EINVAL);
    CHECK(add(w, "a.bin", true, NULL) == CT_OK && ct_writer_commit(w, NULL) == CT_OK);
    CHECK(ct_writer_wait(w, NULL) == CT_OK && problems_of("checkpoint-12") == 0);
    CHECK(ct_writer_snapshot_bytes(w) == bytes);
    CHECK(ct_writer_begin(w, below("checkpoint-13"), NULL) == CT_OK);
    CHECK(add(w, "a.bin", true, NULL) == CT_OK && ct_writer_commit(w, NULL) == CT_OK);
    CHECK(ct_writer_reserve(w, 1, (ct_place){0}, NULL) ==
          CT_OK); /* after the save under way */
    CHECK(!ct_writer_pending(w) && problems_of("checkpoint-13") == 0);
    CHECK(ct_writer_reserve(w, SIZE_MAX / 4, (ct_place){0}, NULL) ==
          CT_OK); /* cannot be had */
    CHECK(ct_writer_wait(w, NULL) == CT_OK && ct_writer_snapshot_bytes(w) == bytes);
    ct_writer_free(w);
}

static void
test_a_save_leaves_the_callers_signals_alone(void)
{
    ct_writer *w = ct_writer_new();
    sigset_t before, after;
    CHECK(sigemptyset(&before) == 0 && sigaddset(&before, SIGUSR1) == 0);
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
    CHECK(ct_writer_begin(w, below("checkpoint-14"), NULL) == CT_OK);
    CHECK(add(w, "a.bin", true, NULL) == CT_OK && ct_writer_commit(w, NULL) == CT_OK);
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &after) == 0);
    for (int number = 1; number < 32; number++) {
        CHECK(sigismember(&after, number) == sigismember(&before, number));
    }
    ct_writer_free(w);
}

/* A device whose copies arrive when somebody waits for them. */
static struct {
    ct_host_copy copies[4];
    size_t n, pinned;
    bool fails;
} late;

static ct_status
late_begin(void *stream, const ct_host_copy *copies, size_t n, void **copied,
           ct_error *err)
{
    (void)stream;
    (void)err;
    for (size_t i = 0; i < n; i++) {
        late.copies[late.n++] = copies[i];
    }
    *copied = &late;
    return CT_OK;
}

static ct_status
late_end(void *copied, ct_error *err)
{
    CHECK(copied == &late);
    for (size_t i = 0; i < late.n; i++) {
        memcpy(late.copies[i].to, late.copies[i].from, late.copies[i].bytes);
    }
    late.n = 0;
    return late.fails ? ct_fail(err, CT_EDEVICE, "the device has failed") : CT_OK;
}

static ct_status
late_pin(void *data, size_t bytes, ct_error *err)
{
    (void)data;
    (void)bytes;
    (void)err;
    late.pinned++;
    return CT_OK;
}

static void
late_unpin(void *data)
{
    (void)data;
    late.pinned--;
}

static ct_status
add_late(ct_writer *writer, const ct_device *device, ct_error *err)
{
    ct_plan plan = {0};
    const ct_place place = {device, 0, NULL};
    CHECK(ct_plan_set_name(&plan, "a.bin", NULL) == CT_OK);
    CHECK(ct_plan_add_data(&plan, payload, sizeof payload, place, NULL) == CT_OK);
    return ct_writer_add(writer, &plan, true, err);
}

static void
test_copies_of_a_device_are_awaited_and_may_fail(void)
{
    ct_device device = ct_device_cpu;
    device.fetch_begin = late_begin;
    device.fetch_end = late_end;
    device.pin = late_pin;
    device.unpin = late_unpin;
    const size_t entries = entries_in_root();
    ct_writer *w = ct_writer_new();
    ct_error err;
    CHECK(ct_writer_begin(w, below("checkpoint-15"), NULL) == CT_OK);
    CHECK(add_late(w, &device, NULL) == CT_OK && late.n == 1 && late.pinned == 1);
    memset(payload, 9, sizeof payload); /* before the copy arrives */
    CHECK(ct_writer_commit(w, NULL) == CT_OK && ct_writer_wait(w, NULL) == CT_OK);
    CHECK(late.n == 0 && problems_of("checkpoint-15") == 0);
    int fd = open(below("checkpoint-15/a.bin"), O_RDONLY);
    unsigned char first = 0;
    CHECK(read(fd, &first, 1) == 1 && first == 9 && close(fd) == 0);
    /* An abort may not give the memory to the next save before. */
    CHECK(ct_writer_begin(w, below("checkpoint-16"), NULL) == CT_OK);
    CHECK(add_late(w, &device, NULL) == CT_OK && late.n == 1);
    ct_writer_abort(w);
    CHECK(late.n == 0);
    late.fails = true;
    CHECK(ct_writer_begin(w, below("checkpoint-16"), NULL) == CT_OK);
    CHECK(add_late(w, &device, NULL) == CT_OK);
    CHECK(ct_writer_commit(w, NULL) == CT_OK && ct_writer_wait(w, &err) == CT_EDEVICE);
    CHECK(strstr(err.message, "the device has failed") != NULL);
    CHECK(access(below("checkpoint-16"), F_OK) < 0 && entries_in_root() == entries + 1);
    ct_writer_free(w);
    CHECK(late.pinned == 0);
}

static ct_status
begin_nothing(void *stream, const ct_host_copy *copies, size_t n, void **copied,
              ct_error *err)
{
    (void)stream;
    (void)copies;
    (void)n;
    (void)copied;
    return ct_fail(err, CT_EDEVICE, "no copy begins");
}

static ct_status
transfer_nothing(void *stream, void *to, const void *from, size_t bytes, ct_error *err)
{
    (void)stream;
    (void)to;
    (void)from;
    (void)bytes;
    return ct_fail(err, CT_EDEVICE, "the device is gone");
}

static void
test_copies_that_do_not_begin_are_made_at_once_or_fail_the_save(void)
{
    ct_device device = ct_device_cpu;
    device.fetch_begin = begin_nothing;
    ct_writer *w = ct_writer_new();
    ct_error err;
    CHECK(ct_writer_begin(w, below("checkpoint-17"), NULL) == CT_OK);
    memset(payload, 5, sizeof payload);
    CHECK(add_late(w, &device, NULL) == CT_OK);
    memset(payload, 6, sizeof payload); /* the file has been written */
    CHECK(ct_writer_commit(w, NULL) == CT_OK && ct_writer_wait(w, NULL) == CT_OK);
    CHECK(problems_of("checkpoint-17") == 0);
    int fd = open(below("checkpoint-17/a.bin"), O_RDONLY);
    unsigned char first = 0;
    CHECK(read(fd, &first, 1) == 1 && first == 5 && close(fd) == 0);
    const size_t entries = entries_in_root();
    device.transfer = transfer_nothing;
    CHECK(ct_writer_begin(w, below("checkpoint-18"), NULL) == CT_OK);
    CHECK(add_late(w, &device, &err) == CT_EDEVICE);
    CHECK(strstr(err.message, "the device is gone") != NULL);
    ct_writer_abort(w);
    CHECK(access(below("checkpoint-18"), F_OK) < 0 && entries_in_root() == entries);
    ct_writer_free(w);
}

static void
test_misuse_is_rejected(void)
{
    ct_writer *w = ct_writer_new();
    ct_error err;
    CHECK(ct_writer_commit(w, &err) == CT_EINVAL);
    CHECK(add(w, "a.bin", true, &err) == CT_EINVAL);
    CHECK(ct_writer_begin(w, "/", &err) == CT_EINVAL);
    CHECK(ct_writer_begin(w, below("checkpoint-9"), &err) == CT_OK);
    CHECK(ct_writer_begin(w, below("checkpoint-9"), &err) == CT_EINVAL);
    ct_writer_free(w);
    CHECK(access(below("checkpoint-9"), F_OK) < 0);
}

/* Fails the n-th allocation of a whole save, for every n. */
static void
test_survives_every_failed_allocation(void)
{
    bool done = false;
    for (size_t n = 1; n < 300 && !done; n++) {
        ct_writer *w = ct_writer_new();
        ct_plan plan = {0};
        CHECK(ct_plan_set_name(&plan, "sub/a.bin", NULL) == CT_OK);
        CHECK(ct_plan_add_data(&plan, payload, 100, (ct_place){0}, NULL) == CT_OK);
        ct_alloc_fail_after(n);
        done = ct_writer_begin(w, below("checkpoint-10"), NULL) == CT_OK &&
               ct_writer_add(w, &plan, true, NULL) == CT_OK &&
               ct_writer_commit(w, NULL) == CT_OK && ct_writer_wait(w, NULL) == CT_OK;
        (void)!ct_writer_wait(w, NULL);
        ct_alloc_fail_after(0);
        ct_plan_fini(&plan);
        ct_writer_free(w);
        CHECK(done == (access(below("checkpoint-10"), F_OK) == 0));
    }
    CHECK(done && problems_of("checkpoint-10") == 0);
}

int
main(void)
{
    CHECK(mkdtemp(root) != NULL);
    test_folder_appears_whole_with_what_others_wrote();
    test_snapshot_memory_is_reused();
    test_flushed_files_may_be_changed_by_others();
    test_what_was_written_to_the_final_folder_meanwhile_is_kept();
    test_failed_write_is_told_once_and_leaves_the_rest();
    test_begin_sweeps_what_a_killed_process_left();
    test_forked_child_leaves_the_save_alone();
    test_older_folders_go_once_the_new_one_is_in_place();
    test_reserved_memory_is_what_the_first_save_uses();
    test_a_save_leaves_the_callers_signals_alone();
    test_copies_of_a_device_are_awaited_and_may_fail();
    test_copies_that_do_not_begin_are_made_at_once_or_fail_the_save();
    test_misuse_is_rejected();
    test_survives_every_failed_allocation();
    CHECK(ct_remove_tree(root, NULL) == CT_OK);
    return 0;
}
