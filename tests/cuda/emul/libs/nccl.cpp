/* A libnccl.so.2 for the emulation: ranks are threads of one process, a collective is
 * worked out when the streams of all have come to it. It is opened as the real one is.
 */
#include "../emul.h"
#include "math/half.h"

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <stdint.h>
#include <string.h>
#include <string>
#include <vector>

namespace {

enum {
    SUM = 0,
    SUCCESS = 0,
    INVALID_ARGUMENT = 4,
    REMOTE_ERROR = 6,
    MAX = 2,
    MIN = 3,
    MEAN = 4,
    BYTE = 1,
    LONG = 4,
    HALF = 6,
    FLOAT = 7,
    DOUBLE = 8,
    BFLOAT = 9,
    IN_PROGRESS = 7,
    NO_COLOR = -1
};

/* ncclConfig_t of NCCL 2.18. */
struct config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};

struct id {
    char bytes[128];
};

/* A rank's operands: `in_bytes` and `out_bytes` of them. Of a group of sends and
 * receives, one of each a rank. */
struct call {
    const char *in;
    char *out;
    size_t in_bytes, out_bytes;
    std::vector<const char *> sent;
    std::vector<char *> received;
};

struct wish {
    int color, key;
};

struct collective {
    std::shared_ptr<emul::meeting> all = std::make_shared<emul::meeting>();
    std::vector<call> calls;
};

struct group {
    std::map<size_t, std::shared_ptr<collective>> begun; /* by their number */
    std::vector<wish> wishes;
    size_t joined = 0, arrived = 0, round = 0;
};

std::mutex mutex;
std::condition_variable changed;
std::map<std::string, group> groups;

struct rank {
    group *of;
    size_t number, world_size, called;
};

size_t
size_of(int dtype)
{
    switch (dtype) {
    case BYTE:
        return 1;
    case HALF:
    case BFLOAT:
        return 2;
    case FLOAT:
        return 4;
    case LONG:
    case DOUBLE:
        return 8;
    default:
        return 0;
    }
}

/* Elements of 16 bits: sums and means in double, rounded once; -0 where all are. */
template <float (*load)(uint16_t), uint16_t (*store)(double)>
void
average_halves(const std::vector<call> &calls, size_t i, int op, char *to)
{
    double sum = -0.0;
    for (const call &it : calls) {
        sum += (double)load(((const uint16_t *)it.in)[i]);
    }
    *(uint16_t *)to = store(op == MEAN ? sum / (double)calls.size() : sum);
}

template <typename T>
void
reduce_as(const std::vector<call> &calls, size_t i, int op, char *to)
{
    T value = ((const T *)calls[0].in)[i];
    for (size_t r = 1; r < calls.size(); r++) {
        const T next = ((const T *)calls[r].in)[i];
        value = op == MAX   ? (next > value ? next : value)
                : op == MIN ? (next < value ? next : value)
                            : (T)(value + next);
    }
    *(T *)to = op == MEAN ? (T)(value / (T)calls.size()) : value;
}

/* Element i of all ranks, into `to`. */
void
reduce(const std::vector<call> &calls, size_t i, int dtype, int op, char *to)
{
    dtype == BYTE     ? reduce_as<unsigned char>(calls, i, op, to)
    : dtype == LONG   ? reduce_as<int64_t>(calls, i, op, to)
    : dtype == DOUBLE ? reduce_as<double>(calls, i, op, to)
    : dtype == HALF ? average_halves<ct_f32_from_f16, ct_f16_from_f64>(calls, i, op, to)
    : dtype == BFLOAT
        ? average_halves<ct_f32_from_bf16, ct_bf16_from_f64>(calls, i, op, to)
        : reduce_as<float>(calls, i, op, to);
}

/* Waits, as the host, for all ranks. */
void
meet(rank *me)
{
    std::unique_lock<std::mutex> held(mutex);
    group &of = *me->of;
    const size_t round = of.round;
    if (++of.arrived == me->world_size) {
        of.arrived = 0;
        of.round++;
        changed.notify_all();
    }
    changed.wait(held, [&] { return of.round != round; });
}

void
touch(const call &it)
{
    emul::touch(it.in, it.in_bytes, false);
    emul::touch(it.out, it.out_bytes, true);
    for (const char *sent : it.sent) {
        emul::touch(sent, it.in_bytes, false);
    }
    for (char *received : it.received) {
        emul::touch(received, it.out_bytes, true);
    }
}

std::shared_ptr<collective>
collective_of(rank *me, size_t number)
{
    const std::lock_guard<std::mutex> held(mutex);
    std::shared_ptr<collective> &it = me->of->begun[number];
    if (!it) {
        it = std::make_shared<collective>();
        it->all->ranks = me->world_size;
        it->calls.resize(me->world_size);
    }
    return it;
}

/* work(calls): once, on the operands of all ranks. */
template <typename Work>
int
enqueue(rank *me, cudaStream_t stream, const char *name, const call &mine, int dtype,
        Work work)
{
    if (size_of(dtype) == 0) {
        return INVALID_ARGUMENT;
    }
    const std::shared_ptr<collective> it = collective_of(me, me->called++);
    it->calls[me->number] = mine;
    emul::enqueue_part(
        stream, name, it->all, [mine] { touch(mine); },
        [it, work] { work(it->calls); });
    return SUCCESS;
}

} // namespace

extern "C" {

int fake_nccl_fail;    /* the next collective is rejected with this result */
int fake_nccl_async;   /* what communicators say of themselves */
int fake_nccl_pending; /* so many times they say before that a call is in progress */
int fake_nccl_aborted;

static int
rejected()
{
    const int result = fake_nccl_fail;
    fake_nccl_fail = SUCCESS;
    return result;
}

int
ncclGetVersion(int *version)
{
    *version = 22907;
    return SUCCESS;
}

int
ncclGetUniqueId(id *made)
{
    static std::atomic<uint64_t> count;
    const uint64_t number = ++count;
    memset(made, 0, sizeof *made);
    memcpy(made->bytes, &number, sizeof number);
    return SUCCESS;
}

static rank *
join(const std::string &name, size_t world_size, size_t number)
{
    std::unique_lock<std::mutex> held(mutex);
    group &it = groups[name];
    it.wishes.resize(world_size);
    it.joined++;
    changed.notify_all();
    changed.wait(held, [&] { return it.joined == world_size; });
    return new rank{&it, number, world_size, 0};
}

int
ncclCommInitRankConfig(rank **comm, int world_size, id of, int number,
                       const config *chosen)
{
    if (chosen->size != sizeof *chosen || chosen->magic != 0xcafebeef ||
        chosen->version != 21800 || chosen->blocking != 0) {
        return INVALID_ARGUMENT;
    }
    *comm = join(std::string(of.bytes, sizeof of.bytes), (size_t)world_size,
                 (size_t)number);
    return IN_PROGRESS;
}

int
ncclCommSplit(rank *comm, int color, int key, rank **made, const config *)
{
    std::string name;
    size_t size = 0, number = 0;
    std::vector<wish> wishes;
    {
        const std::lock_guard<std::mutex> held(mutex);
        comm->of->wishes[comm->number] = {color, key};
    }
    meet(comm);
    {
        const std::lock_guard<std::mutex> held(mutex);
        wishes = comm->of->wishes;
        name = "split " + std::to_string(comm->of->round) + " of " +
               std::to_string((uintptr_t)comm->of) + " " + std::to_string(color);
    }
    meet(comm); /* before anybody asks for the next one */
    for (size_t r = 0; r < wishes.size(); r++) {
        const bool before =
            wishes[r].key < key || (wishes[r].key == key && r < comm->number);
        size += wishes[r].color == color;
        number += wishes[r].color == color && before;
    }
    *made = color == NO_COLOR ? nullptr : join(name, size, number);
    return SUCCESS;
}

int
ncclCommDestroy(rank *comm)
{
    delete comm;
    return SUCCESS;
}

int
ncclCommAbort(rank *comm)
{
    fake_nccl_aborted++;
    for (size_t i = 0; i < comm->called; i++) {
        emul::abort(collective_of(comm, i)->all);
    }
    delete comm;
    return SUCCESS;
}

int
ncclCommGetAsyncError(rank *, int *result)
{
    const bool pending = fake_nccl_pending > 0 && fake_nccl_pending-- > 0;
    *result = pending ? IN_PROGRESS : fake_nccl_async;
    return SUCCESS;
}

const char *
ncclGetErrorString(int result)
{
    return result == REMOTE_ERROR ? "remote process exited" : "invalid argument";
}

int
ncclAllReduce(const void *in, void *out, size_t n, int dtype, int op, rank *comm,
              cudaStream_t stream)
{
    const int result = rejected();
    if (result != SUCCESS) {
        return result;
    }
    const call mine = {(const char *)in,   (char *)out, n * size_of(dtype),
                       n * size_of(dtype), {},          {}};
    return enqueue(comm, stream, "ncclAllReduce", mine, dtype,
                   [=](const std::vector<call> &calls) {
                       for (size_t i = 0; i < n; i++) {
                           char value[8];
                           reduce(calls, i, dtype, op, value);
                           for (const call &it : calls) {
                               memcpy(it.out + i * size_of(dtype), value,
                                      size_of(dtype));
                           }
                       }
                   });
}

int
ncclAllGather(const void *in, void *out, size_t n, int dtype, rank *comm,
              cudaStream_t stream)
{
    const call mine = {(const char *)in,
                       (char *)out,
                       n * size_of(dtype),
                       n * comm->world_size * size_of(dtype),
                       {},
                       {}};
    return enqueue(comm, stream, "ncclAllGather", mine, dtype,
                   [=](const std::vector<call> &calls) {
                       for (const call &to : calls) {
                           for (size_t r = 0; r < calls.size(); r++) {
                               memcpy(to.out + r * n * size_of(dtype), calls[r].in,
                                      n * size_of(dtype));
                           }
                       }
                   });
}

int
ncclReduceScatter(const void *in, void *out, size_t n, int dtype, int op, rank *comm,
                  cudaStream_t stream)
{
    const call mine = {
        (const char *)in,   (char *)out, n * comm->world_size * size_of(dtype),
        n * size_of(dtype), {},          {}};
    return enqueue(comm, stream, "ncclReduceScatter", mine, dtype,
                   [=](const std::vector<call> &calls) {
                       for (size_t r = 0; r < calls.size(); r++) {
                           for (size_t i = 0; i < n; i++) {
                               reduce(calls, r * n + i, dtype, op,
                                      calls[r].out + i * size_of(dtype));
                           }
                       }
                   });
}

int
ncclBroadcast(const void *in, void *out, size_t n, int dtype, int root, rank *comm,
              cudaStream_t stream)
{
    const size_t is_root = comm->number == (size_t)root;
    const call mine = {(const char *)in,   (char *)out, is_root * n * size_of(dtype),
                       n * size_of(dtype), {},          {}};
    return enqueue(comm, stream, "ncclBroadcast", mine, dtype,
                   [=](const std::vector<call> &calls) {
                       for (const call &to : calls) {
                           memmove(to.out, calls[(size_t)root].in, n * size_of(dtype));
                       }
                   });
}

int
ncclReduce(const void *in, void *out, size_t n, int dtype, int op, int root, rank *comm,
           cudaStream_t stream)
{
    const size_t is_root = comm->number == (size_t)root;
    const call mine = {(const char *)in,
                       (char *)out,
                       n * size_of(dtype),
                       is_root * n * size_of(dtype),
                       {},
                       {}};
    return enqueue(comm, stream, "ncclReduce", mine, dtype,
                   [=](const std::vector<call> &calls) {
                       for (size_t i = 0; i < n; i++) {
                           reduce(calls, i, dtype, op,
                                  calls[(size_t)root].out + i * size_of(dtype));
                       }
                   });
}

static thread_local struct {
    call mine;
    size_t n;
    int dtype;
    rank *comm;
    cudaStream_t stream;
} grouped;

int
ncclGroupStart(void)
{
    grouped = {};
    return SUCCESS;
}

int
ncclSend(const void *in, size_t n, int dtype, int, rank *comm, cudaStream_t stream)
{
    grouped.mine.sent.push_back((const char *)in);
    grouped.mine.in_bytes = n * size_of(dtype);
    grouped.n = n;
    grouped.dtype = dtype;
    grouped.comm = comm;
    grouped.stream = stream;
    return SUCCESS;
}

int
ncclRecv(void *out, size_t n, int dtype, int, rank *, cudaStream_t)
{
    grouped.mine.received.push_back((char *)out);
    grouped.mine.out_bytes = n * size_of(dtype);
    return SUCCESS;
}

int
ncclGroupEnd(void)
{
    const size_t bytes = grouped.n * size_of(grouped.dtype);
    return enqueue(grouped.comm, grouped.stream, "ncclSend and ncclRecv", grouped.mine,
                   grouped.dtype, [=](const std::vector<call> &all) {
                       for (size_t to = 0; to < all.size(); to++) {
                           for (size_t from = 0; from < all.size(); from++) {
                               memcpy(all[to].received[from], all[from].sent[to],
                                      bytes);
                           }
                       }
                   });
}

} // extern "C"
