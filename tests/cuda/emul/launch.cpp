#include "emul.h"

#include <memory>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace emul {

place here;
record seen;
bool descending;
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
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    state at;
    uint64_t bits;
    unsigned delta;
    void *fake_stack;
};

std::vector<fibre> fibres(most_threads);
unsigned n_fibres, running;
ucontext_t scheduler;
const std::function<void()> *body;

void
die(const char *why)
{
    fprintf(stderr, "emulated launch: %s (block %u)\n", why, here.block.x);
    abort();
}

#ifdef __SANITIZE_ADDRESS__
const void *host_stack;
size_t host_stack_bytes;
void *host_fake_stack;
#endif

void
leave(state at)
{
    fibre &me = fibres[running];
    me.at = at;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&me.fake_stack, host_stack, host_stack_bytes);
#endif
    swapcontext(&me.context, &scheduler);
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

void
enter(unsigned thread)
{
    fibre &it = fibres[thread];
    running = thread;
    here.thread.x = thread;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&host_fake_stack, it.stack.get(), stack_bytes);
#endif
    swapcontext(&scheduler, &it.context);
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
        const unsigned from = i + fibres[i].delta;
        fibres[i].bits = sent[from < end ? from - first : i - first];
        fibres[i].at = state::ready;
    }
    return true;
}

/* A warp runs as far as it can: what it may do before the others, it does. */
void
run_warp(unsigned first, unsigned end)
{
    do {
        for (unsigned k = first; k < end; k++) {
            const unsigned i = descending ? first + end - 1 - k : k;
            if (fibres[i].at == state::ready) {
                enter(i);
            }
        }
    } while (exchange(first, end));
}

void
release_barrier()
{
    if (count(state::at_barrier, 0, n_fibres) != n_fibres) {
        die("threads wait at a barrier or a shuffle that others never reach");
    }
    for (unsigned i = 0; i < n_fibres; i++) {
        fibres[i].at = state::ready;
    }
}

void
run_block()
{
    const unsigned n_warps = (n_fibres + warp_size - 1) / warp_size;
    for (unsigned i = 0; i < n_fibres; i++) {
        prepare(i);
    }
    for (;;) {
        for (unsigned k = 0; k < n_warps; k++) {
            const unsigned first = (descending ? n_warps - 1 - k : k) * warp_size;
            const unsigned end = first + warp_size;
            run_warp(first, end < n_fibres ? end : n_fibres);
        }
        if (count(state::ended, 0, n_fibres) == n_fibres) {
            return;
        }
        release_barrier();
    }
}

} // namespace

void
launch(unsigned grid, unsigned block, cudaStream_t stream,
       const std::function<void()> &kernel)
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
    grid = most_blocks > 0 && most_blocks < grid ? most_blocks : grid;
    open_device_memory(true);
    body = &kernel;
    n_fibres = block;
    here.block_dim.x = block;
    here.grid_dim.x = grid;
    for (unsigned k = 0; k < grid; k++) {
        here.block.x = descending ? grid - 1 - k : k;
        run_block();
    }
    open_device_memory(false);
}

void
barrier()
{
    leave(state::at_barrier);
}

uint64_t
shuffle_down(unsigned mask, uint64_t bits, unsigned delta)
{
    if (mask != 0xffffffffu) {
        die("a shuffle of part of a warp");
    }
    fibre &me = fibres[running];
    me.bits = bits;
    me.delta = delta;
    leave(state::at_shuffle);
    return me.bits;
}

} // namespace emul
