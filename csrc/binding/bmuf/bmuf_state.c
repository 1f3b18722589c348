/* What BMUF saves besides the state of the optimizer within. */
#include "binding/bmuf/bmuf.h"

static int
check_started(const BMUF *self)
{
    if (self->busy || !self->started || self->config.momentum == 0.0) {
        PyErr_SetString(PyExc_RuntimeError,
                        self->busy ? "a block is being synchronised by another thread"
                                   : "there are no blocks to save or load: "
                                     "block_momentum is 0, or training has not begun");
        return -1;
    }
    return 0;
}

typedef ct_status copy_fn(ct_bmuf *bmuf, const ct_bmuf_flat *flat,
                          const ct_bmuf_list *list, ct_error *err);

static int
copy_one(BMUF *self, const ct_bmuf_flat *flat, PyObject *tensors, copy_fn *copy)
{
    bmuf_tensors t;
    ct_status status;
    ct_error err;
    if (bmuf_tensors_read(ctpy_state_borrow((PyObject *)self), tensors, NULL, &t) < 0) {
        return -1;
    }
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    status = copy(&self->core, flat, &t.list, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    bmuf_tensors_free(&t);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static PyObject *
copy_both(PyObject *op, PyObject *args, const char *format, copy_fn *copy)
{
    BMUF *self = (BMUF *)op;
    PyObject *global, *momentum;
    if (!PyArg_ParseTuple(args, format, &global, &momentum) ||
        check_started(self) < 0 ||
        copy_one(self, &self->core.global, global, copy) < 0 ||
        copy_one(self, &self->core.momentum, momentum, copy) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

const char BMUF_save_blocks_doc[] =
    "_save_blocks($self, model, momentum, /)\n--\n\n"
    "Copy the global model and the momentum of blocks into tensors as long as the\n"
    "parameters, float64 or float32 as their blocks are computed in.";

PyObject *
BMUF_save_blocks(PyObject *op, PyObject *args)
{
    return copy_both(op, args, "OO:_save_blocks", ct_bmuf_save);
}

const char BMUF_load_blocks_doc[] = "_load_blocks($self, model, momentum, /)\n--\n\n"
                                    "Take what _save_blocks() gave.";

PyObject *
BMUF_load_blocks(PyObject *op, PyObject *args)
{
    return copy_both(op, args, "OO:_load_blocks", ct_bmuf_load);
}

static PyObject *
copy_residual(PyObject *op, PyObject *tensors, copy_fn *copy)
{
    BMUF *self = (BMUF *)op;
    if (check_started(self) < 0) {
        return NULL;
    }
    if (!ct_bmuf_is_coded(&self->config)) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "there is no residual: delta_bits is 32, and nothing is missed");
        return NULL;
    }
    return copy_one(self, &self->core.residual, tensors, copy) < 0 ? NULL
                                                                   : Py_NewRef(Py_None);
}

const char BMUF_save_residual_doc[] =
    "_save_residual($self, residual, /)\n--\n\n"
    "Copy what this rank's codes of distances have missed into tensors like those of\n"
    "_save_blocks().";

PyObject *
BMUF_save_residual(PyObject *op, PyObject *arg)
{
    return copy_residual(op, arg, ct_bmuf_save);
}

const char BMUF_load_residual_doc[] = "_load_residual($self, residual, /)\n--\n\n"
                                      "Take what _save_residual() gave.";

PyObject *
BMUF_load_residual(PyObject *op, PyObject *arg)
{
    return copy_residual(op, arg, ct_bmuf_load);
}

const char BMUF_save_left_doc[] =
    "_save_left($self, left, /)\n--\n\n"
    "Copy the parameters as they were when the block ended whose average has not been\n"
    "taken yet into tensors like those of _save_blocks().";

PyObject *
BMUF_save_left(PyObject *op, PyObject *arg)
{
    BMUF *self = (BMUF *)op;
    if (check_started(self) < 0 ||
        copy_one(self, &self->core.left, arg, ct_bmuf_save) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static ct_status
load_left(ct_bmuf *bmuf, const ct_bmuf_flat *flat, const ct_bmuf_list *list,
          ct_error *err)
{
    (void)flat;
    return ct_bmuf_load_left(bmuf, list, err);
}

const char BMUF_load_left_doc[] =
    "_load_left($self, left, /)\n--\n\n"
    "Take what _save_left() gave, and that average later.";

PyObject *
BMUF_load_left(PyObject *op, PyObject *arg)
{
    BMUF *self = (BMUF *)op;
    if (check_started(self) < 0 ||
        copy_one(self, &self->core.left, arg, load_left) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
