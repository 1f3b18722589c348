/* Elements by vectors of up to 16 bytes, which one instruction loads or stores.
 *
 * A row of a chunk is a vector for each thread of the block: a warp's threads use
 * adjacent memory. A thread loads its vectors of several rows before it uses the first,
 * as memory is only busy while enough bytes are on their way. */
#ifndef CT_CUDA_VECTOR_CUH
#define CT_CUDA_VECTOR_CUH

#include "launch.cuh"

#include <string.h>

/* Before a loop over elements that are to be in registers. */
#ifdef __CUDACC__
#define CT_UNROLL _Pragma("unroll")
#else
#define CT_UNROLL
#endif

template <typename Element, unsigned N> struct alignas(N * sizeof(Element)) ct_vector {
    Element of[N];
};

/* What one instruction moves. */
template <size_t Bytes> struct ct_word;
template <> struct ct_word<16> {
    typedef uint4 type;
};
template <> struct ct_word<8> {
    typedef uint2 type;
};
template <> struct ct_word<4> {
    typedef uint32_t type;
};

template <typename Element, unsigned N>
__device__ inline void
ct_load_vector(ct_vector<Element, N> &to, const Element *from)
{
    typedef typename ct_word<sizeof to>::type word;
    const word loaded = *(const word *)from;
    memcpy(&to, &loaded, sizeof to);
}

/* __stwb() is the plain store; as an assignment it may be cut into smaller words. */
template <typename Element, unsigned N>
__device__ inline void
ct_store_vector(const ct_vector<Element, N> &from, Element *to)
{
    typename ct_word<sizeof from>::type stored;
    memcpy(&stored, &from, sizeof from);
    __stwb((decltype(stored) *)to, stored);
}

/* Elements of a row of vectors of N. */
template <unsigned N> struct ct_row {
    static const size_t elems = N * ct_cuda_block_size;
};

template <unsigned N> struct ct_count {
    static const unsigned value = N;
};

/* Calls rows(ct_count<k>, i) for vectors of N elements at i and in the next k - 1 rows,
 * k being Ahead or 1, and one(i) for each element behind the last whole vector, or,
 * where the arrays are not `aligned` to vectors, for all elements. */
template <unsigned N, unsigned Ahead, typename Rows, typename One>
__device__ inline void
ct_each_vector(const ct_cuda_range &range, bool aligned, Rows rows, One one)
{
    const size_t n = aligned ? range.end - range.begin : 0, row = ct_row<N>::elems;
    const size_t end = range.begin + n / N * N;
    size_t i = range.begin + N * threadIdx.x;
    for (; i + (Ahead - 1) * row < end; i += Ahead * row) {
        rows(ct_count<Ahead>(), i);
    }
    for (; Ahead > 1 && i < end; i += row) {
        rows(ct_count<1>(), i);
    }
    for (i = end + threadIdx.x; i < range.end; i += ct_cuda_block_size) {
        one(i);
    }
}

template <typename Element, unsigned N, unsigned Ahead>
__device__ inline void
ct_load_rows(ct_vector<Element, N> (&to)[Ahead], const Element *from)
{
    CT_UNROLL
    for (unsigned a = 0; a < Ahead; a++) {
        ct_load_vector(to[a], from + a * ct_row<N>::elems);
    }
}

/* f(to[i], from[i]), which changes to[i], for each element of a range; both may be the
 * same array. */
template <typename To, typename From, typename F>
__device__ inline void
ct_map(To *to, const From *from, const ct_cuda_range &range, F f)
{
    const unsigned n = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
    const unsigned rows = ct_cuda_chunk_elems / ct_row<n>::elems;
    const bool aligned = (uintptr_t)to % sizeof(ct_vector<To, n>) == 0 &&
                         (uintptr_t)from % sizeof(ct_vector<From, n>) == 0;

    ct_each_vector<n, (rows < 4 ? rows : 4)>(
        range, aligned,
        [&](auto count, size_t i) {
            ct_vector<To, n> y[decltype(count)::value];
            ct_vector<From, n> x[decltype(count)::value];
            ct_load_rows(y, to + i);
            ct_load_rows(x, from + i);
            CT_UNROLL
            for (unsigned a = 0; a < decltype(count)::value; a++) {
                CT_UNROLL
                for (unsigned j = 0; j < n; j++) {
                    f(y[a].of[j], x[a].of[j]);
                }
                ct_store_vector(y[a], to + i + a * ct_row<n>::elems);
            }
        },
        [&](size_t i) { f(to[i], from[i]); });
}

#endif
