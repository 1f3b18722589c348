/* ctrainer._C.cross_entropy: the losses of rows of logits, which become the gradient.
 */
#include "binding/runtime/buffer.h"

#include "core/device/device.h"

typedef struct operands {
    ctpy_target target;
    ctpy_view logits, targets, losses;
    Py_ssize_t classes; /* < 0: the logits' columns */
} operands;

/* The one error of operands that do not fit each other. */
static int
reject(const operands *all)
{
    PyErr_Format(
        PyExc_ValueError,
        "cross_entropy: expected logits of a float dtype and shape (rows, columns), "
        "int64 targets and float64 losses of shape (rows,), all contiguous, and "
        "1 <= classes <= columns; got %s logits of %d dimensions, %zu %s targets, %zu "
        "%s losses, and classes=%zd",
        ct_dtype_name(all->logits.span.dtype), all->logits.ndim, all->targets.span.n,
        ct_dtype_name(all->targets.span.dtype), all->losses.span.n,
        ct_dtype_name(all->losses.span.dtype), all->classes);
    return -1;
}

static int
check(operands *all)
{
    const ctpy_view *logits = &all->logits;
    if (logits->ndim != 2 || logits->strides != NULL || logits->readonly ||
        all->losses.readonly || !ct_dtype_is_float(logits->span.dtype) ||
        all->targets.span.dtype != CT_I64 || all->losses.span.dtype != CT_F64) {
        return reject(all);
    }
    const size_t rows = (size_t)logits->shape[0];
    if (all->classes < 0) {
        all->classes = (Py_ssize_t)logits->shape[1];
    }
    return all->targets.span.n == rows && all->losses.span.n == rows &&
                   all->classes >= 1 && all->classes <= logits->shape[1]
               ? 0
               : reject(all);
}

static int
run(const operands *all, ct_cross_entropy *work)
{
    int ordinal = all->target.ordinal;
    ct_error err, unused;
    ct_status status;
    work->dtype = all->logits.span.dtype;
    work->rows = (size_t)all->logits.shape[0];
    work->stride = (size_t)all->logits.shape[1];
    work->classes = (size_t)all->classes;
    work->logits = all->logits.span.data;
    work->targets = all->targets.span.data;
    work->losses = all->losses.span.data;
    Py_BEGIN_ALLOW_THREADS
    status = ct_device_switch(all->target.device, &ordinal, &err);
    if (status == CT_OK) {
        status = all->target.device->cross_entropy(all->target.stream, work, &err);
        (void)ct_device_switch(all->target.device, &ordinal, &unused);
    }
    Py_END_ALLOW_THREADS
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static const char ctpy_cross_entropy_doc[] =
    "cross_entropy($module, logits, targets, losses, *, classes=-1, "
    "label_smoothing=0.0,\n              scale=1.0, gradient=True)\n--\n\n"
    "Write the cross entropy of each row of logits to losses, and the gradient over "
    "the logits.\n\n"
    "logits: (rows, columns) of a float dtype, contiguous; the first `classes` columns "
    "count, -1:\n"
    "all. targets: int64 (rows,), in [0, classes). losses: float64 (rows,), in nats.\n"
    "label_smoothing, in [0, 1]: the weight of the mean over classes of -log p. With\n"
    "gradient, logits becomes the derivative of each loss times scale. Tensors on one\n"
    "device, behind torch's current stream, or NumPy arrays. Raises ValueError for a\n"
    "target that is no class, with nothing written; on a GPU the row and its loss "
    "become NaN.";

static PyObject *
ctpy_cross_entropy(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"logits",          "targets", "losses",   "classes",
                            "label_smoothing", "scale",   "gradient", NULL};
    ctpy_state *state = PyModule_GetState(module);
    ct_cross_entropy work = {.scale = 1.0};
    operands all = {.classes = -1};
    PyObject *logits, *targets, *losses;
    int gradient = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$nddp:cross_entropy", names,
                                     &logits, &targets, &losses, &all.classes,
                                     &work.smoothing, &work.scale, &gradient)) {
        return NULL;
    }
    if (!(work.smoothing >= 0.0 && work.smoothing <= 1.0)) {
        return PyErr_Format(PyExc_ValueError,
                            "cross_entropy: label_smoothing must be in [0, 1]");
    }
    work.gradient = gradient != 0;
    if (ctpy_view_at(state, logits, "logits", &all.target, &all.logits) < 0 ||
        ctpy_view_at(state, targets, "targets", &all.target, &all.targets) < 0 ||
        ctpy_view_at(state, losses, "losses", &all.target, &all.losses) < 0 ||
        check(&all) < 0 || run(&all, &work) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef ctpy_engine_cross_entropy_functions[] = {
    {"cross_entropy", (PyCFunction)(void (*)(void))ctpy_cross_entropy,
     METH_VARARGS | METH_KEYWORDS,                                        ctpy_cross_entropy_doc},
    {NULL,            NULL,                                            0, NULL                  },
};
