/* State and parameters in a file: updates equal those of memory to the bit, and what
 * fails says what was done. */
#define _GNU_SOURCE /* O_CLOEXEC */
#include "core/base/alloc.h"
#include "core/base/pages.h"
#include "core/optim/optim.h"
#include "ct_test.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    PARAMS = 4,
    STEPS = 3,
    STATES = 2
};

/* Several pieces and a rest, a single piece, an empty parameter, and state in memory.
 */
static const size_t lengths[PARAMS] = {(5 << 19) + 77, 4096, 0, 1003};
static const bool on_disk[PARAMS] = {true, true, true, false};

typedef struct model {
    ct_optim *optim;
    float *param[PARAMS], *grad[PARAMS], *state[PARAMS][STATES];
    ct_disk_memory disk;
    bool uses_disk;
} model;

static const ct_adamw_config adamw = {
    .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.01};

static float *
zeros(size_t n)
{
    float *made = ct_calloc(n + 1, sizeof *made);
    CHECK(made != NULL);
    return made;
}

static size_t
disk_bytes(size_t p)
{
    return ct_pages_round(lengths[p] * sizeof(float));
}

static model *
model_make(bool uses_disk, size_t n_buffers)
{
    model *m = ct_calloc(1, sizeof *m);
    CHECK(m != NULL);
    m->optim = ct_optim_new(&ct_device_cpu);
    m->uses_disk = uses_disk;
    size_t bytes = 0, offset = 0;
    CHECK(m->optim != NULL && ct_optim_resize(m->optim, 1, PARAMS, NULL) == CT_OK);
    ct_optim_groups_borrow(m->optim)[0].adamw = adamw;
    for (size_t p = 0; p < PARAMS; p++) {
        bytes += on_disk[p] ? STATES * disk_bytes(p) : 0;
    }
    if (uses_disk) {
        CHECK(ct_disk_memory_open(&m->disk, bytes, "/tmp", NULL) == CT_OK);
        ct_optim_set_disk(m->optim, &m->disk, n_buffers);
    }
    for (size_t p = 0; p < PARAMS; p++) {
        m->param[p] = zeros(lengths[p]);
        m->grad[p] = zeros(lengths[p]);
        for (size_t k = 0; k < STATES; k++) {
            const bool there = uses_disk && on_disk[p];
            m->state[p][k] =
                there ? (float *)(m->disk.data + offset) : zeros(lengths[p]);
            offset += there ? disk_bytes(p) : 0;
        }
        ct_optim_params_borrow(m->optim)[p] = (ct_optim_param){
            .param = m->param[p],
            .grad = m->grad[p],
            .state = {m->state[p][0], m->state[p][1]},
            .n = lengths[p],
            .dtype = CT_F32,
        };
    }
    return m;
}

static void
model_free(model *m)
{
    for (size_t p = 0; p < PARAMS; p++) {
        for (size_t k = 0; k < STATES; k++) {
            if (!m->uses_disk || !on_disk[p]) {
                ct_free(m->state[p][k]);
            }
        }
        ct_free(m->param[p]);
        ct_free(m->grad[p]);
    }
    ct_optim_free(m->optim);
    ct_disk_memory_close(&m->disk);
    ct_free(m);
}

static void
fill(model *m, uint32_t seed)
{
    for (size_t p = 0; p < PARAMS; p++) {
        for (size_t i = 0; i < lengths[p]; i++) {
            seed = seed * 1664525u + 1013904223u;
            m->grad[p][i] = (float)(int32_t)seed * 0x1p-31f;
        }
    }
}

static ct_status
update(model *m, ct_error *err)
{
    const ct_optim_pass pass = {.grad_scale = 0.5, .zero_grads = true};
    return ct_optim_update(m->optim, NULL, &pass, err);
}

static void
check_equal(const model *a, const model *b)
{
    for (size_t p = 0; p < PARAMS; p++) {
        const size_t bytes = lengths[p] * sizeof(float);
        CHECK(memcmp(a->param[p], b->param[p], bytes) == 0);
        CHECK(memcmp(a->grad[p], b->grad[p], bytes) == 0);
        for (size_t k = 0; k < STATES; k++) {
            CHECK(memcmp(a->state[p][k], b->state[p][k], bytes) == 0);
        }
    }
}

static void
test_updates_are_those_of_state_in_memory(size_t n_buffers)
{
    model *here = model_make(false, 0), *there = model_make(true, n_buffers);
    for (uint32_t step = 0; step < STEPS; step++) {
        fill(here, step);
        fill(there, step);
        CHECK(update(here, NULL) == CT_OK && update(there, NULL) == CT_OK);
        CHECK(ct_optim_params_borrow(there->optim)[0].step == step + 1);
        check_equal(here, there);
        ct_disk_memory_drop_pages(&there->disk);
    }
    /* What is written at the addresses is what the next update reads. */
    here->state[0][0][5] = there->state[0][0][5] = 7.0f;
    here->state[0][1][lengths[0] - 1] = there->state[0][1][lengths[0] - 1] = 9.0f;
    fill(here, 9);
    fill(there, 9);
    CHECK(update(here, NULL) == CT_OK && update(there, NULL) == CT_OK);
    check_equal(here, there);
    model_free(here);
    model_free(there);
}

static void
test_a_file_that_was_cut_stops_before_anything_changes(void)
{
    model *m = model_make(true, 2);
    ct_error err;
    fill(m, 1);
    CHECK(ftruncate(m->disk.fd, 4096) == 0);
    CHECK(update(m, &err) == CT_EIO);
    CHECK(strstr(err.message, "has been cut") != NULL);
    CHECK(strstr(err.message, "nothing is updated") != NULL);
    CHECK(m->param[0][0] == 0.0f && m->param[3][0] == 0.0f);
    CHECK(ct_optim_params_borrow(m->optim)[0].step == 0);
    model_free(m);
}

/* ---- parameters in files --------------------------------------------------------- */

/* Side by side in one file, of which others have the first and the last elements. */
enum {
    BEFORE = 1021,
    AFTER = 77
};

/* Moves the parameters there. */
static void
move_to(model *m, ct_disk_memory *file)
{
    size_t n = BEFORE + AFTER, at = BEFORE;
    for (size_t p = 0; p < PARAMS; p++) {
        n += lengths[p];
    }
    CHECK(ct_disk_memory_open(file, n * sizeof(float), "/tmp", NULL) == CT_OK);
    float *all = (float *)file->data;
    for (size_t i = 0; i < n; i++) {
        all[i] = (float)i;
    }
    for (size_t p = 0; p < PARAMS; p++) {
        memcpy(all + at, m->param[p], lengths[p] * sizeof(float));
        ct_free(m->param[p]);
        m->param[p] = all + at;
        ct_optim_params_borrow(m->optim)[p].param = m->param[p];
        at += lengths[p];
    }
    const ct_disk_memory *files[] = {file};
    CHECK(ct_optim_set_shards(m->optim, files, 1, NULL) == CT_OK);
    ct_disk_memory_drop_pages(file);
}

/* The parameters' memory is the file's. */
static void
free_moved(model *m, ct_disk_memory *file)
{
    for (size_t p = 0; p < PARAMS; p++) {
        m->param[p] = NULL;
    }
    model_free(m);
    ct_disk_memory_close(file);
}

static void
test_parameters_that_share_pages_of_a_file_have_their_own_update(bool state_too)
{
    model *here = model_make(false, 0), *there = model_make(state_too, 3);
    ct_disk_memory file = {0};
    move_to(there, &file);
    for (uint32_t step = 0; step < STEPS; step++) {
        fill(here, step);
        fill(there, step);
        if (step == 1) { /* one without a gradient stays as it is */
            ct_optim_params_borrow(here->optim)[1].grad = NULL;
            ct_optim_params_borrow(there->optim)[1].grad = NULL;
        }
        CHECK(update(here, NULL) == CT_OK && update(there, NULL) == CT_OK);
        check_equal(here, there);
        ct_optim_params_borrow(here->optim)[1].grad = here->grad[1];
        ct_optim_params_borrow(there->optim)[1].grad = there->grad[1];
        ct_disk_memory_drop_pages(&file);
    }
    const float *all = (const float *)file.data;
    const size_t end = (size_t)(there->param[PARAMS - 1] - all) + lengths[PARAMS - 1];
    CHECK(all[0] == 0.0f && all[BEFORE - 1] == (float)(BEFORE - 1));
    CHECK(all[end] == (float)end && all[end + AFTER - 1] == (float)(end + AFTER - 1));
    model_free(here);
    free_moved(there, &file);
}

/* bfloat16 parameters in a file are copies of float32 master weights in memory. */
static void
test_copies_in_a_file_are_written(void)
{
    model *m = model_make(false, 0);
    ct_disk_memory file = {0};
    const size_t n = lengths[0] + lengths[1];
    CHECK(ct_disk_memory_open(&file, n * sizeof(uint16_t), "/tmp", NULL) == CT_OK);
    const ct_disk_memory *files[] = {&file};
    CHECK(ct_optim_set_shards(m->optim, files, 1, NULL) == CT_OK);
    uint16_t *copies = (uint16_t *)file.data;
    for (size_t p = 0; p < 2; p++) {
        ct_optim_params_borrow(m->optim)[p].copy = copies + p * lengths[0];
        ct_optim_params_borrow(m->optim)[p].copy_dtype = CT_BF16;
    }
    fill(m, 3);
    CHECK(update(m, NULL) == CT_OK);
    for (size_t p = 0; p < 2; p++) {
        for (size_t i = 0; i < lengths[p]; i++) {
            uint32_t bits;
            memcpy(&bits, &m->param[p][i], sizeof bits);
            bits += 0x7FFF + (bits >> 16 & 1);
            CHECK(copies[p * lengths[0] + i] == (uint16_t)(bits >> 16));
        }
    }
    model_free(m);
    ct_disk_memory_close(&file);
}

static void
test_a_file_of_parameters_that_was_cut_stops_before_anything_changes(void)
{
    model *m = model_make(false, 0);
    ct_disk_memory file = {0};
    ct_error err;
    move_to(m, &file);
    const float first = m->param[0][0];
    fill(m, 1);
    CHECK(ftruncate(file.fd, 4096 * 4) == 0);
    CHECK(update(m, &err) == CT_EIO && strstr(err.message, "has been cut") != NULL);
    CHECK(m->param[0][0] == first);
    CHECK(ct_optim_params_borrow(m->optim)[0].step == 0);
    free_moved(m, &file);
}

/* ---- what fails ------------------------------------------------------------------ */

/* The descriptor becomes one that a drive's failure is like: every read of the pages
 * fails, or every write. */
static void
test_a_drive_that_fails_is_named_with_what_was_done(bool of_shards, int flags,
                                                    const char *named)
{
    model *m = model_make(true, 2);
    ct_disk_memory file = {0};
    ct_error err;
    if (of_shards) {
        move_to(m, &file);
    }
    const ct_disk_memory *disk = of_shards ? &file : &m->disk;
    char path[] = "/tmp/ct_disk_XXXXXX";
    const int other = mkstemp(path);
    CHECK(other >= 0 && ftruncate(other, (off_t)disk->bytes) == 0);
    (void)close(other);
    const int fd = open(path, flags | O_CLOEXEC);
    CHECK(fd >= 0 && unlink(path) == 0 && dup2(fd, disk->fd) == disk->fd);
    (void)close(fd);
    fill(m, 1);
    CHECK(update(m, &err) == CT_EIO && err.os_error == EBADF);
    CHECK(strstr(err.message, named) != NULL);
    CHECK(strstr(err.message, "resume from the last checkpoint") != NULL);
    CHECK(ct_optim_params_borrow(m->optim)[0].step == 0);
    if (of_shards) {
        free_moved(m, &file);
    }
    else {
        model_free(m);
    }
}

static void
test_a_forked_child_leaves_the_file_alone(void)
{
    model *m = model_make(true, 3);
    ct_error err;
    int ended;
    fill(m, 1);
    const pid_t child = fork();
    if (child == 0) {
        const bool ok = update(m, &err) == CT_ECOMM &&
                        strstr(err.message, "belongs to process") != NULL;
        model_free(m);
        _exit(ok ? 0 : 1);
    }
    CHECK(waitpid(child, &ended, 0) == child && ended == 0);
    CHECK(update(m, NULL) == CT_OK && m->state[0][0][0] != 0.0f);
    model_free(m);
}

static void
test_what_cannot_be_updated_in_pieces_is_rejected(void)
{
    model *m = model_make(true, 2);
    ct_error err;
    fill(m, 1);
    ct_optim_params_borrow(m->optim)[1].state[0] = m->state[1][0] + 1;
    CHECK(update(m, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "page of its own") != NULL);
    ct_optim_params_borrow(m->optim)[1].state[0] = m->state[1][0];
    ct_optim_groups_borrow(m->optim)[0] = (ct_optim_group){
        .kind = CT_OPTIM_LAMB,
        .lamb = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6}
    };
    CHECK(update(m, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "element by element") != NULL);
    CHECK(m->param[0][0] == 0.0f);
    model_free(m);
}

static void
test_memory_that_runs_out_changes_nothing(void)
{
    bool done = false;
    for (size_t n = 1; !done; n++) {
        model *m = model_make(true, 2);
        ct_error err;
        fill(m, 1);
        ct_alloc_fail_after(n);
        const ct_status status = update(m, &err);
        ct_alloc_fail_after(0);
        CHECK(status == CT_OK || status == CT_ENOMEM);
        CHECK((m->param[0][0] != 0.0f) == (status == CT_OK));
        done = status == CT_OK;
        model_free(m);
    }
    for (size_t n = 1; n <= 2; n++) {
        ct_disk_memory memory = {0};
        ct_alloc_fail_after(n);
        const ct_status status = ct_disk_memory_open(&memory, 1, "/tmp", NULL);
        ct_alloc_fail_after(0);
        CHECK((status == CT_OK) == (memory.data != NULL));
        ct_disk_memory_close(&memory);
    }
}

static void
test_a_folder_that_is_missing_or_full_is_named(void)
{
    ct_disk_memory memory = {0};
    ct_error err;
    CHECK(ct_disk_memory_open(&memory, 1, "/nowhere/at/all", &err) == CT_EIO);
    CHECK(err.os_error == ENOENT && strstr(err.message, "/nowhere/at/all") != NULL);
    CHECK(strstr(err.message, "make the folder") != NULL);
    CHECK(ct_disk_memory_open(&memory, 0, "/tmp", &err) == CT_EINVAL ||
          memory.bytes != 0);
    CHECK(ct_disk_memory_open(&memory, SIZE_MAX, "/tmp", &err) == CT_EINVAL);
    CHECK(ct_disk_memory_open(&memory, (size_t)1 << 46, "/tmp", &err) == CT_EIO);
    CHECK(strstr(err.message, "cannot set aside") != NULL);
    CHECK(strstr(err.message, "room for all of it") != NULL);
    CHECK(memory.data == NULL);
}

int
main(void)
{
    test_updates_are_those_of_state_in_memory(1);
    test_updates_are_those_of_state_in_memory(2);
    test_updates_are_those_of_state_in_memory(5);
    test_a_file_that_was_cut_stops_before_anything_changes();
    test_parameters_that_share_pages_of_a_file_have_their_own_update(false);
    test_parameters_that_share_pages_of_a_file_have_their_own_update(true);
    test_copies_in_a_file_are_written();
    test_a_file_of_parameters_that_was_cut_stops_before_anything_changes();
    for (int of_shards = 0; of_shards < 2; of_shards++) {
        test_a_drive_that_fails_is_named_with_what_was_done(of_shards, O_WRONLY,
                                                            "cannot read");
        test_a_drive_that_fails_is_named_with_what_was_done(of_shards, O_RDONLY,
                                                            "cannot write");
    }
    test_a_forked_child_leaves_the_file_alone();
    test_what_cannot_be_updated_in_pieces_is_rejected();
    test_memory_that_runs_out_changes_nothing();
    test_a_folder_that_is_missing_or_full_is_named();
    return 0;
}
