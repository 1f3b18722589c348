/* A libnccl.so.2 for the emulation: ranks are threads of one process, or processes of
 * one machine, which send each other files in a folder that is the group's id. A
 * collective is worked out when the streams of all have come to it, by each process for
 * itself. It is opened as the real one is. */
#include "../emul.h"
#include "math/half.h"

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <string>
#include <unistd.h>
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
    SIGNED_BYTE = 0,
    BYTE = 1,
    INT = 2,
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
    std::map<size_t, std::shared_ptr<collective>> begun;   /* by their number */
    std::vector<std::shared_ptr<emul::meeting>> under_way; /* of processes */
    std::vector<wish> wishes;
    size_t joined = 0, arrived = 0, round = 0;
};

std::mutex mutex;
std::condition_variable changed;
std::map<std::string, group> groups;
extern "C" int fake_nccl_called, fake_nccl_stalls;

struct rank {
    group *of;
    size_t number, world_size, called;
    std::string folder; /* of ranks that are processes; else empty */
    std::string id;     /* of a group that is no split: a folder, too */
};

/* ---- ranks that are processes ---------------------------------------------------- */

typedef std::vector<char> bytes;

std::string
file_of(const std::string &folder, const std::string &what, size_t rank)
{
    return folder + "/" + what + "." + std::to_string(rank);
}

void
send(const std::string &folder, const std::string &what, size_t rank, const bytes &sent)
{
    const std::string file = file_of(folder, what, rank), part = file + ".part";
    std::filesystem::create_directories(folder);
    std::ofstream(part, std::ios::binary).write(sent.data(), (long)sent.size());
    std::filesystem::rename(part, file);
}

bool
all_sent(const std::string &folder, const std::string &what, size_t world_size)
{
    for (size_t r = 0; r < world_size; r++) {
        if (access(file_of(folder, what, r).c_str(), F_OK) != 0) {
            return false;
        }
    }
    return true;
}

bytes
received(const std::string &folder, const std::string &what, size_t rank)
{
    std::ifstream file(file_of(folder, what, rank), std::ios::binary);
    return bytes(std::istreambuf_iterator<char>(file), {});
}

/* What each rank sends, as the host: every rank has to call it. */
std::vector<bytes>
exchange(const std::string &folder, const std::string &what, size_t rank,
         size_t world_size, const bytes &sent)
{
    std::vector<bytes> all;
    send(folder, what, rank, sent);
    while (!all_sent(folder, what, world_size)) {
        usleep(1000);
    }
    for (size_t r = 0; r < world_size; r++) {
        all.push_back(received(folder, what, r));
    }
    return all;
}

template <typename T>
bytes
bytes_of(const T &value)
{
    return bytes((const char *)&value, (const char *)&value + sizeof value);
}

template <typename T>
T
value_of(const bytes &from)
{
    T value;
    memcpy(&value, from.data(), sizeof value);
    return value;
}

size_t
size_of(int dtype)
{
    switch (dtype) {
    case SIGNED_BYTE:
    case BYTE:
        return 1;
    case HALF:
    case BFLOAT:
        return 2;
    case INT:
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
    dtype == BYTE          ? reduce_as<unsigned char>(calls, i, op, to)
    : dtype == SIGNED_BYTE ? reduce_as<int8_t>(calls, i, op, to)
    : dtype == INT         ? reduce_as<int32_t>(calls, i, op, to)
    : dtype == LONG        ? reduce_as<int64_t>(calls, i, op, to)
    : dtype == DOUBLE      ? reduce_as<double>(calls, i, op, to)
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

/* A rank's operands as another process has sent them: its results are thrown away. */
struct remote {
    bytes in, out;

    remote(const bytes &from, const call &mine)
    {
        const size_t out_bytes = value_of<size_t>(from);
        in = bytes(from.begin() + sizeof out_bytes, from.end());
        out.resize(out_bytes * std::max<size_t>(mine.received.size(), 1));
    }

    call as_call(const call &mine)
    {
        call made = {in.data(), out.data(), in.size(), out.size(), {}, {}};
        for (size_t r = 0; r < mine.sent.size(); r++) {
            made.sent.push_back(in.data() + r * mine.in_bytes);
            made.received.push_back(out.data() + r * mine.out_bytes);
        }
        return made;
    }
};

bytes
sent_by(const call &mine)
{
    bytes sent = bytes_of(mine.out_bytes);
    for (const char *part : mine.sent) {
        sent.insert(sent.end(), part, part + mine.in_bytes);
    }
    if (mine.sent.empty()) {
        sent.insert(sent.end(), mine.in, mine.in + mine.in_bytes);
    }
    return sent;
}

template <typename Work>
void
enqueue_for_processes(rank *me, cudaStream_t stream, const char *name, const call &mine,
                      Work work)
{
    const auto all = std::make_shared<emul::meeting>();
    const rank self = *me;
    const std::string number = std::to_string(me->called);
    const std::string before = std::to_string(me->called - 1);
    me->called++;
    const bool stalls = ++fake_nccl_called == fake_nccl_stalls;
    all->ranks = 1;
    all->send = [=] { send(self.folder, number, self.number, sent_by(mine)); };
    all->arrived = [=] {
        return !stalls && all_sent(self.folder, number, self.world_size);
    };
    me->of->under_way.push_back(all);
    emul::enqueue_part(
        stream, name, all, [mine] { touch(mine); },
        [=] {
            std::vector<remote> others;
            std::vector<call> calls;
            others.reserve(self.world_size);
            for (size_t r = 0; r < self.world_size; r++) {
                others.emplace_back(received(self.folder, number, r), mine);
                calls.push_back(r == self.number ? mine : others.back().as_call(mine));
            }
            work(calls);
            /* All have come here, and so are done with the one before. */
            std::filesystem::remove(file_of(self.folder, before, self.number));
        });
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
    if (!me->folder.empty()) {
        enqueue_for_processes(me, stream, name, mine, work);
        return SUCCESS;
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
int fake_nccl_called; /* collectives of ranks that are processes, so far */
int fake_nccl_stalls; /* the number of the one that never ends */

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
    memset(made, 0, sizeof *made);
    snprintf(made->bytes, sizeof made->bytes, "%s/emulated-nccl-%d-%d",
             std::filesystem::temp_directory_path().c_str(), (int)getpid(),
             (int)++count);
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
    return new rank{&it, number, world_size, 0, "", ""};
}

/* Every rank says which process it is. */
static bool
are_threads(const std::string &folder, size_t world_size, size_t number)
{
    bool same = true;
    for (const bytes &it :
         exchange(folder, "process", number, world_size, bytes_of(getpid()))) {
        same = same && value_of<pid_t>(it) == getpid();
    }
    return same;
}

int
ncclCommInitRankConfig(rank **comm, int world_size, id of, int number,
                       const config *chosen)
{
    if (chosen->size != sizeof *chosen || chosen->magic != 0xcafebeef ||
        chosen->version != 21800 || chosen->blocking != 0) {
        return INVALID_ARGUMENT;
    }
    const auto ranks = (size_t)world_size, own = (size_t)number;
    *comm = are_threads(of.bytes, ranks, own)
                ? join(of.bytes, ranks, own)
                : new rank{new group(), own, ranks, 0, of.bytes, ""};
    (*comm)->id = of.bytes;
    return IN_PROGRESS;
}

int
ncclCommSplit(rank *comm, int color, int key, rank **made, const config *)
{
    std::string name;
    size_t size = 0, number = 0;
    std::vector<wish> wishes;
    if (!comm->folder.empty()) {
        const std::string what = "split" + std::to_string(comm->of->round++);
        for (const bytes &it : exchange(comm->folder, what, comm->number,
                                        comm->world_size, bytes_of(wish{color, key}))) {
            wishes.push_back(value_of<wish>(it));
        }
        name = comm->folder + "-" + what + "-" + std::to_string(color);
    }
    else {
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
    }
    for (size_t r = 0; r < wishes.size(); r++) {
        const bool before =
            wishes[r].key < key || (wishes[r].key == key && r < comm->number);
        size += wishes[r].color == color;
        number += wishes[r].color == color && before;
    }
    *made = color == NO_COLOR      ? nullptr
            : comm->folder.empty() ? join(name, size, number)
                                   : new rank{new group(), number, size, 0, name, ""};
    return SUCCESS;
}

/* The last one clears up. */
static void
leave(const rank *comm)
{
    const std::string &folder = comm->folder.empty() ? comm->id : comm->folder;
    if (!folder.empty()) {
        std::error_code unused;
        send(folder, "left", comm->number, {});
        if (all_sent(folder, "left", comm->world_size)) {
            std::filesystem::remove_all(folder, unused);
        }
    }
    delete comm;
}

int
ncclCommDestroy(rank *comm)
{
    if (fake_nccl_async != SUCCESS || fake_nccl_pending > 0) {
        emul::die(
            "ncclCommDestroy of a communicator that is not idle: its thread would "
            "stay in a group call");
    }
    leave(comm);
    return SUCCESS;
}

int
ncclCommAbort(rank *comm)
{
    fake_nccl_aborted++;
    for (size_t i = 0; i < comm->called; i++) {
        emul::abort(comm->folder.empty() ? collective_of(comm, i)->all
                                         : comm->of->under_way[i]);
    }
    leave(comm);
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
