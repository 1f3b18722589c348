/* What an entry does around its kernels: streams, waiting, errors, nothing to do. Only
 * the emulation can count and reject, so this test is for it alone. */
#include "cuda_test.h"

#include "../../cuda/launch.cuh"

#include <thread>

static const cudaStream_t other = (cudaStream_t)(uintptr_t)0x5eed;

/* Every entry with one span of n elements of dtype, or with none. */
struct fixture {
    twin a, b, c, d;
    ct_scratch scratch = {};
    update_table table;
    double *sum;
    ct_error err;

    fixture(ct_dtype dtype, size_t n)
        : a(dtype, n, 0), b(dtype, n, 0), c(dtype, n, 0), d(dtype, n, 0)
    {
        CHECK(cudaMalloc((void **)&sum, sizeof *sum) == cudaSuccess);
        CHECK(ct_device_cuda.scratch_grow(&scratch, 4096, NULL) == CT_OK);
        CHECK(ct_device_cuda.table_reserve(&table.of, 1, NULL) == CT_OK);
        emul::reset();
    }
    ~fixture()
    {
        ct_device_cuda.scratch_release(&scratch);
        (void)cudaFree(sum);
    }

    ct_status call(int entry)
    {
        const ct_span x = a.on_device(), y = b.on_device();
        const ct_rule_coef coef = {};
        ct_update_span span = {};
        span.n = a.n;
        span.grad = a.device();
        span.param = b.device();
        span.state[0] = c.device();
        span.state[1] = d.device();
        span.dtype = span.grad_dtype = span.state_dtype = a.dtype;
        ct_update update = {};
        update.rule = CT_RULE_adamw;
        update.coefs = &coef;
        update.spans = &span;
        update.n_spans = 1;
        update.zero_grads = true;
        switch (entry) {
        case 0:
            return ct_device_cuda.norm(other, &scratch, 2.0, &x, 1, sum, &err);
        case 1:
            return ct_device_cuda.update(other, &table.of, &update, &err);
        case 2:
            return ct_device_cuda.scale(other, 0.5, INFINITY, &x, 1, &err);
        case 3:
            return ct_device_cuda.norms(other, &scratch, 2.0, &x, 1, sum, &err);
        case 4:
            return ct_device_cuda.average(other, &x, &y, 1, 0.5, &err);
        case 5:
            return ct_device_cuda.add(other, &x, &y, 1, 0.5, &err);
        case 6:
            return ct_device_cuda.zero(other, &x, 1, &err);
        default:
            return ct_device_cuda.copy(other, &y, &x, 1, &err);
        }
    }
};

enum {
    N_ENTRIES = 8,
    N_FLOAT_ENTRIES = 6 /* zero and copy take any dtype */
};

static void
test_an_entry_enqueues_on_its_stream_and_does_not_wait()
{
    for (int entry = 0; entry < N_ENTRIES; entry++) {
        fixture f(CT_F32, 100);
        CHECK(f.call(entry) == CT_OK);
        CHECK(emul::seen.launches >= 1);
        CHECK(emul::seen.stream == other);
        CHECK(emul::seen.waits == 0);
        CHECK(emul::seen.allocations == 0);
    }
}

/* Norm, factor and update of as many tensors as small models have. */
static void
test_a_thousand_tensors_take_three_launches()
{
    const size_t tensors = 1000;
    twin grads(CT_F32, 2 * tensors, 0), params(CT_F32, tensors, 0);
    twin states(CT_F32, 2 * tensors, 0);
    fixture f(CT_F32, 1);
    ct_scratch outcome = {};
    const ct_rule_coef coef = {};
    const ct_clip_request request = {2.0, 1.0, 1.0, false, NULL, 0, 0};
    std::vector<ct_update_span> spans(tensors);
    std::vector<ct_span> list(tensors);
    CHECK(ct_device_cuda.scratch_grow(&outcome, sizeof(ct_clip_outcome), NULL) ==
          CT_OK);
    for (int update = 0; update < 4; update++) {
        for (size_t i = 0; i < tensors; i++) {
            float *const grad = (float *)grads.device() + i;
            spans[i] = {};
            spans[i].n = 1;
            spans[i].grad = list[i].data = grad + (update == 2 ? tensors : 0);
            spans[i].param = (float *)params.device() + i;
            spans[i].state[0] = (float *)states.device() + i;
            spans[i].state[1] = (float *)states.device() + tensors + i;
            list[i].n = 1;
            list[i].dtype = CT_F32;
        }
        if (update == 3) { /* one has moved */
            std::swap(spans[500].state[0], spans[500].state[1]);
        }
        ct_update all = {};
        all.rule = CT_RULE_adamw;
        all.coefs = &coef;
        all.spans = spans.data();
        all.n_spans = tensors;
        all.clip = (const ct_clip_outcome *)outcome.data;
        emul::seen = {};
        CHECK(ct_device_cuda.clip(other, &f.scratch, &request, list.data(), tensors,
                                  (ct_clip_outcome *)outcome.data, &f.err) == CT_OK);
        CHECK(ct_device_cuda.update(other, &f.table.of, &all, &f.err) == CT_OK);
        CHECK(update == 0 || emul::seen.launches == (update == 3 ? 4u : 3u));
        CHECK(update == 0 || emul::seen.waits + emul::seen.allocations == 0);
    }
    CHECK(cudaStreamSynchronize(other) == cudaSuccess);
    ct_device_cuda.scratch_release(&outcome);
}

/* Matrices of one row, one behind the other. */
struct matrices {
    twin grads, sums, averages, factors;
    std::vector<ct_factored> list;

    matrices(size_t n, size_t cols)
        : grads(CT_F32, n * cols, 0), sums(CT_F64, n * (cols + 1), 0),
          averages(CT_F32, n * (cols + 1), 0), factors(CT_F32, n * (cols + 1), 0),
          list(n)
    {
        for (size_t i = 0; i < n; i++) {
            ct_factored &f = list[i];
            f = {};
            f.matrices = f.rows = 1;
            f.cols = f.n = cols;
            f.grad = (float *)grads.device() + i * cols;
            f.sums = (double *)sums.device() + i * (cols + 1);
            f.row = (float *)averages.device() + i * (cols + 1);
            f.col = (float *)f.row + 1;
            f.row_factor = (float *)factors.device() + i * (cols + 1);
            f.col_factor = (float *)f.row_factor + 1;
            f.grad_dtype = f.state_dtype = f.real = CT_F32;
            f.grad_scale = 1.0;
        }
    }

    ct_status call(fixture *f)
    {
        const ct_status status = ct_device_cuda.factor_sums(
            other, &f->scratch, list.data(), list.size(), &f->err);
        return status == CT_OK
                   ? ct_device_cuda.factor(other, list.data(), list.size(), &f->err)
                   : status;
    }
};

/* Whatever their number: each kernel is launched once. */
static void
test_factored_moments_of_a_hundred_matrices_take_five_launches()
{
    matrices m(100, 5);
    fixture f(CT_F32, 1);
    CHECK(m.call(&f) == CT_OK);
    emul::seen = {};
    CHECK(m.call(&f) == CT_OK);
    CHECK(emul::seen.launches == 5 && emul::seen.stream == other);
    CHECK(emul::seen.waits + emul::seen.allocations == 0);
    for (size_t n = 1; n <= 5; n++) {
        emul::fail_launch = n;
        CHECK(m.call(&f) == CT_EDEVICE);
        CHECK(strstr(f.err.message, "launch factor") != NULL);
    }
    CHECK(cudaStreamSynchronize(other) == cudaSuccess);
}

static void
test_large_matrices_share_the_memory_for_sums()
{
    const size_t cols = (1 << 20) - 1;
    matrices m(3, cols);
    fixture f(CT_F32, 1);
    random_numbers numbers = {4};
    m.grads.fill(&numbers, -1.0, 1.0);
    emul::seen = {};
    CHECK(m.call(&f) == CT_OK);
    CHECK(emul::seen.launches == 3 * 2 + 2); /* two fit, then one */
    CHECK(f.scratch.bytes <= 1 << 24);
    CHECK(cudaStreamSynchronize(other) == cudaSuccess);
    const std::vector<unsigned char> back = m.sums.download();
    const double *sums = (const double *)back.data();
    for (size_t i = 0; i < 3 * cols; i++) {
        const double x = get(CT_F32, m.grads.host.data(), i);
        CHECK(sums[i + i / cols + 1] == x * x); /* behind the sum of a row */
    }
}

static void
test_read_waits()
{
    fixture f(CT_F32, 1);
    double host = -1.0;
    CHECK(f.call(0) == CT_OK);
    CHECK(ct_device_cuda.read(other, f.sum, &host, &f.err) == CT_OK);
    CHECK(emul::seen.waits == 1);
}

static void
test_nothing_to_do_launches_nothing()
{
    for (int entry = 0; entry < N_ENTRIES; entry++) {
        fixture f(CT_F32, 0);
        CHECK(f.call(entry) == CT_OK);
        CHECK(emul::seen.launches == 0);
    }
}

static void
test_a_rejected_launch_is_reported()
{
    for (int entry = 0; entry < N_ENTRIES; entry++) {
        fixture f(CT_F32, 100);
        CHECK(f.call(entry) == CT_OK);
        const size_t launches = emul::seen.launches;
        for (size_t n = 1; n <= launches; n++) {
            fixture failing(CT_F32, 100);
            emul::fail_launch = n;
            CHECK(failing.call(entry) == CT_EDEVICE);
            CHECK(strstr(failing.err.message, "cudaErrorLaunchOutOfResources") != NULL);
            CHECK(cudaGetLastError() == cudaSuccess);
        }
    }
}

static void
test_integers_are_rejected_where_they_make_no_sense()
{
    for (int entry = 0; entry < N_ENTRIES; entry++) {
        fixture f(CT_I32, 100);
        const ct_status expected = entry < N_FLOAT_ENTRIES ? CT_EINVAL : CT_OK;
        CHECK(f.call(entry) == expected);
        if (expected == CT_EINVAL) {
            CHECK(strstr(f.err.message, "int32") != NULL);
            CHECK(emul::seen.launches == 0);
        }
    }
}

static void
test_copy_rejects_unequal_lengths_and_odd_pairs()
{
    fixture f(CT_F32, 100);
    const ct_span shorter = {f.a.device(), 99, CT_F32};
    const ct_span whole = {f.b.device(), 100, CT_F32};
    const ct_span integers = {f.b.device(), 100, CT_I32};
    CHECK(ct_device_cuda.copy(other, &whole, &shorter, 1, &f.err) == CT_EINVAL);
    CHECK(ct_device_cuda.copy(other, &whole, &integers, 1, &f.err) == CT_EINVAL);
    CHECK(ct_device_cuda.copy(other, &integers, &whole, 1, &f.err) == CT_EINVAL);
    CHECK(emul::seen.launches == 0);
}

static void
test_scratch_grows_by_doubling_and_survives_a_rejection()
{
    ct_scratch scratch = {};
    ct_error err;
    emul::reset();
    CHECK(ct_device_cuda.scratch_grow(&scratch, 100, &err) == CT_OK);
    CHECK(ct_device_cuda.scratch_grow(&scratch, 50, &err) == CT_OK);
    CHECK(ct_device_cuda.scratch_grow(&scratch, 100, &err) == CT_OK);
    CHECK(emul::seen.allocations == 1);
    CHECK(ct_device_cuda.scratch_grow(&scratch, 101, &err) == CT_OK);
    CHECK(scratch.bytes == 200);

    void *const data = scratch.data;
    emul::fail_malloc = 1;
    CHECK(ct_device_cuda.scratch_grow(&scratch, 1000, &err) == CT_EDEVICE);
    CHECK(strstr(err.message, "cudaErrorMemoryAllocation") != NULL);
    CHECK(scratch.data == data && scratch.bytes == 200);
    CHECK(cudaGetLastError() == cudaSuccess);

    static int asked, answer;
    ct_cuda_free_kept = [] { return asked++, answer != 0; };
    emul::fail_malloc = 1;
    CHECK(ct_device_cuda.scratch_grow(&scratch, 201, &err) == CT_EDEVICE);
    CHECK(asked == 1 && scratch.data == data && scratch.bytes == 200);
    answer = 1;
    emul::fail_malloc = 1;
    CHECK(ct_device_cuda.scratch_grow(&scratch, 201, &err) == CT_OK);
    CHECK(asked == 2 && scratch.bytes == 201); /* no more than is needed */
    CHECK(ct_device_cuda.scratch_grow(&scratch, 202, &err) == CT_OK && asked == 2);
    ct_cuda_free_kept = NULL;
    ct_device_cuda.scratch_release(&scratch);
    CHECK(scratch.data == NULL && scratch.bytes == 0);
    ct_device_cuda.scratch_release(&scratch);
}

static void
test_a_table_survives_a_rejection_and_a_release()
{
    fixture f(CT_F32, 100);
    ct_update_table *const table = &f.table.of;
    CHECK(f.call(1) == CT_OK && table->n == 1);
    emul::fail_malloc = 1;
    CHECK(ct_device_cuda.table_reserve(table, 1000, &f.err) == CT_EDEVICE);
    CHECK(table->n == 1 && f.call(1) == CT_OK);
    CHECK(ct_device_cuda.table_reserve(table, 1000, &f.err) == CT_OK);
    CHECK(table->n == 0 && f.call(1) == CT_OK && table->n == 1);
    ct_device_cuda.table_release(table);
    CHECK(table->device.data == NULL && table->host == NULL);
    CHECK(f.call(1) == CT_OK && table->n == 1);
    ct_device_cuda.table_release(table);
    ct_device_cuda.table_release(table);
}

/* Of three operands: more elements than 32 bits count, one chunk, one of two. */
static void
test_chunks_end_where_their_operand_does()
{
    const size_t chunk = ct_cuda_chunk_elems, many = (size_t)1 << 34;
    ct_cuda_batch<ct_span> batch = {3, 0, {}, {}};
    const size_t lengths[] = {many + 1, chunk, chunk + 5};
    for (int i = 0; i < 3; i++) {
        batch.operands[i] = {NULL, lengths[i], CT_U8};
        batch.n_chunks += (uint32_t)ct_cuda_chunks_of(lengths[i]);
        batch.chunk_end[i] = batch.n_chunks;
    }
    const size_t of_first = many / chunk;
    const struct {
        size_t chunk, begin, end;
        uint32_t operand;
    } cases[] = {
        {0,            0,            chunk,     0},
        {of_first - 1, many - chunk, many,      0},
        {of_first,     many,         many + 1,  0},
        {of_first + 1, 0,            chunk,     1},
        {of_first + 2, 0,            chunk,     2},
        {of_first + 3, chunk,        chunk + 5, 2},
    };
    for (const auto &it : cases) {
        const ct_cuda_range range = ct_cuda_range_of(batch, it.chunk);
        CHECK(range.operand == it.operand && range.begin == it.begin &&
              range.end == it.end);
    }
    CHECK(batch.n_chunks == of_first + 4);
}

/* More numbers than a launch carries. */
static void
test_numbers_are_free_when_they_are_sent()
{
    std::vector<double> numbers(9001), back(numbers.size());
    const size_t bytes = numbers.size() * sizeof numbers[0];
    void *there;
    ct_error err;
    for (size_t i = 0; i < numbers.size(); i++) {
        numbers[i] = (double)i;
    }
    CHECK(cudaMalloc(&there, bytes) == cudaSuccess);
    emul::reset();
    CHECK(ct_device_cuda.send(other, there, numbers.data(), bytes, &err) == CT_OK);
    CHECK(emul::seen.waits == 0);
    std::fill(numbers.begin(), numbers.end(), -1.0);
    CHECK(ct_device_cuda.transfer(other, back.data(), there, bytes, &err) == CT_OK);
    for (size_t i = 0; i < back.size(); i++) {
        CHECK(back[i] == (double)i);
    }
    CHECK(cudaFree(there) == cudaSuccess);
}

/* The stream may go on with the data at once, and so may the host. */
static void
test_copies_to_pinned_memory_are_not_awaited()
{
    twin x(CT_F32, 5000, 0), y(CT_F32, 300, 0);
    random_numbers numbers = {1};
    std::vector<unsigned char> to(4 * 5300);
    void *copied = NULL;
    ct_error err;
    const ct_span spans[] = {x.on_device(), y.on_device()};
    x.fill(&numbers, -1, 1);
    y.fill(&numbers, -1, 1);
    CHECK(ct_device_cuda.pin(to.data(), to.size(), &err) == CT_OK);
    emul::reset();
    const ct_host_copy copies[] = {
        {to.data(),     x.device(), 4 * 5000},
        {&to[4 * 5000], y.device(), 4 * 300 }
    };
    CHECK(ct_device_cuda.fetch_begin(other, copies, 2, &copied, &err) == CT_OK);
    CHECK(ct_device_cuda.zero(other, spans, 2, &err) == CT_OK);
    CHECK(emul::seen.waits == 0);
    CHECK(ct_device_cuda.fetch_end(copied, &err) == CT_OK);
    CHECK(memcmp(to.data(), x.host.data(), 4 * 5000) == 0);
    CHECK(memcmp(&to[4 * 5000], y.host.data(), 4 * 300) == 0);
    ct_device_cuda.unpin(to.data());
    emul::reset();
    emul::fail_pin = 1;
    CHECK(ct_device_cuda.pin(to.data(), to.size(), &err) == CT_EDEVICE);
    CHECK(cudaGetLastError() == cudaSuccess);
}

/* A checkpoint's writer, and objects that die: one call that CUDA rejects would end the
 * capture of a thread that knows nothing of them. */
static void
test_other_threads_work_beside_a_capture()
{
    twin x(CT_F32, 5000, 0);
    std::vector<unsigned char> to(4 * 5000);
    cudaStream_t captured;
    cudaGraph_t graph;
    CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);
    const auto work = [&] {
        const ct_host_copy copy = {to.data(), x.device(), 4 * 5000};
        const ct_span span = x.on_device();
        ct_pending_read read = {};
        ct_scratch scratch = {};
        void *copied = NULL;
        double value = 0.0;
        ct_error err;
        CHECK(ct_device_cuda.pin(to.data(), to.size(), &err) == CT_OK);
        CHECK(ct_device_cuda.fetch_begin(other, &copy, 1, &copied, &err) == CT_OK);
        CHECK(ct_device_cuda.fetch_end(copied, &err) == CT_OK);
        ct_device_cuda.unpin(to.data());
        CHECK(ct_device_cuda.transfer(other, to.data(), x.device(), 8, &err) == CT_OK);
        CHECK(ct_device_cuda.read_begin(other, &read, x.device(), 8, &err) == CT_OK);
        CHECK(ct_device_cuda.read_end(&read, &value, &err) == CT_OK);
        ct_device_cuda.read_release(&read);
        CHECK(ct_device_cuda.norm(other, &scratch, 2.0, &span, 1, &value, &err) ==
              CT_OK);
        ct_device_cuda.scratch_release(&scratch);
    };
    std::thread(work).join();
    work(); /* as a destructor in the thread that captures */
    CHECK(cudaStreamEndCapture(captured, &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

/* Work in a graph is done at each replay, and a value on its way to the host arrives
 * after that. */
static void
test_a_graph_brings_values_to_the_host()
{
    const double one = 1.0;
    double *x, value = 0.0;
    ct_pending_read read = {};
    bool capturing = true;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replayed;
    ct_error err;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaMalloc((void **)&x, sizeof *x) == cudaSuccess);
    CHECK(ct_device_cuda.send(stream, x, &one, sizeof one, &err) == CT_OK);
    CHECK(ct_device_cuda.capturing(stream, &capturing, &err) == CT_OK && !capturing);
    const ct_span span = {x, 1, CT_F64};
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK(ct_device_cuda.capturing(stream, &capturing, &err) == CT_OK && capturing);
    CHECK(ct_device_cuda.scale(stream, 2.0, INFINITY, &span, 1, &err) == CT_OK);
    CHECK(ct_device_cuda.read_begin(stream, &read, x, sizeof *x, &err) == CT_OK);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&replayed, graph, 0) == cudaSuccess);
    for (double expected = 2.0; expected < 20.0; expected *= 2.0) {
        CHECK(cudaGraphLaunch(replayed, stream) == cudaSuccess);
        CHECK(ct_device_cuda.read_end(&read, &value, &err) == CT_OK);
        CHECK(value == expected);
    }
    ct_device_cuda.read_release(&read);
    CHECK(cudaGraphExecDestroy(replayed) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess && cudaFree(x) == cudaSuccess);
}

static void
test_every_entry_of_the_table_is_there()
{
    const void *entries[sizeof(ct_device) / sizeof(void *)];
    memcpy(entries, &ct_device_cuda, sizeof entries);
    for (const void *entry : entries) {
        CHECK(entry != NULL);
    }
    CHECK(strcmp(ct_device_cuda.name, "cuda") == 0);
}

int
main()
{
    test_chunks_end_where_their_operand_does();
    test_every_entry_of_the_table_is_there();
    test_an_entry_enqueues_on_its_stream_and_does_not_wait();
    test_a_thousand_tensors_take_three_launches();
    test_factored_moments_of_a_hundred_matrices_take_five_launches();
    test_large_matrices_share_the_memory_for_sums();
    test_numbers_are_free_when_they_are_sent();
    test_copies_to_pinned_memory_are_not_awaited();
    test_other_threads_work_beside_a_capture();
    test_a_graph_brings_values_to_the_host();
    test_read_waits();
    test_nothing_to_do_launches_nothing();
    test_a_rejected_launch_is_reported();
    test_integers_are_rejected_where_they_make_no_sense();
    test_copy_rejects_unequal_lengths_and_odd_pairs();
    test_scratch_grows_by_doubling_and_survives_a_rejection();
    test_a_table_survives_a_rejection_and_a_release();
    return 0;
}
