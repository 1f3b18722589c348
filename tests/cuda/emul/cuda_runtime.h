/* CUDA C++ as far as cuda/ uses it, for a C++ compiler: a kernel is a function, a
 * thread a fibre, a launch a loop over blocks on a stream. */
#ifndef CT_EMUL_CUDA_RUNTIME_H
#define CT_EMUL_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"
#include "emul.h"

#include <stdint.h>
#include <string.h>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __grid_constant__ &/* one copy for all threads, as there */
#define __launch_bounds__(...)
#define __shared__ static /* blocks run one after another */

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static inline uint4
make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return {x, y, z, w};
}

struct alignas(8) uint2 {
    unsigned x, y;
};

static inline uint2
make_uint2(unsigned x, unsigned y)
{
    return {x, y};
}

template <typename T>
static inline void
__stwb(T *to, T value)
{
    *to = value;
}

#define threadIdx (emul::here.thread)
#define blockIdx (emul::here.block)
#define blockDim (emul::here.block_dim)
#define gridDim (emul::here.grid_dim)
#define __syncthreads() emul::barrier()

namespace emul {

template <typename T>
static inline T
shuffled(unsigned mask, T value, unsigned from)
{
    uint64_t bits = 0;
    static_assert(sizeof value <= sizeof bits, "at most eight bytes");
    memcpy(&bits, &value, sizeof value);
    bits = shuffle(mask, bits, from);
    memcpy(&value, &bits, sizeof value);
    return value;
}

} // namespace emul

template <typename T>
static inline T
__shfl_down_sync(unsigned mask, T value, unsigned delta)
{
    return emul::shuffled(mask, value, threadIdx.x % 32 + delta);
}

template <typename T>
static inline T
__shfl_sync(unsigned mask, T value, unsigned lane)
{
    return emul::shuffled(mask, value, lane);
}

template <typename T>
static inline T
__shfl_xor_sync(unsigned mask, T value, unsigned lanes)
{
    return emul::shuffled(mask, value, threadIdx.x % 32 ^ lanes);
}

/* Arguments are evaluated now and used when the stream comes to it. */
#define CT_LAUNCH(kernel, grid, block, stream_, ...)                                   \
    emul::launch(                                                                      \
        #kernel, grid, block, (cudaStream_t)(stream_),                                 \
        emul::bind([=](const auto &...given) { kernel(given...); }, __VA_ARGS__))

namespace emul {

template <typename Kernel, typename... Args>
std::function<void()>
bind(Kernel kernel, const Args &...args)
{
    return
        [kernel, given = std::tuple<Args...>(args...)] { std::apply(kernel, given); };
}

} // namespace emul

/* A NaN that a GPU computes has these bits, whatever its operands have. */
#define CT_COMPUTED(value) emul::computed(value)

namespace emul {

static inline float
computed(float value)
{
    const uint32_t bits = 0x7fffffff;
    if (value != value) {
        memcpy(&value, &bits, sizeof value);
    }
    return value;
}

static inline double
computed(double value)
{
    return value != value ? __builtin_nan("") : value;
}

} // namespace emul

#endif
