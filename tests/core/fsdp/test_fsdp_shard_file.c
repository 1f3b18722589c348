/* Shards in a file: gathers have the values at the shards' addresses, whoever wrote
 * there and however early a thread has read, and failures leave nothing behind. */
#define _GNU_SOURCE /* O_CLOEXEC */
#include "core/base/alloc.h"
#include "core/base/pages.h"
#include "core/fsdp/unit.h"
#include "ct_ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    SHARE = 5000, /* elements that a rank has of each group: several pages */
    GROUPS = 2
};

typedef struct fixture {
    ct_fsdp unit;
    ct_fsdp_ledger ledger;
    ct_mapping full, grads, copy;
    ct_disk_memory disk;
    float *shards[GROUPS]; /* in the file */
    ct_span spans[GROUPS];
} fixture;

static float
value_of(size_t group, size_t element)
{
    return (float)(group * 100000 + element);
}

static void
open_unit(fixture *f, const ct_comm *comm)
{
    const size_t n = SHARE * (size_t)comm->world_size;
    const size_t bytes = ct_pages_round(SHARE * sizeof(float));
    const ct_fsdp_group groups[GROUPS] = {
        {.n = n, .trainable = true},
        {.n = n}
    };
    memset(f, 0, sizeof *f);
    CHECK(ct_fsdp_init(&f->unit, &ct_device_cpu, groups, GROUPS, comm->world_size,
                       NULL) == CT_OK);
    CHECK(ct_mapping_open(&f->full, ct_fsdp_full_bytes(&f->unit), false, NULL) ==
          CT_OK);
    CHECK(ct_mapping_open(&f->grads, ct_fsdp_grad_bytes(&f->unit), false, NULL) ==
          CT_OK);
    CHECK(ct_disk_memory_open(&f->disk, GROUPS * bytes, "/tmp", NULL) == CT_OK);
    CHECK(ct_mapping_open(&f->copy, f->disk.bytes, false, NULL) == CT_OK);
    f->unit.ledger = &f->ledger;
    f->unit.full = &f->full;
    f->unit.grads = &f->grads;
    f->unit.config = (ct_fsdp_config){.predivide = 1.0, .postdivide = 1.0};
    f->unit.file = (ct_shard_file){.disk = &f->disk, .copy = &f->copy};
    for (size_t g = 0; g < GROUPS; g++) {
        f->shards[g] = (float *)(f->disk.data + g * bytes);
        for (size_t i = 0; i < SHARE; i++) {
            f->shards[g][i] = value_of(g, (size_t)comm->rank * SHARE + i);
        }
        f->spans[g] = (ct_span){f->shards[g], SHARE, CT_F32};
    }
}

static void
close_unit(fixture *f)
{
    ct_fsdp_drop_read(&f->unit);
    CHECK(f->ledger.reads == 0);
    ct_fsdp_fini(&f->unit);
    ct_mapping_close(&f->full);
    ct_mapping_close(&f->grads);
    ct_mapping_close(&f->copy);
    ct_disk_memory_close(&f->disk);
    ct_fsdp_ledger_close(&f->ledger, &ct_device_cpu);
}

/* first: of the first element of this rank's first shard. */
static void
check_full(const fixture *f, const ct_comm *comm, float first)
{
    const float *full = f->full.data;
    const size_t n = SHARE * (size_t)comm->world_size;
    for (size_t g = 0; g < GROUPS; g++) {
        const float *own = full + f->unit.groups[g].at / sizeof *full;
        for (size_t i = 0; i < n; i++) {
            const bool changed = g == 0 && i % SHARE == 0;
            CHECK(own[i] == (changed ? first : value_of(g, i)));
        }
    }
    CHECK(!f->unit.file.held && f->ledger.reads == 0);
    CHECK(f->ledger.live == f->full.bytes);
}

static void
gathers_what_is_at_the_addresses(ct_comm *comm, void *arg)
{
    fixture f;
    const bool ahead = *(bool *)arg;
    open_unit(&f, comm);
    for (int pass = 0; pass < 3; pass++) {
        f.shards[0][0] = (float)pass;
        CHECK(!ahead || ct_fsdp_begin_read(&f.unit, NULL) == CT_OK);
        CHECK(!ahead || ct_fsdp_begin_read(&f.unit, NULL) == CT_OK);
        CHECK(f.ledger.reads == ahead);
        CHECK(f.ledger.live == (ahead ? f.copy.bytes : 0));
        CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
        check_full(&f, comm, (float)pass);
        CHECK(f.ledger.peak == f.full.bytes + f.copy.bytes);
        CHECK(ct_fsdp_begin_read(&f.unit, NULL) == CT_OK && f.ledger.reads == 0);
        ct_fsdp_release(&f.unit);
    }
    close_unit(&f);
}

static void
a_prefetch_takes_the_copy(ct_comm *comm, void *arg)
{
    fixture f;
    (void)arg;
    open_unit(&f, comm);
    f.shards[0][0] = 7.0F;
    CHECK(ct_fsdp_begin_read(&f.unit, NULL) == CT_OK);
    CHECK(ct_fsdp_begin_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    CHECK(f.ledger.reads == 0);
    f.shards[0][0] = 8.0F; /* too late */
    CHECK(ct_fsdp_gather(&f.unit, comm, NULL, NULL) == CT_OK);
    check_full(&f, comm, 7.0F);
    ct_fsdp_release(&f.unit);
    close_unit(&f);
}

static void
a_dropped_read_is_made_again(ct_comm *comm, void *arg)
{
    fixture f;
    ct_fsdp_ledger other = {.live = 0};
    (void)arg;
    open_unit(&f, comm);
    CHECK(ct_fsdp_begin_read(&f.unit, NULL) == CT_OK);
    ct_fsdp_set_ledger(&f.unit, &other);
    CHECK(f.ledger.reads == 0 && f.ledger.live == 0);
    CHECK(other.reads == 1 && other.live == f.copy.bytes);
    ct_fsdp_set_ledger(&f.unit, &f.ledger);
    ct_fsdp_drop_read(&f.unit);
    CHECK(f.ledger.reads == 0 && f.ledger.live == 0);
    f.shards[0][0] = -1.0F;
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    check_full(&f, comm, -1.0F);
    ct_fsdp_release(&f.unit);
    close_unit(&f);
}

/* As after load_state_dict(assign=True): one shard is elsewhere. */
static void
a_shard_in_memory_is_gathered_from_there(ct_comm *comm, void *arg)
{
    fixture f;
    static float elsewhere[SHARE];
    (void)arg;
    open_unit(&f, comm);
    memcpy(elsewhere, f.shards[0], sizeof elsewhere);
    elsewhere[0] = 5.0F;
    f.spans[0].data = elsewhere;
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    check_full(&f, comm, 5.0F);
    close_unit(&f);
}

static void
what_the_drive_fails_to_read_is_an_error_and_no_gather(ct_comm *comm, void *arg)
{
    const bool ahead = *(bool *)arg;
    fixture f;
    ct_error err;
    open_unit(&f, comm);
    const int before = dup(f.disk.fd);
    char path[] = "/tmp/ct_shards_XXXXXX";
    const int other = mkstemp(path);
    CHECK(other >= 0 && ftruncate(other, (off_t)f.disk.bytes) == 0);
    const int blind = open(path, O_WRONLY | O_CLOEXEC);
    CHECK(unlink(path) == 0 && dup2(blind, f.disk.fd) == f.disk.fd);
    (void)close(other);
    (void)close(blind);
    CHECK(!ahead || ct_fsdp_begin_read(&f.unit, &err) == CT_OK);
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, &err) == CT_EIO);
    CHECK(err.os_error == EBADF && strstr(err.message, "cannot read") != NULL);
    CHECK(!f.unit.gathered && f.ledger.live == 0 && f.ledger.reads == 0);
    CHECK(dup2(before, f.disk.fd) == f.disk.fd);
    (void)close(before);
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    ct_fsdp_release(&f.unit);
    CHECK(ftruncate(f.disk.fd, 4096) == 0);
    CHECK(ct_fsdp_begin_read(&f.unit, &err) == CT_EIO);
    CHECK(strstr(err.message, "has been cut") != NULL);
    CHECK(ct_fsdp_begin_gather(&f.unit, comm, f.spans, &err) == CT_EIO);
    CHECK(!f.unit.begun && f.ledger.live == 0 && f.ledger.begun == 0);
    close_unit(&f);
}

static void
a_forked_child_ends_without_the_reading_thread(ct_comm *comm, void *arg)
{
    fixture f;
    ct_error err;
    int ended;
    (void)arg;
    open_unit(&f, comm);
    CHECK(ct_fsdp_begin_read(&f.unit, NULL) == CT_OK);
    const pid_t child = fork();
    if (child == 0) {
        ct_fsdp_drop_read(&f.unit);
        const bool ok = ct_fsdp_begin_read(&f.unit, &err) == CT_ECOMM &&
                        strstr(err.message, "a gather") != NULL;
        close_unit(&f);
        _exit(ok ? 0 : 1);
    }
    CHECK(waitpid(child, &ended, 0) == child && ended == 0);
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    check_full(&f, comm, value_of(0, 0));
    close_unit(&f);
}

int
main(void)
{
    for (int ahead = 0; ahead < 2; ahead++) {
        bool arg = ahead != 0;
        for (int ranks = 1; ranks <= 3; ranks++) {
            run_ranks(ranks, 30.0, gathers_what_is_at_the_addresses, &arg);
        }
        run_ranks(1, 30.0, what_the_drive_fails_to_read_is_an_error_and_no_gather,
                  &arg);
    }
    run_ranks(2, 30.0, a_prefetch_takes_the_copy, NULL);
    run_ranks(2, 30.0, a_dropped_read_is_made_again, NULL);
    run_ranks(1, 30.0, a_shard_in_memory_is_gathered_from_there, NULL);
    run_ranks(1, 30.0, a_forked_child_ends_without_the_reading_thread, NULL);
    return 0;
}
