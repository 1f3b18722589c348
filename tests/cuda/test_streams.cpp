/* What the emulation says of programs whose work is not ordered. Each runs in a process
 * of its own, which has to end as told. */
#include "cuda_test.h"

#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

static cudaStream_t
new_stream()
{
    cudaStream_t made;
    CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking) == cudaSuccess);
    return made;
}

static char *
memory()
{
    void *made;
    CHECK(cudaMalloc(&made, 4096) == cudaSuccess);
    return (char *)made;
}

static void
clear(char *data, size_t bytes, cudaStream_t stream)
{
    CHECK(cudaMemsetAsync(data, 0, bytes, stream) == cudaSuccess);
}

/* What a child writes, where it ends by abort(); "" where it ends by itself. */
template <typename Program>
static std::string
said_by(Program program)
{
    int ends[2], status;
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        program();
        _exit(0);
    }
    close(ends[1]);
    std::string said;
    char buffer[512];
    for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) {
        said.append(buffer, (size_t)n);
    }
    close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGABRT : said.empty());
    return said;
}

static bool
has(const std::string &said, const char *part)
{
    if (said.find(part) == std::string::npos) {
        fprintf(stderr, "%s\n", said.c_str());
        return false;
    }
    return said.find("CTRAINER_EMUL_SEED=") != std::string::npos;
}

/* Two writes of the same memory, on two streams. */
template <typename Between>
static std::string
said_of_two_streams(Between between)
{
    return said_by([&] {
        const cudaStream_t first = new_stream(), second = new_stream();
        char *data = memory();
        clear(data, 64, first);
        between(first, second);
        clear(data + 60, 64, second);
        CHECK(cudaFree(data) == cudaSuccess);
    });
}

static void
test_streams_are_ordered_by_events_and_waits_alone()
{
    const std::string said = said_of_two_streams([](cudaStream_t, cudaStream_t) {});
    CHECK(has(said, "race: cudaMemsetAsync on stream ") &&
          has(said, "writes, and nothing orders them"));
    CHECK(said_of_two_streams([](cudaStream_t first, cudaStream_t second) {
              cudaEvent_t event;
              (void)cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
              (void)cudaEventRecord(event, first);
              (void)cudaStreamWaitEvent(second, event, 0);
          }).empty());
    CHECK(said_of_two_streams([](cudaStream_t first, cudaStream_t) {
              (void)cudaStreamSynchronize(first);
          }).empty());
    CHECK(has(said_of_two_streams([](cudaStream_t, cudaStream_t second) {
                  (void)cudaStreamSynchronize(second);
              }),
              "race: "));
}

static void
test_nothing_is_done_before_somebody_waits()
{
    const cudaStream_t stream = new_stream();
    unsigned char zeros[64] = {}, back[64];
    char *data = memory();
    size_t late = 0;
    CHECK(cudaHostRegister(back, sizeof back, 0) == cudaSuccess); /* else it waits */
    for (int i = 0; i < 64; i++) {
        memset(back, 1, sizeof back);
        clear(data, 64, stream);
        CHECK(cudaMemcpyAsync(back, data, 64, cudaMemcpyDeviceToHost, stream) ==
              cudaSuccess);
        late += back[0] == 1;
        CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
        CHECK(memcmp(back, zeros, sizeof back) == 0);
    }
    CHECK(late > 32 && cudaFree(data) == cudaSuccess);
    CHECK(cudaHostUnregister(back) == cudaSuccess);
}

static void
test_memory_is_used_only_while_it_is_there()
{
    CHECK(has(said_by([] {
                  char *data = memory();
                  (void)cudaFree(data);
                  (void)cudaFree(data);
              }),
              "cudaFree of 0x"));
    CHECK(has(said_by([] {
                  char *data = memory();
                  emul::free_behind(NULL, data);
                  emul::enqueue(NULL, "late", [=] { emul::touch(data, 1, false); });
                  (void)cudaStreamSynchronize(NULL);
              }),
              "late uses memory that is not, or no longer, there"));
    const std::string said = said_by([] {
        char *data = memory();
        clear(data, 64, new_stream());
        emul::free_behind(NULL, data);
        emul::wait_for_device();
    });
    CHECK(has(said, said.find("release") != std::string::npos
                        ? "release of memory that cudaMemsetAsync on stream "
                        : "cudaMemsetAsync uses memory that is not, or no longer"));
}

static void
test_a_stream_is_its_devices()
{
    emul::n_devices = 2;
    CHECK(cudaSetDevice(1) == cudaSuccess);
    const cudaStream_t other = new_stream();
    char *data = memory();
    CHECK(cudaSetDevice(0) == cudaSuccess);
    emul::launch("nothing", 1, 32, other, [] {});
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    CHECK(has(said_by([=] {
                  emul::launch("wrong", 1, 1, NULL,
                               [=] { emul::touch(data, 4, true); });
                  (void)cudaStreamSynchronize(NULL);
              }),
              "wrong uses another device's memory"));
    CHECK(cudaSetDevice(1) == cudaSuccess && cudaFree(data) == cudaSuccess);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    emul::n_devices = 1;
}

/* Thread 0 writes what the others read, of its block or of all blocks. */
static std::string
said_of_a_launch(unsigned blocks, bool with_barrier)
{
    return said_by([=] {
        char *data = memory();
        emul::launch("threads", blocks, 64, NULL, [=] {
            if (emul::here.thread.x == 0) {
                emul::touch(data, 4, true);
            }
            if (with_barrier) {
                emul::barrier();
            }
            emul::touch(data, 4, false);
        });
        (void)cudaStreamSynchronize(NULL);
    });
}

static void
test_threads_are_ordered_by_barriers_of_their_block()
{
    CHECK(said_of_a_launch(1, true).empty());
    CHECK(has(said_of_a_launch(1, false), "with no barrier between them"));
    CHECK(has(said_of_a_launch(2, true), "race in threads"));
}

/* In the mode that is torch's, until the thread says that it knows. */
static void
test_a_capture_ends_at_a_call_that_has_nothing_to_do_with_it()
{
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const cudaStream_t stream = new_stream(), beside = new_stream();
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK(has(said_by([] { (void)memory(); }), "cudaMalloc while a stream is"));
    CHECK(has(said_by([&] { (void)cudaStreamSynchronize(beside); }), "Synchronize"));
    CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
    CHECK(cudaFree(memory()) == cudaSuccess && mode == cudaStreamCaptureModeGlobal);
    CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
    const auto in_another_thread = [] { std::thread([] { (void)memory(); }).join(); };
    CHECK(has(said_by(in_another_thread), "cudaMalloc while a stream is"));
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    std::thread([] { CHECK(cudaFree(memory()) == cudaSuccess); }).join();
}

static void
test_a_copy_goes_where_its_kind_says()
{
    char here[8] = {};
    char *data = memory();
    CHECK(cudaMemcpyAsync(data, here, 8, cudaMemcpyDeviceToHost, NULL) ==
          cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(here, data, 8, cudaMemcpyHostToDevice, NULL) ==
          cudaErrorInvalidValue);
    CHECK(cudaMemsetAsync(data + 4090, 0, 8, NULL) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(cudaFree(data) == cudaSuccess);
}

int
main()
{
    test_nothing_is_done_before_somebody_waits();
    test_a_copy_goes_where_its_kind_says();
    test_a_capture_ends_at_a_call_that_has_nothing_to_do_with_it();
#ifdef __SANITIZE_ADDRESS__
    return 0; /* accesses are the sanitizer's to look at */
#endif
    test_streams_are_ordered_by_events_and_waits_alone();
    test_memory_is_used_only_while_it_is_there();
    test_a_stream_is_its_devices();
    test_threads_are_ordered_by_barriers_of_their_block();
    return 0;
}
