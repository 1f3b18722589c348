/* A device of torch whose memory is the emulation's: torch's build for the CPU trains
 * "on a GPU". An operator copies its operands to the host, is computed there, and its
 * results are copied back, so results are the CPU's; views share memory. The host can
 * touch that memory in copies and kernels alone. */
#include "../emul.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr c10::DeviceType TYPE = c10::DeviceType::PrivateUse1;
/* Torch's only stream. No other call has it by chance. */
char the_stream;
void *const EMUL_STREAM = &the_stream;

void
release(void *data)
{
    cudaFree(data);
}

size_t by_torch; /* allocations */

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        void *data = nullptr;
        if (bytes != 0) {
            by_torch++;
            TORCH_CHECK(cudaMalloc(&data, bytes) == cudaSuccess, "out of memory");
        }
        return {data, data, &release, c10::Device(TYPE, 0)};
    }

    c10::DeleterFnPtr raw_deleter() const override
    {
        return &release;
    }

    void copy_data(void *to, const void *from, std::size_t bytes) const override
    {
        emul::opened both(to, from);
        memcpy(to, from, bytes);
    }
};

Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

/* One device with one stream, on which everything is done at once. */
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override
    {
        return TYPE;
    }
    c10::Device exchangeDevice(c10::Device device) const override
    {
        return device;
    }
    c10::Device getDevice() const override
    {
        return c10::Device(TYPE, 0);
    }
    void setDevice(c10::Device) const override
    {
    }
    void uncheckedSetDevice(c10::Device) const noexcept override
    {
    }
    c10::Stream getStream(c10::Device device) const override
    {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
    c10::Stream getDefaultStream(c10::Device device) const override
    {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        return stream;
    }
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return 1;
    }
    void *getStreamNativeHandle(const c10::Stream) const override
    {
        return EMUL_STREAM;
    }
    void record(void **, const c10::Stream &, const c10::DeviceIndex,
                const c10::EventFlag) const override
    {
    }
    void block(void *, const c10::Stream &) const override
    {
    }
    bool queryEvent(void *) const override
    {
        return true;
    }
    void destroyEvent(void *, const c10::DeviceIndex) const noexcept override
    {
    }
    bool queryStream(const c10::Stream &) const override
    {
        return true;
    }
    void synchronizeStream(const c10::Stream &) const override
    {
    }
    void synchronizeEvent(void *) const override
    {
    }
    void synchronizeDevice(const c10::DeviceIndex) const override
    {
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override
    {
        return true;
    }
    bool isAvailable() const override
    {
        return true;
    }
    bool hasPrimaryContext(c10::DeviceIndex) const override
    {
        return true;
    }
    c10::DeviceIndex deviceCount() const override
    {
        return 1;
    }
    c10::DeviceIndex getCurrentDevice() const override
    {
        return 0;
    }
    void
    resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override
    {
        auto *impl = storage.unsafeGetStorageImpl();
        c10::DataPtr data = allocator.allocate(bytes);
        allocator.copy_data(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
        impl->set_data_ptr_noswap(std::move(data));
        impl->set_nbytes(bytes);
    }
};

at::Tensor
empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
      std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
      std::optional<at::MemoryFormat> format)
{
    return at::detail::empty_generic(size, &allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor
empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
              std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
              std::optional<at::Device>, std::optional<bool>)
{
    return at::detail::empty_strided_generic(
        size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        c10::dtype_or_default(dtype));
}

/* The same memory as a tensor of the host, to be used while it is opened. Made before
 * that: a second reference to a tensor of Python's waits for the GIL, which another
 * thread may hold that waits for the memory. */
at::Tensor
on_host(const at::Tensor &tensor)
{
    if (tensor.device().is_cpu() || tensor.numel() == 0) {
        return tensor.device().is_cpu() ? tensor : at::empty(tensor.sizes());
    }
    char *data = (char *)tensor.storage().mutable_data() +
                 tensor.storage_offset() * (int64_t)tensor.itemsize();
    return at::from_blob(
        data, tensor.sizes(), tensor.strides(), [](void *) {},
        at::TensorOptions().dtype(tensor.dtype()), at::Device(at::kCPU));
}

const void *
memory_of(const at::Tensor &tensor)
{
    return tensor.device().is_cpu() ? nullptr : tensor.storage().data();
}

at::Tensor
copy_from(const at::Tensor &from, const at::Tensor &to, bool)
{
    if (from.numel() != 0) {
        const at::Tensor target = on_host(to), source = on_host(from);
        emul::opened both(memory_of(to), memory_of(from));
        target.copy_(source);
    }
    return to;
}

at::Tensor
copy_from_and_resize(const at::Tensor &from, const at::Tensor &to)
{
    if (to.sizes() != from.sizes()) {
        to.resize_(from.sizes());
    }
    return copy_from(from, to, false);
}

at::Scalar
local_scalar(const at::Tensor &tensor)
{
    const at::Tensor source = on_host(tensor);
    emul::opened both(memory_of(tensor), nullptr);
    return source.item();
}

at::Tensor
as_strided(const at::Tensor &tensor, c10::SymIntArrayRef size,
           c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset)
{
    const auto begin = offset ? std::optional<int64_t>(offset->expect_int())
                              : std::optional<int64_t>();
    return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                             C10_AS_INTARRAYREF_SLOW(stride), begin);
}

at::Tensor
view(const at::Tensor &tensor, c10::SymIntArrayRef size)
{
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor
reshape_alias(const at::Tensor &tensor, c10::SymIntArrayRef size,
              c10::SymIntArrayRef stride)
{
    return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor &
resize_(const at::Tensor &tensor, c10::SymIntArrayRef size,
        std::optional<at::MemoryFormat>)
{
    const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    auto *impl = tensor.unsafeGetTensorImpl();
    const auto elements = c10::multiply_integers(sizes) + tensor.storage_offset();
    const size_t bytes = (size_t)elements * tensor.dtype().itemsize();
    if (bytes > tensor.storage().nbytes()) {
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(),
                                                                 bytes);
    }
    impl->set_sizes_contiguous(sizes);
    return tensor;
}

at::Tensor &
set_storage(at::Tensor &tensor, at::Storage storage, c10::SymInt offset,
            c10::SymIntArrayRef size, c10::SymIntArrayRef stride)
{
    return at::native::set_storage_cpu_(tensor, storage, offset.expect_int(),
                                        C10_AS_INTARRAYREF_SLOW(size),
                                        C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor &
set_whole_storage(at::Tensor &tensor, at::Storage storage)
{
    const auto n = (int64_t)(storage.nbytes() / tensor.itemsize());
    return at::native::set_storage_cpu_(tensor, storage, 0, {n}, {});
}

at::Tensor &
set_tensor(at::Tensor &tensor, const at::Tensor &source)
{
    return at::native::set_tensor_(tensor, source);
}

void
fall_back(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar);
    m.impl("as_strided", &as_strided);
    m.impl("view", &view);
    m.impl("_reshape_alias", &reshape_alias);
    m.impl("resize_", &resize_);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("set_.source_Storage", &set_whole_storage);
    m.impl("set_.source_Tensor", &set_tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m)
{
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

/* Mixed precision casts as it does on CUDA. */
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m)
{
    m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m)
{
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(LOWER)
    AT_FORALL_FP32(FP32)
    AT_FORALL_PROMOTE(PROMOTE)
}

struct Registration {
    Registration()
    {
        at::RegisterPrivateUse1HooksInterface(new Hooks());
    }
} registration;

} // namespace

/* For Python. */
extern "C" void *
emul_torchs_stream()
{
    return EMUL_STREAM;
}

/* How often memory was taken that is not torch's. */
extern "C" size_t
emul_allocations_of_ours()
{
    return emul::seen.allocations - by_torch;
}

extern "C" void *
emul_last_stream()
{
    return emul::seen.stream;
}
