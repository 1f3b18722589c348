/* Mappings of the device's memory: an address is reserved once, and blocks of memory
 * come and go there.
 *
 * At a release the host is ahead of the device, still at work on the memory. So a
 * released block stays at its address, with an event behind the last use, until another
 * mapping needs the block: the host then waits for the event, and so cannot run further
 * ahead than the memory allows. The host never waits for the last work of a stream, or
 * the device would have nothing to do meanwhile: then another block is made.
 *
 * The functions of release and close return no status: a failing driver is reported by
 * the next launch or allocation. */
#include "kernels.h"

#include "core/base/alloc.h"
#include "driver.h"
#include "status.h"

#include <string.h>

struct ct_cached_block {
    CUmemGenericAllocationHandle memory;
    size_t bytes;
    cudaEvent_t left;      /* behind the last use of a released block */
    void *last;            /* the stream of that use */
    ct_mapping *at;        /* the address; NULL: not mapped */
    ct_block_cache *cache; /* the cache of a released block; NULL: in use */
    ct_cached_block *next;
};

static CUdeviceptr
address_of(const ct_mapping *map)
{
    return (CUdeviceptr)(uintptr_t)map->data;
}

static CUmemAllocationProp
kind_of(const ct_mapping *map)
{
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = map->ordinal},
    };
}

/* bytes up to a whole number of the device's pages. */
static ct_status
round_up(const ct_driver *driver, const ct_mapping *map, size_t bytes, size_t *rounded,
         ct_error *err)
{
    const CUmemAllocationProp kind = kind_of(map);
    size_t page = 1;
    ct_status status = ct_driver_check(
        driver->granularity(&page, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "ask for the size of the GPU's pages", err);
    *rounded = (bytes + page - 1) / page * page;
    return status;
}

/* ---- blocks ---------------------------------------------------------------------- */

/* Waits for the last use; an error of the device reappears at the next launch. */
static void
unmap(const ct_driver *driver, ct_cached_block *block)
{
    if (block->at != NULL) {
        const enum cudaStreamCaptureMode mode = ct_cuda_relax_mode();
        (void)cudaEventSynchronize(block->left);
        ct_cuda_restore_mode(mode);
        (void)driver->unmap(address_of(block->at), block->bytes);
        block->at->block = NULL;
        block->at = NULL;
    }
}

static void
destroy(const ct_driver *driver, ct_cached_block *block)
{
    unmap(driver, block);
    (void)driver->release(block->memory);
    (void)cudaEventDestroy(block->left);
    ct_free(block);
}

static ct_status
create(const ct_driver *driver, const ct_mapping *map, size_t bytes,
       ct_cached_block **made, ct_error *err)
{
    /* Memory of the mapping's device, whatever device is current now. */
    const CUmemAllocationProp kind = kind_of(map);
    ct_cached_block *block = ct_calloc(1, sizeof *block);
    if (block == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a block of the GPU's memory");
    }
    block->bytes = bytes;
    ct_status status =
        ct_cuda_check(cudaEventCreateWithFlags(&block->left, cudaEventDisableTiming),
                      "make an event", err);
    if (status != CT_OK) {
        ct_free(block);
        return status;
    }
    status = ct_driver_check(driver->create(&block->memory, bytes, &kind, 0),
                             "get memory for parameters or gradients", err);
    if (status != CT_OK) {
        (void)cudaEventDestroy(block->left);
        ct_free(block);
        return status;
    }
    *made = block;
    return CT_OK;
}

static ct_status
map_block(const ct_driver *driver, ct_mapping *map, ct_cached_block *block,
          ct_error *err)
{
    const CUdeviceptr address = address_of(map);
    const CUmemAccessDesc access = {.location = kind_of(map).location,
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    ct_status status =
        ct_driver_check(driver->map(address, block->bytes, 0, block->memory, 0),
                        "map memory at an address", err);
    if (status != CT_OK) {
        return status;
    }
    /* Set before access is, so that destroy() unmaps after a failure below. */
    block->at = map;
    map->block = block;
    return ct_driver_check(driver->set_access(address, block->bytes, &access, 1),
                           "make memory accessible", err);
}

/* ---- blocks that lie ready ------------------------------------------------------- */

/* Appends: the block at the front was released first. */
static void
put(ct_block_cache *cache, ct_cached_block *block)
{
    ct_cached_block **end = &cache->first;
    while (*end != NULL) {
        end = &(*end)->next;
    }
    *end = block;
    block->next = NULL;
    block->cache = cache;
    cache->ops = &ct_cuda_mapping_ops;
}

static void
take_out(ct_cached_block *block)
{
    ct_cached_block **link = &block->cache->first;
    while (*link != block) {
        link = &(*link)->next;
    }
    *link = block->next;
    block->cache = NULL;
}

/* Has the device left the block, or other work behind the last use on that stream? */
static bool
may_wait_for(const ct_cached_block *block)
{
    const ct_cached_block *later = block->next;
    while (later != NULL && later->last != block->last) {
        later = later->next;
    }
    return block->at == NULL || later != NULL ||
           ct_cuda_query(block->left) != cudaErrorNotReady;
}

/* The block that was released first, of exactly as many bytes: the driver maps whole
 * blocks. Any, or only such as the host may wait for. */
static ct_cached_block *
find(const ct_block_cache *cache, size_t bytes, bool any)
{
    ct_cached_block *block = cache == NULL ? NULL : cache->first;
    while (block != NULL && (block->bytes != bytes || !(any || may_wait_for(block)))) {
        block = block->next;
    }
    return block;
}

static void
cuda_discard(ct_block_cache *cache)
{
    const ct_driver *driver;
    ct_error unused;
    if (ct_driver_borrow(&driver, &unused) != CT_OK) {
        return;
    }
    while (cache->first != NULL) {
        ct_cached_block *block = cache->first;
        take_out(block);
        destroy(driver, block);
    }
}

/* A released block, or a new block, for which released blocks are freed if necessary,
 * and what the framework keeps. */
static ct_status
get_block(const ct_driver *driver, const ct_mapping *map, size_t bytes,
          ct_block_cache *cache, ct_cached_block **block, ct_error *err)
{
    ct_cached_block *released = find(cache, bytes, false);
    ct_status status = CT_OK;
    if (released == NULL) {
        status = create(driver, map, bytes, block, err);
        released = status == CT_ENOMEM ? find(cache, bytes, true) : NULL;
    }
    if (released != NULL) {
        take_out(released);
        /* Waits until the device has left the old address. */
        unmap(driver, released);
        *block = released;
        return CT_OK;
    }
    if (status == CT_ENOMEM && cache != NULL && cache->first != NULL) {
        cuda_discard(cache);
        status = create(driver, map, bytes, block, err);
    }
    if (status == CT_ENOMEM && ct_cuda_free_kept != NULL && ct_cuda_free_kept()) {
        status = create(driver, map, bytes, block, err);
    }
    return status;
}

/* ---- entries --------------------------------------------------------------------- */

static ct_status
cuda_open(ct_mapping *map, size_t bytes, ct_error *err)
{
    const ct_driver *driver;
    CUdeviceptr address = 0;
    size_t reserved = 0;
    ct_status status =
        ct_cuda_check(cudaGetDevice(&map->ordinal), "find the current GPU", err);
    if (status != CT_OK || bytes == 0) {
        return status;
    }
    status = ct_driver_borrow(&driver, err);
    if (status == CT_OK) {
        status = round_up(driver, map, bytes, &reserved, err);
    }
    if (status == CT_OK) {
        status = ct_driver_check(driver->reserve(&address, reserved, 0, 0, 0),
                                 "reserve addresses of the GPU", err);
    }
    memcpy((void *)&map->data, &address,
           sizeof map->data); /* the driver's type is an integer */
    return status;
}

static ct_status
cuda_obtain(ct_mapping *map, size_t bytes, ct_block_cache *cache, ct_error *err)
{
    const ct_driver *driver;
    ct_cached_block *block = map->block;
    size_t wanted;
    ct_status status = ct_driver_borrow(&driver, err);
    if (status == CT_OK) {
        status = round_up(driver, map, bytes, &wanted, err);
    }
    if (status != CT_OK || wanted == 0) {
        return status;
    }
    if (block != NULL && block->bytes == wanted) {
        /* Still at this address, where the old content's last use comes first. */
        if (block->cache == NULL) {
            return CT_OK;
        }
        take_out(block);
        return block->last == map->stream
                   ? CT_OK
                   : ct_cuda_check(
                         cudaStreamWaitEvent((cudaStream_t)map->stream, block->left, 0),
                         "let a stream wait for another", err);
    }
    if (block != NULL) {
        unmap(driver, block);
    }
    block = NULL;
    status = get_block(driver, map, wanted, cache, &block, err);
    if (status != CT_OK || block == NULL) {
        return status;
    }
    status = map_block(driver, map, block, err);
    if (status != CT_OK) {
        destroy(driver, block);
    }
    return status;
}

static void
cuda_release(ct_mapping *map, ct_block_cache *cache)
{
    const ct_driver *driver;
    ct_cached_block *block = map->block;
    ct_error unused;
    if (block == NULL || block->cache != NULL ||
        ct_driver_borrow(&driver, &unused) != CT_OK) {
        return;
    }
    (void)cudaEventRecord(block->left, (cudaStream_t)map->stream);
    block->last = map->stream;
    if (cache == NULL) {
        destroy(driver, block);
        return;
    }
    /* A use after the release then faults at once, for the price of waiting here. */
    if (map->watched) {
        unmap(driver, block);
    }
    put(cache, block);
}

static void
cuda_close(ct_mapping *map)
{
    const ct_driver *driver;
    size_t reserved;
    ct_error unused;
    ct_cached_block *block = map->block;
    if (ct_driver_borrow(&driver, &unused) != CT_OK) {
        return;
    }
    if (block != NULL && block->cache != NULL) {
        take_out(block);
        destroy(driver, block);
    }
    cuda_release(map, NULL);
    if (round_up(driver, map, map->bytes, &reserved, &unused) == CT_OK) {
        (void)driver->unreserve(address_of(map), reserved);
    }
}

const ct_mapping_ops ct_cuda_mapping_ops = {
    .open = cuda_open,
    .obtain = cuda_obtain,
    .release = cuda_release,
    .close = cuda_close,
    .discard = cuda_discard,
};
