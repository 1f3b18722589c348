/* ctrainer._C.CheckpointWriter over core/checkpoint/writer.h, and functions that write
 * a single file.
 *
 * The core takes one call at a time: `busy` is set while a call is in the core without
 * the GIL, and other threads' calls raise meanwhile. */
#include "binding/checkpoint/tensors.h"
#include "binding/runtime/buffer.h"

#include "core/base/alloc.h"
#include "core/checkpoint/writer.h"
#include "core/checkpoint/zip.h"

#include <limits.h>
#include <stdbool.h>

/* ---- lifetime -------------------------------------------------------------------- */

typedef struct CheckpointWriter {
    PyObject_HEAD
    ct_writer *core; /* never NULL */
    bool busy;       /* a thread is in the core without the GIL */
} CheckpointWriter;

PyDoc_STRVAR(CheckpointWriter_doc,
             "CheckpointWriter()\n--\n\n"
             "Saves folders of files in the background, each whole or not at all.");

/* In tp_new, so that every instance has a core: methods need no check. */
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
    PyObject_GC_UnTrack(op);
    /* Nobody else can reach the object by now, so the claim is not needed. */
    ct_writer *core = ((CheckpointWriter *)op)->core;
    Py_BEGIN_ALLOW_THREADS /* waits for the disk */
    ct_writer_free(core);
    Py_END_ALLOW_THREADS
    ctpy_leaf_dealloc(op);
}

/* ---- calls of the core ----------------------------------------------------------- */

/* Claims the core for the calling thread, which may then release the GIL; NULL with a
 * RuntimeError if another thread has claimed it. */
static ct_writer *
writer_enter(PyObject *op)
{
    CheckpointWriter *self = (CheckpointWriter *)op;
    bool busy;
    CTPY_LOCK(op);
    /* The lock is for builds without the GIL. */
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

/* Ends the claim. None, or NULL with the exception for `status`. */
static PyObject *
writer_leave(PyObject *op, ct_status status, const ct_error *err)
{
    CTPY_LOCK(op);
    ((CheckpointWriter *)op)->busy = false;
    CTPY_UNLOCK();
    if (status != CT_OK) {
        return ctpy_raise(err);
    }
    Py_RETURN_NONE;
}

typedef ct_status step_fn(ct_writer *writer, ct_error *err);

/* Calls a function of the core without the GIL. */
static PyObject *
run_step(PyObject *op, step_fn *step)
{
    ct_error err = {0};
    ct_status status;
    /* A second thread must not change the files of a save in progress. */
    ct_writer *core = writer_enter(op);
    if (core == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = step(core, &err);
    Py_END_ALLOW_THREADS
    return writer_leave(op, status, &err);
}

/* ---- plans of files -------------------------------------------------------------- */

/* A dict of str to str, or None, as *n pairs that borrow its strings; NULL with an
 * exception. */
static ct_st_pair *
pairs_from(PyObject *dict, size_t *n)
{
    Py_ssize_t at = 0;
    PyObject *key, *value;
    *n = 0;
    if (dict != Py_None && !PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "metadata must be a dict or None");
        return NULL;
    }
    /* One more than needed, so that no entries are no failed allocation. */
    const Py_ssize_t most = dict == Py_None ? 0 : PyDict_GET_SIZE(dict);
    ct_st_pair *pairs = ct_calloc((size_t)most + 1, sizeof *pairs);
    if (pairs == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    while (most != 0 && PyDict_Next(dict, &at, &key, &value)) {
        Py_ssize_t key_n, value_n;
        if (!PyUnicode_Check(key) || !PyUnicode_Check(value)) {
            PyErr_SetString(PyExc_TypeError, "metadata must map str to str");
            break;
        }
        ct_st_pair *pair = &pairs[(*n)++];
        pair->key.data = PyUnicode_AsUTF8AndSize(key, &key_n);
        pair->value.data = PyUnicode_AsUTF8AndSize(value, &value_n);
        if (pair->key.data == NULL || pair->value.data == NULL) {
            break;
        }
        pair->key.n = (size_t)key_n;
        pair->value.n = (size_t)value_n;
    }
    if (PyErr_Occurred()) {
        ct_free(pairs);
        return NULL;
    }
    return pairs;
}

/* A (name, data) pair of an archive; data is bytes, a tensor or an array. */
static int
fill_record(ctpy_state *state, PyObject *pair, bool may_excerpt, ct_zip_record *record)
{
    ct_span span;
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
        !PyUnicode_Check(PyTuple_GET_ITEM(pair, 0))) {
        PyErr_SetString(PyExc_TypeError, "records must be tuples (name, data)");
        return -1;
    }
    PyObject *data = PyTuple_GET_ITEM(pair, 1);
    record->name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(pair, 0));
    if (record->name == NULL) {
        return -1;
    }
    /* The pickled object of an archive; tensors' storages are the other records. */
    if (PyBytes_Check(data)) {
        record->data = PyBytes_AS_STRING(data);
        record->bytes = (size_t)PyBytes_GET_SIZE(data);
        return 0;
    }
    if (may_excerpt && PyTuple_Check(data)) {
        record->excerpts = ctpy_excerpts_from(data, record->name, &record->bytes);
        record->n_excerpts = (size_t)PyTuple_GET_SIZE(data);
        return record->excerpts == NULL ? -1 : 0;
    }
    if (ctpy_memory_from(state, data, record->name, &span, &record->place) < 0) {
        return -1;
    }
    record->data = span.data;
    record->bytes = span.n * ct_dtype_size(span.dtype);
    return 0;
}

static void
records_free(ct_zip_record *records, PyObject *list)
{
    for (Py_ssize_t i = 0; records != NULL && i < PyList_GET_SIZE(list); i++) {
        ct_free((void *)records[i].excerpts);
    }
    ct_free(records);
}

/* Borrow the list's names and data. NULL with an exception. */
static ct_zip_record *
records_from(ctpy_state *state, PyObject *list, bool may_excerpt)
{
    size_t n = (size_t)PyList_GET_SIZE(list);
    ct_zip_record *records = ct_calloc(n + 1, sizeof *records);
    if (records == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        if (fill_record(state, PyList_GET_ITEM(list, (Py_ssize_t)i), may_excerpt,
                        &records[i]) < 0) {
            records_free(records, list);
            return NULL;
        }
    }
    return records;
}

/* The plan of a file, and the objects that its data is borrowed from. Starts with
 * may_excerpt set or not. */
typedef struct content {
    ct_plan plan;
    ctpy_tensors tensors;
    ct_st_pair *pairs;
    PyObject *list;
    ct_zip_record *records;
} content;

static void
content_fini(content *c)
{
    /* Empty after an add, which takes the plan over. */
    ct_plan_fini(&c->plan);
    ct_free(c->pairs);
    ctpy_tensors_fini(&c->tensors);
    records_free(c->records, c->list);
    Py_XDECREF(c->list);
}

static int
plan_tensors(content *c, ctpy_state *state, PyObject *dict, PyObject *metadata)
{
    size_t n;
    ct_error err;
    if (ctpy_tensors_from(state, dict, &c->tensors) < 0 ||
        (c->pairs = pairs_from(metadata, &n)) == NULL) {
        return -1;
    }
    const ct_status status =
        ct_st_plan(&c->plan, c->tensors.entries, c->tensors.n, c->pairs, n, &err);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
plan_records(content *c, ctpy_state *state, PyObject *records)
{
    ct_error err;
    /* A list of our own keeps names and data alive up to content_fini. */
    if ((c->list = PySequence_List(records)) == NULL ||
        (c->records = records_from(state, c->list, c->tensors.may_excerpt)) == NULL) {
        return -1;
    }
    const size_t n = (size_t)PyList_GET_SIZE(c->list);
    const ct_status status = ct_zip_plan(&c->plan, c->records, n, &err);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Adds a plan to the save and returns None, or NULL with an exception. */
static PyObject *
add_plan_steal(PyObject *op, PyObject *name, ct_plan *plan, int snapshot)
{
    ct_error err = {0};
    ct_writer *core = NULL;
    PyObject *path = ctpy_path_from(name);
    ct_status status =
        path == NULL ? CT_EHOST : ct_plan_set_name(plan, PyBytes_AS_STRING(path), &err);
    Py_XDECREF(path);
    /* Freed here if the writer is not reached, as the caller has let go of the plan. */
    if (status != CT_OK || (core = writer_enter(op)) == NULL) {
        ct_plan_fini(plan);
        return status == CT_OK || path == NULL ? NULL : ctpy_raise(&err);
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_writer_add(core, plan, snapshot != 0, &err);
    Py_END_ALLOW_THREADS
    return writer_leave(op, status, &err);
}

/* ---- a save ---------------------------------------------------------------------- */

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
    ct_writer *core = path == NULL ? NULL : writer_enter(op);
    if (core == NULL) {
        Py_XDECREF(path);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_writer_begin(core, PyBytes_AS_STRING(path), &err);
    Py_END_ALLOW_THREADS
    /* Before the claim ends, as another thread may then change the folder. */
    const char *folder = status == CT_OK ? ct_writer_folder_borrow(core) : NULL;
    PyObject *text = folder == NULL ? NULL : PyUnicode_DecodeFSDefault(folder);
    answer = writer_leave(op, status, &err);
    Py_DECREF(path);
    if (answer == NULL || text == NULL) {
        Py_XDECREF(answer);
        Py_XDECREF(text);
        return NULL;
    }
    Py_DECREF(answer);
    return text;
}

PyDoc_STRVAR(
    join_doc,
    "join($self, folder, number, /)\n--\n\n"
    "Take part in the save whose folder another process got from begin().\n\n"
    "number is this process's, as the other names it in commit(). What is added "
    "is\nwritten there; commit() ends this process's part.");

static PyObject *
CheckpointWriter_join(PyObject *op, PyObject *args)
{
    ct_error err = {0};
    PyObject *path;
    int number;
    if (!PyArg_ParseTuple(args, "O&i:join", PyUnicode_FSConverter, &path, &number)) {
        return NULL;
    }
    PyObject *answer = NULL;
    ct_writer *core = writer_enter(op);
    if (core != NULL) {
        ct_status status;
        Py_BEGIN_ALLOW_THREADS
        status = ct_writer_join(core, PyBytes_AS_STRING(path), number, &err);
        Py_END_ALLOW_THREADS
        answer = writer_leave(op, status, &err);
    }
    Py_DECREF(path);
    return answer;
}

static const char CheckpointWriter_add_safetensors_doc[] =
    "add_safetensors($self, name, tensors, metadata=None, *, snapshot=True)\n--\n\n"
    "Add a safetensors file of a dict of named tensors or arrays.\n\n"
    "They must be contiguous, on the CPU or, with the plugin, on a GPU. A value may "
    "also be (uint8 array of its\n"
    "bytes, dtype such as 'F8_E4M3', shape). With snapshot they are copied, and may\n"
    "change once this returns; without it the file is written before it returns.";

static PyObject *
CheckpointWriter_add_safetensors(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "tensors", "metadata", "snapshot", NULL};
    PyObject *name, *dict, *metadata = Py_None, *answer = NULL;
    int snapshot = 1;
    content c = {.list = NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O$p:add_safetensors", names,
                                     &name, &dict, &metadata, &snapshot)) {
        return NULL;
    }
    if (plan_tensors(&c, ctpy_state_borrow(op), dict, metadata) == 0) {
        answer = add_plan_steal(op, name, &c.plan, snapshot);
    }
    content_fini(&c);
    return answer;
}

static const char CheckpointWriter_add_archive_doc[] =
    "add_archive($self, name, records, *, snapshot=True)\n--\n\n"
    "Add an archive as torch.save lays it out, of (record name, data) pairs.\n\n"
    "data is bytes, or a contiguous tensor or array on the CPU.";

static PyObject *
CheckpointWriter_add_archive(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "records", "snapshot", NULL};
    PyObject *name, *records, *answer = NULL;
    int snapshot = 1;
    content c = {.list = NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$p:add_archive", names, &name,
                                     &records, &snapshot)) {
        return NULL;
    }
    if (plan_records(&c, ctpy_state_borrow(op), records) == 0) {
        answer = add_plan_steal(op, name, &c.plan, snapshot);
    }
    content_fini(&c);
    return answer;
}

static const char CheckpointWriter_add_bytes_doc[] =
    "add_bytes($self, name, data, /)\n--\n\n"
    "Add a file of these bytes.";

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
    /* The bytes were copied: the buffer may change from now on. */
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

PyDoc_STRVAR(
    share_doc,
    "share($self, fd, memory, /)\n--\n\n"
    "Let tensors that are added from now on, and lie in memory, a shared "
    "mapping of\nthe file fd, be written from there without a copy.\n\n"
    "They must not change until the save is done; fd and memory may be closed.");

static PyObject *
CheckpointWriter_share(PyObject *op, PyObject *args)
{
    ct_error err = {0};
    Py_buffer view;
    int fd;
    if (!PyArg_ParseTuple(args, "iy*:share", &fd, &view)) {
        return NULL;
    }
    PyObject *answer = NULL;
    ct_writer *core = writer_enter(op);
    if (core != NULL) {
        ct_status status = ct_writer_share(core, fd, view.buf, (size_t)view.len, &err);
        answer = writer_leave(op, status, &err);
    }
    PyBuffer_Release(&view);
    return answer;
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
    ct_writer *core = path == NULL ? NULL : writer_enter(op);
    PyObject *answer = NULL;
    if (core != NULL) {
        ct_status status = ct_writer_remove_after(core, PyBytes_AS_STRING(path), &err);
        answer = writer_leave(op, status, &err);
    }
    Py_XDECREF(path);
    return answer;
}

/* One claim for all: no other thread begins a save between them. */
static ct_status
commit_with(ct_writer *writer, const int *parts, size_t n, double timeout, bool wait,
            ct_error *err)
{
    ct_status status =
        n == 0 ? CT_OK : ct_writer_expect(writer, parts, n, timeout, err);
    if (status == CT_OK) {
        status = ct_writer_commit(writer, err);
    }
    return status == CT_OK && wait ? ct_writer_wait(writer, err) : status;
}

/* A sequence of int, to be released with ct_free; NULL with an exception. */
static int *
numbers_from(PyObject *sequence, size_t *n)
{
    PyObject *list = PySequence_List(sequence);
    int *numbers = NULL;
    if (list == NULL) {
        return NULL;
    }
    *n = (size_t)PyList_GET_SIZE(list);
    numbers = ct_calloc(*n + 1, sizeof *numbers);
    if (numbers == NULL) {
        (void)PyErr_NoMemory();
    }
    for (size_t i = 0; numbers != NULL && i < *n && !PyErr_Occurred(); i++) {
        const long number = PyLong_AsLong(PyList_GET_ITEM(list, (Py_ssize_t)i));
        numbers[i] = (int)number;
        if (!PyErr_Occurred() && (number < 0 || number > INT_MAX)) {
            PyErr_Format(PyExc_ValueError,
                         "parts must be numbers of processes from 0 on, got %ld",
                         number);
        }
    }
    Py_DECREF(list);
    if (PyErr_Occurred()) {
        ct_free(numbers);
        return NULL;
    }
    return numbers;
}

static const char CheckpointWriter_commit_doc[] =
    "commit($self, wait=False, parts=(), timeout=1800.0)\n--\n\n"
    "End the save: a thread of C writes it, synchronises it and renames it.\n\n"
    "With wait, returns when it is in place, raising OSError if it failed;\n"
    "without, an error is raised by the next begin() or wait(). parts are the numbers\n"
    "of the processes that have joined the save: it waits for their files, timeout\n"
    "seconds after its own at most, and fails with any of them.";

static PyObject *
CheckpointWriter_commit(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"wait", "parts", "timeout", NULL};
    int wait = 0;
    size_t n = 0;
    double timeout = 1800.0;
    ct_error err = {0};
    PyObject *parts = NULL, *answer = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|pOd:commit", names, &wait, &parts,
                                     &timeout)) {
        return NULL;
    }
    int *numbers = parts == NULL ? NULL : numbers_from(parts, &n);
    ct_writer *core = parts != NULL && numbers == NULL ? NULL : writer_enter(op);
    if (core != NULL) {
        ct_status status;
        Py_BEGIN_ALLOW_THREADS
        status = commit_with(core, numbers, n, timeout, wait != 0, &err);
        Py_END_ALLOW_THREADS
        answer = writer_leave(op, status, &err);
    }
    ct_free(numbers);
    return answer;
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

PyDoc_STRVAR(abort_doc, "abort($self, /)\n--\n\n"
                        "Drop the save that begin() started, folder and all, if any.");

static PyObject *
CheckpointWriter_abort(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return run_step(op, abort_step);
}

/* ---- snapshot memory ------------------------------------------------------------- */

PyDoc_STRVAR(
    reserve_doc,
    "reserve($self, nbytes, like=None, /)\n--\n\n"
    "Ready memory for snapshots of nbytes in the background, of tensors that are\n"
    "where `like` is; None: in the host's memory.\n\n"
    "The first save then waits no longer than the next ones.");

static PyObject *
CheckpointWriter_reserve(PyObject *op, PyObject *args)
{
    ct_error err;
    PyObject *nbytes, *like = Py_None;
    ct_place place = {0};
    ct_span unused;
    if (!PyArg_ParseTuple(args, "O|O:reserve", &nbytes, &like)) {
        return NULL;
    }
    size_t bytes = PyLong_AsSize_t(nbytes);
    if (PyErr_Occurred() ||
        (like != Py_None &&
         ctpy_memory_from(ctpy_state_borrow(op), like, "like", &unused, &place) < 0)) {
        return NULL;
    }
    ct_writer *core = writer_enter(op);
    if (core == NULL) {
        return NULL;
    }
    ct_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ct_writer_reserve(core, bytes, place, &err);
    Py_END_ALLOW_THREADS
    return writer_leave(op, status, &err);
}

static ct_status
release_step(ct_writer *writer, ct_error *Py_UNUSED(err))
{
    ct_writer_release(writer);
    return CT_OK;
}

PyDoc_STRVAR(release_doc,
             "release($self, /)\n--\n\n"
             "Wait, then return the memory kept for snapshots to the system.");

static PyObject *
CheckpointWriter_release(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return run_step(op, release_step);
}

/* ---- the type -------------------------------------------------------------------- */

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

static PyGetSetDef CheckpointWriter_getset[] = {
    {"pending",        CheckpointWriter_get_pending,        NULL,
     "Is a committed save still being written?",                              NULL},
    {"folder",         CheckpointWriter_get_folder,         NULL,
     "Where the files of the open save go, or None.",                         NULL},
    {"snapshot_bytes", CheckpointWriter_get_snapshot_bytes, NULL,
     "Memory kept for snapshots, in bytes; 0 while a save is being written.", NULL},
    {NULL,             NULL,                                NULL, NULL,       NULL},
};

#define WITH_KEYWORDS(name)                                                            \
    #name, (PyCFunction)(void (*)(void))CheckpointWriter_##name,                       \
        METH_VARARGS | METH_KEYWORDS, CheckpointWriter_##name##_doc

static PyMethodDef CheckpointWriter_methods[] = {
    {"begin", CheckpointWriter_begin, METH_O, begin_doc},
    {"join", CheckpointWriter_join, METH_VARARGS, join_doc},
    {WITH_KEYWORDS(add_safetensors)},
    {WITH_KEYWORDS(add_archive)},
    {"add_bytes", CheckpointWriter_add_bytes, METH_VARARGS,
     CheckpointWriter_add_bytes_doc},
    {"share", CheckpointWriter_share, METH_VARARGS, share_doc},
    {"flush", CheckpointWriter_flush, METH_NOARGS, flush_doc},
    {"show", CheckpointWriter_show, METH_NOARGS, show_doc},
    {WITH_KEYWORDS(commit)},
    {"wait", CheckpointWriter_wait, METH_NOARGS, wait_doc},
    {"abort", CheckpointWriter_abort, METH_NOARGS, abort_doc},
    {"release", CheckpointWriter_release, METH_NOARGS, release_doc},
    {"remove_after", CheckpointWriter_remove_after, METH_O, remove_after_doc},
    {"reserve", CheckpointWriter_reserve, METH_VARARGS, reserve_doc},
    {NULL, NULL, 0, NULL},
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

/* ---- functions of the module ----------------------------------------------------- */

/* None, or NULL with an exception. */
static PyObject *
publish(ct_plan *plan, PyObject *file)
{
    ct_status status;
    ct_error err;
    PyObject *path = ctpy_path_from(file);
    if (path == NULL) {
        return NULL;
    }
    /* The caller owns all that the plan borrows. */
    Py_BEGIN_ALLOW_THREADS
    status = ct_plan_publish(plan, PyBytes_AS_STRING(path), &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return status == CT_OK ? Py_NewRef(Py_None) : ctpy_raise(&err);
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
    PyObject *path, *dict, *metadata, *answer = NULL;
    content c = {.tensors = {.may_excerpt = true}};
    if (!PyArg_ParseTuple(args, "OOO:write_safetensors", &path, &dict, &metadata)) {
        return NULL;
    }
    if (plan_tensors(&c, PyModule_GetState(module), dict, metadata) == 0) {
        answer = publish(&c.plan, path);
    }
    content_fini(&c);
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
    PyObject *path, *records, *answer = NULL;
    content c = {.tensors = {.may_excerpt = true}};
    if (!PyArg_ParseTuple(args, "OO:write_archive", &path, &records)) {
        return NULL;
    }
    if (plan_records(&c, PyModule_GetState(module), records) == 0) {
        answer = publish(&c.plan, path);
    }
    content_fini(&c);
    return answer;
}

PyMethodDef ctpy_checkpoint_writer_functions[] = {
    {"write_archive",     ctpy_write_archive,     METH_VARARGS, ctpy_write_archive_doc},
    {"write_safetensors", ctpy_write_safetensors, METH_VARARGS,
     ctpy_write_safetensors_doc                                                       },
    {NULL,                NULL,                   0,            NULL                  },
};
