#include "emul.h"

#include <numeric>
#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

/* Between fibres by the compiler's own jumps: the sanitizer takes each one of the
 * library, and each call that does not return, for an exception that leaves the stack,
 * which it then clears. */
#define SWITCHES __attribute__((noipa, no_sanitize("address")))

namespace emul {

place here;
unsigned most_blocks;
size_t fail_launch;

namespace {

const unsigned warp_size = 32, most_threads = 1024;
const size_t stack_bytes = 256 * 1024;

enum class state {
    ready,
    at_barrier,
    at_shuffle,
    ended
};

struct fibre {
    ucontext_t context; /* before it runs first; */
    void *left[5];      /* then this, which costs no system call */
    bool has_run;
    std::unique_ptr<char[]> stack;
    state at;
    uint64_t bits;
    unsigned from; /* the lane; beyond the warp: itself */
    void *fake_stack;
};

std::vector<fibre> fibres(most_threads);
unsigned n_fibres, running;
void *scheduler[5];
const std::function<void()> *body;

#ifdef __SANITIZE_ADDRESS__
const void *host_stack;
size_t host_stack_bytes;
void *host_fake_stack;
#endif

/* Of its own: a function that jumps itself is not seen to be jumped to. */
SWITCHES void
jump(void **to)
{
    __builtin_longjmp(to, 1);
}

SWITCHES void
leave(state at)
{
    fibre &me = fibres[running];
    me.at = at;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&me.fake_stack, host_stack, host_stack_bytes);
#endif
    if (__builtin_setjmp(me.left) == 0) {
        jump(scheduler);
    }
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(me.fake_stack, &host_stack, &host_stack_bytes);
#endif
}

void
start()
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &host_stack, &host_stack_bytes);
#endif
    for (;;) { /* a fibre outlives the block, and is the same thread of the next */
        (*body)();
        leave(state::ended);
    }
}

SWITCHES void
enter(unsigned thread)
{
    fibre &it = fibres[thread];
    running = thread;
    here.thread.x = thread;
    enter_thread(thread);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&host_fake_stack, it.stack.get(), stack_bytes);
#endif
    if (__builtin_setjmp(scheduler) == 0) {
        if (it.has_run) {
            jump(it.left);
        }
        it.has_run = true;
        setcontext(&it.context);
    }
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(host_fake_stack, nullptr, nullptr);
#endif
}

void
prepare(unsigned thread)
{
    fibre &it = fibres[thread];
    it.at = state::ready;
    if (it.stack) {
        return;
    }
    it.stack.reset(new char[stack_bytes]);
    getcontext(&it.context);
    it.context.uc_stack.ss_sp = it.stack.get();
    it.context.uc_stack.ss_size = stack_bytes;
    it.context.uc_link = nullptr;
    makecontext(&it.context, start, 0);
}

unsigned
count(state at, unsigned begin, unsigned end)
{
    unsigned n = 0;
    for (unsigned i = begin; i < end; i++) {
        n += fibres[i].at == at;
    }
    return n;
}

/* Lanes that have all come to a shuffle exchange and go on. */
bool
exchange(unsigned first, unsigned end)
{
    if (count(state::at_shuffle, first, end) != end - first) {
        return false;
    }
    uint64_t sent[warp_size];
    for (unsigned i = first; i < end; i++) {
        sent[i - first] = fibres[i].bits;
    }
    for (unsigned i = first; i < end; i++) {
        const unsigned from = fibres[i].from;
        fibres[i].bits = sent[from < end - first ? from : i - first];
        fibres[i].at = state::ready;
    }
    return true;
}

/* The numbers below n, each once. */
struct order {
    unsigned n, begin, step;

    explicit order(unsigned n_) : n(n_), begin((unsigned)draw() % n_), step(1)
    {
        do {
            step = (unsigned)draw() % n + 1;
        } while (std::gcd(step, n) != 1);
    }
    unsigned operator[](unsigned k) const
    {
        return (unsigned)((begin + (uint64_t)k * step) % n);
    }
};

/* A warp runs up to a barrier or a shuffle; whether it was any. */
bool
run_warp(unsigned first, unsigned end)
{
    const order lanes(end - first);
    bool ran = exchange(first, end);
    for (unsigned k = 0; k < end - first; k++) {
        const unsigned i = first + lanes[k];
        if (fibres[i].at == state::ready) {
            enter(i);
            ran = true;
        }
    }
    return ran;
}

void
release_barrier()
{
    if (count(state::at_barrier, 0, n_fibres) != n_fibres) {
        die("threads wait at a barrier or a shuffle that others never reach (block %u)",
            here.block.x);
    }
    for (unsigned i = 0; i < n_fibres; i++) {
        fibres[i].at = state::ready;
    }
    begin_interval(false);
}

void
run_block()
{
    const unsigned n_warps = (n_fibres + warp_size - 1) / warp_size;
    for (unsigned i = 0; i < n_fibres; i++) {
        prepare(i);
    }
    begin_interval(true);
    for (;;) {
        for (bool ran = true; ran;) {
            const order warps(n_warps);
            ran = false;
            for (unsigned k = 0; k < n_warps; k++) {
                const unsigned first = warps[k] * warp_size;
                ran |= run_warp(first, std::min(first + warp_size, n_fibres));
            }
        }
        if (count(state::ended, 0, n_fibres) == n_fibres) {
            return;
        }
        release_barrier();
    }
}

} // namespace

void
run_blocks(unsigned grid, unsigned block, const std::function<void()> &kernel)
{
    const order blocks(grid);
    open_memory(NULL, 0);
    in_kernel = true;
    body = &kernel;
    n_fibres = block;
    here.block_dim.x = block;
    here.grid_dim.x = grid;
    for (unsigned k = 0; k < grid; k++) {
        here.block.x = blocks[k];
        run_block();
    }
    in_kernel = false;
}

void
launch(const char *name, unsigned grid, unsigned block, cudaStream_t stream,
       std::function<void()> kernel)
{
    seen.launches++;
    seen.stream = stream;
    if (grid == 0 || block == 0 || block > most_threads) {
        set_last_error(cudaErrorInvalidConfiguration);
        return;
    }
    if (fail_launch > 0 && --fail_launch == 0) {
        set_last_error(cudaErrorLaunchOutOfResources);
        return;
    }
    if (device_of_stream(stream) != current_device) {
        set_last_error(cudaErrorInvalidResourceHandle);
        return;
    }
    grid = most_blocks > 0 && most_blocks < grid ? most_blocks : grid;
    enqueue(stream, name, [grid, block, kernel = std::move(kernel)] {
        run_blocks(grid, block, kernel);
    });
}

void
barrier()
{
    leave(state::at_barrier);
}

uint64_t
shuffle(unsigned mask, uint64_t bits, unsigned from)
{
    if (mask != 0xffffffffu) {
        die("a shuffle of part of a warp (block %u)", here.block.x);
    }
    fibre &me = fibres[running];
    me.bits = bits;
    me.from = from;
    leave(state::at_shuffle);
    return me.bits;
}

} // namespace emul
