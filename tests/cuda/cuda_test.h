/* What the kernel tests share: the same sources run on the host emulation and, built by
 * nvcc, on a GPU. */
#ifndef CT_CUDA_TEST_H
#define CT_CUDA_TEST_H

#include "../../cuda/kernels.h"
#include "../core/ct_test.h"
#include "math/half.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <vector>

#ifdef CT_EMUL
#include "emul/emul.h"
#endif

enum {
    SKIPPED = 77
};

static const ct_dtype float_dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_F16};

static inline void
skip_without_device()
{
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        exit(SKIPPED);
    }
}

static inline void
check_ok(ct_status status, const ct_error &err)
{
    if (status != CT_OK) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
}

/* Uniform in [-1, 1), the same everywhere: xorshift64*, Vigna 2016. */
struct random_numbers {
    uint64_t state;

    double next()
    {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return (double)(int64_t)(state * 0x2545f4914f6cdd1du) / 9223372036854775808.0;
    }
};

static inline void
put(ct_dtype dtype, void *data, size_t i, double value)
{
    switch (dtype) {
    case CT_F32:
        ((float *)data)[i] = (float)value;
        break;
    case CT_F64:
        ((double *)data)[i] = value;
        break;
    case CT_BF16:
        ((uint16_t *)data)[i] = ct_bf16_from_f64(value);
        break;
    default:
        ((uint16_t *)data)[i] = ct_f16_from_f64(value);
        break;
    }
}

static inline double
get(ct_dtype dtype, const void *data, size_t i)
{
    switch (dtype) {
    case CT_F32:
        return (double)((const float *)data)[i];
    case CT_F64:
        return ((const double *)data)[i];
    case CT_BF16:
        return (double)ct_f32_from_bf16(((const uint16_t *)data)[i]);
    default:
        return (double)ct_f32_from_f16(((const uint16_t *)data)[i]);
    }
}

/* The stream of the tests: no other is behind it by chance. */
static inline cudaStream_t
stream()
{
    static cudaStream_t made;
    if (made == NULL) {
        CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking) == cudaSuccess);
    }
    return made;
}

/* The same bytes twice, for a kernel of the CPU and for one of the device. The data
 * starts `shift` elements into its block, hence at an address aligned to no more. */
struct twin {
    enum {
        GUARD = 16 /* bytes behind the last element, which no kernel writes */
    };
    std::vector<unsigned char> host;
    void *block;
    size_t n, element, shift;
    ct_dtype dtype;
    unsigned char pattern; /* of the guard; a copy of another's differs */

    twin(ct_dtype type, size_t length, size_t shifted)
        : host(length * ct_dtype_size(type)), n(length), element(ct_dtype_size(type)),
          shift(shifted), dtype(type)
    {
        static unsigned char last;
        pattern = ++last;
        const size_t bytes = (n + shift) * element + GUARD;
        CHECK(cudaMalloc(&block, bytes) == cudaSuccess);
        CHECK(cudaMemsetAsync(block, pattern, bytes, stream()) == cudaSuccess);
        CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
    }
    twin(const twin &) = delete;
    twin(twin &&other) noexcept
        : host(std::move(other.host)), block(other.block), n(other.n),
          element(other.element), shift(other.shift), dtype(other.dtype),
          pattern(other.pattern)
    {
        other.block = NULL;
    }
    ~twin()
    {
        (void)cudaFree(block);
    }

    void fill(random_numbers *numbers, double low, double high)
    {
        for (size_t i = 0; i < n; i++) {
            const double unit = (numbers->next() + 1) / 2;
            put(dtype, host.data(), i, low + (high - low) * unit);
        }
        upload();
    }

    void *device() const
    {
        return (unsigned char *)block + shift * element;
    }

    void upload() const
    {
        CHECK(cudaMemcpyAsync(device(), host.data(), host.size(),
                              cudaMemcpyHostToDevice, stream()) == cudaSuccess);
        CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
    }

    /* With `more` bytes of those behind the last element. */
    std::vector<unsigned char> download(size_t more = 0) const
    {
        std::vector<unsigned char> back(host.size() + more);
        CHECK(cudaMemcpyAsync(back.data(), device(), back.size(),
                              cudaMemcpyDeviceToHost, stream()) == cudaSuccess);
        CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
        return back;
    }

    /* The same bits, but for NaN's, and none behind. */
    bool agree() const
    {
        std::vector<unsigned char> expected = host;
        expected.resize(host.size() + GUARD, pattern);
        const std::vector<unsigned char> back = download(GUARD);
        const size_t checked = back == expected ? 0 : back.size();
        for (size_t i = 0; i < checked; i++) {
            const size_t k = i / element;
            if (back[i] != expected[i] && !(k < n && ct_dtype_is_float(dtype) &&
                                            isnan(get(dtype, back.data(), k)) &&
                                            isnan(get(dtype, expected.data(), k)))) {
                return false;
            }
        }
        return true;
    }

    ct_span on_host()
    {
        return {host.data(), n, dtype};
    }

    ct_span on_device() const
    {
        return {device(), n, dtype};
    }
};

struct update_table {
    ct_update_table of = {};

    ~update_table()
    {
        ct_device_cuda.table_release(&of);
    }
};

/* The outcome of clipping, in the device's memory while the test lives. */
struct outcome_twin {
    ct_clip_outcome host;
    ct_clip_outcome *device;

    outcome_twin(double coef, int skip) : host{1.0, coef, !skip, skip}, device(NULL)
    {
        CHECK(cudaMalloc((void **)&device, sizeof host) == cudaSuccess);
        CHECK(cudaMemcpyAsync(device, &host, sizeof host, cudaMemcpyHostToDevice,
                              stream()) == cudaSuccess);
        CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
    }
    ~outcome_twin()
    {
        (void)cudaFree(device);
    }
};

/* Lengths around a warp, a block and a chunk, none at all, and n_small small ones, to
 * be more than a launch can carry; a few with CTRAINER_SMALL, for slow tools. */
static inline std::vector<size_t>
lengths(size_t n_small)
{
    std::vector<size_t> all = {1,   0,    31,   32,   33,    255,  256,
                               257, 8191, 8192, 8193, 24577, 40000};
    if (getenv("CTRAINER_SMALL") != NULL) {
        all.resize(9);
        n_small = 3;
    }
    for (size_t i = 0; i < n_small; i++) {
        all.push_back(i % 23);
    }
    return all;
}

/* Runs the test; in the emulation twice, once with all the blocks that a launch asks
 * for and once with few, and with threads in another order. */
template <typename Test>
static inline void
in_two_orders(Test test)
{
#ifdef CT_EMUL
    for (int few = 0; few < 2; few++) {
        emul::reset();
        emul::most_blocks = few != 0 ? 3 : 0;
        test();
    }
#else
    test();
#endif
}

#endif
