/* A unit of sharded parameters over the device and NCCL gives the bits that it gives
 * on the CPU over a group of threads. */
#include "cuda_test.h"

#include "../../cuda/comm_nccl.h"
#include "../../cuda/dynlib.h"
#include "../core/ct_comm_local.h"
#include "core/fsdp/unit.h"

#include <functional>
#include <thread>

enum {
    RANKS = 2,
    GROUPS = 2,
    SHARE =
        640 /* elements that a rank has of each group: more than a quantized block */
};

/* ---- a side: the CPU or the device, with memory of its own ----------------------- */

struct array {
    ct_span span;
    bool on_device;

    array(bool device, ct_dtype dtype, size_t n) : on_device(device)
    {
        span = {NULL, n, dtype};
        const size_t bytes = n * ct_dtype_size(dtype);
        if (device) {
            CHECK(cudaMalloc(&span.data, bytes) == cudaSuccess);
        }
        else {
            span.data = malloc(bytes);
        }
    }
    array(const array &) = delete;
    ~array()
    {
        on_device ? (void)cudaFree(span.data) : free(span.data);
    }

    void fill(uint64_t seed) const
    {
        random_numbers numbers = {seed};
        std::vector<unsigned char> host(bytes());
        for (size_t i = 0; i < span.n; i++) {
            put(span.dtype, host.data(), i, numbers.next());
        }
        move(span.data, host.data(), cudaMemcpyHostToDevice, NULL);
    }

    std::vector<unsigned char> read(void *stream) const
    {
        std::vector<unsigned char> host(bytes());
        move(host.data(), span.data, cudaMemcpyDeviceToHost, stream);
        return host;
    }

    size_t bytes() const
    {
        return span.n * ct_dtype_size(span.dtype);
    }

    void move(void *to, const void *from, cudaMemcpyKind kind, void *on) const
    {
        if (!on_device) {
            memcpy(to, from, bytes());
            return;
        }
        const cudaStream_t stream = (cudaStream_t)on;
        CHECK(cudaMemcpyAsync(to, from, bytes(), kind, stream) == cudaSuccess);
        CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    }
};

static std::vector<unsigned char>
bytes_of(const ct_fsdp &unit, size_t group)
{
    const ct_fsdp_group &g = unit.groups[group];
    const char *from = (const char *)unit.full->data + g.at;
    std::vector<unsigned char> host(g.n * ct_dtype_size(g.full));
    if (unit.device == &ct_device_cpu) {
        memcpy(host.data(), from, host.size());
        return host;
    }
    const cudaStream_t stream = (cudaStream_t)unit.stream;
    CHECK(cudaMemcpyAsync(host.data(), from, host.size(), cudaMemcpyDeviceToHost,
                          stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    return host;
}

/* ---- units ----------------------------------------------------------------------- */

struct options {
    ct_dtype compute, reduce;
    int gather_bits, reduce_bits;
    bool ahead, wide, watched, offload;
};

struct unit_fixture {
    const bool on_device, shards_on_device;
    ct_fsdp core;
    ct_fsdp_ledger *ledger;
    ct_mapping full, grads;
    array first, second, residual;

    unit_fixture(const ct_device *device, const ct_comm *comm, const options &o,
                 ct_fsdp_ledger *account, void *stream)
        : on_device(device != &ct_device_cpu),
          shards_on_device(on_device && !o.offload), ledger(account),
          first(shards_on_device, CT_F32, SHARE),
          second(shards_on_device, CT_F32, SHARE),
          residual(on_device, CT_F32, (size_t)SHARE * RANKS)
    {
        const size_t n = (size_t)SHARE * (size_t)comm->world_size;
        ct_fsdp_group groups[GROUPS] = {};
        for (ct_fsdp_group &group : groups) {
            group.n = n;
            group.full = o.compute;
        }
        groups[0].trainable = true;
        ct_error err;
        check_ok(ct_fsdp_init(&core, device, groups, GROUPS, comm->world_size, &err),
                 err);
        check_ok(ct_mapping_open_on(device->mapping, &full, ct_fsdp_full_bytes(&core),
                                    o.watched, &err),
                 err);
        check_ok(ct_mapping_open_on(device->mapping, &grads, ct_fsdp_grad_bytes(&core),
                                    o.watched, &err),
                 err);
        core.stream = stream;
        core.ledger = ledger;
        core.full = &full;
        core.grads = &grads;
        core.config.reduce = o.reduce;
        core.config.predivide = 2.0; /* neither the mean nor one: all paths scale */
        core.config.postdivide = 3.0;
        core.config.offload = o.offload;
        core.config.gather_bits = o.gather_bits;
        core.config.reduce_bits = o.reduce_bits;
        core.residual = o.reduce_bits == 0 ? NULL : (float *)residual.span.data;
        CHECK(device->zero(stream, &residual.span, 1, NULL) == CT_OK);
        first.fill(11 + (uint64_t)comm->rank);
        second.fill(77 + (uint64_t)comm->rank);
    }
    unit_fixture(const unit_fixture &) = delete;

    ~unit_fixture()
    {
        ct_fsdp_fini(&core);
        ct_mapping_close(&full);
        ct_mapping_close(&grads);
    }

    void gather(ct_comm *comm, bool ahead)
    {
        const ct_span shards[GROUPS] = {first.span, second.span};
        ct_error err;
        if (ahead) {
            check_ok(ct_fsdp_begin_gather(&core, comm, shards, &err), err);
        }
        check_ok(ct_fsdp_gather(&core, comm, shards, &err), err);
    }

    void take(uint64_t seed, size_t at, size_t n, bool add, bool wide) const
    {
        const array grad(on_device, CT_F32, n);
        ct_error err;
        grad.fill(seed);
        check_ok(ct_fsdp_take_grad(const_cast<ct_fsdp *>(&core), 0, at, &grad.span, add,
                                   wide, &err),
                 err);
    }
};

/* What a rank has after a forward and two backwards. */
struct result {
    std::vector<unsigned char> full[GROUPS], grad;
};

static result
train(const ct_device *device, ct_comm *comm, ct_comm *replicate, const options &o,
      void *stream)
{
    ct_fsdp_ledger ledger = {};
    result made;
    {
        unit_fixture unit(device, comm, o, &ledger, stream);
        const size_t n = (size_t)SHARE * (size_t)comm->world_size;
        const array out(unit.shards_on_device, CT_F32, SHARE);
        ct_error err;
        unit.core.replicate_group = replicate;
        unit.gather(comm, o.ahead);
        for (size_t g = 0; g < GROUPS; g++) {
            made.full[g] = bytes_of(unit.core, g);
        }
        ct_fsdp_release(&unit.core);
        for (int backward = 0; backward < 2; backward++) {
            const uint64_t seed = 100 + 10 * (uint64_t)backward + (uint64_t)comm->rank;
            unit.gather(comm, o.ahead);
            unit.take(seed, 5, n - 100, false, o.wide);
            unit.take(seed + 50, 5, n - 100, true, o.wide);
            check_ok(ct_fsdp_clear_grads(&unit.core, 0, 0, 5, &err), err);
            check_ok(ct_fsdp_clear_grads(&unit.core, 0, n - 95, 95, &err), err);
            ct_fsdp_release(&unit.core);
            check_ok(ct_fsdp_reduce(&unit.core, comm, 0, NULL, &out.span, backward == 1,
                                    &err),
                     err);
            ct_fsdp_drop_grads(&unit.core);
        }
        check_ok(ct_fsdp_settle(&unit.core, comm, &err), err);
        check_ok(ct_fsdp_await_copies(&unit.core, &err), err);
        made.grad = out.read(stream);
        CHECK(ledger.live == 0 && ledger.peak > 0);
    }
    ct_fsdp_ledger_close(&ledger, device);
    return made;
}

/* ---- ranks ----------------------------------------------------------------------- */

static void
on_every_rank(int ranks, const std::function<void(int)> &work)
{
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; r++) {
        threads.emplace_back([&work, r] {
            emul::current_host = r + 1;
            work(r);
        });
    }
    for (std::thread &it : threads) {
        it.join();
    }
}

static ct_comm *
join_nccl(const char *id, int rank, int world_size, cudaStream_t stream)
{
    ct_comm *comm = NULL;
    ct_error err;
    check_ok(ct_nccl_join(id, rank, world_size, stream, 30.0, &comm, &err), err);
    return comm;
}

/* Groups of RANKS that share, and of the two that have the same shards if hybrid. */
static ct_comm *
split(ct_comm *comm, bool by_shard)
{
    ct_comm *made = NULL;
    ct_error err;
    const int color = by_shard ? comm->rank % RANKS : comm->rank / RANKS;
    check_ok(ct_comm_split(comm, color, 0, &made, &err), err);
    return made;
}

static result
run_rank(const ct_device *device, ct_comm *all, const options &o, bool hybrid,
         void *stream)
{
    if (!hybrid) {
        return train(device, all, NULL, o, stream);
    }
    ct_comm *sharing = split(all, false), *replicate = split(all, true);
    const result made = train(device, sharing, replicate, o, stream);
    replicate->ops->free(replicate);
    sharing->ops->free(sharing);
    return made;
}

static void
check_equal(const options &o, bool hybrid)
{
    const int ranks = hybrid ? 2 * RANKS : RANKS;
    ct_comm *host[2 * RANKS];
    result on_host[2 * RANKS], on_device[2 * RANKS];
    char id[CT_COMM_ID_BYTES];
    ct_error err;
    check_ok(ct_nccl_id(id, &err), err);
    check_ok(ct_comm_local_new(host, ranks, 30.0, &err), err);
    on_every_rank(ranks, [&](int r) {
        on_host[r] = run_rank(&ct_device_cpu, host[r], o, hybrid, NULL);
        host[r]->ops->free(host[r]);
    });
    on_every_rank(ranks, [&](int r) {
        cudaStream_t stream, side;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking) == cudaSuccess);
        ct_comm *comm = join_nccl(id, r, ranks, side);
        on_device[r] = run_rank(&ct_device_cuda, comm, o, hybrid, stream);
        comm->ops->free(comm);
        (void)cudaStreamDestroy(side);
        (void)cudaStreamDestroy(stream);
    });
    for (int r = 0; r < ranks; r++) {
        for (size_t g = 0; g < GROUPS; g++) {
            CHECK(on_host[r].full[g] == on_device[r].full[g]);
        }
        CHECK(on_host[r].grad == on_device[r].grad);
    }
    CHECK(on_host[0].grad != on_host[1].grad);
    CHECK(emul::seen.orders > 0); /* the side streams behind the units' */
    CHECK(emul::vm.blocks == 0 && emul::vm.reserved == 0);
}

static void
test_whole_elements_of_every_dtype()
{
    for (ct_dtype dtype : {CT_F32, CT_BF16, CT_F16}) {
        check_equal({dtype, dtype, 0, 0, false, false, false, false}, false);
    }
    check_equal({CT_BF16, CT_F32, 0, 0, false, false, false, false}, false);
}

static void
test_wide_gradients_prefetch_and_watching()
{
    check_equal({CT_BF16, CT_BF16, 0, 0, true, true, true, false}, false);
}

static void
test_quantized()
{
    check_equal({CT_F32, CT_F32, 8, 8, false, false, false, false}, false);
    check_equal({CT_BF16, CT_F32, 8, 4, false, false, false, false}, false);
}

static void
test_shards_in_the_hosts_memory()
{
    check_equal({CT_F32, CT_F32, 0, 0, false, false, false, true}, false);
    check_equal({CT_BF16, CT_BF16, 8, 8, false, true, false, true}, false);
}

static void
test_replicate_groups()
{
    check_equal({CT_F32, CT_F32, 0, 0, false, false, false, false}, true);
}

static void
test_a_unit_without_memory_is_not_gathered()
{
    const options o = {CT_F32, CT_F32, 0, 0, false, false, false, false};
    ct_comm *comm = ct_comm_self_new();
    ct_fsdp_ledger ledger = {};
    ct_error err;
    {
        unit_fixture unit(&ct_device_cuda, comm, o, &ledger, NULL);
        const ct_span shards[GROUPS] = {unit.first.span, unit.second.span};
        emul::fail_create = 1;
        CHECK(ct_fsdp_gather(&unit.core, comm, shards, &err) == CT_ENOMEM);
        CHECK(!unit.core.gathered && ledger.live == 0);
        emul::fail_create = 1;
        CHECK(ct_fsdp_clear_grads(&unit.core, 0, 0, 1, &err) == CT_ENOMEM);
        CHECK(!unit.core.holds_grads && ledger.live == 0);
    }
    ct_fsdp_ledger_close(&ledger, &ct_device_cuda);
    comm->ops->free(comm);
}

int
main()
{
    const char *folders[] = {CT_EMUL_WHEELS};
    ct_error err;
    check_ok(ct_dynlib_set_path(folders, 1, &err), err);
    in_two_orders([] {
        test_whole_elements_of_every_dtype();
        test_wide_gradients_prefetch_and_watching();
        test_quantized();
        test_shards_in_the_hosts_memory();
        test_replicate_groups();
        test_a_unit_without_memory_is_not_gathered();
    });
    return 0;
}
