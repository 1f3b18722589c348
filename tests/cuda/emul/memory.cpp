/* The emulated runtime: memory, copies, errors. Without a sanitizer each allocation is
 * pages of its own, ends at a guard page, and cannot be touched while no kernel or
 * copy runs: host code that follows a device pointer crashes here as it would there.
 * Under AddressSanitizer it is malloc's, whose red zones see more. */
#include "emul.h"

#include <map>
#include <mutex>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace emul {

size_t fail_malloc;
bool no_events;
size_t busy;
int n_devices = 1;

namespace {

struct block {
    char *pages;
    size_t pages_bytes;
};

std::map<void *, block> blocks; /* by the address that cudaMalloc gave */
std::mutex blocks_lock;         /* ranks of a group may be threads */
std::mutex gpu;                 /* held by who works on the memory */
cudaError_t last_error = cudaSuccess;
bool host_sees; /* for hosts that compute on this memory themselves */

} // namespace

void
reset()
{
    seen = {};
    fail_launch = fail_malloc = fail_create = 0;
    descending = false;
    most_blocks = 0;
    last_error = cudaSuccess;
}

void
set_last_error(cudaError_t error)
{
    last_error = error;
}

static bool
is_on_device(const void *data)
{
    std::lock_guard<std::mutex> held(blocks_lock);
    const auto behind = blocks.upper_bound(const_cast<void *>(data));
    if (behind == blocks.begin()) {
        return false;
    }
    const block &it = std::prev(behind)->second;
    return (const char *)data < it.pages + it.pages_bytes;
}

void
add_device_memory(void *data, size_t bytes)
{
    std::lock_guard<std::mutex> held(blocks_lock);
    blocks[data] = {(char *)data, bytes};
}

void
remove_device_memory(void *data)
{
    std::lock_guard<std::mutex> held(blocks_lock);
    blocks.erase(data);
}

static void
hold_gpu(bool hold)
{
    hold ? gpu.lock() : gpu.unlock();
}

#ifndef __SANITIZE_ADDRESS__
int
memory_protection()
{
    return host_sees ? PROT_READ | PROT_WRITE : PROT_NONE;
}

static void
open_block(const block &it, bool open)
{
    mprotect(it.pages, it.pages_bytes,
             open ? PROT_READ | PROT_WRITE : memory_protection());
}

static void
open_blocks(bool open)
{
    std::lock_guard<std::mutex> held(blocks_lock);
    for (const auto &entry : blocks) {
        open_block(entry.second, open);
    }
}

/* The one block that a copy or memset works on; a host address is none. */
static void
open_block_around(const void *data, bool open)
{
    std::lock_guard<std::mutex> held(blocks_lock);
    const auto behind = blocks.upper_bound(const_cast<void *>(data));
    if (behind == blocks.begin()) {
        return;
    }
    const block &it = std::prev(behind)->second;
    if ((const char *)data < it.pages + it.pages_bytes) {
        open_block(it, open);
    }
}
#else
int
memory_protection()
{
    return PROT_READ | PROT_WRITE;
}

static void
open_blocks(bool)
{
}

static void
open_block_around(const void *, bool)
{
}
#endif

void
open_device_memory(bool open)
{
    if (open) {
        hold_gpu(true);
    }
    open_blocks(open);
    if (!open) {
        hold_gpu(false);
    }
}

opened::opened(const void *one_, const void *other_) : one(one_), other(other_)
{
    hold_gpu(true);
    open_block_around(one, true);
    open_block_around(other, true);
}

opened::~opened()
{
    open_block_around(one, false);
    open_block_around(other, false);
    hold_gpu(false);
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
    *device = 0;
    return cudaSuccess;
}

cudaError_t
cudaSetDevice(int device)
{
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
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
    emul::seen.allocations++;
    if (emul::fail_malloc > 0 && --emul::fail_malloc == 0) {
        emul::last_error = cudaErrorMemoryAllocation;
        return cudaErrorMemoryAllocation;
    }
#ifdef __SANITIZE_ADDRESS__
    *data = aligned_alloc(256, (bytes + 255) / 256 * 256);
    *data = realloc(*data, bytes); /* shrunk in place: the red zone starts at bytes */
    std::lock_guard<std::mutex> held(emul::blocks_lock);
    emul::blocks[*data] = {(char *)*data, bytes};
#else
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t size = (bytes + page - 1) / page * page;
    char *pages =
        (char *)mmap(NULL, size + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(pages, size, emul::memory_protection());
    *data = pages + (size - bytes) / 16 * 16; /* an overrun meets the guard page */
    std::lock_guard<std::mutex> held(emul::blocks_lock);
    emul::blocks[*data] = {pages, size};
#endif
    return cudaSuccess;
}

cudaError_t
cudaFree(void *data)
{
    emul::seen.waits += data != NULL;
    std::lock_guard<std::mutex> held(emul::blocks_lock);
#ifdef __SANITIZE_ADDRESS__
    emul::blocks.erase(data);
    free(data);
#else
    const auto found = emul::blocks.find(data);
    if (found != emul::blocks.end()) {
        munmap(found->second.pages,
               found->second.pages_bytes + (size_t)sysconf(_SC_PAGESIZE));
        emul::blocks.erase(found);
    }
#endif
    return cudaSuccess;
}

cudaError_t
cudaMemsetAsync(void *data, int value, size_t bytes, cudaStream_t stream)
{
    emul::seen.stream = stream;
    emul::opened block(data, nullptr);
    memset(data, value, bytes);
    return cudaSuccess;
}

cudaError_t
cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                cudaStream_t stream)
{
    const bool up = kind == cudaMemcpyHostToDevice ||
                    (kind == cudaMemcpyDefault && emul::is_on_device(to));
    const void *device = up ? to : from;
    emul::seen.stream = stream;
    emul::opened block(device, nullptr);
    if (bytes != 0) {
        memcpy(to, from, bytes);
    }
    return cudaSuccess;
}

cudaError_t
cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = (cudaStream_t)malloc(1);
    return cudaSuccess;
}

cudaError_t
cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

cudaError_t
cudaStreamQuery(cudaStream_t)
{
    return emul::busy > 0 && emul::busy-- > 0 ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t
cudaStreamSynchronize(cudaStream_t)
{
    emul::seen.waits++;
    return cudaSuccess;
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    if (emul::no_events) {
        return cudaErrorMemoryAllocation;
    }
    *event = (cudaEvent_t)malloc(1);
    return cudaSuccess;
}

cudaError_t
cudaEventRecord(cudaEvent_t, cudaStream_t)
{
    return cudaSuccess;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t)
{
    emul::seen.waits++;
    return cudaSuccess;
}

cudaError_t
cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned)
{
    emul::seen.orders++;
    return cudaSuccess;
}

cudaError_t
cudaEventQuery(cudaEvent_t)
{
    return cudaStreamQuery(NULL);
}

cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t
cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *data)
{
    attributes->type =
        emul::is_on_device(data) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

/* For Python's tests, whose torch computes where it takes a device's memory to be. */
void
emul_show_memory(int shown)
{
    emul::host_sees = shown != 0;
}

} // extern "C"
