/* ctrainer._C.CheckpointWriter: the Python API of core/checkpoint/writer.h. */
#include "binding/checkpoint/tensors.h"
#include "binding/runtime/ctpy.h"

#include "core/base/alloc.h"
#include "core/checkpoint/writer.h"

#include <stdbool.h>

typedef struct CheckpointWriter {
    PyObject_HEAD
    ct_writer *core; /* never NULL */
    bool busy;       /* a thread is in the core without the GIL */
} CheckpointWriter;

PyDoc_STRVAR(CheckpointWriter_doc,
             "CheckpointWriter()\n--\n\n"
             "Saves folders of files in the background, each whole or not at all.");

/* Claims the core for the calling thread, which may then release the GIL; NULL with a
 * RuntimeError when another one has it. */
static ct_writer *
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

/* Gives it back; None, or NULL with the exception of the call that ended so. */
static PyObject *
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

/* Hands a plan over and returns None, or NULL with an exception. */
static PyObject *
add_plan_steal(PyObject *op, PyObject *name, ct_plan *plan, int snapshot)
{
    ct_error err = {0};
    ct_writer *core = NULL;
    PyObject *path = ctpy_path_from(name);
    ct_status status =
        path == NULL ? CT_EHOST : ct_plan_set_name(plan, PyBytes_AS_STRING(path), &err);
    Py_XDECREF(path);
    if (status != CT_OK || (core = ctpy_writer_enter(op)) == NULL) {
        ct_plan_fini(plan);
        return status == CT_OK || path == NULL ? NULL : ctpy_raise(&err);
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_writer_add(core, plan, snapshot != 0, &err);
    Py_END_ALLOW_THREADS
    return ctpy_writer_leave(op, status, &err);
}

PyObject *
CheckpointWriter_add_safetensors(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "tensors", "metadata", "snapshot", NULL};
    PyObject *name, *dict, *metadata = Py_None, *answer = NULL, *none = NULL;
    int snapshot = 1;
    size_t n = 0;
    ct_st_pair *pairs = NULL;
    ctpy_tensors tensors = {0};
    ct_plan plan = {0};
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O$p:add_safetensors", names,
                                     &name, &dict, &metadata, &snapshot)) {
        return NULL;
    }
    if (metadata == Py_None && (metadata = none = PyDict_New()) == NULL) {
        return NULL;
    }
    if (!PyDict_Check(metadata)) {
        PyErr_SetString(PyExc_TypeError, "metadata must be a dict or None");
        goto done;
    }
    if (ctpy_tensors_from(ctpy_state_borrow(op), dict, 0, &tensors) < 0 ||
        (pairs = ctpy_pairs_from(metadata, &n)) == NULL) {
        goto done;
    }
    if (ct_st_plan(&plan, tensors.entries, tensors.n, pairs, n, &err) != CT_OK) {
        ct_plan_fini(&plan);
        (void)ctpy_raise(&err);
        goto done;
    }
    answer = add_plan_steal(op, name, &plan, snapshot);
done:
    ct_free(pairs);
    ctpy_tensors_fini(&tensors);
    Py_XDECREF(none);
    return answer;
}

PyObject *
CheckpointWriter_add_archive(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "records", "snapshot", NULL};
    PyObject *name, *given, *answer = NULL, *list = NULL;
    int snapshot = 1;
    ct_zip_record *records = NULL;
    ct_plan plan = {0};
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$p:add_archive", names, &name,
                                     &given, &snapshot) ||
        (list = PySequence_List(given)) == NULL) {
        return NULL;
    }
    size_t n = (size_t)PyList_GET_SIZE(list);
    records = ctpy_records_from(ctpy_state_borrow(op), list, false);
    if (records == NULL) {
        goto done;
    }
    if (ct_zip_plan(&plan, records, n, &err) != CT_OK) {
        ct_plan_fini(&plan);
        (void)ctpy_raise(&err);
        goto done;
    }
    answer = add_plan_steal(op, name, &plan, snapshot);
done:
    ctpy_records_free(records, list);
    Py_DECREF(list);
    return answer;
}

/* checkpoint_add.c: the methods that add files. */
PyObject *
CheckpointWriter_add_safetensors(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *CheckpointWriter_add_archive(PyObject *op, PyObject *args, PyObject *kwargs);

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

PyDoc_STRVAR(wait_doc, "wait($self, /)\n--\n\n"
                       "Return when no save is being written; raise its OSError if it\n"
                       "failed. The folder of a failed save has been removed.");

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

static PyObject *
CheckpointWriter_add_bytes(PyObject *op, PyObject *args)
{
    PyObject *name;
    Py_buffer view;
    ct_buf buf = {0};
    ct_plan plan = {0};
    ct_error err;
    if (!PyArg_ParseTuple(args, "Oy*:add_bytes", &name, &view)) {
        return NULL;
    }
    ct_status status = ct_buf_add(&buf, view.buf, (size_t)view.len, &err);
    PyBuffer_Release(&view);
    if (status == CT_OK) {
        status = ct_plan_add_buf(&plan, &buf, &err);
    }
    if (status != CT_OK) {
        ct_buf_fini(&buf);
        ct_plan_fini(&plan);
        return ctpy_raise(&err);
    }
    return add_plan_steal(op, name, &plan, 1);
}

/* CheckpointWriter: the methods that add files to the open save. */

static const char CheckpointWriter_add_safetensors_doc[] =
    "add_safetensors($self, name, tensors, metadata=None, *, snapshot=True)\n--\n\n"
    "Add a safetensors file of a dict of named tensors or arrays.\n\n"
    "They must be contiguous and on the CPU. A value may also be (uint8 array of its\n"
    "bytes, dtype such as 'F8_E4M3', shape). With snapshot they are copied, and may\n"
    "change once this returns; without it the file is written before it returns.";

static const char CheckpointWriter_add_archive_doc[] =
    "add_archive($self, name, records, *, snapshot=True)\n--\n\n"
    "Add an archive as torch.save lays it out, of (record name, data) pairs.\n\n"
    "data is bytes, or a contiguous tensor or array on the CPU.";

static const char CheckpointWriter_add_bytes_doc[] =
    "add_bytes($self, name, data, /)\n--\n\n"
    "Add a file of these bytes.";

/* Writing one file at once, without a checkpoint around it: functions of the module. */

/* Writes the plan that `status` and `err` speak of, frees it, and returns None or NULL.
 */
static PyObject *
write_steal(ct_plan *plan, ct_status status, PyObject *path, ct_error *err)
{
    if (status == CT_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = ct_plan_publish(plan, PyBytes_AS_STRING(path), err);
        Py_END_ALLOW_THREADS
    }
    ct_plan_fini(plan);
    if (status != CT_OK) {
        return ctpy_raise(err);
    }
    Py_RETURN_NONE;
}

static const char ctpy_write_safetensors_doc[] =
    "write_safetensors($module, path, tensors, metadata, /)\n--\n\n"
    "Write a dict of named tensors or arrays as a safetensors file, whole or not at\n"
    "all.\n\n"
    "In the place of one may be (data, dtype, shape), where data is uint8, or a tuple "
    "of\n"
    "excerpts (path as bytes, offset, n) of other files, or (None, 0, n) for n zeros, "
    "in\n"
    "bytes: they are read a block at a time.";

static PyObject *
ctpy_write_safetensors(PyObject *module, PyObject *args)
{
    PyObject *given, *dict, *metadata, *path = NULL, *answer = NULL;
    ctpy_tensors tensors = {.may_excerpt = true};
    ct_st_pair *pairs = NULL;
    size_t n = 0;
    if (!PyArg_ParseTuple(args, "OOO!:write_safetensors", &given, &dict, &PyDict_Type,
                          &metadata) ||
        (path = ctpy_path_from(given)) == NULL) {
        return NULL;
    }
    if (ctpy_tensors_from(PyModule_GetState(module), dict, 0, &tensors) == 0 &&
        (pairs = ctpy_pairs_from(metadata, &n)) != NULL) {
        ct_error err;
        ct_plan plan = {0};
        ct_status status =
            ct_st_plan(&plan, tensors.entries, tensors.n, pairs, n, &err);
        answer = write_steal(&plan, status, path, &err);
    }
    ct_free(pairs);
    ctpy_tensors_fini(&tensors);
    Py_DECREF(path);
    return answer;
}

static const char ctpy_write_archive_doc[] =
    "write_archive($module, path, records, /)\n--\n\n"
    "Write (record name, data) pairs as an archive "
    "that torch.load reads, whole or not\n"
    "at all. Data may be a tuple of excerpts, as "
    "write_safetensors takes them.";

static PyObject *
ctpy_write_archive(PyObject *module, PyObject *args)
{
    PyObject *given, *items, *path = NULL, *list = NULL, *answer = NULL;
    ct_zip_record *records = NULL;
    if (!PyArg_ParseTuple(args, "OO:write_archive", &given, &items) ||
        (path = ctpy_path_from(given)) == NULL) {
        return NULL;
    }
    if ((list = PySequence_List(items)) != NULL &&
        (records = ctpy_records_from(PyModule_GetState(module), list, true)) != NULL) {
        ct_error err;
        ct_plan plan = {0};
        ct_status status =
            ct_zip_plan(&plan, records, (size_t)PyList_GET_SIZE(list), &err);
        answer = write_steal(&plan, status, path, &err);
    }
    ctpy_records_free(records, list);
    Py_XDECREF(list);
    Py_DECREF(path);
    return answer;
}

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

PyMethodDef ctpy_checkpoint_writer_functions[] = {
    {"write_archive",     ctpy_write_archive,     METH_VARARGS, ctpy_write_archive_doc},
    {"write_safetensors", ctpy_write_safetensors, METH_VARARGS,
     ctpy_write_safetensors_doc                                                       },
    {NULL,                NULL,                   0,            NULL                  },
};
