/* Memory of the device at fixed addresses comes, goes and is handed on, behind the work
 * on it. */
#include "cuda_test.h"

static void
open_maps(ct_mapping *maps, size_t n, const size_t *bytes, bool watched)
{
    ct_error err;
    for (size_t i = 0; i < n; i++) {
        check_ok(ct_mapping_open_on(ct_device_cuda.mapping, &maps[i], bytes[i], watched,
                                    &err),
                 err);
    }
}

static void
obtain(ct_mapping *map, ct_block_cache *spares)
{
    ct_error err;
    check_ok(ct_mapping_obtain(map, map->bytes, spares, &err), err);
}

static void
test_memory_is_handed_on_when_it_is_needed()
{
    const size_t bytes[] = {1 << 20, (1 << 20) - 5, 3 << 20, 1 << 20};
    ct_mapping maps[4];
    ct_block_cache spares = {};
    open_maps(maps, 4, bytes, false);
    const size_t before = emul::vm.created;
    check_ok(ct_mapping_obtain(&maps[0], 0, &spares, NULL), {});
    CHECK(emul::vm.created == before);
    obtain(&maps[0], &spares);
    const void *address = maps[0].data;
    ct_mapping_release(&maps[0], &spares);
    const size_t waits = emul::seen.waits;
    obtain(&maps[0], &spares); /* it has not gone yet: nobody waits */
    CHECK(emul::seen.waits == waits && emul::vm.created == before + 1);
    obtain(&maps[1], &spares);
    ct_mapping_release(&maps[0], &spares);
    ct_mapping_release(&maps[1], &spares);
    CHECK(emul::seen.waits == waits && emul::vm.created == before + 2);
    obtain(&maps[3], &spares); /* as many pages: they go there when their work ends */
    CHECK(emul::seen.waits <= waits + 1 && emul::vm.created == before + 2);
    obtain(&maps[2], &spares);
    obtain(&maps[1], &spares);
    obtain(&maps[0], &spares);
    CHECK(emul::vm.created == before + 4 && maps[0].data == address);
    for (ct_mapping &map : maps) {
        ct_mapping_release(&map, &spares);
    }
    ct_block_cache_discard(&spares);
    CHECK(emul::vm.blocks == 0);
    obtain(&maps[0], &spares);
    ct_block_cache_discard(&spares);
    for (ct_mapping &map : maps) {
        ct_mapping_close(&map);
    }
    CHECK(emul::vm.blocks == 0 && emul::vm.reserved == 0);
}

/* The work is on its stream, and not done, when the memory is released and taken. */
static void
test_memory_is_handed_on_behind_the_work_on_it()
{
    const size_t bytes[] = {1 << 20, 1 << 20};
    ct_mapping maps[2];
    ct_block_cache spares = {};
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    open_maps(maps, 2, bytes, false);
    for (int i = 0; i < 20; i++) { /* now and then a stream is early */
        ct_mapping *map = &maps[i % 2];
        map->stream = stream;
        obtain(map, &spares);
        const ct_span all = {map->data, bytes[0], CT_U8};
        CHECK(ct_device_cuda.zero(stream, &all, 1, NULL) == CT_OK);
        ct_mapping_release(map, &spares);
    }
    CHECK(emul::vm.blocks <= 2);
    ct_mapping_close(&maps[0]);
    ct_mapping_close(&maps[1]);
    ct_block_cache_discard(&spares);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(emul::vm.blocks == 0 && emul::vm.reserved == 0);
}

/* Units of a pass in turn: the device has the work on the last unit when the host has
 * waited for memory, unless memory is short. */
static void
test_the_host_stays_ahead(bool is_short)
{
    const size_t bytes[] = {1 << 20, 1 << 20, 1 << 20, 1 << 20};
    ct_mapping maps[4];
    ct_block_cache spares = {};
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    open_maps(maps, 4, bytes, false);
    size_t pending = 0;
    for (int i = 0; i < 40; i++) {
        ct_mapping *map = &maps[i % 4];
        map->stream = stream;
        emul::fail_create = is_short && i > 0 ? 1 : 0;
        obtain(map, &spares);
        emul::fail_create = 0;
        if (i % 4 == 3) { /* has the work of two units before come to its end? */
            const size_t waits = emul::seen.waits;
            CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
            pending += emul::seen.waits - waits;
        }
        const ct_span all = {map->data, bytes[0], CT_U8};
        CHECK(ct_device_cuda.zero(stream, &all, 1, NULL) == CT_OK);
        ct_mapping_release(map, &spares);
    }
    CHECK(is_short ? pending == 0 : pending >= 3); /* now and then a stream is early */
    CHECK(emul::vm.blocks == (is_short ? 1 : 2));
    for (ct_mapping &map : maps) {
        ct_mapping_close(&map);
    }
    ct_block_cache_discard(&spares);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(emul::vm.blocks == 0 && emul::vm.reserved == 0);
}

/* At the same address, where one stream leaves what the other takes. */
/* A unit that dies while a graph is captured, in the thread that captures. */
static void
test_memory_goes_beside_a_capture()
{
    const size_t bytes[] = {1 << 20};
    ct_mapping map;
    ct_block_cache spares = {};
    cudaStream_t captured;
    cudaGraph_t graph;
    CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking) == cudaSuccess);
    open_maps(&map, 1, bytes, false);
    obtain(&map, &spares);
    CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);
    ct_mapping_release(&map, &spares);
    ct_block_cache_discard(&spares);
    ct_mapping_close(&map);
    CHECK(cudaStreamEndCapture(captured, &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(emul::vm.blocks == 0 && emul::vm.reserved == 0);
}

static void
test_memory_changes_streams()
{
    const size_t bytes = 1 << 20;
    ct_mapping map;
    ct_block_cache spares = {};
    cudaStream_t streams[2];
    open_maps(&map, 1, &bytes, false);
    for (cudaStream_t &it : streams) {
        CHECK(cudaStreamCreateWithFlags(&it, cudaStreamNonBlocking) == cudaSuccess);
    }
    const size_t waits = emul::seen.waits;
    for (int i = 0; i < 6; i++) {
        map.stream = streams[i / 2 % 2];
        obtain(&map, &spares);
        const ct_span all = {map.data, bytes, CT_U8};
        CHECK(ct_device_cuda.zero(map.stream, &all, 1, NULL) == CT_OK);
        ct_mapping_release(&map, &spares);
    }
    CHECK(emul::vm.blocks == 1 && emul::seen.waits == waits);
    ct_mapping_close(&map);
    ct_block_cache_discard(&spares);
    for (cudaStream_t it : streams) {
        CHECK(cudaStreamSynchronize(it) == cudaSuccess);
        CHECK(cudaStreamDestroy(it) == cudaSuccess);
    }
    CHECK(emul::vm.blocks == 0 && emul::vm.reserved == 0);
}

/* Where memory is short, what lies ready for others goes first. */
static void
test_memory_that_is_short()
{
    const size_t bytes[] = {1 << 20, 2 << 20};
    ct_mapping maps[2];
    ct_block_cache spares = {};
    ct_error err;
    open_maps(maps, 2, bytes, false);
    emul::fail_create = 1;
    CHECK(ct_mapping_obtain(&maps[0], bytes[0], &spares, &err) == CT_ENOMEM);
    CHECK(strstr(err.message, "the GPU's memory is used up") != NULL);
    static int asked;
    ct_cuda_free_kept = [] { return asked++ == 0; };
    emul::fail_create = 1;
    obtain(&maps[0], &spares);
    CHECK(asked == 1);
    ct_mapping_release(&maps[0], &spares);
    emul::fail_create = 1;
    obtain(&maps[1], &spares);
    CHECK(emul::vm.blocks == 1 && asked == 1);
    ct_cuda_free_kept = NULL;
    ct_mapping_close(&maps[0]);
    ct_mapping_close(&maps[1]);
    ct_block_cache_discard(&spares);
    CHECK(emul::vm.blocks == 0 && emul::vm.reserved == 0);
}

static void
test_bytes_go_up_and_come_down()
{
    const unsigned char sent[] = {1, 2, 3, 4, 5};
    unsigned char back[sizeof sent] = {0};
    twin there(CT_U8, sizeof sent, 0);
    ct_error err;
    check_ok(ct_device_cuda.transfer(NULL, there.device(), sent, sizeof sent, &err),
             err);
    check_ok(ct_device_cuda.transfer(NULL, back, there.device(), sizeof sent, &err),
             err);
    CHECK(memcmp(sent, back, sizeof sent) == 0);
    CHECK(ct_device_cuda.transfer(NULL, NULL, NULL, 0, &err) == CT_OK);
}

/* Gradients that are kept wide and then are not. */
static void
test_a_mapping_takes_as_much_as_is_asked_for()
{
    const size_t bytes = 4 << 20;
    ct_mapping map;
    ct_block_cache spares = {};
    ct_error err;
    open_maps(&map, 1, &bytes, true);
    for (size_t part : {bytes, bytes / 2, bytes}) {
        check_ok(ct_mapping_obtain(&map, part, &spares, &err), err);
        const ct_span span = {map.data, part, CT_U8};
        check_ok(ct_device_cuda.zero(NULL, &span, 1, &err), err);
        ct_mapping_release(&map, &spares);
    }
    CHECK(emul::vm.blocks == 2);
    ct_mapping_close(&map);
    ct_block_cache_discard(&spares);
    CHECK(emul::vm.blocks == 0);
}

static void
test_an_old_driver_is_told()
{
    const size_t bytes = 1 << 20;
    ct_mapping map;
    ct_error err;
    emul::without_vm = true;
    CHECK(ct_mapping_open_on(ct_device_cuda.mapping, &map, bytes, false, &err) ==
          CT_EDEVICE);
    CHECK(strstr(err.message, "NVIDIA's driver has no cuMem") != NULL);
    emul::without_vm = false;
}

int
main()
{
    test_an_old_driver_is_told(); /* first: what is found is kept */
    test_memory_is_handed_on_when_it_is_needed();
    test_memory_is_handed_on_behind_the_work_on_it();
    test_the_host_stays_ahead(false);
    test_the_host_stays_ahead(true);
    test_memory_goes_beside_a_capture();
    test_memory_changes_streams();
    test_memory_that_is_short();
    test_bytes_go_up_and_come_down();
    test_a_mapping_takes_as_much_as_is_asked_for();
    return 0;
}
