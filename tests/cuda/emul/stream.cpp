/* Streams, events, and the order in which the work on them is done: as late as it can
 * be, but for what a draw takes earlier. Ranks of a group may be threads of a test:
 * each host has a NULL stream of its own, waits for the streams that it made, and for
 * those that nobody made, as torch's. */
#include "emul.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <thread>
#include <utility>

namespace emul {

record seen;
thread_local int current_host;
bool no_events;
size_t busy;

struct queue {
    uint32_t number; /* in a clock */
    int device;
    std::deque<std::shared_ptr<operation>> waiting;
    std::shared_ptr<operation> last; /* of all that were enqueued */
    CUgraph_st *captured;            /* what is enqueued goes there, or NULL */
};

struct operation {
    const char *name;
    queue *on;
    clock at; /* what has happened when it begins, and itself */
    std::function<void()> work;
    std::shared_ptr<operation> after;
    std::shared_ptr<meeting> all;
    bool ended;
};

} // namespace emul

struct CUstream_st {
    emul::queue queue;
    int owner; /* a host; EVERYBODY: all hosts' */
    bool destroyed;
};

struct CUevent_st {
    int device = emul::current_device;
    std::shared_ptr<emul::operation> recorded;
};

/* The work of one stream, in its order. */
struct CUgraph_st {
    struct node {
        const char *name;
        std::function<void()> work;
        cudaEvent_t recorded; /* or NULL */
    };
    std::vector<node> nodes;
};
struct CUgraphExec_st : CUgraph_st {};

namespace emul {
namespace {

typedef std::shared_ptr<operation> work_ptr;
typedef std::unique_lock<std::mutex> held_lock;

std::mutex device_lock; /* of all that is here, and of who works on the memory */
std::condition_variable changed;
/* In use also at the exit, as what they name is. */
clock &host = *new clock(); /* what the host has waited for; one for all threads */
thread_local bool enqueues; /* else the thread only asks: nothing is behind that */
/* The work that such a thread asked for last, if unfinished: to ask again at once is to
 * wait. */
thread_local work_ptr asked;
thread_local bool asked_again;
std::deque<CUstream_st> &streams = *new std::deque<CUstream_st>();
auto &found =
    *new std::map<cudaStream_t, CUstream_st *>();          /* as the program names it */
std::map<std::pair<int, int>, CUstream_st *> null_streams; /* by host and device */
const int EVERYBODY = -1;
std::atomic<int> captures; /* of all threads, each of the mode Global */
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

unsigned
seed()
{
    static const unsigned chosen = [] {
        const char *given = getenv("CTRAINER_EMUL_SEED");
        return given == nullptr ? 1U : (unsigned)strtoul(given, nullptr, 10);
    }();
    return chosen;
}

/* Says the seed where a program fails. */
struct seed_report {
    seed_report()
    {
        on_exit(
            [](int status, void *) {
                if (status != 0) {
                    fprintf(stderr, "CTRAINER_EMUL_SEED=%u\n", seed());
                }
            },
            nullptr);
    }
} reported;

CUstream_st *
new_stream(int owner)
{
    streams.emplace_back();
    CUstream_st *made = &streams.back();
    made->queue.number = (uint32_t)streams.size() - 1;
    made->queue.device = current_device;
    made->owner = owner;
    return made;
}

CUstream_st *
stream_of(cudaStream_t handle)
{
    CUstream_st *&it = handle == nullptr ? null_streams[{current_host, current_device}]
                                         : found[handle];
    if (it == nullptr) {
        it = new_stream(handle == nullptr ? current_host : EVERYBODY);
    }
    if (it->destroyed) {
        die("a stream is used that was destroyed");
    }
    return it;
}

/* ---- doing it -------------------------------------------------------------------- */

struct runner {
    held_lock &held;
    bool may_wait; /* for the other ranks of a collective */
    unsigned depth;

    ~runner()
    {
        close_memory();
    }

    void begin(const operation &it)
    {
        begin_operation(it.name, it.on->number, it.on->device, it.at);
    }

    void end(const work_ptr &it)
    {
        it->ended = true;
        it->work = nullptr; /* and the operands in it */
        it->after = nullptr;
        it->all = nullptr;
        it->on->waiting.pop_front();
    }

    /* Does what is first on the queue, or something that it needs; false: it can not.
     */
    bool step(queue *on)
    {
        const work_ptr it = on->waiting.front();
        const work_ptr after = it->after; /* another rank may end `it` meanwhile */
        if (after && !after->ended) {
            return until(after);
        }
        if (it->all && !it->all->aborted) {
            return it->all->send ? meet_processes(it) : meet(it);
        }
        if (it->work && !it->all) {
            begin(*it);
            it->work();
        }
        end(it);
        return true;
    }

    bool until(const work_ptr &target)
    {
        if (++depth > 10000) {
            die("streams wait for each other, at %s", target->name);
        }
        bool can = true;
        while (can && !target->ended) {
            can = step(target->on);
        }
        depth--;
        return can;
    }

    bool meet_processes(const work_ptr &it)
    {
        const std::shared_ptr<meeting> all = it->all;
        begin(*it);
        it->work();
        if (!all->sent) {
            all->send();
            all->sent = true;
        }
        if (!all->arrived()) {
            close_memory();
            if (may_wait) {
                changed.wait_for(held, std::chrono::milliseconds(1));
            }
            return may_wait;
        }
        all->work();
        end(it);
        all->work = nullptr;
        return true;
    }

    bool meet(const work_ptr &it)
    {
        const std::shared_ptr<meeting> all = it->all;
        if (all->parts.size() < all->ranks) {
            if (may_wait) {
                close_memory();
                changed.wait(held);
            }
            return may_wait;
        }
        for (const work_ptr &part : all->parts) {
            if (part->on->waiting.front() != part) { /* then it is looked at anew */
                return step(part->on);
            }
        }
        for (const work_ptr &part : all->parts) {
            begin(*part);
            part->work();
        }
        all->work();
        for (const work_ptr &part : all->parts) {
            end(part);
        }
        all->work = nullptr; /* it names what names it */
        changed.notify_all();
        return true;
    }
};

bool
run_until(held_lock &held, const work_ptr &target, bool may_wait)
{
    runner it = {held, may_wait, 0};
    return it.until(target);
}

std::deque<work_ptr> &with_processes = *new std::deque<work_ptr>();

void
see_to_processes()
{
    for (;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        held_lock held(device_lock);
        while (!with_processes.empty() && with_processes.front()->ended) {
            with_processes.pop_front();
        }
        for (size_t i = 0; i < with_processes.size(); i++) {
            const work_ptr it = with_processes[i];
            (void)(it->ended || run_until(held, it, false));
        }
    }
}

bool
is_mine(const CUstream_st &it)
{
    return it.queue.device == current_device &&
           (it.owner == current_host || it.owner == EVERYBODY);
}

/* Now and then something is done though nobody waits for it. */
void
do_something_early(held_lock &held)
{
    if (draw() % 8 != 0) {
        return;
    }
    std::vector<queue *> busy_ones;
    for (CUstream_st &it : streams) {
        if (is_mine(it) && !it.queue.waiting.empty()) {
            busy_ones.push_back(&it.queue);
        }
    }
    if (!busy_ones.empty()) {
        runner one = {held, false, 0};
        (void)one.step(busy_ones[draw() % busy_ones.size()]);
    }
}

work_ptr
append(queue *on, const char *name, std::function<void()> work,
       const work_ptr &after = nullptr)
{
    if (on->captured != nullptr) {
        die("%s in a graph is not emulated", name);
    }
    clock at = host;
    enqueues = true;
    asked = nullptr;
    if (on->last) {
        at.join(on->last->at);
    }
    if (after) {
        at.join(after->at);
    }
    at.resize(std::max(at.size(), (size_t)on->number + 1));
    at[on->number]++;
    on->last = std::make_shared<operation>(
        operation{name, on, at, std::move(work), after, nullptr, false});
    on->waiting.push_back(on->last);
    return on->last;
}

void
finish_append(held_lock &held, const work_ptr &made)
{
    if (host_sees) {
        (void)run_until(held, made, true);
    }
    else {
        do_something_early(held);
    }
}

void
wait_for(held_lock &held, queue *on)
{
    const work_ptr last = on->last;
    if (last) {
        (void)run_until(held, last, true);
        host.join(last->at);
    }
}

/* Not of a thread that enqueues nothing, as one that writes a file. */
void
count_wait(const work_ptr &last)
{
    seen.waits += enqueues && !(last && last->ended) ? 1 : 0;
}

cudaError_t
ask(const work_ptr &last)
{
    held_lock held(device_lock);
    if (last && asked == last) {
        seen.waits += asked_again ? 0 : 1;
        asked_again = true;
    }
    else {
        asked = enqueues && last && !last->ended ? last : nullptr;
        asked_again = false;
    }
    if ((busy > 0 && busy-- > 0) || draw() % 4 == 0 ||
        (last && !run_until(held, last, false))) {
        set_last_error(cudaErrorNotReady); /* for the next launch */
        return cudaErrorNotReady;
    }
    if (last && enqueues) {
        host.join(last->at);
    }
    return cudaSuccess;
}

} // namespace

void
clock::join(const clock &other)
{
    resize(std::max(size(), other.size()));
    for (size_t i = 0; i < other.size(); i++) {
        (*this)[i] = std::max((*this)[i], other[i]);
    }
}

/* xorshift64*, Vigna 2016. */
uint64_t
draw()
{
    static thread_local uint64_t state = 0x9e3779b97f4a7c15u * (seed() + 1);
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du >> 32;
}

void
die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "emulated device: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\nCTRAINER_EMUL_SEED=%u\n", seed());
    va_end(arguments);
    ::abort();
}

void
enqueue(cudaStream_t stream, const char *name, std::function<void()> work)
{
    held_lock held(device_lock);
    queue *on = &stream_of(stream)->queue;
    if (on->captured != nullptr) {
        on->captured->nodes.push_back({name, std::move(work), nullptr});
        return;
    }
    finish_append(held, append(on, name, std::move(work)));
}

void
reject_in_capture(const char *name)
{
    if (captures > 0 && capture_mode != cudaStreamCaptureModeRelaxed) {
        die("%s while a stream is captured", name);
    }
}

int
device_of_stream(cudaStream_t stream)
{
    const held_lock held(device_lock);
    return stream_of(stream)->queue.device;
}

void
work_at_once(cudaStream_t stream, const char *name, const std::function<void()> &work)
{
    held_lock held(device_lock);
    const work_ptr made = append(&stream_of(stream)->queue, name, work);
    (void)run_until(held, made, true);
}

void
enqueue_part(cudaStream_t stream, const char *name, const std::shared_ptr<meeting> &all,
             std::function<void()> touch, std::function<void()> work)
{
    held_lock held(device_lock);
    const work_ptr made = append(&stream_of(stream)->queue, name, std::move(touch));
    made->all = all;
    all->parts.push_back(made);
    all->work = std::move(work);
    if (all->send) {
        static std::thread *const sees = new std::thread(see_to_processes);
        (void)sees;
        with_processes.push_back(made);
    }
    changed.notify_all();
    finish_append(held, made);
}

void
abort(const std::shared_ptr<meeting> &all)
{
    const held_lock held(device_lock);
    all->aborted = true;
    all->work = nullptr;
    changed.notify_all();
}

void
exclusively(const std::function<void(const clock &)> &work)
{
    const held_lock held(device_lock);
    work(host);
}

void
wait_for_device()
{
    held_lock held(device_lock);
    for (size_t i = 0; i < streams.size(); i++) { /* meanwhile others add some */
        if (is_mine(streams[i])) {
            wait_for(held, &streams[i].queue);
        }
    }
}

} // namespace emul

extern "C" {

cudaError_t
cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    if (flags != cudaStreamNonBlocking) {
        emul::die("streams that wait for the NULL stream are not emulated");
    }
    const emul::held_lock held(emul::device_lock);
    *stream = emul::new_stream(emul::current_host);
    emul::found[*stream] = *stream;
    return cudaSuccess;
}

cudaError_t
cudaStreamDestroy(cudaStream_t stream)
{
    const emul::held_lock held(emul::device_lock);
    emul::stream_of(stream)->destroyed = true;
    return cudaSuccess;
}

cudaError_t
cudaStreamQuery(cudaStream_t stream)
{
    std::shared_ptr<emul::operation> last;
    {
        const emul::held_lock held(emul::device_lock);
        last = emul::stream_of(stream)->queue.last;
    }
    return emul::ask(last);
}

cudaError_t
cudaStreamSynchronize(cudaStream_t stream)
{
    emul::held_lock held(emul::device_lock);
    emul::reject_in_capture("cudaStreamSynchronize");
    emul::queue *on = &emul::stream_of(stream)->queue;
    if (on->captured != nullptr) {
        emul::die("cudaStreamSynchronize of a stream that is captured");
    }
    emul::count_wait(on->last);
    emul::wait_for(held, on);
    return cudaSuccess;
}

cudaError_t
cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    emul::held_lock held(emul::device_lock);
    emul::seen.orders++;
    if (event->recorded) {
        emul::finish_append(held, emul::append(&emul::stream_of(stream)->queue,
                                               "cudaStreamWaitEvent", nullptr,
                                               event->recorded));
    }
    return cudaSuccess;
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    if (emul::no_events) {
        return cudaErrorMemoryAllocation;
    }
    *event = new CUevent_st();
    return cudaSuccess;
}

cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    emul::held_lock held(emul::device_lock);
    emul::queue *on = &emul::stream_of(stream)->queue;
    if (event->device != on->device) {
        return cudaErrorInvalidResourceHandle;
    }
    event->recorded = emul::append(on, "cudaEventRecord", nullptr);
    emul::finish_append(held, event->recorded);
    return cudaSuccess;
}

cudaError_t
cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    if (flags == cudaEventRecordDefault) {
        return cudaEventRecord(event, stream);
    }
    const emul::held_lock held(emul::device_lock);
    emul::queue *on = &emul::stream_of(stream)->queue;
    if (on->captured == nullptr) {
        return cudaErrorInvalidValue;
    }
    on->captured->nodes.push_back({"cudaEventRecord", nullptr, event});
    return cudaSuccess;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t event)
{
    emul::held_lock held(emul::device_lock);
    emul::reject_in_capture("cudaEventSynchronize");
    if (event->recorded) {
        emul::count_wait(event->recorded);
        (void)emul::run_until(held, event->recorded, true);
        emul::host.join(event->recorded->at);
    }
    return cudaSuccess;
}

cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    emul::reject_in_capture("cudaEventQuery");
    return emul::ask(event->recorded);
}

cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

/* ---- graphs ---------------------------------------------------------------------- */

cudaError_t
cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    const emul::held_lock held(emul::device_lock);
    emul::queue *on = &emul::stream_of(stream)->queue;
    if (on->captured != nullptr || mode != cudaStreamCaptureModeGlobal) {
        return cudaErrorInvalidValue;
    }
    on->captured = new CUgraph_st();
    emul::captures++;
    return cudaSuccess;
}

cudaError_t
cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    const emul::held_lock held(emul::device_lock);
    emul::queue *on = &emul::stream_of(stream)->queue;
    if (on->captured == nullptr) {
        return cudaErrorInvalidValue;
    }
    *graph = std::exchange(on->captured, nullptr);
    emul::captures--;
    return cudaSuccess;
}

cudaError_t
cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    const emul::held_lock held(emul::device_lock);
    *status = emul::stream_of(stream)->queue.captured != nullptr
                  ? cudaStreamCaptureStatusActive
                  : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t
cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode)
{
    std::swap(*mode, emul::capture_mode);
    return cudaSuccess;
}

cudaError_t
cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long)
{
    *made = new CUgraphExec_st{*graph};
    return cudaSuccess;
}

cudaError_t
cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    emul::held_lock held(emul::device_lock);
    emul::queue *on = &emul::stream_of(stream)->queue;
    for (const CUgraph_st::node &node : graph->nodes) {
        const emul::work_ptr made = emul::append(on, node.name, node.work);
        if (node.recorded != nullptr) {
            node.recorded->recorded = made;
        }
        emul::finish_append(held, made);
    }
    return cudaSuccess;
}

cudaError_t
cudaGraphExecDestroy(cudaGraphExec_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t
cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

} // extern "C"
