/* Communicators over NCCL: collectives are enqueued on one stream.
 *
 * The host never blocks in NCCL: the communicator is non-blocking, and a wait
 * polls the event and the communicator in turn. A rank that died shows as an error of
 * the communicator while the stream stays busy for ever; a rank that does not come
 * shows as nothing at all until the time-out. After an error the communicator is
 * aborted, and every later call fails at once.
 *
 * Where a stream waits in place of the host, a thread of the process looks after the
 * collective: after an error or the time-out that thread aborts the communicator, which
 * lets the stream continue, and the group's next call says why. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */

#include "comm_nccl.h"

#include "core/base/alloc.h"
#include "core/base/wait.h"
#include "kernels.h"
#include "nccl.h"
#include "status.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <time.h>

struct ct_work {
    cudaEvent_t done;
    const char *what;
    ct_deadline deadline; /* of a collective that a stream waits for */
    ct_work *next;
};

/* Memory of the device that grows as needed: copies of spans in host memory. */
typedef struct staging {
    char *memory;
    size_t room;
} staging;

typedef struct member {
    ct_comm base; /* first: a ct_comm * of ours is a member * */
    const ct_nccl *nccl;
    cudaStream_t stream;
    double timeout_seconds;
    staging staging;
    float *token; /* one element of the device's memory, for barrier */
    struct member *next_watched;
    /* What the watching thread uses, too. */
    pthread_mutex_t lock;
    ct_nccl_handle handle;    /* NULL after an error */
    ct_work *first, **behind; /* collectives that streams wait for, in their order */
    ct_error failure;         /* of one of these */
} member;

/* ---- waiting; every failure names the collective `what` and the rank ------------- */

/* CT_ECOMM with NCCL's message, unless the call succeeded or is in progress. */
static ct_status
check_on(const member *comm, ct_nccl_result result, const char *what, ct_error *err)
{
    if (result == 0 || result == CT_NCCL_IN_PROGRESS) {
        return CT_OK;
    }
    return ct_fail(err, CT_ECOMM, "%s on rank %d of %d: NCCL says %s", what,
                   comm->base.rank, comm->base.world_size,
                   comm->nccl->error_string(result));
}

/* Aborting frees the handle and whatever waits on the other ranks. */
static ct_status
give_up(member *comm, ct_status status)
{
    if (comm->handle != NULL) {
        (void)comm->nccl->abort(comm->handle);
    }
    comm->handle = NULL;
    return status;
}

static ct_status
fail_broken(const member *comm, const char *what, ct_error *err)
{
    const bool known = comm->failure.message[0] != '\0';
    return ct_fail(err, CT_ECOMM,
                   "%s on rank %d of %d: the group broke at an earlier error%s%s", what,
                   comm->base.rank, comm->base.world_size, known ? ": " : "",
                   comm->failure.message);
}

/* Whether NCCL has accepted the last call and, with an event, the stream has reached
 * the event. */
static ct_status
look(const member *comm, const cudaEvent_t *done, const char *what, bool *ended,
     ct_error *err)
{
    ct_nccl_result result = 0;
    ct_status status =
        check_on(comm, comm->nccl->async_error(comm->handle, &result), what, err);
    if (status == CT_OK) {
        status = check_on(comm, result, what, err);
    }
    /* The event is only valid once NCCL has put the call on the stream. */
    *ended = result != CT_NCCL_IN_PROGRESS;
    if (status != CT_OK || !*ended || done == NULL) {
        return status;
    }
    const cudaError_t busy = ct_cuda_query(*done);
    *ended = busy == cudaSuccess;
    /* CUDA ends with the process, which may have work under way. */
    return busy == cudaErrorNotReady || busy == cudaErrorCudartUnloading
               ? CT_OK
               : ct_cuda_check(busy, what, err);
}

/* look(), and CT_ECOMM after the deadline; aborts the group on failure. */
static ct_status
look_in_time(member *comm, const cudaEvent_t *done, const char *what,
             ct_deadline deadline, bool *ended, ct_error *err)
{
    ct_status status = comm->handle == NULL ? fail_broken(comm, what, err)
                                            : look(comm, done, what, ended, err);
    if (status == CT_OK && !*ended && ct_deadline_left(deadline) <= 0.0) {
        status = ct_fail(err, CT_ECOMM,
                         "%s on rank %d of %d: another rank did not come, or was "
                         "not done, within %g seconds",
                         what, comm->base.rank, comm->base.world_size,
                         comm->timeout_seconds);
    }
    return status == CT_OK ? CT_OK : give_up(comm, status);
}

/* Waits for NCCL to accept the last call and, with `done`, for the stream to reach the
 * event; aborts the group on failure. */
static ct_status
settle(member *comm, const cudaEvent_t *done, const char *what, ct_error *err)
{
    const ct_deadline deadline = ct_deadline_after(comm->timeout_seconds);
    bool ended = false;
    ct_status status = CT_OK;
    while (status == CT_OK && !ended) {
        pthread_mutex_lock(&comm->lock);
        status = look_in_time(comm, done, what, deadline, &ended, err);
        pthread_mutex_unlock(&comm->lock);
        /* Polling, as no call of CUDA waits for an event and an error of NCCL at
         * once. */
        (void)sched_yield();
    }
    return status;
}

/* Waits for all work that is on the stream so far. */
static ct_status
settle_stream(member *comm, const char *what, ct_error *err)
{
    cudaEvent_t done;
    ct_status status = ct_cuda_mark(comm->stream, &done, err);
    if (status != CT_OK) {
        return status;
    }
    status = settle(comm, &done, what, err);
    (void)cudaEventDestroy(done);
    return status;
}

/* ---- watching -------------------------------------------------------------------- */

static const double WATCH_SECONDS = 0.1;

/* The members of this process, and whether a thread watches. A forked child has no such
 * thread, and begins anew. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    member *members;
    bool runs;
    ct_owner owner;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void
drop_first(member *comm)
{
    ct_work *const work = comm->first;
    comm->first = work->next;
    if (comm->first == NULL) {
        comm->behind = &comm->first;
    }
    (void)cudaEventDestroy(work->done);
    ct_free(work);
}

/* Drops the collectives that have ended. */
static void
look_after(member *comm)
{
    bool ended = true;
    if (pthread_mutex_trylock(&comm->lock) != 0) {
        return; /* a call of NCCL may take long; the next round comes soon */
    }
    if (comm->first != NULL) {
        (void)cudaSetDevice(comm->base.gpu); /* or device 0 gets a context of its own */
    }
    while (comm->first != NULL && ended) {
        const ct_work *work = comm->first;
        if (comm->handle == NULL ||
            look_in_time(comm, &work->done, work->what, work->deadline, &ended,
                         &comm->failure) != CT_OK) {
            ended = true; /* none of the others will be looked at */
        }
        if (ended) {
            drop_first(comm);
        }
    }
    pthread_mutex_unlock(&comm->lock);
}

static void *
watch_all(void *unused)
{
    pthread_mutex_lock(&watch.lock);
    while (watch.members != NULL) {
        struct timespec until;
        for (member *it = watch.members; it != NULL; it = it->next_watched) {
            look_after(it);
        }
        (void)clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += (long)(1e9 * WATCH_SECONDS);
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        (void)pthread_cond_timedwait(&watch.changed, &watch.lock, &until);
    }
    watch.runs = false;
    pthread_mutex_unlock(&watch.lock);
    return unused;
}

static ct_status
watch_begin(member *comm, ct_error *err)
{
    pthread_t thread;
    int failed = 0;
    if (!ct_owner_is_here(watch.owner)) {
        (void)pthread_mutex_init(&watch.lock, NULL); /* may be held for ever here */
        (void)pthread_cond_init(&watch.changed, NULL);
        watch.members = NULL;
        watch.runs = false;
        watch.owner = ct_owner_here();
    }
    pthread_mutex_lock(&watch.lock);
    comm->next_watched = watch.members;
    watch.members = comm;
    if (!watch.runs) {
        failed = pthread_create(&thread, NULL, watch_all, NULL);
        watch.runs = failed == 0;
        if (watch.runs) {
            (void)pthread_detach(thread);
        }
    }
    pthread_mutex_unlock(&watch.lock);
    return failed == 0
               ? CT_OK
               : ct_fail(err, CT_ENOMEM,
                         "no thread to watch a group's collectives: error %d", failed);
}

static void
watch_end(const member *comm)
{
    pthread_mutex_lock(&watch.lock);
    for (member **it = &watch.members; *it != NULL; it = &(*it)->next_watched) {
        if (*it == comm) {
            *it = comm->next_watched;
            break;
        }
    }
    if (watch.members == NULL) {
        pthread_cond_signal(&watch.changed);
    }
    pthread_mutex_unlock(&watch.lock);
}

/* ---- operands in host memory ----------------------------------------------------- */

enum {
    ALIGNMENT = 256 /* of a part of the memory */
};

static size_t
bytes_of(const ct_span *span)
{
    return span->n * ct_dtype_size(span->dtype);
}

static bool
is_on_host(const ct_span *span)
{
    struct cudaPointerAttributes found;
    if (span->n == 0) {
        return false;
    }
    if (cudaPointerGetAttributes(&found, span->data) != cudaSuccess) {
        (void)cudaGetLastError(); /* memory that CUDA has never seen */
        return true;
    }
    return found.type != cudaMemoryTypeDevice && found.type != cudaMemoryTypeManaged;
}

static bool
needs_staging(const ct_request *request)
{
    return is_on_host(&request->in) || is_on_host(&request->out);
}

static size_t
place_of(const ct_span *span, bool is_staged, size_t *used)
{
    const size_t at = *used;
    if (is_staged) {
        *used += (bytes_of(span) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    return at;
}

static void
release_staging(staging *s)
{
    (void)cudaFree(s->memory);
    *s = (staging){0};
}

/* The next launch would report the error, too. */
static ct_status
get_memory(void **memory, size_t bytes, const char *what, ct_error *err)
{
    ct_status status = ct_cuda_check(cudaMalloc(memory, bytes), what, err);
    if (status != CT_OK) {
        (void)cudaGetLastError();
    }
    return status;
}

static ct_status
make_room(staging *s, size_t bytes, ct_error *err)
{
    if (bytes <= s->room) {
        return CT_OK;
    }
    /* Freed first, as both together may not fit; cudaFree waits for the device. */
    release_staging(s);
    ct_status status = get_memory((void **)&s->memory, bytes,
                                  "get memory for a collective on host memory", err);
    s->room = status == CT_OK ? bytes : 0;
    return status;
}

/* *staged becomes the request with copies in device memory of its host spans. */
static ct_status
stage(staging *s, const ct_request *request, ct_request *staged, cudaStream_t stream,
      bool *is_staged, ct_error *err)
{
    const bool in = is_on_host(&request->in), out = is_on_host(&request->out);
    size_t used = 0;
    *staged = *request;
    *is_staged = in || out;
    /* Both places before the memory: growing moves what is there. */
    const size_t in_at = place_of(&request->in, in, &used);
    const size_t out_at = place_of(&request->out, out, &used);
    ct_status status = make_room(s, used, err);
    if (status != CT_OK || !*is_staged) {
        return status;
    }
    staged->in.data = in ? s->memory + in_at : request->in.data;
    staged->out.data = out ? s->memory + out_at : request->out.data;
    return in ? ct_cuda_check(cudaMemcpyAsync(staged->in.data, request->in.data,
                                              bytes_of(&request->in),
                                              cudaMemcpyHostToDevice, stream),
                              "copy to the device", err)
              : CT_OK;
}

/* Copies the result of a staged collective back. */
static ct_status
unstage(const ct_request *request, const ct_request *staged, cudaStream_t stream,
        ct_error *err)
{
    const bool in_place = request->what == CT_ALL_REDUCE ||
                          request->what == CT_BROADCAST || request->what == CT_REDUCE;
    const ct_span *to = in_place ? &request->in : &request->out;
    const ct_span *from = in_place ? &staged->in : &staged->out;
    return to->data == from->data
               ? CT_OK
               : ct_cuda_check(cudaMemcpyAsync(to->data, from->data, bytes_of(to),
                                               cudaMemcpyDeviceToHost, stream),
                               "copy from the device", err);
}

/* ---- NCCL's numbers -------------------------------------------------------------- */

/* ncclDataType_t plus 1, so that 0 is a dtype that NCCL has not. */
static const int dtypes[CT_DTYPE_COUNT] = {
    [CT_I8] = 1,  [CT_U8] = 2,  [CT_BOOL] = 2, [CT_I32] = 3,   [CT_I64] = 5,
    [CT_F16] = 7, [CT_F32] = 8, [CT_F64] = 9,  [CT_BF16] = 10,
};

static ct_status
dtype_of(const ct_span *span, const char *what, int *dtype, ct_error *err)
{
    *dtype = dtypes[span->dtype] - 1;
    return *dtype >= 0 ? CT_OK
                       : ct_fail(err, CT_EINVAL, "%s: NCCL has no %s", what,
                                 ct_dtype_name(span->dtype));
}

/* ncclRedOp_t. Of bools, which are NCCL's uint8, a sum says "any" and a mean "all". */
static int
op_of(ct_reduce_op op, ct_dtype dtype)
{
    enum {
        SUM = 0,
        MAX = 2,
        MIN = 3,
        MEAN = 4
    };
    const bool is_bool = dtype == CT_BOOL;
    const int ops[] = {
        [CT_REDUCE_SUM] = is_bool ? MAX : SUM,
        [CT_REDUCE_MEAN] = is_bool ? MIN : MEAN,
        [CT_REDUCE_MAX] = MAX,
        [CT_REDUCE_MIN] = MIN,
    };
    return ops[op];
}

/* ---- collectives ----------------------------------------------------------------- */

/* A send to and a receive from every rank, as a group that cannot block. */
static ct_nccl_result
exchange(const member *comm, const ct_request *r, int dtype)
{
    const ct_nccl *nccl = comm->nccl;
    const int ranks = comm->base.world_size;
    const size_t n = r->in.n / (size_t)ranks;
    const size_t bytes = n * ct_dtype_size(r->in.dtype);
    ct_nccl_result result = nccl->group_start();
    for (int peer = 0; result == 0 && peer < ranks; peer++) {
        const size_t at = (size_t)peer * bytes;
        result = nccl->send((const char *)r->in.data + at, n, dtype, peer, comm->handle,
                            comm->stream);
        if (result == 0) {
            result = nccl->receive((char *)r->out.data + at, n, dtype, peer,
                                   comm->handle, comm->stream);
        }
    }
    /* Ended after an error too, or every later call would join this group. */
    const ct_nccl_result ended = nccl->group_end();
    return result != 0 ? result : ended;
}

/* NCCL has no barrier: a sum of one element ends when every rank has come. */
static ct_nccl_result
enqueue(const member *comm, const ct_request *r, int dtype)
{
    const ct_nccl *nccl = comm->nccl;
    const int op = op_of(r->op, r->in.dtype);
    void *in = r->in.data;
    switch (r->what) {
    case CT_ALL_REDUCE:
        return nccl->all_reduce(in, in, r->in.n, dtype, op, comm->handle, comm->stream);
    case CT_ALL_GATHER:
        return nccl->all_gather(in, r->out.data, r->in.n, dtype, comm->handle,
                                comm->stream);
    case CT_REDUCE_SCATTER:
        return nccl->reduce_scatter(in, r->out.data, r->out.n, dtype, op, comm->handle,
                                    comm->stream);
    case CT_ALL_TO_ALL:
        return exchange(comm, r, dtype);
    case CT_BROADCAST:
        return nccl->broadcast(in, in, r->in.n, dtype, r->root, comm->handle,
                               comm->stream);
    case CT_REDUCE:
        return nccl->reduce(in, in, r->in.n, dtype, op, r->root, comm->handle,
                            comm->stream);
    case CT_BARRIER:
        break;
    }
    return nccl->all_reduce(comm->token, comm->token, 1, dtype, op, comm->handle,
                            comm->stream);
}

/* NCCL is not called for empty operands; all ranks have equal lengths, so none
 * waits. */
static bool
moves_nothing(const ct_request *r)
{
    return r->what != CT_BARRIER && r->in.n == 0;
}

/* Puts the collective on the stream, and waits until NCCL has accepted it. */
static ct_status
submit(member *comm, const ct_request *r, ct_error *err)
{
    const char *what = ct_collective_name(r->what);
    int dtype = 0;
    ct_status status = dtype_of(&r->in, what, &dtype, err);
    if (status != CT_OK) {
        return status;
    }
    pthread_mutex_lock(&comm->lock);
    if (comm->handle == NULL) {
        status = fail_broken(comm, what, err);
    }
    else {
        status = check_on(comm, enqueue(comm, r, dtype), what, err);
        status = status == CT_OK ? CT_OK : give_up(comm, status);
    }
    pthread_mutex_unlock(&comm->lock);
    return status == CT_OK ? settle(comm, NULL, what, err) : status;
}

/* Any thread of the process may call. A thread's current GPU is the first, unless the
 * thread has chosen a GPU. */
static ct_status
use_own_gpu(const member *comm, int *before, ct_error *err)
{
    return ct_cuda_use(comm->base.gpu, before, err);
}

static void
use_again(int before)
{
    ct_error unused;
    int own;
    (void)ct_cuda_use(before, &own, &unused);
}

static ct_status
check(const ct_comm *op, const ct_request *request, ct_error *err)
{
    const ct_status here =
        ct_comm_check_here(op, ct_collective_name(request->what), err);
    return here == CT_OK ? ct_request_check(request, op->world_size, err) : here;
}

static ct_status
nccl_run(ct_comm *op, const ct_request *request, ct_error *err)
{
    member *comm = (member *)op;
    const char *what = ct_collective_name(request->what);
    ct_request staged;
    bool is_staged = false;
    ct_status status = check(op, request, err);
    if (status != CT_OK || moves_nothing(request)) {
        return status;
    }
    int gpu;
    status = use_own_gpu(comm, &gpu, err);
    if (status != CT_OK) {
        return status;
    }
    const enum cudaStreamCaptureMode mode = ct_cuda_relax_mode();
    /* A copy of ordinary host memory may wait for the stream without a time-out: first,
     * the stream comes so far. */
    if (needs_staging(request)) {
        status = settle_stream(comm, what, err);
    }
    if (status == CT_OK) {
        status = stage(&comm->staging, request, &staged, comm->stream, &is_staged, err);
    }
    if (status == CT_OK) {
        status = submit(comm, &staged, err);
    }
    if (status == CT_OK) {
        status = settle_stream(comm, what, err);
    }
    if (status == CT_OK && is_staged) {
        status = unstage(request, &staged, comm->stream, err);
    }
    if (status == CT_OK && is_staged) {
        status = settle_stream(comm, what, err);
    }
    ct_cuda_restore_mode(mode);
    use_again(gpu);
    return status;
}

/* A collective on host memory has ended when it was started. */
static ct_status
nccl_start(ct_comm *op, const ct_request *request, ct_work **work, ct_error *err)
{
    member *comm = (member *)op;
    ct_status status = check(op, request, err);
    if (status != CT_OK || moves_nothing(request)) {
        return status;
    }
    if (needs_staging(request)) {
        return nccl_run(op, request, err);
    }
    ct_work *made = ct_calloc(1, sizeof *made);
    if (made == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to begin a collective");
    }
    made->what = ct_collective_name(request->what);
    int gpu;
    status = use_own_gpu(comm, &gpu, err);
    if (status == CT_OK) {
        status = submit(comm, request, err);
        if (status == CT_OK) {
            status = ct_cuda_mark(comm->stream, &made->done, err);
        }
        use_again(gpu);
    }
    if (status != CT_OK) {
        ct_free(made);
        return status;
    }
    *work = made;
    return CT_OK;
}

static ct_status
nccl_wait(ct_comm *op, ct_work *work, ct_error *err)
{
    ct_status status = ct_comm_check_here(op, work->what, err);
    if (status != CT_OK) {
        return status;
    }
    status = settle((member *)op, &work->done, work->what, err);
    (void)cudaEventDestroy(work->done);
    ct_free(work);
    return status;
}

/* Passes the work to the watching thread. */
static ct_status
nccl_order(ct_comm *op, ct_work *work, void *stream, ct_error *err)
{
    member *comm = (member *)op;
    ct_status status = ct_comm_check_here(op, work->what, err);
    if (status != CT_OK) {
        return status;
    }
    pthread_mutex_lock(&comm->lock);
    if (comm->handle == NULL) {
        status = fail_broken(comm, work->what, err);
    }
    if (status == CT_OK && comm->stream != stream) {
        status = ct_cuda_check(cudaStreamWaitEvent(stream, work->done, 0),
                               "let a stream wait for another", err);
    }
    if (status == CT_OK) {
        work->deadline = ct_deadline_after(comm->timeout_seconds);
        *comm->behind = work;
        comm->behind = &work->next;
    }
    pthread_mutex_unlock(&comm->lock);
    if (status != CT_OK) {
        (void)cudaEventDestroy(work->done);
        ct_free(work);
    }
    return status;
}

/* An event may be destroyed while a stream waits for it. */
static ct_status
put_behind(const member *comm, cudaStream_t later, cudaStream_t earlier, ct_error *err)
{
    cudaEvent_t here;
    if (later == earlier) {
        return CT_OK;
    }
    ct_status status = ct_comm_check_here(&comm->base, "a collective", err);
    if (status != CT_OK) {
        return status;
    }
    int gpu;
    status = use_own_gpu(comm, &gpu, err);
    if (status != CT_OK) {
        return status;
    }
    status = ct_cuda_mark(earlier, &here, err);
    if (status == CT_OK) {
        status = ct_cuda_check(cudaStreamWaitEvent(later, here, 0),
                               "let a stream wait for another", err);
        (void)cudaEventDestroy(here);
    }
    use_again(gpu);
    return status;
}

static ct_status
nccl_follow(ct_comm *op, void *stream, ct_error *err)
{
    const member *comm = (const member *)op;
    return put_behind(comm, comm->stream, stream, err);
}

static ct_status
nccl_precede(ct_comm *op, void *stream, ct_error *err)
{
    const member *comm = (const member *)op;
    return put_behind(comm, stream, comm->stream, err);
}

/* A stream continues behind a failed collective only once the group is aborted. */
static ct_status
nccl_check(ct_comm *op, ct_error *err)
{
    member *comm = (member *)op;
    ct_status status = ct_comm_check_here(op, "a collective", err);
    if (status == CT_OK) {
        pthread_mutex_lock(&comm->lock);
        status = comm->handle == NULL ? fail_broken(comm, "an update", err) : CT_OK;
        pthread_mutex_unlock(&comm->lock);
    }
    return status;
}

/* ---- joining, splitting and leaving ---------------------------------------------- */

static const double LEAVE_SECONDS = 5.0;

/* Collectives that streams wait for may end in a while; then the communicator is
 * aborted, or freeing memory would wait for a rank that has gone. */
static void
let_end(member *comm)
{
    const ct_deadline deadline = ct_deadline_after(LEAVE_SECONDS);
    ct_error unused;
    bool ended = true;
    while (comm->first != NULL && comm->handle != NULL) {
        if (look_in_time(comm, &comm->first->done, "leave the group", deadline, &ended,
                         &unused) == CT_OK &&
            ended) {
            drop_first(comm);
        }
        (void)sched_yield();
    }
    while (comm->first != NULL) {
        drop_first(comm);
    }
}

/* NCCL destroys an idle communicator; at another one NCCL would return from the middle
 * of a group call, and the thread's next collectives would never be launched. */
static void
leave(member *comm)
{
    ct_nccl_result state = 0;
    const ct_nccl_result answer = comm->nccl->async_error(comm->handle, &state);
    (void)(answer == 0 && state == 0 ? comm->nccl->destroy(comm->handle)
                                     : comm->nccl->abort(comm->handle));
}

static void
nccl_free(ct_comm *op)
{
    member *comm = (member *)op;
    if (ct_comm_is_here(op)) { /* a forked child has neither NCCL's threads nor CUDA */
        int gpu = comm->base.gpu;
        ct_error unused;
        (void)use_own_gpu(comm, &gpu, &unused);
        const enum cudaStreamCaptureMode mode = ct_cuda_relax_mode();
        watch_end(comm);
        let_end(comm);
        (void)pthread_mutex_destroy(&comm->lock);
        if (comm->handle != NULL) {
            leave(comm);
        }
        release_staging(&comm->staging);
        (void)cudaFree(comm->token);
        ct_cuda_restore_mode(mode);
        use_again(gpu);
    }
    ct_free(comm);
}

/* A member without a handle yet; NULL, with *status and *err, on failure. */
static member *
member_new(const ct_comm_ops *ops, const ct_nccl *nccl, int rank, int world_size,
           void *stream, double timeout_seconds, ct_status *status, ct_error *err)
{
    member *made = ct_calloc(1, sizeof *made);
    if (made == NULL) {
        *status = ct_fail(err, CT_ENOMEM, "no memory for a communicator");
        return NULL;
    }
    made->base = ct_comm_made(ops, rank, world_size);
    made->nccl = nccl;
    made->base.stream = made->stream = stream;
    made->timeout_seconds = timeout_seconds;
    made->behind = &made->first;
    (void)pthread_mutex_init(&made->lock, NULL);
    *status = get_memory((void **)&made->token, sizeof *made->token, "get memory", err);
    if (*status == CT_OK) {
        *status =
            ct_cuda_check(cudaGetDevice(&made->base.gpu), "ask for the device", err);
    }
    if (*status == CT_OK) {
        *status = ct_cuda_check(
            cudaMemsetAsync(made->token, 0, sizeof *made->token, made->stream),
            "clear memory", err);
    }
    if (*status != CT_OK) {
        nccl_free(&made->base);
        return NULL;
    }
    return made;
}

/* Sets *comm, or frees `made`. */
static ct_status
finish_join(member *made, ct_status status, ct_comm **comm, ct_error *err)
{
    if (status == CT_OK) {
        status = watch_begin(made, err);
    }
    if (status != CT_OK) {
        nccl_free(&made->base);
        return status;
    }
    *comm = &made->base;
    return CT_OK;
}

static ct_status
split(member *comm, const ct_members *members, ct_comm **made, ct_error *err)
{
    static const char what[] = "split";
    const bool joins = members->n > 1;
    const int color = joins ? members->ranks[0] : CT_NCCL_NO_COLOR;
    ct_nccl_handle handle = NULL;
    ct_status status = CT_OK;
    member *part =
        member_new(comm->base.ops, comm->nccl, members->index, joins ? members->n : 1,
                   comm->stream, comm->timeout_seconds, &status, err);
    if (part == NULL) {
        return status;
    }
    pthread_mutex_lock(&comm->lock);
    status = comm->handle == NULL
                 ? fail_broken(comm, what, err)
                 : check_on(comm,
                            comm->nccl->split(comm->handle, color, members->index,
                                              &handle, NULL),
                            what, err);
    pthread_mutex_unlock(&comm->lock);
    if (status == CT_OK) {
        status = settle(comm, NULL, what, err);
    }
    part->handle = handle;
    if (status == CT_OK && joins) {
        status = settle(part, NULL, what, err);
    }
    if (status == CT_OK && !joins) {
        nccl_free(&part->base);
        return CT_OK;
    }
    return finish_join(part, status, made, err);
}

/* Every rank of the group calls it, also a rank that will be in no smaller group. */
static ct_status
nccl_split(ct_comm *op, const ct_members *members, ct_comm **made, ct_error *err)
{
    member *comm = (member *)op;
    int gpu;
    ct_status status = ct_comm_check_here(op, "split", err);
    if (status == CT_OK) {
        status = use_own_gpu(comm, &gpu, err);
    }
    if (status == CT_OK) {
        status = split(comm, members, made, err);
        use_again(gpu);
    }
    return status;
}

static const ct_comm_ops nccl_ops = {
    .name = "nccl",
    .run = nccl_run,
    .start = nccl_start,
    .wait = nccl_wait,
    .group = nccl_split,
    .free = nccl_free,
    .takes_device_memory = true,
    .follow = nccl_follow,
    .precede = nccl_precede,
    .order = nccl_order,
    .check = nccl_check,
};

ct_status
ct_nccl_id(char id[CT_COMM_ID_BYTES], ct_error *err)
{
    const ct_nccl *nccl = NULL;
    ct_nccl_group_id made;
    ct_status status = ct_nccl_borrow(&nccl, err);
    if (status == CT_OK) {
        status = ct_nccl_check(nccl->get_id(&made), "make a group's id", err);
    }
    if (status == CT_OK) {
        memcpy(id, made.bytes, sizeof made.bytes);
    }
    return status;
}

static ct_status
check_arguments(int rank, int world_size, double timeout_seconds, ct_error *err)
{
    if (world_size < 1 || rank < 0 || rank >= world_size) {
        return ct_fail(err, CT_EINVAL,
                       "rank must be in [0, world_size), got %d of a world_size of %d",
                       rank, world_size);
    }
    if (!(timeout_seconds > 0.0 && timeout_seconds < 1e9)) {
        return ct_fail(err, CT_EINVAL,
                       "timeout_seconds must be above 0 and below 1e9, got %g",
                       timeout_seconds);
    }
    return CT_OK;
}

ct_status
ct_nccl_join(const char id[CT_COMM_ID_BYTES], int rank, int world_size, void *stream,
             double timeout_seconds, ct_comm **comm, ct_error *err)
{
    static const char what[] = "join the group";
    const ct_nccl *nccl = NULL;
    ct_nccl_group_id same;
    ct_nccl_config config = {.size = sizeof config,
                             .magic = CT_NCCL_MAGIC,
                             .version = CT_NCCL_CONFIG_VERSION,
                             .cga_cluster_size = INT_MIN,
                             .min_ctas = INT_MIN,
                             .max_ctas = INT_MIN,
                             .split_share = INT_MIN};
    memcpy(same.bytes, id, sizeof same.bytes);
    ct_status status = check_arguments(rank, world_size, timeout_seconds, err);
    if (status == CT_OK) {
        status = ct_nccl_borrow(&nccl, err);
    }
    if (status != CT_OK) {
        return status;
    }
    member *made = member_new(&nccl_ops, nccl, rank, world_size, stream,
                              timeout_seconds, &status, err);
    if (made == NULL) {
        return status;
    }
    status =
        check_on(made, nccl->init_rank(&made->handle, world_size, same, rank, &config),
                 what, err);
    if (status == CT_OK) {
        status = settle(made, NULL, what, err);
    }
    return finish_join(made, status, comm, err);
}
