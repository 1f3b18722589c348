/* The emulated launch, and what tests may ask of it.
 *
 * Threads of a block are fibres that run one at a time: a warp as far as it can, up to
 * a barrier, then the next, first to last or last to first; blocks follow each other
 * in the same order. A result that depends on the order, or on the number of blocks,
 * is a race on a GPU. */
#ifndef CT_EMUL_H
#define CT_EMUL_H

#include "cuda_runtime_api.h"

#include <functional>
#include <stdint.h>

namespace emul {

struct index {
    unsigned x;
};

struct place {
    index thread, block, block_dim, grid_dim;
};

extern place here; /* of the fibre that runs */

/* What happened since the last reset(). */
struct record {
    size_t launches;
    size_t waits; /* calls that make the host wait for the device */
    size_t allocations;
    size_t orders;       /* of a stream behind another */
    cudaStream_t stream; /* of the last launch, copy or memset */
};

extern record seen;
extern bool descending;      /* threads and blocks run last to first */
extern unsigned most_blocks; /* a launch gets no more than that; 0: what it asks */
extern size_t fail_launch;   /* the n-th launch from now on is rejected; 0: none */
extern size_t fail_malloc;   /* likewise for cudaMalloc */
extern bool no_events;       /* cudaEventCreateWithFlags fails */
extern size_t busy;          /* so many times cudaStreamQuery says not yet */
extern int n_devices;        /* what cudaGetDeviceCount says */
extern size_t fail_create;   /* like fail_malloc, for cuMemCreate */
extern bool without_vm;      /* a driver that maps no memory */

/* Memory of the driver that there is now, and how much there has been. */
struct vm_record {
    size_t reserved, blocks; /* addresses and memory that were not given back */
    size_t created;          /* blocks, ever */
};
extern vm_record vm;

void reset();

/* Stops the program with a message when threads of a block can never go on: a barrier
 * that not all of them reach, a shuffle without the whole warp. */
void launch(unsigned grid, unsigned block, cudaStream_t stream,
            const std::function<void()> &kernel);
void barrier();
uint64_t shuffle_down(unsigned mask, uint64_t bits, unsigned delta);

/* Between the files of the emulation. Open, device memory is the calling thread's: of
 * several, one at a time is a GPU. */
void open_device_memory(bool open);
int memory_protection(); /* of new memory */

/* While it lives, the blocks around two addresses are open; others than device memory
 * are none. */
struct opened {
    const void *one, *other;
    opened(const void *one, const void *other);
    ~opened();
};

void add_device_memory(void *data, size_t bytes);
void remove_device_memory(void *data);
void set_last_error(cudaError_t error);

} // namespace emul

#endif
