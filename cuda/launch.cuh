/* Launches: work on many spans in few launches.
 *
 * The operands of a launch travel by value in the kernel's parameters, 32 764 bytes on
 * every architecture of CUDA 13: nothing is copied to the device beforehand and nothing
 * has to outlive the call. The elements are cut into chunks, numbered through all spans
 * of the launch, and the blocks take the chunks in turn. The chunks depend on the
 * spans' lengths alone, hence the order of every sum does too. */
#ifndef CT_CUDA_LAUNCH_CUH
#define CT_CUDA_LAUNCH_CUH

#include "core/base/span.h"
#include "status.h"

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

/* The host emulation of the tests defines a launch of its own. */
#ifndef CT_LAUNCH
#define CT_LAUNCH(kernel, grid, block, stream, ...)                                    \
    kernel<<<grid, block, 0, (cudaStream_t)(stream)>>>(__VA_ARGS__)
#define CT_COMPUTED(value) (value) /* a result; the emulation's NaN is the GPU's */
#endif

/* An address that does not come from a kernel's parameters: loads and stores through
 * that are then those of global memory, too. */
template <typename T>
__device__ static inline T *
ct_global(T *data)
{
#ifdef __CUDACC__
    __builtin_assume(__isGlobal(data));
#endif
    return data;
}

static const unsigned ct_cuda_block_size = 256;

/* Begins a kernel for blocks of ct_cuda_block_size threads, of which a multiprocessor
 * can run so many at a time: four leave a thread 64 registers. */
#define CT_KERNEL_BY(blocks)                                                           \
    __global__ static void __launch_bounds__(ct_cuda_block_size, blocks)
#define CT_KERNEL CT_KERNEL_BY(4)

static const unsigned ct_cuda_max_grid = 4096; /* more than any GPU runs at once */
static const size_t ct_cuda_chunk_elems = 8192;
static const size_t ct_cuda_param_bytes = 32764; /* of a kernel, from sm_70 on */

/* Operand has a field `n`, its elements, or its ct_cuda_operand_chunks(). 2^32 chunks
 * would be 32 TiB of bytes: more than a device holds, so 32 bits count them. */
template <typename Operand> struct ct_cuda_batch {
    static const unsigned capacity =
        (ct_cuda_param_bytes - 256) / (sizeof(Operand) + sizeof(uint32_t));

    uint32_t n_operands;
    uint32_t n_chunks;
    uint32_t chunk_end[capacity]; /* chunks of operands 0 .. i together */
    Operand operands[capacity];
};

/* A chunk: elements [begin, end) of batch.operands[operand]. */
struct ct_cuda_range {
    uint32_t operand;
    size_t begin, end;
};

/* The number of the chunk's operand. */
template <typename Batch>
__device__ inline uint32_t
ct_cuda_operand_at(const Batch &batch, size_t chunk)
{
    uint32_t low = 0, high = batch.n_operands - 1;
    while (low < high) { /* the first operand that ends behind this chunk */
        const uint32_t middle = (low + high) / 2;
        if (batch.chunk_end[middle] > chunk) {
            high = middle;
        }
        else {
            low = middle + 1;
        }
    }
    return low;
}

/* Of an operand of n elements. */
template <typename Batch>
__device__ inline ct_cuda_range
ct_cuda_range_in(const Batch &batch, size_t chunk, uint32_t operand, size_t n)
{
    const size_t first = operand == 0 ? 0 : batch.chunk_end[operand - 1];
    const size_t begin = (chunk - first) * ct_cuda_chunk_elems;
    const size_t left = n - begin;
    return {operand, begin,
            begin + (left < ct_cuda_chunk_elems ? left : ct_cuda_chunk_elems)};
}

template <typename Operand>
__device__ inline ct_cuda_range
ct_cuda_range_of(const ct_cuda_batch<Operand> &batch, size_t chunk)
{
    const uint32_t operand = ct_cuda_operand_at(batch, chunk);
    return ct_cuda_range_in(batch, chunk, operand, batch.operands[operand].n);
}

static inline size_t
ct_cuda_chunks_of(size_t n)
{
    return n / ct_cuda_chunk_elems + (n % ct_cuda_chunk_elems != 0);
}

static inline unsigned
ct_cuda_grid_size(uint32_t n_chunks)
{
    return n_chunks < ct_cuda_max_grid ? n_chunks : ct_cuda_max_grid;
}

/* The chunks of an operand, unless its type says otherwise. */
template <typename Operand>
static inline size_t
ct_cuda_operand_chunks(const Operand &operand)
{
    return ct_cuda_chunks_of(operand.n);
}

/* Calls launch(batch) for the operands load(0) .. load(n - 1), as many at a time as a
 * batch takes; empty ones are left out, and a batch of none is not launched. */
template <typename Operand, typename Load, typename Launch>
ct_status
ct_cuda_in_batches(size_t n, Load load, Launch launch)
{
    static_assert(sizeof(ct_cuda_batch<Operand>) + 64 <= ct_cuda_param_bytes,
                  "a batch and what else a kernel takes are its parameters");
    ct_cuda_batch<Operand> batch;
    ct_status status = CT_OK;

    batch.n_operands = batch.n_chunks = 0;
    for (size_t i = 0; i < n && status == CT_OK; i++) {
        const Operand operand = load(i);
        const size_t chunks = ct_cuda_operand_chunks(operand);
        if (chunks == 0) {
            continue;
        }
        batch.n_chunks += (uint32_t)chunks;
        batch.operands[batch.n_operands] = operand;
        batch.chunk_end[batch.n_operands++] = batch.n_chunks;
        if (batch.n_operands == batch.capacity) {
            status = launch(batch);
            batch.n_operands = batch.n_chunks = 0;
        }
    }
    return status == CT_OK && batch.n_operands > 0 ? launch(batch) : status;
}

/* Follows every launch: the only report of a bad launch. */
static inline ct_status
ct_cuda_launched(const char *what, ct_error *err)
{
    const cudaError_t result = cudaGetLastError();
    return result == cudaSuccess ? CT_OK : ct_cuda_check(result, what, err);
}

/* The kernels that compute take floating-point spans: `kernel` and the span's number
 * are for the message. */
static inline ct_status
ct_cuda_check_float(const char *kernel, size_t span, ct_dtype dtype, ct_error *err)
{
    return ct_dtype_is_float(dtype)
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "%s: span %zu is %s, and only float dtypes work", kernel, span,
                         ct_dtype_name(dtype));
}

#endif
