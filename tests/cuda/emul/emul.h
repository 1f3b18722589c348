/* The emulated device, and what tests may ask of it.
 *
 * A stream is a queue that nothing works off before somebody waits for it; only events
 * and waits order one behind another. Threads of a block are fibres that run one at a
 * time: a warp up to a barrier or a shuffle, then another, at random, as are the order
 * of blocks and of lanes. What is at random comes of $CTRAINER_EMUL_SEED. Two accesses
 * to memory that nothing orders end the program with the names of both (races.cpp). */
#ifndef CT_EMUL_H
#define CT_EMUL_H

#include "cuda_runtime_api.h"

#include <atomic>
#include <functional>
#include <memory>
#include <stdint.h>
#include <tuple>
#include <vector>

namespace emul {

struct index {
    unsigned x;
};

struct place {
    index thread, block, block_dim, grid_dim;
};

extern place here; /* of the fibre that runs */

/* A number of events, counted by several threads. */
struct count : std::atomic<size_t> {
    using std::atomic<size_t>::operator=;
    count() : std::atomic<size_t>(0)
    {
    }
    count(const count &other) : std::atomic<size_t>(other.load())
    {
    }
    count &operator=(const count &other)
    {
        store(other.load());
        return *this;
    }
};

/* What happened since the last reset(). */
struct record {
    count launches;
    count waits; /* calls that make the host wait, not for what has ended already */
    count allocations;
    count orders;        /* of a stream behind another */
    cudaStream_t stream; /* of the last launch, copy or memset */
};

extern record seen;
extern unsigned most_blocks; /* a launch gets no more than that; 0: what it asks */
extern size_t fail_launch;   /* the n-th launch from now on is rejected; 0: none */
extern size_t fail_malloc;   /* likewise for cudaMalloc */
extern size_t fail_pin;      /* likewise for cudaHostRegister */
extern bool no_events;       /* cudaEventCreateWithFlags fails */
extern size_t busy;          /* so many times cudaStreamQuery says not yet */
extern int n_devices;        /* what cudaGetDeviceCount says */
extern size_t fail_create;   /* like fail_malloc, for cuMemCreate */
extern bool without_vm;      /* a driver that maps no memory */

/* Which of the hosts the calling thread is, each with its streams: ranks that are
 * threads of a program differ. */
extern thread_local int current_host;

/* Memory of the driver that there is now, and how much there has been. */
struct vm_record {
    size_t reserved, blocks; /* addresses and memory that were not given back */
    size_t created;          /* blocks, ever */
};
extern vm_record vm;

void reset();

/* ---- launches -------------------------------------------------------------------- */

/* Enqueues a launch. The program stops with a message when threads of a block can never
 * go on: at a barrier that not all of them reach, a shuffle without the whole warp. */
void launch(const char *name, unsigned grid, unsigned block, cudaStream_t stream,
            std::function<void()> kernel);
void barrier();
uint64_t shuffle(unsigned mask, uint64_t bits, unsigned from);

/* ---- streams --------------------------------------------------------------------- */

/* Of the calling thread's draws, which are those of every other thread. */
uint64_t draw();

[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

void enqueue(cudaStream_t stream, const char *name, std::function<void()> work);
int device_of_stream(cudaStream_t stream);

/* Ends the program where a thread captures a stream, and the calling one has not said
 * that the call belongs to no graph. */
void reject_in_capture(const char *name);

/* Work of a library that is done when the call returns, though nothing says so to the
 * host: it is ordered behind the stream, and what follows is not ordered behind it. */
void
work_at_once(cudaStream_t stream, const char *name, const std::function<void()> &work);

/* A collective: every rank's part is reached before `work` is done for all of them.
 * touch() names the rank's memory. If the other ranks are processes, there is one part:
 * when the stream has reached the part, send() is called once, and `work` is done after
 * arrived() has said that the other ranks have sent, too. A thread looks after such
 * parts, as the host may be busy elsewhere. */
struct meeting {
    size_t ranks;
    std::function<void()> work;
    std::vector<std::shared_ptr<struct operation>> parts; /* of those who have come */
    bool aborted;
    std::function<void()> send; /* or empty: the ranks are threads of this process */
    std::function<bool()> arrived;
    bool sent;
};
void
enqueue_part(cudaStream_t stream, const char *name, const std::shared_ptr<meeting> &all,
             std::function<void()> touch, std::function<void()> work);
void abort(const std::shared_ptr<meeting> &all);

void wait_for_device();

/* The memory is gone when the stream comes there. */
void free_behind(cudaStream_t stream, void *data);

/* ---- memory ---------------------------------------------------------------------- */

/* The running operation, no kernel, reads or writes these bytes: device memory can be
 * touched from here to its end. Memory of the host is nobody's. */
void touch(const void *data, size_t bytes, bool writes);

/* Device memory can be touched from here to the end of the running operation; NULL: all
 * of it. */
void open_memory(const void *data, size_t bytes);

/* The number of the device with all these bytes in one block; -1: none has. */
int device_of(const void *data, size_t bytes);

/* ---- between the files of the emulation ------------------------------------------ */

extern bool host_sees; /* a host that computes on the memory itself: nothing is late */
extern thread_local int current_device;

extern thread_local bool in_kernel;

void *reserve_addresses(size_t bytes);
void close_memory();
int memory_protection(); /* of memory that is not open */
void add_device_memory(void *data, size_t bytes);
void set_last_error(cudaError_t error);
void run_blocks(unsigned grid, unsigned block, const std::function<void()> &kernel);

/* What has happened before, as the number of operations that each stream had done. */
struct clock : std::vector<uint32_t> {
    void join(const clock &other);
};

/* The host, with what it has seen, while no operation runs. */
void exclusively(const std::function<void(const clock &host)> &work);

/* Bounds of the device's addresses; none under AddressSanitizer. */
struct bounds {
    uintptr_t begin;
    size_t bytes;
};
extern bounds arena;

/* The accesses that follow are an operation's: the `number`-th of a stream, which has
 * seen what `at` says. */
void begin_operation(const char *name, uint32_t stream, int device, const clock &at);
/* Of a launch: the running thread, in an interval between barriers. */
void enter_thread(unsigned thread);
void begin_interval(bool of_new_block);
/* Memory is taken back by what has seen `at`, NULL: by the running operation. */
void check_release(const void *data, size_t bytes, const char *name, const clock *at);
size_t remove_device_memory(void *data, const char *name, const clock *at);
void set_home(const void *data, size_t bytes, int device); /* -1: none any more */

} // namespace emul

#endif
