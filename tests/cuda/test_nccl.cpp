/* Our collectives over NCCL's calls, with ranks that are threads and an NCCL of the
 * emulation: what goes where, and what happens when it fails. */
#include "cuda_test.h"

#include "../../cuda/comm_nccl.h"
#include "../../cuda/dynlib.h"
#include "../../cuda/nccl.h"
#include "../core/ct_reduce_to.h"

#include <dlfcn.h>
#include <functional>
#include <limits.h>
#include <sched.h>
#include <thread>

enum {
    RANKS = 3,
    N = 5
};

/* One buffer a rank, filled and read while no rank runs. */
struct buffers {
    std::vector<twin> of;

    buffers(size_t n, double (*value)(size_t rank, size_t i))
    {
        for (size_t r = 0; r < RANKS; r++) {
            of.emplace_back(CT_F32, n, 0);
            for (size_t i = 0; i < n; i++) {
                put(CT_F32, of[r].host.data(), i, value(r, i));
            }
            of[r].upload();
        }
    }

    void check(double (*expected)(size_t rank, size_t i)) const
    {
        for (size_t r = 0; r < RANKS; r++) {
            const std::vector<unsigned char> back = of[r].download();
            for (size_t i = 0; i < of[r].n; i++) {
                CHECK(get(CT_F32, back.data(), i) == expected(r, i));
            }
        }
    }
};

static ct_comm *comms[RANKS];

static void
on_every_rank(const std::function<void(size_t)> &work)
{
    std::vector<std::thread> threads;
    for (size_t r = 0; r < RANKS; r++) {
        threads.emplace_back([&work, r] {
            emul::current_host = (int)r + 1;
            work(r);
        });
    }
    for (std::thread &it : threads) {
        it.join();
    }
}

static void
join_all()
{
    char id[CT_COMM_ID_BYTES];
    ct_error err;
    check_ok(ct_nccl_id(id, &err), err);
    on_every_rank([&](size_t r) {
        ct_error mine;
        check_ok(ct_nccl_join(id, (int)r, RANKS, NULL, 30.0, &comms[r], &mine), mine);
        CHECK(comms[r]->rank == (int)r && comms[r]->world_size == RANKS);
    });
}

static void
leave_all()
{
    for (ct_comm *comm : comms) {
        comm->ops->free(comm);
    }
}

static double
own(size_t rank, size_t i)
{
    return 10.0 * (double)rank + (double)i;
}

static double
nothing(size_t, size_t)
{
    return -1.0;
}

static void
test_all_reduce()
{
    const struct {
        ct_reduce_op op;
        double (*expected)(size_t rank, size_t i);
    } cases[] = {
        {CT_REDUCE_SUM,  [](size_t, size_t i) { return 30.0 + 3.0 * (double)i; }},
        {CT_REDUCE_MEAN, [](size_t, size_t i) { return 10.0 + (double)i; }      },
        {CT_REDUCE_MAX,  [](size_t, size_t i) { return 20.0 + (double)i; }      },
        {CT_REDUCE_MIN,  [](size_t, size_t i) { return (double)i; }             },
    };
    for (const auto &it : cases) {
        buffers all(N, own);
        on_every_rank([&](size_t r) {
            const ct_span span = all.of[r].on_device();
            ct_error err;
            check_ok(ct_comm_all_reduce(comms[r], &span, it.op, &err), err);
        });
        all.check(it.expected);
    }
}

static void
test_all_gather()
{
    buffers in(N, own), out(N * RANKS, nothing);
    on_every_rank([&](size_t r) {
        const ct_span from = in.of[r].on_device(), to = out.of[r].on_device();
        ct_error err;
        check_ok(ct_comm_all_gather(comms[r], &to, &from, &err), err);
    });
    out.check([](size_t, size_t i) { return own(i / N, i % N); });
}

static void
test_reduce_scatter()
{
    buffers in(N * RANKS, own), out(N, nothing);
    on_every_rank([&](size_t r) {
        const ct_span from = in.of[r].on_device(), to = out.of[r].on_device();
        ct_error err;
        check_ok(ct_comm_reduce_scatter(comms[r], &to, &from, CT_REDUCE_SUM, &err),
                 err);
    });
    out.check([](size_t r, size_t i) { return 30.0 + 3.0 * (double)(r * N + i); });
}

static void
test_all_to_all()
{
    buffers in(N * RANKS, own), out(N * RANKS, nothing);
    on_every_rank([&](size_t r) {
        const ct_span from = in.of[r].on_device(), to = out.of[r].on_device();
        ct_error err;
        check_ok(ct_comm_all_to_all(comms[r], &to, &from, &err), err);
    });
    out.check([](size_t r, size_t i) { return own(i / N, r * N + i % N); });
}

static void
test_reduce()
{
    buffers all(N, own);
    on_every_rank([&](size_t r) {
        const ct_span span = all.of[r].on_device();
        ct_error err;
        check_ok(reduce_to(comms[r], &span, CT_REDUCE_MAX, 1, &err), err);
    });
    all.check([](size_t r, size_t i) { return own(r == 1 ? 2 : r, i); });
}

static void
test_broadcast_and_barrier()
{
    buffers all(N, own);
    on_every_rank([&](size_t r) {
        const ct_span span = all.of[r].on_device();
        ct_error err;
        check_ok(ct_comm_broadcast(comms[r], &span, 1, &err), err);
        check_ok(ct_comm_barrier(comms[r], &err), err);
    });
    all.check([](size_t, size_t i) { return own(1, i); });
}

static void
test_wrong_operands_are_rejected()
{
    buffers all(N, own);
    ct_comm *comm = comms[0];
    ct_error err;
    const ct_span span = all.of[0].on_device();
    const ct_span shorts = {all.of[0].device(), N, CT_I16};
    CHECK(ct_comm_all_reduce(comm, &shorts, CT_REDUCE_SUM, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "NCCL has no int16") != NULL);
    CHECK(ct_comm_all_gather(comm, &span, &span, &err) == CT_EINVAL);
    CHECK(ct_comm_reduce_scatter(comm, &span, &span, CT_REDUCE_SUM, &err) == CT_EINVAL);
    CHECK(ct_comm_all_to_all(comm, &span, &span, &err) == CT_EINVAL);
    CHECK(ct_comm_broadcast(comm, &span, RANKS, &err) == CT_EINVAL);
    CHECK(ct_comm_broadcast(comm, &span, -1, &err) == CT_EINVAL);
    CHECK(reduce_to(comm, &span, CT_REDUCE_SUM, -1, &err) == CT_EINVAL);

    ct_comm *made = NULL;
    const char id[CT_COMM_ID_BYTES] = {0};
    CHECK(ct_nccl_join(id, 2, 2, NULL, 30.0, &made, &err) == CT_EINVAL);
    CHECK(ct_nccl_join(id, 0, 0, NULL, 30.0, &made, &err) == CT_EINVAL);
    CHECK(ct_nccl_join(id, 0, 1, NULL, 0.0, &made, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "timeout_seconds must be above 0") != NULL);
    CHECK(made == NULL);
}

static int *
library_variable(const char *name)
{
    void *library = dlopen(CT_EMUL_WHEELS "/nvidia/nccl/lib/libnccl.so.2", RTLD_NOW);
    CHECK(library != NULL);
    int *found = (int *)dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

static void
check_broken(ct_comm *comm, const ct_span *span, int aborted)
{
    ct_error err;
    CHECK(ct_comm_all_reduce(comm, span, CT_REDUCE_SUM, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "broke at an earlier error") != NULL);
    CHECK(*library_variable("fake_nccl_aborted") == aborted);
}

static void
test_a_rejected_collective_breaks_the_group()
{
    buffers all(N, own);
    const ct_span span = all.of[0].on_device();
    ct_comm *comm = comms[0];
    ct_error err;
    *library_variable("fake_nccl_fail") = 6;
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "remote process exited") != NULL);
    check_broken(comm, &span, 1);
}

static ct_comm *
join_alone(double timeout_seconds)
{
    char id[CT_COMM_ID_BYTES];
    ct_comm *comm = NULL;
    ct_error err;
    check_ok(ct_nccl_id(id, &err), err);
    check_ok(ct_nccl_join(id, 0, 1, NULL, timeout_seconds, &comm, &err), err);
    return comm;
}

/* Alone in its group, rank 0 waits for a stream that is busy for a while. */
static void
test_a_dead_peer_ends_the_wait()
{
    ct_comm *comm = join_alone(30.0);
    ct_error err;
    buffers all(N, own);
    const ct_span span = all.of[0].on_device();

    emul::busy = 3;
    *library_variable("fake_nccl_pending") = 5;
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_OK);
    CHECK(emul::busy == 0 && *library_variable("fake_nccl_pending") == 0);

    emul::busy = 1000000;
    *library_variable("fake_nccl_async") = 6;
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_ECOMM);
    CHECK(strcmp(err.message,
                 "all_reduce on rank 0 of 1: NCCL says remote process exited") == 0);
    emul::busy = 0;
    *library_variable("fake_nccl_async") = 0;
    check_broken(comm, &span, 2);
    comm->ops->free(comm);
}

/* A stream that never ends, and a call that is never taken in. */
static void
test_a_rank_that_does_not_come_ends_the_wait_in_time()
{
    const int aborted = *library_variable("fake_nccl_aborted");
    buffers all(N, own);
    const ct_span span = all.of[0].on_device();
    ct_error err;
    for (int k = 0; k < 2; k++) {
        ct_comm *comm = join_alone(0.2);
        emul::busy = k == 0 ? SIZE_MAX : 0;
        *library_variable("fake_nccl_pending") = k == 0 ? 0 : INT_MAX;
        CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_ECOMM);
        CHECK(strcmp(err.message,
                     "all_reduce on rank 0 of 1: another rank did not come, or was not "
                     "done, within 0.2 seconds") == 0);
        emul::busy = 0;
        *library_variable("fake_nccl_pending") = 0;
        check_broken(comm, &span, aborted + k + 1);
        comm->ops->free(comm);
    }
}

static void
test_a_group_that_failed_is_aborted_when_it_is_left()
{
    const int aborted = *library_variable("fake_nccl_aborted");
    ct_comm *comm = join_alone(30.0);
    *library_variable("fake_nccl_async") = 6;
    comm->ops->free(comm);
    *library_variable("fake_nccl_async") = 0;
    CHECK(*library_variable("fake_nccl_aborted") == aborted + 1);
}

/* Which waiting, watching and leaving would end. */
static void
test_a_graph_is_captured_beside_a_group()
{
    cudaStream_t captured;
    cudaGraph_t graph;
    ct_comm *comm = join_alone(30.0);
    buffers all(N, own);
    const ct_request sum = {
        CT_ALL_REDUCE, CT_REDUCE_SUM, 0, all.of[0].on_device(), {}, {}};
    int64_t number = 3;
    const ct_span on_host = {&number, 1, CT_I64};
    CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);
    std::thread([&] {
        ct_error err;
        emul::busy = 3;
        check_ok(ct_comm_all_reduce(comm, &sum.in, CT_REDUCE_SUM, &err), err);
        check_ok(ct_comm_all_reduce(comm, &on_host, CT_REDUCE_SUM, &err), err);
        emul::busy = 3; /* which only the watching thread asks for */
        check_ok(ct_comm_enqueue(comm, &sum, NULL, &err), err);
        while (emul::busy != 0) {
            sched_yield();
        }
        comm->ops->free(comm);
    }).join();
    CHECK(cudaStreamEndCapture(captured, &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

static void
test_joining_ends_in_time()
{
    char id[CT_COMM_ID_BYTES];
    ct_comm *comm = NULL;
    ct_error err;
    check_ok(ct_nccl_id(id, &err), err);
    *library_variable("fake_nccl_pending") = INT_MAX;
    CHECK(ct_nccl_join(id, 0, 1, NULL, 0.2, &comm, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "join the group on rank 0 of 1: another rank") != NULL);
    *library_variable("fake_nccl_pending") = 0;
    CHECK(comm == NULL);
}

/* It is on the stream when start returns; wait asks until the stream has come there. */
static void
test_what_has_begun_is_waited_for()
{
    ct_comm *comm = join_alone(30.0);
    buffers all(N, own);
    const ct_request r = {
        CT_ALL_REDUCE, CT_REDUCE_SUM, 0, all.of[0].on_device(), {}, {}};
    ct_work *first = NULL, *second = NULL;
    ct_error err;
    emul::busy = 4;
    check_ok(ct_comm_start(comm, &r, &first, &err), err);
    check_ok(ct_comm_start(comm, &r, &second, &err), err);
    CHECK(first != NULL && second != NULL && emul::busy == 4);
    check_ok(ct_comm_wait(comm, first, &err), err);
    CHECK(emul::busy == 0);
    check_ok(ct_comm_wait(comm, second, &err), err);
    comm->ops->free(comm);
}

/* Between two kernels of a stream, on the group's; then the group's last work before a
 * third. */
static void
test_a_stream_waits_in_place_of_the_host()
{
    buffers all(N, own);
    cudaStream_t streams[RANKS];
    ct_comm *group[RANKS];
    ct_work *last[RANKS] = {};
    char id[CT_COMM_ID_BYTES];
    CHECK(ct_nccl_id(id, NULL) == CT_OK);
    on_every_rank([&](size_t r) {
        ct_error err;
        check_ok(ct_nccl_join(id, (int)r, RANKS, NULL, 30.0, &group[r], &err), err);
    });
    const size_t waits = emul::seen.waits;
    on_every_rank([&](size_t r) {
        const ct_request sum = {
            CT_ALL_REDUCE, CT_REDUCE_SUM, 0, all.of[r].on_device(), {}, {}};
        ct_work *work = NULL;
        ct_error err;
        CHECK(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking) ==
              cudaSuccess);
        const auto twice = [&] {
            check_ok(ct_device_cuda.scale(streams[r], 2.0, INFINITY, &sum.in, 1, &err),
                     err);
        };
        twice();
        check_ok(ct_comm_enqueue(group[r], &sum, streams[r], &err), err);
        twice();
        check_ok(ct_comm_follow(group[r], streams[r], &err), err);
        check_ok(ct_comm_start(group[r], &sum, &work, &err), err);
        check_ok(ct_comm_order(group[r], work, streams[r], &err), err);
        twice();
        check_ok(ct_comm_follow(group[r], streams[r], &err), err);
        check_ok(ct_comm_start(group[r], &sum, &last[r], &err), err);
        check_ok(ct_comm_precede(group[r], streams[r], &err), err);
        twice();
    });
    CHECK(emul::seen.waits == waits);
    on_every_rank([&](size_t r) {
        ct_error err;
        check_ok(ct_comm_wait(group[r], last[r], &err), err);
        CHECK(cudaStreamSynchronize(streams[r]) == cudaSuccess);
        CHECK(cudaStreamDestroy(streams[r]) == cudaSuccess);
        group[r]->ops->free(group[r]);
    });
    all.check([](size_t, size_t i) { return 16 * 9 * (30.0 + 3.0 * (double)i); });
}

/* No wait looks after the collective: the watching thread ends it, a stream that waits
 * for that goes on, and the next call says why. */
static void
test_a_failure_behind_the_hosts_back_is_reported()
{
    const int aborted = *library_variable("fake_nccl_aborted");
    buffers all(N, own);
    for (int k = 0; k < 2; k++) {
        ct_comm *comm = join_alone(k == 0 ? 0.2 : 30.0);
        const ct_request sum = {
            CT_ALL_REDUCE, CT_REDUCE_SUM, 0, all.of[0].on_device(), {}, {}};
        const char *const why = k == 0 ? "was not done, within 0.2 seconds"
                                       : "NCCL says remote process exited";
        ct_work *work = NULL;
        ct_error err;
        emul::busy = SIZE_MAX;
        check_ok(ct_comm_enqueue(comm, &sum, NULL, &err), err);
        check_ok(ct_comm_start(comm, &sum, &work, &err), err);
        *library_variable("fake_nccl_async") = k == 0 ? 0 : 6;
        while (*library_variable("fake_nccl_aborted") == aborted + k) {
            sched_yield();
        }
        emul::busy = 0;
        *library_variable("fake_nccl_async") = 0;
        CHECK(ct_comm_order(comm, work, NULL, &err) == CT_ECOMM);
        CHECK(strstr(err.message,
                     "all_reduce on rank 0 of 1: the group broke at an "
                     "earlier error: all_reduce on rank 0 of 1: ") == err.message);
        CHECK(strstr(err.message, why) != NULL);
        check_broken(comm, &sum.in, aborted + k + 1);
        comm->ops->free(comm);
    }
}

/* One of two ranks never comes. */
static void
test_a_stream_goes_on_when_a_rank_does_not_come()
{
    char id[CT_COMM_ID_BYTES];
    ct_comm *two[2];
    buffers all(N, own);
    ct_error err;
    check_ok(ct_nccl_id(id, &err), err);
    on_every_rank([&](size_t r) {
        ct_error mine;
        if (r < 2) {
            check_ok(ct_nccl_join(id, (int)r, 2, NULL, 0.3, &two[r], &mine), mine);
        }
    });
    on_every_rank([&](size_t r) {
        const ct_request sum = {
            CT_ALL_REDUCE, CT_REDUCE_SUM, 0, all.of[r].on_device(), {}, {}};
        ct_error mine;
        cudaStream_t stream;
        if (r != 0) {
            return;
        }
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        check_ok(ct_comm_enqueue(two[r], &sum, stream, &mine), mine);
        CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
        CHECK(ct_comm_barrier(two[r], &mine) == CT_ECOMM);
        CHECK(strstr(mine.message, "another rank did not come") != NULL);
        CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    });
    on_every_rank([&](size_t r) {
        if (r < 2) {
            two[r]->ops->free(two[r]);
        }
    });
}

static void
test_a_stream_cannot_be_followed_without_an_event()
{
    ct_comm *comm = join_alone(30.0);
    ct_error err;
    int stream = 0;
    const size_t orders = emul::seen.orders;
    emul::no_events = true;
    CHECK(ct_comm_follow(comm, &stream, &err) == CT_EDEVICE);
    emul::no_events = false;
    CHECK(strstr(err.message, "cannot make an event: CUDA says ") == err.message);
    CHECK(emul::seen.orders == orders);
    comm->ops->free(comm);
}

/* What is asked of a group from the host: its operands are copied there and back. */
static void
test_host_memory_is_copied()
{
    on_every_rank([&](size_t r) {
        int64_t values[2] = {(int64_t)r, 5}, all[2 * RANKS] = {};
        bool flags[2] = {r == 1, true};
        const ct_span two = {values, 2, CT_I64}, six = {all, 2 * RANKS, CT_I64};
        const ct_span said = {flags, 2, CT_BOOL};
        ct_error err;
        check_ok(ct_comm_all_gather(comms[r], &six, &two, &err), err);
        for (int64_t i = 0; i < RANKS; i++) {
            CHECK(all[2 * i] == i && all[2 * i + 1] == 5);
        }
        check_ok(ct_comm_all_reduce(comms[r], &two, CT_REDUCE_SUM, &err), err);
        CHECK(values[0] == 3 && values[1] == 15);
        check_ok(ct_comm_all_reduce(comms[r], &said, CT_REDUCE_SUM, &err), err);
        CHECK(flags[0] && flags[1]);
        const ct_request again = {CT_BROADCAST, CT_REDUCE_SUM, 2, two, {}, {}};
        ct_work *work = NULL;
        values[1] = (int64_t)r;
        check_ok(ct_comm_start(comms[r], &again, &work, &err), err);
        CHECK(work == NULL && values[1] == 2);
    });
}

/* Memory for the copies is missing once: then there is none, and later there is. */
static void
test_memory_for_copies_may_be_missing()
{
    ct_comm *comm = join_alone(30.0);
    std::vector<float> values(1000, 1.0f);
    const ct_span few = {values.data(), 10, CT_F32},
                  all = {values.data(), 1000, CT_F32};
    ct_error err;
    check_ok(ct_comm_all_reduce(comm, &few, CT_REDUCE_SUM, &err), err);
    emul::fail_malloc = 1;
    CHECK(ct_comm_all_reduce(comm, &all, CT_REDUCE_SUM, &err) == CT_EDEVICE);
    CHECK(strstr(err.message, "get memory for a collective on host memory") != NULL);
    CHECK(cudaGetLastError() == cudaSuccess);
    check_ok(ct_comm_all_reduce(comm, &few, CT_REDUCE_SUM, &err), err);
    emul::fail_malloc = 1;
    CHECK(ct_comm_all_reduce(comm, &all, CT_REDUCE_SUM, &err) == CT_EDEVICE);
    CHECK(cudaGetLastError() == cudaSuccess);
    comm->ops->free(comm);
}

/* Ranks 2 and 0 in that order; rank 1 alone; then a group that rank 1 is not in. */
static void
test_groups_are_split()
{
    on_every_rank([&](size_t r) {
        ct_comm *part = NULL, *none = NULL;
        int64_t sum = (int64_t)r + 1;
        const ct_span span = {&sum, 1, CT_I64};
        ct_error err;
        check_ok(ct_comm_split(comms[r], r == 1, -(int64_t)r, &part, &err), err);
        CHECK(part->world_size == (r == 1 ? 1 : 2));
        CHECK(part->rank == (r == 0 ? 1 : 0));
        check_ok(ct_comm_all_reduce(part, &span, CT_REDUCE_SUM, &err), err);
        CHECK(sum == (r == 1 ? 2 : 4));
        part->ops->free(part);
        check_ok(ct_comm_split(comms[r], r == 1 ? -1 : 7, 0, &none, &err), err);
        CHECK((none == NULL) == (r == 1));
        if (none != NULL) {
            check_ok(ct_comm_barrier(none, &err), err);
            none->ops->free(none);
        }
    });
}

/* Threads of a process whose current GPU is not the group's. */
static void
test_any_thread_may_call()
{
    static const int GPU = 1;
    ct_comm *group[RANKS];
    void *there[RANKS];
    char id[CT_COMM_ID_BYTES];
    emul::n_devices = GPU + 1;
    CHECK(ct_nccl_id(id, NULL) == CT_OK);
    on_every_rank([&](size_t r) {
        cudaStream_t stream;
        ct_error err;
        CHECK(cudaSetDevice(GPU) == cudaSuccess);
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        CHECK(cudaMalloc(&there[r], sizeof(float)) == cudaSuccess);
        CHECK(cudaMemsetAsync(there[r], 0, sizeof(float), stream) == cudaSuccess);
        check_ok(ct_nccl_join(id, (int)r, RANKS, stream, 30.0, &group[r], &err), err);
    });
    on_every_rank([&](size_t r) {
        int64_t value = (int64_t)r;
        const ct_span one = {&value, 1, CT_I64};
        cudaStream_t stream = (cudaStream_t)group[r]->stream;
        const ct_span value_there = {there[r], 1, CT_F32};
        const ct_request sum = {CT_ALL_REDUCE, CT_REDUCE_SUM, 0, value_there, {}, {}};
        ct_comm *part = NULL;
        ct_work *work = NULL;
        ct_error err;
        int current = -1;
        check_ok(ct_comm_all_reduce(group[r], &one, CT_REDUCE_SUM, &err), err);
        CHECK(value == 3);
        check_ok(ct_comm_barrier(group[r], &err), err);
        check_ok(ct_comm_start(group[r], &sum, &work, &err), err);
        check_ok(ct_comm_wait(group[r], work, &err), err);
        check_ok(ct_comm_follow(group[r], NULL, &err), err);
        check_ok(ct_comm_split(group[r], 0, 0, &part, &err), err);
        CHECK(part->gpu == GPU);
        CHECK(cudaGetDevice(&current) == cudaSuccess && current == 0);
        part->ops->free(part);
        group[r]->ops->free(group[r]);
        CHECK(cudaFree(there[r]) == cudaSuccess);
        CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    });
    emul::n_devices = 1;
}

static void
test_nothing_to_send_is_no_collective()
{
    ct_comm *comm = comms[1];
    ct_error err;
    const ct_span nothing_at_all = {NULL, 0, CT_F32};
    const ct_request begun = {CT_ALL_REDUCE, CT_REDUCE_SUM, 0, nothing_at_all, {}, {}};
    ct_work *work = NULL;
    CHECK(ct_comm_all_reduce(comm, &nothing_at_all, CT_REDUCE_SUM, &err) == CT_OK);
    CHECK(ct_comm_start(comm, &begun, &work, &err) == CT_OK && work == NULL);
}

int
main()
{
    const char *folder = CT_EMUL_WHEELS;
    ct_error err;
    int version = 0;
    check_ok(ct_dynlib_set_path(&folder, 1, &err), err);
    check_ok(ct_nccl_version(&version, &err), err);
    CHECK(version == 22907);
    join_all();
    test_all_reduce();
    test_all_gather();
    test_reduce_scatter();
    test_all_to_all();
    test_reduce();
    test_broadcast_and_barrier();
    test_wrong_operands_are_rejected();
    test_nothing_to_send_is_no_collective();
    test_a_stream_cannot_be_followed_without_an_event();
    test_host_memory_is_copied();
    test_memory_for_copies_may_be_missing();
    test_groups_are_split();
    test_any_thread_may_call();
    test_a_stream_waits_in_place_of_the_host();
    test_a_rejected_collective_breaks_the_group();
    test_a_dead_peer_ends_the_wait();
    test_a_rank_that_does_not_come_ends_the_wait_in_time();
    test_a_group_that_failed_is_aborted_when_it_is_left();
    test_a_graph_is_captured_beside_a_group();
    test_joining_ends_in_time();
    test_what_has_begun_is_waited_for();
    test_a_failure_behind_the_hosts_back_is_reported();
    test_a_stream_goes_on_when_a_rank_does_not_come();
    leave_all();
    return 0;
}
