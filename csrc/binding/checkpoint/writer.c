/* ctrainer._C.CheckpointWriter: the Python face of core/checkpoint/writer.h. */
#include "binding/checkpoint/writer.h"
#include "binding/checkpoint/tensors.h"

static PyObject *
CheckpointWriter_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                     PyObject *Py_UNUSED(kwargs))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL && (((CheckpointWriter *)op)->core = ct_writer_new()) == NULL) {
        Py_CLEAR(op);
        return PyErr_NoMemory();
    }
    return op;
}

static void
CheckpointWriter_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    ct_writer *core = ((CheckpointWriter *)op)->core;
    Py_BEGIN_ALLOW_THREADS /* it waits for the disk */
    ct_writer_free(core);
    Py_END_ALLOW_THREADS
    type->tp_free(op);
    Py_DECREF(type);
}

ct_writer *
ctpy_writer_enter(PyObject *op)
{
    CheckpointWriter *self = (CheckpointWriter *)op;
    bool busy;
    CTPY_LOCK(op);
    busy = self->busy;
    self->busy = true;
    CTPY_UNLOCK();
    if (busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this CheckpointWriter is in use by another thread");
        return NULL;
    }
    return self->core;
}

PyObject *
ctpy_writer_leave(PyObject *op, ct_status status, const ct_error *err)
{
    CTPY_LOCK(op);
    ((CheckpointWriter *)op)->busy = false;
    CTPY_UNLOCK();
    if (status != CT_OK) {
        return ctpy_raise(err);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    begin_doc,
    "begin($self, folder, /)\n--\n\n"
    "Start a save that is to appear as folder, and return where its files go.\n\n"
    "Waits for the save before; raises its OSError if it failed. What is put\n"
    "into the returned folder until commit() becomes part of the save.");

static PyObject *
CheckpointWriter_begin(PyObject *op, PyObject *arg)
{
    ct_error err = {0};
    ct_status status;
    PyObject *path = ctpy_path_from(arg), *answer;
    ct_writer *core = path == NULL ? NULL : ctpy_writer_enter(op);
    if (core == NULL) {
        Py_XDECREF(path);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_writer_begin(core, PyBytes_AS_STRING(path), &err);
    Py_END_ALLOW_THREADS
    const char *folder = status == CT_OK ? ct_writer_folder_borrow(core) : NULL;
    PyObject *text = folder == NULL ? NULL : PyUnicode_DecodeFSDefault(folder);
    answer = ctpy_writer_leave(op, status, &err);
    Py_DECREF(path);
    if (answer == NULL || text == NULL) {
        Py_XDECREF(answer);
        Py_XDECREF(text);
        return NULL;
    }
    Py_DECREF(answer);
    return text;
}

typedef ct_status step_fn(ct_writer *writer, ct_error *err);

/* Calls one core function without the GIL. */
static PyObject *
run_step(PyObject *op, step_fn *step)
{
    ct_error err = {0};
    ct_status status;
    ct_writer *core = ctpy_writer_enter(op);
    if (core == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = step(core, &err);
    Py_END_ALLOW_THREADS
    return ctpy_writer_leave(op, status, &err);
}

PyDoc_STRVAR(flush_doc, "flush($self, /)\n--\n\n"
                        "Write all files added so far, so that they can be read.");

static PyObject *
CheckpointWriter_flush(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return run_step(op, ct_writer_flush);
}

PyDoc_STRVAR(show_doc,
             "show($self, /)\n--\n\n"
             "Write all files added so far, and show the folder under its final "
             "name\nuntil the save is committed, as a link.");

static PyObject *
CheckpointWriter_show(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return run_step(op, ct_writer_show);
}

PyDoc_STRVAR(remove_after_doc,
             "remove_after($self, folder, /)\n--\n\n"
             "Remove another folder as soon as the open save is in place.");

static PyObject *
CheckpointWriter_remove_after(PyObject *op, PyObject *arg)
{
    ct_error err;
    PyObject *path = ctpy_path_from(arg);
    ct_writer *core = path == NULL ? NULL : ctpy_writer_enter(op);
    PyObject *answer = NULL;
    if (core != NULL) {
        ct_status status = ct_writer_remove_after(core, PyBytes_AS_STRING(path), &err);
        answer = ctpy_writer_leave(op, status, &err);
    }
    Py_XDECREF(path);
    return answer;
}

static ct_status
commit_and_wait(ct_writer *writer, ct_error *err)
{
    ct_status status = ct_writer_commit(writer, err);
    return status == CT_OK ? ct_writer_wait(writer, err) : status;
}

PyDoc_STRVAR(
    CheckpointWriter_commit_doc,
    "commit($self, wait=False)\n--\n\n"
    "End the save: a thread of C writes it, synchronises it and renames it.\n\n"
    "With wait, returns when it is in place, raising OSError if it failed;\n"
    "without, an error is raised by the next begin() or wait().");

static PyObject *
CheckpointWriter_commit(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"wait", NULL};
    int wait = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|p:commit", names, &wait)) {
        return NULL;
    }
    return run_step(op, wait ? commit_and_wait : ct_writer_commit);
}

PyDoc_STRVAR(wait_doc, "wait($self, /)\n--\n\n"
                       "Return when no save is being written; raise its OSError if it\n"
                       "failed. The folder of a failed save has been removed.");

static PyObject *
CheckpointWriter_wait(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return run_step(op, ct_writer_wait);
}

static ct_status
abort_step(ct_writer *writer, ct_error *Py_UNUSED(err))
{
    ct_writer_abort(writer);
    return CT_OK;
}

PyDoc_STRVAR(reserve_doc, "reserve($self, nbytes, /)\n--\n\n"
                          "Ready memory for snapshots of nbytes in the background.\n\n"
                          "The first save then waits no longer than the next ones.");

static PyObject *
CheckpointWriter_reserve(PyObject *op, PyObject *arg)
{
    ct_error err;
    size_t bytes = PyLong_AsSize_t(arg);
    ct_writer *core = PyErr_Occurred() ? NULL : ctpy_writer_enter(op);
    if (core == NULL) {
        return NULL;
    }
    ct_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ct_writer_reserve(core, bytes, &err);
    Py_END_ALLOW_THREADS
    return ctpy_writer_leave(op, status, &err);
}

PyDoc_STRVAR(abort_doc, "abort($self, /)\n--\n\n"
                        "Drop the save that begin() started, folder and all, if any.");

static PyObject *
CheckpointWriter_abort(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return run_step(op, abort_step);
}

static ct_status
release_step(ct_writer *writer, ct_error *Py_UNUSED(err))
{
    ct_writer_release(writer);
    return CT_OK;
}

PyDoc_STRVAR(release_doc,
             "release($self, /)\n--\n\n"
             "Wait, then give the memory kept for snapshots back to the system.");

static PyObject *
CheckpointWriter_release(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return run_step(op, release_step);
}

static PyObject *
CheckpointWriter_get_pending(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(ct_writer_pending(((CheckpointWriter *)op)->core));
}

static PyObject *
CheckpointWriter_get_folder(PyObject *op, void *Py_UNUSED(closure))
{
    const char *folder = ct_writer_folder_borrow(((CheckpointWriter *)op)->core);
    if (folder == NULL) {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeFSDefault(folder);
}

static PyObject *
CheckpointWriter_get_snapshot_bytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(ct_writer_snapshot_bytes(((CheckpointWriter *)op)->core));
}

#define WITH_KEYWORDS(name)                                                            \
    #name, (PyCFunction)(void (*)(void))CheckpointWriter_##name,                       \
        METH_VARARGS | METH_KEYWORDS, CheckpointWriter_##name##_doc

static PyMethodDef CheckpointWriter_methods[] = {
    {"begin", CheckpointWriter_begin, METH_O, begin_doc},
    {WITH_KEYWORDS(add_safetensors)},
    {WITH_KEYWORDS(add_archive)},
    {"add_bytes", CheckpointWriter_add_bytes, METH_VARARGS,
     CheckpointWriter_add_bytes_doc},
    {"flush", CheckpointWriter_flush, METH_NOARGS, flush_doc},
    {"show", CheckpointWriter_show, METH_NOARGS, show_doc},
    {WITH_KEYWORDS(commit)},
    {"wait", CheckpointWriter_wait, METH_NOARGS, wait_doc},
    {"abort", CheckpointWriter_abort, METH_NOARGS, abort_doc},
    {"release", CheckpointWriter_release, METH_NOARGS, release_doc},
    {"remove_after", CheckpointWriter_remove_after, METH_O, remove_after_doc},
    {"reserve", CheckpointWriter_reserve, METH_O, reserve_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef CheckpointWriter_getset[] = {
    {"pending",        CheckpointWriter_get_pending,        NULL,
     "Is a committed save still being written?",                              NULL},
    {"folder",         CheckpointWriter_get_folder,         NULL,
     "Where the files of the open save go, or None.",                         NULL},
    {"snapshot_bytes", CheckpointWriter_get_snapshot_bytes, NULL,
     "Memory kept for snapshots, in bytes; 0 while a save is being written.", NULL},
    {NULL,             NULL,                                NULL, NULL,       NULL},
};

PyDoc_STRVAR(CheckpointWriter_doc,
             "CheckpointWriter()\n--\n\n"
             "Saves folders of files in the background, each whole or not at all.");

static PyType_Slot CheckpointWriter_slots[] = {
    {Py_tp_doc,      (void *)CheckpointWriter_doc},
    {Py_tp_new,      CheckpointWriter_new        },
    {Py_tp_traverse, ctpy_leaf_traverse          },
    {Py_tp_dealloc,  CheckpointWriter_dealloc    },
    {Py_tp_methods,  CheckpointWriter_methods    },
    {Py_tp_getset,   CheckpointWriter_getset     },
    {0,              NULL                        },
};

PyType_Spec CheckpointWriter_spec = {
    .name = "ctrainer._C.CheckpointWriter",
    .basicsize = sizeof(CheckpointWriter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = CheckpointWriter_slots,
};
