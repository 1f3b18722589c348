/* A libnccl.so.2 for the emulation: ranks are threads of one process, a collective is
 * worked out by the rank that comes last. It is opened as the real one is. */
#include "../emul.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <stdint.h>
#include <string.h>
#include <string>
#include <vector>

namespace {

enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = 4,
    REMOTE_ERROR = 6,
    MAX = 2,
    MIN = 3,
    MEAN = 4,
    FLOAT = 7
};

struct id {
    char bytes[128];
};

struct call {
    const float *in;
    float *out;
};

/* What a rank sends to each and receives from it. */
struct exchange {
    std::vector<const float *> sent;
    std::vector<float *> received;
};

struct group {
    std::vector<call> calls;
    std::vector<exchange> exchanges;
    size_t joined = 0, arrived = 0, round = 0, left = 0;
};

std::mutex mutex;
std::condition_variable changed;
std::map<std::string, group> groups;

struct rank {
    group *of;
    size_t number, world_size;
};

float
reduced(const std::vector<call> &calls, size_t i, int op)
{
    float value = calls[0].in[i];
    for (size_t r = 1; r < calls.size(); r++) {
        const float next = calls[r].in[i];
        value = op == MAX   ? (next > value ? next : value)
                : op == MIN ? (next < value ? next : value)
                            : value + next;
    }
    return op == MEAN ? value / (float)calls.size() : value;
}

/* Waits for all ranks; the last one runs `work` on their buffers. */
template <typename Work>
int
meet(rank *me, const void *in, void *out, int dtype, Work work)
{
    if (dtype != FLOAT) {
        return INVALID_ARGUMENT;
    }
    std::unique_lock<std::mutex> held(mutex);
    group &of = *me->of;
    of.calls[me->number] = {(const float *)in, (float *)out};
    const size_t round = of.round;
    if (++of.arrived == me->world_size) {
        emul::open_device_memory(true);
        work(of.calls);
        emul::open_device_memory(false);
        of.arrived = 0;
        of.round++;
        changed.notify_all();
    }
    else {
        changed.wait(held, [&] { return of.round != round; });
    }
    return SUCCESS;
}

} // namespace

extern "C" {

int fake_nccl_fail;  /* the next collective is refused with this result */
int fake_nccl_async; /* what the communicator says while the stream is busy */
int fake_nccl_aborted;

static int
refused()
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
    static int count;
    memset(made, 0, sizeof *made);
    made->bytes[0] = (char)++count;
    return SUCCESS;
}

int
ncclCommInitRank(rank **comm, int world_size, id of, int number)
{
    std::unique_lock<std::mutex> held(mutex);
    group &it = groups[std::string(of.bytes, sizeof of.bytes)];
    it.calls.resize((size_t)world_size);
    it.exchanges.resize((size_t)world_size);
    it.joined++;
    changed.notify_all();
    changed.wait(held, [&] { return it.joined == (size_t)world_size; });
    *comm = new rank{&it, (size_t)number, (size_t)world_size};
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
    delete comm;
    return SUCCESS;
}

int
ncclCommGetAsyncError(rank *, int *result)
{
    *result = fake_nccl_async;
    return SUCCESS;
}

const char *
ncclGetErrorString(int result)
{
    return result == REMOTE_ERROR ? "remote process exited" : "invalid argument";
}

int
ncclAllReduce(const void *in, void *out, size_t n, int dtype, int op, rank *comm,
              cudaStream_t)
{
    const int result = refused();
    if (result != SUCCESS) {
        return result;
    }
    return meet(comm, in, out, dtype, [&](const std::vector<call> &calls) {
        for (size_t i = 0; i < n; i++) {
            const float value = reduced(calls, i, op);
            for (const call &it : calls) {
                it.out[i] = value;
            }
        }
    });
}

int
ncclAllGather(const void *in, void *out, size_t n, int dtype, rank *comm, cudaStream_t)
{
    return meet(comm, in, out, dtype, [&](const std::vector<call> &calls) {
        for (const call &to : calls) {
            for (size_t r = 0; r < calls.size(); r++) {
                memcpy(to.out + r * n, calls[r].in, n * sizeof(float));
            }
        }
    });
}

int
ncclReduceScatter(const void *in, void *out, size_t n, int dtype, int op, rank *comm,
                  cudaStream_t)
{
    return meet(comm, in, out, dtype, [&](const std::vector<call> &calls) {
        for (size_t r = 0; r < calls.size(); r++) {
            for (size_t i = 0; i < n; i++) {
                calls[r].out[i] = reduced(calls, r * n + i, op);
            }
        }
    });
}

int
ncclBroadcast(const void *in, void *out, size_t n, int dtype, int root, rank *comm,
              cudaStream_t)
{
    return meet(comm, in, out, dtype, [&](const std::vector<call> &calls) {
        for (const call &to : calls) {
            memmove(to.out, calls[(size_t)root].in, n * sizeof(float));
        }
    });
}

static thread_local struct {
    exchange parts;
    size_t n;
    int dtype;
    rank *comm;
} grouped;

int
ncclGroupStart(void)
{
    grouped = {};
    return SUCCESS;
}

int
ncclSend(const void *in, size_t n, int dtype, int, rank *comm, cudaStream_t)
{
    grouped.parts.sent.push_back((const float *)in);
    grouped.n = n;
    grouped.dtype = dtype;
    grouped.comm = comm;
    return SUCCESS;
}

int
ncclRecv(void *out, size_t, int, int, rank *, cudaStream_t)
{
    grouped.parts.received.push_back((float *)out);
    return SUCCESS;
}

int
ncclGroupEnd(void)
{
    rank *me = grouped.comm;
    const size_t n = grouped.n;
    {
        const std::lock_guard<std::mutex> held(mutex);
        me->of->exchanges[me->number] = grouped.parts;
    }
    return meet(me, nullptr, nullptr, grouped.dtype, [&](const std::vector<call> &) {
        const std::vector<exchange> &all = me->of->exchanges;
        for (size_t to = 0; to < all.size(); to++) {
            for (size_t from = 0; from < all.size(); from++) {
                memcpy(all[to].received[from], all[from].sent[to], n * sizeof(float));
            }
        }
    });
}

} // extern "C"
