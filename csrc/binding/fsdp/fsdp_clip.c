/* The norm of gradients that are spread over ranks, and clipping by it. */
#include "binding/fsdp/unit.h"

#include "binding/runtime/buffer.h"
#include "binding/optim/grads.h"
#include "core/comm/history.h"

#include <math.h>

typedef struct clip_job {
    ct_span *spans;
    size_t n;
    double p, max_norm, total;
    int alone;  /* of this rank's shards */
    bool ready; /* else an exception is kept, and the others are only told */
    const ct_device *device;
    void *stream;
} clip_job;

/* The sum of this rank's powers. */
static ct_status
own_sum(const clip_job *job, double *sum, ct_error *err)
{
    const ct_device *device = job->device;
    ct_scratch scratch = {NULL, 0}, made = {NULL, 0};
    *sum = 0.0;
    if (job->n == 0) {
        return CT_OK;
    }
    ct_status status = device->scratch_grow(&made, sizeof *sum, err);
    if (status == CT_OK) {
        status = device->norm(job->stream, &scratch, job->p, job->spans, job->n,
                              made.data, err);
    }
    if (status == CT_OK) {
        status = device->read(job->stream, made.data, sum, err);
    }
    device->scratch_release(&made);
    device->scratch_release(&scratch);
    return status;
}

/* A rank that fails joins the others all the same: they would wait for it. */
static ct_status
norm_over_ranks(clip_job *job, ct_comm *comm, ct_error *err)
{
    enum {
        SUM,
        FAILED,
        WHO,
        N
    };
    double told[N] = {0.0};
    ct_error others;
    const ct_status own = job->ready
                              ? own_sum(job, &told[SUM], err)
                              : ct_fail(err, CT_EHOST, "no gradients to measure");
    if (own != CT_OK) {
        told[FAILED] = 1.0;
        told[WHO] = comm->rank;
    }
    const ct_status status =
        job->alone
            ? CT_OK
            : ct_comm_reduce_numbers(comm, told, N,
                                     isinf(job->p) ? CT_REDUCE_MAX : CT_REDUCE_SUM,
                                     own == CT_OK ? err : &others);
    job->total = isinf(job->p) ? told[SUM] : pow(told[SUM], 1.0 / job->p);
    if (own != CT_OK || status != CT_OK) {
        return own != CT_OK ? own : status;
    }
    return told[FAILED] == 0.0 ? CT_OK
           : told[FAILED] == 1.0
               ? ct_fail(err, CT_ECOMM,
                         "rank %d of %d failed to measure its gradients, so that there "
                         "is no norm; its own error says why",
                         ct_rank_called(&comm->names, (int)told[WHO]), comm->names.of)
               : ct_fail(err, CT_ECOMM,
                         "%.0f of %d ranks failed to measure their gradients, so that "
                         "there is no norm; their own errors say why",
                         told[FAILED], comm->names.of);
}

/* NaN in any gradient makes all of them NaN, as a multiplication does. */
static ct_status
clip(clip_job *job, ct_comm *comm, ct_error *err)
{
    ct_status status = norm_over_ranks(job, comm, err);
    const double factor = job->max_norm / (job->total + 1e-6);
    if (status != CT_OK || job->n == 0 || factor >= 1.0) {
        return status;
    }
    return job->device->scale(job->stream, factor, (double)INFINITY, job->spans, job->n,
                              err);
}

/* The gradients that are there; *owners keeps them. */
static int
read_grads(FSDPUnit *self, PyObject *params, clip_job *job, PyObject *owners)
{
    PyObject *name = fsdp_state_borrow(self)->str_grad;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
        PyObject *grad = PyObject_GetAttr(PyList_GET_ITEM(params, i), name);
        int result = grad == NULL ? -1 : 0;
        if (result == 0 && !Py_IsNone(grad)) {
            result = fsdp_shard_from(self, grad, "a gradient", 1, &job->spans[job->n]);
            job->n += result == 0;
            result = result < 0 ? -1 : PyList_Append(owners, grad);
        }
        Py_XDECREF(grad);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* What is to be measured; -1 with an exception. */
static int
prepare(FSDPUnit *self, PyObject *params, clip_job *job, PyObject *owners)
{
    job->spans = PyMem_New(ct_span, (size_t)PyList_GET_SIZE(params) + 1);
    if (job->spans == NULL) {
        PyErr_NoMemory();
    }
    job->ready = job->spans != NULL && owners != NULL &&
                 read_grads(self, params, job, owners) == 0 &&
                 fsdp_use_stream(self) == 0;
    job->device = self->core.config.offload ? &ct_device_cpu : self->core.device;
    job->stream = self->core.stream;
    return job->ready ? 0 : -1;
}

static int
run(PyObject *op, PyObject *params, clip_job *job)
{
    FSDPUnit *self = (FSDPUnit *)op;
    Communicator *group = (Communicator *)self->communicator;
    ct_comm *comm = ctpy_comm_borrow(fsdp_state_borrow(self), (PyObject *)group);
    PyObject *owners, *type = NULL, *value = NULL, *trace = NULL;
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    owners = PyList_New(0);
    if (prepare(self, params, job, owners) < 0) {
        PyErr_Fetch(&type, &value, &trace);
    }
    Py_INCREF(group);
    group->busy++;
    Py_BEGIN_ALLOW_THREADS
    status = clip(job, comm, &err);
    Py_END_ALLOW_THREADS
    group->busy--;
    Py_DECREF(group);
    Py_XDECREF(owners);
    PyMem_Free(job->spans);
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
        return -1;
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

const char FSDPUnit_clip_doc[] =
    "clip($self, params, max_norm, norm_type, alone=False, /)\n--\n\n"
    "Scale the gradients of a list of parameters, whose shards lie on all ranks, so\n"
    "that their norm together is at most max_norm; return what it was. Collective.\n\n"
    "norm_type: p > 0, or inf. Powers are added in double. alone: the norm is that of\n"
    "this rank's shards, and nobody else is asked. Where one rank fails all raise,\n"
    "the others a RuntimeError that names it, and no gradient has changed.";

PyObject *
FSDPUnit_clip(PyObject *op, PyObject *args)
{
    PyObject *params;
    clip_job job = {.n = 0};
    if (!PyArg_ParseTuple(args, "O!dd|p:clip", &PyList_Type, &params, &job.max_norm,
                          &job.p, &job.alone)) {
        return NULL;
    }
    if (!(job.p > 0.0)) {
        return PyErr_Format(PyExc_ValueError, "norm_type must be above 0 or inf");
    }
    return run(op, params, &job) < 0 ? NULL : PyFloat_FromDouble(job.total);
}
