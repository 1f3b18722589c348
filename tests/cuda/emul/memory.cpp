/* The emulated runtime: memory, copies, errors. Without a sanitizer device memory lies
 * in one range of addresses, each block of it ending at a page that is nobody's, and
 * none of it can be touched while no operation runs: host code that follows a device
 * pointer crashes here as it would there. Under AddressSanitizer it is malloc's, whose
 * red zones see more. New memory has the bits of NaN. */
#include "emul.h"

#include <map>
#include <mutex>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace emul {

size_t fail_malloc;
size_t fail_pin;
int n_devices = 1;
bool host_sees;
thread_local int current_device;

namespace {

struct block {
    size_t bytes;
    int device;
};

/* By address; in use also at the exit. */
std::map<uintptr_t, block> &blocks = *new std::map<uintptr_t, block>();
std::mutex blocks_lock;                            /* and of the next */
auto &pinned = *new std::map<uintptr_t, size_t>(); /* memory of the host */
thread_local cudaError_t last_error = cudaSuccess;

const unsigned char unset = 0xff;

} // namespace

void
reset()
{
    seen = {};
    fail_launch = fail_malloc = fail_create = fail_pin = 0;
    most_blocks = 0;
    last_error = cudaSuccess;
}

void
set_last_error(cudaError_t error)
{
    last_error = error;
}

static cudaError_t
fail(cudaError_t error)
{
    last_error = error;
    return error;
}

int
device_of(const void *data, size_t bytes)
{
    const std::lock_guard<std::mutex> held(blocks_lock);
    const auto behind = blocks.upper_bound((uintptr_t)data);
    if (behind == blocks.begin()) {
        return -1;
    }
    const auto &[begin, it] = *std::prev(behind);
    const size_t at = (uintptr_t)data - begin;
    return at < it.bytes && bytes <= it.bytes - at ? it.device : -1;
}

static void
pin(void *data, size_t bytes)
{
    const std::lock_guard<std::mutex> held(blocks_lock);
    pinned[(uintptr_t)data] = bytes;
}

static void
unpin(void *data, const char *name)
{
    const std::lock_guard<std::mutex> held(blocks_lock);
    if (pinned.erase((uintptr_t)data) == 0) {
        die("%s of memory that is not pinned", name);
    }
}

static bool
is_pinned(const void *data, size_t bytes)
{
    const std::lock_guard<std::mutex> held(blocks_lock);
    const auto behind = pinned.upper_bound((uintptr_t)data);
    return behind != pinned.begin() &&
           (uintptr_t)data + bytes <=
               std::prev(behind)->first + std::prev(behind)->second;
}

void
add_device_memory(void *data, size_t bytes)
{
    const std::lock_guard<std::mutex> held(blocks_lock);
    blocks[(uintptr_t)data] = {bytes, current_device};
    set_home(data, bytes, current_device);
}

size_t
remove_device_memory(void *data, const char *name, const clock *at)
{
    size_t bytes;
    {
        const std::lock_guard<std::mutex> held(blocks_lock);
        const auto found = blocks.find((uintptr_t)data);
        if (found == blocks.end()) {
            die("%s of %p, where no block of memory begins", name, data);
        }
        bytes = found->second.bytes;
        blocks.erase(found);
    }
    check_release(data, bytes, name, at);
    set_home(data, bytes, -1);
    return bytes;
}

#ifdef __SANITIZE_ADDRESS__

int
memory_protection()
{
    return PROT_READ | PROT_WRITE;
}

void *
reserve_addresses(size_t bytes)
{
    return mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                0);
}

void
open_memory(const void *, size_t)
{
}

void
close_memory()
{
}

static void *
get_memory(size_t bytes)
{
    void *data = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return realloc(data, bytes); /* shrunk in place: the red zone starts at bytes */
}

static void
give_back(void *data, size_t)
{
    free(data);
}

#else

static size_t used; /* of the range */

int
memory_protection()
{
    return host_sees ? PROT_READ | PROT_WRITE : PROT_NONE;
}

void *
reserve_addresses(size_t bytes)
{
    const std::lock_guard<std::mutex> held(blocks_lock);
    const size_t big = 64 << 10; /* pages of the driver */
    const size_t at = bytes % big == 0 ? (used + big - 1) / big * big : used;
    if (arena.bytes - at < bytes) {
        die("no address is left");
    }
    used = at + bytes;
    return (void *)(arena.begin + at);
}

static const size_t page = 4096;
static std::vector<bounds> opened; /* ranges of pages */

void
open_memory(const void *data, size_t bytes)
{
    const uintptr_t begin = (uintptr_t)data / page * page;
    const uintptr_t end = ((uintptr_t)data + bytes + page - 1) / page * page;
    const bounds pages =
        data == NULL ? bounds{arena.begin, used} : bounds{begin, end - begin};
    for (const bounds &it : opened) {
        if (it.begin <= pages.begin &&
            pages.begin + pages.bytes <= it.begin + it.bytes) {
            return;
        }
    }
    opened.push_back(pages);
    mprotect((void *)pages.begin, pages.bytes, PROT_READ | PROT_WRITE);
}

void
close_memory()
{
    for (const bounds &it : opened) {
        mprotect((void *)it.begin, it.bytes, memory_protection());
    }
    opened.clear();
}

static void *
get_memory(size_t bytes)
{
    const size_t size = (bytes + page - 1) / page * page;
    char *pages = (char *)reserve_addresses(size + page);
    return pages + (size - bytes) / 16 * 16; /* an overrun meets the page behind */
}

static void
give_back(void *data, size_t bytes)
{
    char *pages = (char *)((uintptr_t)data / page * page);
    madvise(pages, (size_t)((char *)data + bytes - pages), MADV_DONTNEED);
}

#endif

void
free_behind(cudaStream_t stream, void *data)
{
    enqueue(stream, "a release of memory",
            [=] { give_back(data, remove_device_memory(data, "release", NULL)); });
}

} // namespace emul

extern "C" {

const char *
cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation       ? "cudaErrorMemoryAllocation"
           : error == cudaErrorLaunchOutOfResources ? "cudaErrorLaunchOutOfResources"
           : error == cudaErrorInvalidConfiguration ? "cudaErrorInvalidConfiguration"
           : error == cudaErrorNoDevice             ? "cudaErrorNoDevice"
                                                    : "cudaErrorInvalidValue";
}

const char *
cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory" : "emulated error";
}

cudaError_t
cudaGetLastError(void)
{
    const cudaError_t error = emul::last_error;
    emul::last_error = cudaSuccess;
    return error;
}

cudaError_t
cudaGetDeviceCount(int *count)
{
    *count = emul::n_devices;
    return emul::n_devices > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t
cudaGetDevice(int *device)
{
    *device = emul::current_device;
    return cudaSuccess;
}

cudaError_t
cudaSetDevice(int device)
{
    if (device < 0 || device >= emul::n_devices) {
        return emul::fail(cudaErrorInvalidDevice);
    }
    emul::current_device = device;
    return cudaSuccess;
}

cudaError_t
cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t
cudaDriverGetVersion(int *version)
{
    const char *given = getenv("EMUL_DRIVER_VERSION");
    *version = given != NULL ? atoi(given) : CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t
cudaMalloc(void **data, size_t bytes)
{
    emul::reject_in_capture("cudaMalloc");
    emul::seen.allocations++;
    if (emul::fail_malloc > 0 && --emul::fail_malloc == 0) {
        return emul::fail(cudaErrorMemoryAllocation);
    }
    *data = emul::get_memory(bytes);
    emul::exclusively([=](const emul::clock &) {
        emul::open_memory(*data, bytes);
        memset(*data, emul::unset, bytes);
        emul::close_memory();
    });
    emul::add_device_memory(*data, bytes);
    return cudaSuccess;
}

cudaError_t
cudaHostAlloc(void **data, size_t bytes, unsigned)
{
    emul::reject_in_capture("cudaHostAlloc");
    emul::seen.allocations++;
    *data = malloc(bytes);
    memset(*data, emul::unset, bytes);
    emul::pin(*data, bytes);
    return cudaSuccess;
}

cudaError_t
cudaFreeHost(void *data)
{
    emul::reject_in_capture("cudaFreeHost");
    if (data != NULL) {
        emul::unpin(data, "cudaFreeHost");
    }
    free(data);
    return cudaSuccess;
}

cudaError_t
cudaHostRegister(void *data, size_t bytes, unsigned)
{
    emul::reject_in_capture("cudaHostRegister");
    if (emul::fail_pin > 0 && --emul::fail_pin == 0) {
        return emul::fail(cudaErrorMemoryAllocation);
    }
    emul::pin(data, bytes);
    return cudaSuccess;
}

cudaError_t
cudaHostUnregister(void *data)
{
    emul::reject_in_capture("cudaHostUnregister");
    emul::unpin(data, "cudaHostUnregister");
    return cudaSuccess;
}

cudaError_t
cudaFree(void *data)
{
    emul::reject_in_capture("cudaFree");
    if (data == NULL) {
        return cudaSuccess;
    }
    emul::seen.waits++;
    emul::wait_for_device();
    emul::exclusively([=](const emul::clock &host) {
        emul::give_back(data, emul::remove_device_memory(data, "cudaFree", &host));
    });
    return cudaSuccess;
}

cudaError_t
cudaMemsetAsync(void *data, int value, size_t bytes, cudaStream_t stream)
{
    if (bytes == 0) {
        return cudaSuccess;
    }
    if (emul::device_of(data, bytes) < 0) {
        return emul::fail(cudaErrorInvalidValue);
    }
    emul::seen.stream = stream;
    emul::enqueue(stream, "cudaMemsetAsync", [=] {
        emul::touch(data, bytes, true);
        memset(data, value, bytes);
    });
    return cudaSuccess;
}

cudaError_t
cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                cudaStream_t stream)
{
    const bool to_device = emul::device_of(to, bytes) >= 0;
    const bool from_device = emul::device_of(from, bytes) >= 0;
    if (bytes == 0) {
        return cudaSuccess;
    }
    if ((kind == cudaMemcpyHostToDevice && (!to_device || from_device)) ||
        (kind == cudaMemcpyDeviceToHost && (to_device || !from_device))) {
        return emul::fail(cudaErrorInvalidValue);
    }
    emul::seen.stream = stream;
    emul::enqueue(stream, "cudaMemcpyAsync", [=] {
        emul::touch(from, bytes, false);
        emul::touch(to, bytes, true);
        memmove(to, from, bytes);
    });
    /* The call returns when ordinary memory has the bytes. */
    return from_device && !to_device && !emul::is_pinned(to, bytes)
               ? cudaStreamSynchronize(stream)
               : cudaSuccess;
}

cudaError_t
cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *data)
{
    attributes->type = emul::device_of(data, 1) >= 0 ? cudaMemoryTypeDevice
                                                     : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

/* For Python's tests, whose torch computes where it takes a device's memory to be. */
void
emul_show_memory(int shown)
{
    emul::host_sees = shown != 0;
}

void
emul_set_devices(int n)
{
    emul::n_devices = n;
}

void
emul_be_host(int host)
{
    emul::current_host = host;
}

} // extern "C"
