/* The emulated driver: physical memory is a file without a name, which is mapped where
 * addresses were reserved. What real drivers reject is rejected: parts of a block,
 * addresses that are taken or not reserved, memory without access. */
#include "cuda.h"
#include "emul.h"

#include <map>
#include <mutex>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

namespace emul {

size_t fail_create;
vm_record vm;
bool without_vm;

namespace {

const size_t page = 64 << 10; /* small: tests have many */

struct mapped {
    size_t bytes;
    int file;
};

std::map<CUmemGenericAllocationHandle, size_t> physical; /* their bytes; by file */
std::map<CUdeviceptr, size_t> reserved;
std::map<CUdeviceptr, mapped> maps;
std::mutex lock;

CUresult
granularity(size_t *bytes, const CUmemAllocationProp *kind,
            CUmemAllocationGranularity_flags)
{
    *bytes = page;
    return kind->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                   kind->location.type == CU_MEM_LOCATION_TYPE_DEVICE
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

CUresult
reserve(CUdeviceptr *address, size_t bytes, size_t, CUdeviceptr, unsigned long long)
{
    if (bytes == 0 || bytes % page != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    void *data = reserve_addresses(bytes);
    const std::lock_guard<std::mutex> held(lock);
    *address = (CUdeviceptr)(uintptr_t)data;
    reserved[*address] = bytes;
    vm.reserved++;
    return CUDA_SUCCESS;
}

CUresult
unreserve(CUdeviceptr address, size_t bytes)
{
    const std::lock_guard<std::mutex> held(lock);
    if (maps.count(address) != 0 || reserved.count(address) == 0 ||
        reserved[address] != bytes) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    reserved.erase(address);
    vm.reserved--;
    return CUDA_SUCCESS;
}

CUresult
create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *,
       unsigned long long)
{
    if (fail_create > 0 && --fail_create == 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const int file = memfd_create("emulated memory", MFD_CLOEXEC);
    if (bytes == 0 || bytes % page != 0 || file < 0 ||
        ftruncate(file, (off_t)bytes) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const std::lock_guard<std::mutex> held(lock);
    *handle = (CUmemGenericAllocationHandle)file;
    physical[*handle] = bytes;
    vm.blocks++;
    vm.created++;
    return CUDA_SUCCESS;
}

CUresult
release(CUmemGenericAllocationHandle handle)
{
    const std::lock_guard<std::mutex> held(lock);
    if (physical.erase(handle) == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    close((int)handle);
    vm.blocks--;
    return CUDA_SUCCESS;
}

CUresult
map(CUdeviceptr address, size_t bytes, size_t offset,
    CUmemGenericAllocationHandle handle, unsigned long long)
{
    const std::lock_guard<std::mutex> held(lock);
    const auto place = reserved.find(address);
    if (place == reserved.end() || place->second < bytes || offset != 0 ||
        maps.count(address) != 0 || physical.count(handle) == 0 ||
        physical[handle] != bytes) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    maps[address] = {bytes, (int)handle};
    return CUDA_SUCCESS;
}

CUresult
set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t n)
{
    const std::lock_guard<std::mutex> held(lock);
    const auto found = maps.find(address);
    if (found == maps.end() || found->second.bytes != bytes || n != 1 ||
        access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    void *data = (void *)(uintptr_t)address;
    exclusively([=](const clock &) {
        mmap(data, bytes, memory_protection(), MAP_SHARED | MAP_FIXED,
             found->second.file, 0);
    });
    add_device_memory(data, bytes);
    return CUDA_SUCCESS;
}

CUresult
unmap(CUdeviceptr address, size_t bytes)
{
    const std::lock_guard<std::mutex> held(lock);
    const auto found = maps.find(address);
    if (found == maps.end() || found->second.bytes != bytes) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    void *data = (void *)(uintptr_t)address;
    exclusively([=](const clock &host) {
        (void)remove_device_memory(data, "cuMemUnmap", &host);
        mmap(data, bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    });
    maps.erase(found);
    return CUDA_SUCCESS;
}

} // namespace
} // namespace emul

extern "C" cudaError_t
cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned,
                                 unsigned long long,
                                 enum cudaDriverEntryPointQueryResult *found)
{
    static const std::map<std::string, void *> all = {
        {"cuMemGetAllocationGranularity", (void *)emul::granularity},
        {"cuMemAddressReserve",           (void *)emul::reserve    },
        {"cuMemAddressFree",              (void *)emul::unreserve  },
        {"cuMemCreate",                   (void *)emul::create     },
        {"cuMemRelease",                  (void *)emul::release    },
        {"cuMemMap",                      (void *)emul::map        },
        {"cuMemSetAccess",                (void *)emul::set_access },
        {"cuMemUnmap",                    (void *)emul::unmap      },
    };
    const auto it = all.find(symbol);
    const bool known = it != all.end() && !emul::without_vm;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    *function = known ? it->second : NULL;
    return cudaSuccess;
}
