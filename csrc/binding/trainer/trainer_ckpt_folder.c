/* Trainer: a checkpoint's folder, from when it is opened to when it is in place. */
#include "binding/engine/trainer_account.h"
#include "binding/trainer/checkpoint.h"

/* Each checkpoint is written to a temporary folder,
 * RUN/.ctrainer-saving-X/checkpoint-N, by whoever overrides what: while a save is open
 * _get_output_dir() answers the folder above it, so that overrides which work out the
 * path themselves land there too.
 *
 * On several ranks args.should_save says which write; the others get the folder's path,
 * and hand over the files that are theirs when the save ends. Every step is taken by
 * all ranks, or by none. */

static const char saving_doing[] = "saving a checkpoint";

PyObject *
ctpy_ckpt_writer_borrow(PyObject *op)
{
    Trainer *self = (Trainer *)op;
    if (self->writer == NULL) {
        PyObject *module = PyImport_ImportModule("ctrainer.checkpoint");
        self->writer = module == NULL
                           ? NULL
                           : PyObject_CallMethod(module, "CheckpointWriter", NULL);
        Py_XDECREF(module);
    }
    return self->writer;
}

int
ctpy_ckpt_tell_writer(PyObject *op, const char *name)
{
    PyObject *writer = Py_XNewRef(ctpy_ckpt_writer_borrow(op));
    PyObject *answer = writer == NULL ? NULL : PyObject_CallMethod(writer, name, NULL);
    Py_XDECREF(answer);
    Py_XDECREF(writer);
    return answer == NULL ? -1 : 0;
}

PyObject *
ctpy_ckpt_path(PyObject *op, PyObject *folder)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t step;
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return NULL;
    }
    return PyUnicode_FromFormat("%S/checkpoint-%lld", folder, (long long)step);
}

/* Opens the save; its folder as bytes, NULL with an exception. */
static PyObject *
open_folder(PyObject *op, PyObject *trial)
{
    PyObject *run = PyObject_CallMethod(op, "_run_dir", "O", trial);
    PyObject *path = run == NULL ? NULL : ctpy_ckpt_path(op, run);
    PyObject *folder = NULL, *bytes = NULL;
    if (path != NULL && ctpy_ckpt_writer_borrow(op) != NULL) {
        folder = PyObject_CallMethod(((Trainer *)op)->writer, "begin", "O", path);
    }
    if (folder != NULL) {
        bytes = PyUnicode_EncodeFSDefault(folder);
    }
    Py_XDECREF(folder);
    Py_XDECREF(path);
    Py_XDECREF(run);
    return bytes;
}

/* The first folder that a rank has opened: where those that write nothing are told that
 * the checkpoint is in the making. */
static PyObject *
first_folder(PyObject *folders)
{
    for (Py_ssize_t r = 0; r < PyList_GET_SIZE(folders); r++) {
        PyObject *bytes = PyList_GET_ITEM(folders, r);
        if (PyBytes_GET_SIZE(bytes) > 0) {
            return PyUnicode_DecodeFSDefaultAndSize(PyBytes_AS_STRING(bytes),
                                                    PyBytes_GET_SIZE(bytes));
        }
    }
    PyErr_SetString(PyExc_ValueError,
                    "args.should_save is False on every rank: nobody would write the "
                    "checkpoint");
    return NULL;
}

/* Drops the open save, if this rank has one, under the exception that is set. */
static void
drop(PyObject *op)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (((Trainer *)op)->saves && ctpy_ckpt_tell_writer(op, "abort") < 0) {
        PyErr_Clear();
    }
    PyErr_Restore(type, value, trace);
}

int
ctpy_ckpt_begin(PyObject *op, PyObject *trial)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    int saves;
    if (ctpy_field_bool(op, names->str_args, names->str_should_save, &saves) < 0) {
        return -1;
    }
    self->saves = saves;
    PyObject *own = saves ? open_folder(op, trial) : NULL;
    PyObject *folders = ctpy_account(op, saving_doing, own);
    PyObject *folder = folders == NULL ? NULL : first_folder(folders);
    Py_XDECREF(folders);
    Py_XDECREF(own);
    if (folder == NULL) {
        drop(op);
        return -1;
    }
    Py_XSETREF(self->staged, folder);
    self->saving = true;
    return 0;
}

/* Without args.async_save the loop goes on once the folder is on the disk. */
static int
wait_unless_async(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int async_save;
    if (ctpy_field_bool(op, names->str_args, names->str_async_save, &async_save) < 0) {
        return -1;
    }
    return async_save ? 0 : ctpy_ckpt_tell_writer(op, "wait");
}

/* With the files of the other ranks. */
static int
commit(PyObject *op, PyObject *files)
{
    if (!((Trainer *)op)->saves) {
        return 0;
    }
    PyObject *answer = PyObject_CallMethod(op, "_add_rank_files", "O", files);
    if (answer != NULL) {
        Py_SETREF(answer, PyObject_CallMethod(op, "_check_save", NULL));
    }
    Py_XDECREF(answer);
    return answer == NULL || ctpy_ckpt_tell_writer(op, "commit") < 0 ? -1 : 0;
}

int
ctpy_ckpt_end(PyObject *op)
{
    Trainer *self = (Trainer *)op;
    PyObject *own =
        PyErr_Occurred() ? NULL : PyObject_CallMethod(op, "_take_rank_files", NULL);
    PyObject *files = ctpy_account(op, saving_doing, own);
    int result = files == NULL ? -1 : commit(op, files);
    if (result < 0) {
        drop(op);
    }
    self->saving = false;
    if (result == 0 && self->saves) {
        result = wait_unless_async(op);
    }
    if (files != NULL) { /* else all know */
        PyObject *all = ctpy_account(op, saving_doing, NULL);
        result = all == NULL ? -1 : result;
        Py_XDECREF(all);
    }
    Py_XDECREF(files);
    Py_XDECREF(own);
    return result;
}
