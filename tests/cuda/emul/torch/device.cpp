/* A device of torch whose memory is the emulation's: torch's build for the CPU trains
 * "on a GPU". An operator copies its operands to the host, is computed there, and its
 * results are copied back, so results are the CPU's; views share memory. The host can
 * touch that memory in copies and kernels alone.
 *
 * An operator is done at once, behind what is on torch's current stream, yet counts as
 * enqueued there: work on another stream is ordered behind it by an event, or by a wait
 * of the host's, as an item() or a copy to the host is. */
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

#include <atomic>
#include <set>
#include <utility>

extern "C" {
int PyGILState_Check(void);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);
}

namespace {

/* Torch enqueues some operators with the GIL held. The emulation waits for the stream,
 * on which a collective may wait for what another rank's thread enqueues from Python.
 */
struct without_gil {
    void *const held = PyGILState_Check() == 1 ? PyEval_SaveThread() : nullptr;

    ~without_gil()
    {
        if (held != nullptr) {
            PyEval_RestoreThread(held);
        }
    }
};

constexpr c10::DeviceType TYPE = c10::DeviceType::PrivateUse1;
enum {
    DEVICES = 4 /* at most */
};
char default_streams[DEVICES]; /* no other call has their addresses by chance */
thread_local c10::StreamId current_streams[DEVICES]; /* 0: the default one */

/* The answer of a query, which is no error of the next launch: torch clears it, too. */
bool
has_ended(cudaError_t answer)
{
    if (answer == cudaErrorNotReady) {
        (void)cudaGetLastError();
    }
    return answer == cudaSuccess;
}

cudaStream_t
native(c10::StreamId id, c10::DeviceIndex device)
{
    return id == 0 ? (cudaStream_t)&default_streams[device] : (cudaStream_t)id;
}

cudaStream_t
current_stream(c10::DeviceIndex device)
{
    return native(current_streams[device], device);
}

emul::count by_torch; /* allocations */

struct Memory {
    void *data;
    cudaStream_t stream;
};

/* Torch's cache hands memory on behind the stream of the allocation. */
void
release(void *memory)
{
    const std::unique_ptr<Memory> it((Memory *)memory);
    emul::free_behind(it->stream, it->data);
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        const auto device = (c10::DeviceIndex)emul::current_device;
        if (bytes == 0) {
            return {nullptr, c10::Device(TYPE, device)};
        }
        auto made = std::make_unique<Memory>();
        made->stream = current_stream(device);
        by_torch++;
        const size_t fails = std::exchange(emul::fail_malloc, 0); /* the plugin's */
        TORCH_CHECK(cudaMalloc(&made->data, bytes) == cudaSuccess, "out of memory");
        emul::fail_malloc = fails;
        void *data = made->data;
        return {data, made.release(), &release, c10::Device(TYPE, device)};
    }

    void copy_data(void *to, const void *from, std::size_t bytes) const override
    {
        const auto device = (c10::DeviceIndex)emul::current_device;
        const without_gil others_run;
        emul::work_at_once(current_stream(device), "torch's copy", [=] {
            emul::touch(from, bytes, false);
            emul::touch(to, bytes, true);
            memcpy(to, from, bytes);
        });
    }
};

Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override
    {
        return TYPE;
    }
    c10::Device exchangeDevice(c10::Device device) const override
    {
        const c10::Device before = getDevice();
        uncheckedSetDevice(device);
        return before;
    }
    c10::Device getDevice() const override
    {
        return c10::Device(TYPE, (c10::DeviceIndex)emul::current_device);
    }
    void setDevice(c10::Device device) const override
    {
        uncheckedSetDevice(device);
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override
    {
        if (device.index() >= 0) {
            (void)cudaSetDevice(device.index());
        }
    }
    c10::Stream getStream(c10::Device device) const override
    {
        const auto index = device.index() < 0 ? getDevice().index() : device.index();
        return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, index),
                           current_streams[index]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override
    {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
    c10::Stream getNewStream(c10::Device device, int) const override
    {
        const c10::DeviceGuard guard(device);
        cudaStream_t made;
        (void)cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
        return c10::Stream(c10::Stream::UNSAFE, device, (c10::StreamId)made);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        const c10::Stream before = getStream(stream.device());
        current_streams[stream.device_index()] = stream.id();
        return before;
    }
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return (c10::DeviceIndex)emul::n_devices;
    }
    void *getStreamNativeHandle(const c10::Stream stream) const override
    {
        return native(stream.id(), stream.device_index());
    }
    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex,
                const c10::EventFlag) const override
    {
        const c10::DeviceGuard guard(stream.device());
        if (*event == nullptr) {
            (void)cudaEventCreateWithFlags((cudaEvent_t *)event, 0);
        }
        (void)cudaEventRecord((cudaEvent_t)*event,
                              native(stream.id(), stream.device_index()));
    }
    void block(void *event, const c10::Stream &stream) const override
    {
        (void)cudaStreamWaitEvent(native(stream.id(), stream.device_index()),
                                  (cudaEvent_t)event, 0);
    }
    bool queryEvent(void *event) const override
    {
        return event == nullptr || has_ended(cudaEventQuery((cudaEvent_t)event));
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override
    {
        (void)cudaEventDestroy((cudaEvent_t)event);
    }
    bool queryStream(const c10::Stream &stream) const override
    {
        return has_ended(cudaStreamQuery(native(stream.id(), stream.device_index())));
    }
    void synchronizeStream(const c10::Stream &stream) const override
    {
        (void)cudaStreamSynchronize(native(stream.id(), stream.device_index()));
    }
    void synchronizeEvent(void *event) const override
    {
        (void)cudaEventSynchronize((cudaEvent_t)event);
    }
    void synchronizeDevice(const c10::DeviceIndex) const override
    {
        emul::wait_for_device();
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
        return (c10::DeviceIndex)emul::n_devices;
    }
    c10::DeviceIndex getCurrentDevice() const override
    {
        return (c10::DeviceIndex)emul::current_device;
    }
    at::Allocator *getPinnedMemoryAllocator() const override
    {
        return c10::GetCPUAllocator();
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
      std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
      std::optional<at::MemoryFormat> format)
{
    const c10::DeviceGuard guard(device.value_or(at::Device(TYPE)));
    return at::detail::empty_generic(size, &allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor
empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
              std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
              std::optional<at::Device> device, std::optional<bool>)
{
    const c10::DeviceGuard guard(device.value_or(at::Device(TYPE)));
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

/* The rows of a tensor from dimension `dim` on; all of its memory is opened before, as
 * one range. */
void
touch_rows(const char *data, const at::Tensor &tensor, int64_t dim, bool writes)
{
    const auto element = (int64_t)tensor.itemsize();
    if (dim == tensor.dim()) {
        emul::touch(data, (size_t)element, writes);
        return;
    }
    if (dim == tensor.dim() - 1 && tensor.stride(dim) == 1) {
        emul::touch(data, (size_t)(tensor.size(dim) * element), writes);
        return;
    }
    for (int64_t i = 0; i < tensor.size(dim); i++) {
        touch_rows(data + i * tensor.stride(dim) * element, tensor, dim + 1, writes);
    }
}

void
touch(const at::Tensor &host, bool writes)
{
    const auto *data = (const char *)host.const_data_ptr();
    if (emul::device_of(data, 1) < 0) {
        return;
    }
    if (host.is_non_overlapping_and_dense()) {
        emul::touch(data, host.nbytes(), writes);
        return;
    }
    int64_t end = 1;
    for (int64_t i = 0; i < host.dim(); i++) {
        end += (host.size(i) - 1) * host.stride(i);
    }
    emul::open_memory(data, (size_t)end * host.itemsize());
    touch_rows(data, host, 0, writes);
}

/* An operator's own copies to the host are no copies of a program's. */
thread_local int operators;
/* Calls of operators that wait for CUDA's kernels, counted as by
 * torch.cuda.set_sync_debug_mode(): whether the device had ended or not. */
std::atomic<size_t> waits_of_torch;

void
host_waits_on(cudaStream_t stream)
{
    const size_t before = emul::seen.waits;
    (void)cudaStreamSynchronize(stream);
    waits_of_torch += emul::seen.waits == before ? 1 : 0;
}

struct Operator {
    Operator()
    {
        operators++;
    }
    ~Operator()
    {
        operators--;
    }
};

/* `work` on tensors of the host, made by on_host(); those of the host itself are no
 * device's memory. */
void
compute(const at::Tensor &on, const char *name, const at::Tensor *to,
        const at::Tensor &from, bool host_waits, const std::function<void()> &work)
{
    const c10::DeviceGuard guard(on.device());
    const cudaStream_t stream = current_stream(on.device().index());
    const without_gil others_run;
    emul::work_at_once(stream, name, [&] {
        touch(from, false);
        if (to != nullptr) {
            touch(*to, true);
        }
        work();
    });
    if (host_waits && operators == 0) {
        host_waits_on(stream);
    }
}

/* A copy to the host without a wait: garbage until the stream has come so far. */
void
fill_late(const at::Tensor &to, const at::Tensor &value, cudaStream_t stream)
{
    const at::Tensor target = at::from_blob(
        to.mutable_data_ptr(), to.sizes(), to.strides(),
        [kept = to.storage()](void *) {}, to.options());
    if (target.is_non_overlapping_and_dense()) {
        memset(target.mutable_data_ptr(), 0xff, target.nbytes());
    }
    emul::enqueue(stream, "torch's copy to the host",
                  [target, value] { target.copy_(value); });
}

at::Tensor
copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking)
{
    if (from.numel() == 0) {
        return to;
    }
    const bool from_host = from.device().is_cpu(), to_host = to.device().is_cpu();
    const bool is_late = to_host && non_blocking && operators == 0;
    const at::Tensor source = on_host(from),
                     target =
                         is_late ? at::empty(to.sizes(), to.options()) : on_host(to);
    compute(from_host ? to : from, "torch's copy", &target, source,
            (from_host || to_host) && !non_blocking, [&] { target.copy_(source); });
    if (is_late) {
        fill_late(to, target, current_stream(from.device().index()));
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
    at::Scalar value;
    compute(tensor, "torch's item()", nullptr, source, true,
            [&] { value = source.item(); });
    return value;
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

/* Changed by an operator whose schema does not say so. */
std::vector<size_t>
changed_silently(const std::string &name)
{
    return name == "aten::native_batch_norm" ? std::vector<size_t>{3, 4}
                                             : std::vector<size_t>();
}

bool
holds_mask(const c10::IValue &argument)
{
    if (argument.isTensor()) {
        const at::Tensor &tensor = argument.toTensor();
        return tensor.defined() &&
               (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    }
    if (argument.isOptionalTensorList()) {
        for (const std::optional<at::Tensor> &it : argument.toOptionalTensorVector()) {
            if (it && holds_mask(c10::IValue(*it))) {
                return true;
            }
        }
    }
    return false;
}

/* Does the host wait for CUDA's kernels of an operator? For results of the host, and
 * for sizes that depend on values. */
bool
host_waits_for(const c10::OperatorHandle &op, const c10::IValue *arguments)
{
    static const std::set<std::string> SIZED_BY_VALUES = {
        "aten::nonzero",  "aten::masked_select", "aten::_unique",
        "aten::_unique2", "aten::unique_dim",    "aten::unique_consecutive",
        "aten::bincount", "aten::_ctc_loss",
    };
    for (const c10::Argument &result : op.schema().returns()) {
        if (!result.type()->isSubtypeOf(*c10::TensorType::get()) &&
            !result.type()->isSubtypeOf(*c10::ListType::ofTensors())) {
            return true;
        }
    }
    const std::string &name = op.schema().name();
    if (name == "aten::index" || name == "aten::index_put_" ||
        name == "aten::_index_put_impl_") {
        /* A single value is filled in. */
        return holds_mask(arguments[1]) &&
               (name == "aten::index" || arguments[2].toTensor().numel() != 1);
    }
    if (name == "aten::repeat_interleave") {
        return arguments[op.schema().arguments().size() - 1].isNone();
    }
    return SIZED_BY_VALUES.count(name) != 0;
}

/* Torch makes the GPU of an operator's tensors the current GPU. */
c10::optional<c10::Device>
device_of(const c10::IValue *arguments, size_t n)
{
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < n; i++) {
        if (arguments[i].isTensor()) {
            tensors.push_back(arguments[i].toTensor());
        }
        else if (arguments[i].isTensorList()) {
            const std::vector<at::Tensor> list = arguments[i].toTensorVector();
            tensors.insert(tensors.end(), list.begin(), list.end());
        }
    }
    for (const at::Tensor &of : tensors) {
        if (of.defined() && of.device().type() == TYPE) {
            return of.device();
        }
    }
    return c10::nullopt;
}

void
fall_back(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    const size_t n = op.schema().arguments().size(), first = stack->size() - n;
    const c10::OptionalDeviceGuard guard(device_of(stack->data() + first, n));
    if (operators == 0 && host_waits_for(op, stack->data() + first)) {
        host_waits_on(current_stream((c10::DeviceIndex)emul::current_device));
    }
    const Operator running;
    std::vector<std::pair<at::Tensor, at::Tensor>> changed;
    for (size_t i : changed_silently(op.schema().name())) {
        c10::IValue &argument = (*stack)[first + i];
        if (argument.isTensor() && argument.toTensor().defined()) {
            changed.emplace_back(argument.toTensor(), argument.toTensor().cpu());
            argument = changed.back().second;
        }
    }
    at::native::cpu_fallback(op, stack);
    for (const auto &it : changed) {
        it.first.copy_(it.second);
    }
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

/* Mixed precision casts as on CUDA. */
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
    return &default_streams[0];
}

/* How often memory was taken that is not torch's. */
extern "C" size_t
emul_allocations_of_ours()
{
    return emul::seen.allocations - by_torch;
}

/* Calls that made the host wait for the device, also torch's that might have. */
extern "C" size_t
emul_waits()
{
    return emul::seen.waits + waits_of_torch;
}

/* The plugin's next cudaMalloc finds no memory. */
extern "C" void
emul_fail_malloc()
{
    emul::fail_malloc = 1;
}

/* The next memory of the host cannot be pinned. */
extern "C" void
emul_fail_pin()
{
    emul::fail_pin = 1;
}

/* Launches of our kernels: torch's run on the host. */
extern "C" size_t
emul_launches()
{
    return emul::seen.launches;
}

extern "C" void *
emul_last_stream()
{
    return emul::seen.stream;
}
