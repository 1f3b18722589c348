/* Trainer: a checkpoint as one transaction around the hooks that write it. */
#include "binding/engine/ranks.h"
#include "binding/trainer/trainer.h"

typedef PyObject *save_fn(PyObject *op, PyObject *model, PyObject *trial);

static const char saving_doing[] = "saving a checkpoint";

/* The writer of this trainer, made at its first save; borrowed. NULL with an exception.
 */
static PyObject *
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

/* "checkpoint-N" in folder, N being the state's step. */
static PyObject *
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

/* Calls writer.name() and says whether that went well. */
static int
ctpy_ckpt_tell_writer(PyObject *op, const char *name)
{
    PyObject *writer = Py_XNewRef(ctpy_ckpt_writer_borrow(op));
    PyObject *answer = writer == NULL ? NULL : PyObject_CallMethod(writer, name, NULL);
    Py_XDECREF(answer);
    Py_XDECREF(writer);
    return answer == NULL ? -1 : 0;
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

/* Opens a save on the ranks that write, and tells the others its folder. All ranks call
 * it, and all fail where one does. */
static int
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

/* Commits the open save when all ranks have come here well, or drops it: then with an
 * exception, this rank's own if one is set. */
static int
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

/* What `save` writes becomes one checkpoint, or nothing does. */
static PyObject *
save_whole(PyObject *op, PyObject *model, PyObject *trial, save_fn *save)
{
    if (ctpy_ckpt_begin(op, trial) < 0) {
        return NULL;
    }
    PyObject *answer = save(op, model, trial);
    if (ctpy_ckpt_end(op) < 0) {
        Py_CLEAR(answer);
    }
    return answer;
}

static PyObject *
call_save_checkpoint(PyObject *op, PyObject *model, PyObject *trial)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *const stack[] = {model, trial};
    return ctpy_call_adapted(op, names->str__save_checkpoint, stack, 2, NULL);
}

PyObject *
ctpy_save_checkpoint(PyObject *op, PyObject *model, PyObject *trial)
{
    return ((Trainer *)op)->saving ? call_save_checkpoint(op, model, trial)
                                   : save_whole(op, model, trial, call_save_checkpoint);
}

static const char Trainer__save_atomically_doc[] =
    "_save_atomically($self, model, trial=None)\n--\n\n"
    "Call _save_checkpoint(model, trial) so that all it writes appears as one "
    "folder.\n\n"
    "Returns when the snapshot is taken; _wait_for_save() waits for the disk.";

static PyObject *
Trainer__save_atomically(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"model", "trial", NULL};
    PyObject *model, *trial = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:_save_atomically", keywords,
                                     &model, &trial)) {
        return NULL;
    }
    return ctpy_save_checkpoint(op, model, trial);
}

/* Calls op.name(folder), a hook. */
static int
save_part(PyObject *op, const char *name, PyObject *folder)
{
    PyObject *answer = PyObject_CallMethod(op, name, "O", folder);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
save_weights(PyObject *op, PyObject *folder)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *const stack[] = {folder, Py_True};
    PyObject *answer = ctpy_call_adapted(op, names->str_save_model, stack, 1,
                                         names->kw__internal_call);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static PyObject *
write_parts(PyObject *op, PyObject *folder, PyObject *trial)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int only_model;
    if (save_weights(op, folder) < 0 || save_part(op, "_note_best", trial) < 0 ||
        ctpy_field_bool(op, names->str_args, names->str_save_only_model, &only_model) <
            0) {
        return NULL;
    }
    if (!only_model && (save_part(op, "_save_optimizer_and_scheduler", folder) < 0 ||
                        save_part(op, "_save_scaler", folder) < 0 ||
                        save_part(op, "_save_weight_average", folder) < 0 ||
                        save_part(op, "_save_blocks", folder) < 0 ||
                        save_part(op, "_save_rng_state", folder) < 0)) {
        return NULL;
    }
    if (save_part(op, "_save_trainer_state", folder) < 0) {
        return NULL;
    }
    return ((Trainer *)op)->saves ? PyObject_CallMethod(op, "_rotate_checkpoints", NULL)
                                  : Py_NewRef(Py_None);
}

/* A schedule-free optimizer's average is what is worth keeping: the weights are written
 * in its eval mode, and a training that is under way goes on in train mode, as one that
 * is resumed from the checkpoint does. */
static PyObject *
write_in_eval_mode(PyObject *op, PyObject *folder, PyObject *trial)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *type, *value, *trace;
    int training;
    if (ctpy_get_bool(op, names->str_is_in_train, &training) < 0 ||
        ctpy_set_optimizer_mode(op, names->str_eval) < 0) {
        return NULL;
    }
    PyObject *answer = write_parts(op, folder, trial);
    PyErr_Fetch(&type, &value, &trace);
    if (training && ctpy_set_optimizer_mode(op, names->str_train) < 0) {
        Py_CLEAR(answer);
        if (type == NULL) {
            return NULL;
        }
        PyErr_Clear();
    }
    PyErr_Restore(type, value, trace);
    return answer;
}

/* The files of one checkpoint, in the folder of the open save. */
static PyObject *
write_checkpoint(PyObject *op, PyObject *Py_UNUSED(model), PyObject *trial)
{
    PyObject *run = NULL, *folder = NULL, *answer = NULL;
    if (trial == Py_None &&
        (answer = PyObject_CallMethod(op, "store_flos", NULL)) == NULL) {
        return NULL;
    }
    Py_CLEAR(answer);
    run = PyObject_CallMethod(op, "_get_output_dir", "O", trial);
    if (run != NULL && (folder = ctpy_ckpt_path(op, run)) != NULL) {
        answer = write_in_eval_mode(op, folder, trial);
    }
    int native = answer == NULL
                     ? 1
                     : ctpy_is_default(op, ctpy_state_borrow(op)->str__save_checkpoint);
    if (native < 0 || (native == 0 && ((Trainer *)op)->saves &&
                       ctpy_ckpt_tell_writer(op, "show") < 0)) {
        Py_CLEAR(answer); /* an override finds in checkpoint-N what super() has saved */
    }
    Py_XDECREF(folder);
    Py_XDECREF(run);
    return answer;
}

static const char Trainer__save_checkpoint_doc[] =
    "_save_checkpoint($self, model, trial=None, metrics=None)\n--\n\n"
    "Save the model, optimizer, schedule, generators and state as checkpoint-N.\n\n"
    "Hook; called by the trainer inside a save that makes the folder appear whole. An\n"
    "override may call super() and add files to _get_output_dir(trial)/checkpoint-N.\n"
    "Called by the user, it returns when the folder is in place.";

static PyObject *
Trainer__save_checkpoint(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"model", "trial", "metrics", NULL};
    PyObject *model, *trial = Py_None, *metrics = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO:_save_checkpoint", keywords,
                                     &model, &trial, &metrics)) {
        return NULL;
    }
    if (((Trainer *)op)->saving) {
        return write_checkpoint(op, model, trial);
    }
    PyObject *answer = save_whole(op, model, trial, write_checkpoint);
    if (answer != NULL && ((Trainer *)op)->saves &&
        ctpy_ckpt_tell_writer(op, "wait") < 0) {
        Py_CLEAR(answer);
    }
    return answer;
}

static const char Trainer_save_model_doc[] =
    "save_model($self, output_dir=None, _internal_call=False)\n--\n\n"
    "Save the model, and the processing class, for from_pretrained() to load.\n\n"
    "output_dir is args.output_dir if not given. Hook.";

/* The folder that is given, or args.output_dir. */
static PyObject *
folder_or_default(PyObject *op, PyObject *given)
{
    if (given != Py_None) {
        return Py_NewRef(given);
    }
    PyObject *settings = PyObject_GetAttr(op, ctpy_state_borrow(op)->str_args);
    PyObject *folder =
        settings == NULL ? NULL : PyObject_GetAttrString(settings, "output_dir");
    Py_XDECREF(settings);
    return folder;
}

/* Every rank's part of a save: what of the weights this one has to write; None: the
 * model has them. */
static PyObject *
save_together(PyObject *op, PyObject *folder, bool due)
{
    PyObject *in_checkpoint = ((Trainer *)op)->saving ? Py_True : Py_False;
    PyObject *answer = NULL, *weights = PyObject_CallMethod(op, "_share_weights", "OO",
                                                            folder, in_checkpoint);
    if (weights != NULL && due) {
        answer = weights == Py_None
                     ? PyObject_CallMethod(op, "_save", "O", folder)
                     : PyObject_CallMethod(op, "_save_shared", "OO", folder, weights);
    }
    else if (weights != NULL) {
        answer = Py_NewRef(Py_None);
    }
    Py_XDECREF(weights);
    return answer;
}

static PyObject *
Trainer_save_model(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"output_dir", "_internal_call", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *folder = Py_None, *answer;
    int internal = 0, due;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|Op:save_model", keywords, &folder,
                                     &internal) ||
        ctpy_field_bool(op, names->str_args, names->str_should_save, &due) < 0 ||
        (folder = folder_or_default(op, folder)) == NULL) {
        return NULL;
    }
    answer = save_together(op, folder, due);
    Py_DECREF(folder);
    if (!due) {
        return answer;
    }
    if (answer != NULL && !internal) {
        Py_SETREF(answer, PyObject_CallMethod(op, "_push_saved_model", NULL));
    }
    return answer;
}

static const char Trainer__get_output_dir_doc[] =
    "_get_output_dir($self, trial=None)\n--\n\n"
    "Return the folder that checkpoints are written to.\n\n"
    "While one is being made that is a temporary folder; what is put into its\n"
    "checkpoint-N becomes part of the checkpoint.";

static PyObject *
Trainer__get_output_dir(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"trial", NULL};
    Trainer *self = (Trainer *)op;
    PyObject *trial = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:_get_output_dir", keywords,
                                     &trial)) {
        return NULL;
    }
    if (!self->saving) {
        return PyObject_CallMethod(op, "_run_dir", "O", trial);
    }
    PyObject *path = PyImport_ImportModule("os.path"), *run = NULL;
    if (path != NULL) {
        run = PyObject_CallMethod(path, "dirname", "O", self->staged);
        Py_DECREF(path);
    }
    return run;
}

static const char Trainer__wait_for_save_doc[] =
    "_wait_for_save($self, /, release=False)\n--\n\n"
    "Return when the last checkpoint is on the disk; raise OSError if it failed.\n\n"
    "With release, give the memory of the snapshots back.";

static PyObject *
Trainer__wait_for_save(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"release", NULL};
    Trainer *self = (Trainer *)op;
    int release = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|p:_wait_for_save", keywords,
                                     &release)) {
        return NULL;
    }
    if (self->writer == NULL || self->saving ||
        (release && ctpy_ckpt_tell_writer(op, "release") < 0)) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    return PyObject_CallMethod(self->writer, "wait", NULL);
}

static const char Trainer__checkpoint_writer_doc[] =
    "_checkpoint_writer($self, /)\n--\n\n"
    "Return the CheckpointWriter of this trainer.";

static PyObject *
Trainer__checkpoint_writer(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return Py_XNewRef(ctpy_ckpt_writer_borrow(op));
}

/* Each checkpoint is written to a temporary folder,
 * RUN/.ctrainer-saving-X/checkpoint-N, by whoever overrides what: while a save is open
 * _get_output_dir() answers the folder above it, so that overrides which work out the
 * path themselves land there too.
 *
 * On several ranks args.should_save says which write; the others get the folder's path,
 * and hand over the files that are theirs when the save ends. Every step is taken by
 * all ranks, or by none. */

PyMethodDef Trainer_trainer_checkpoint_methods[] = {
    {"_checkpoint_writer", Trainer__checkpoint_writer,                            METH_NOARGS,
     Trainer__checkpoint_writer_doc                                                                                        },
    {"_get_output_dir",    (PyCFunction)(void (*)(void))Trainer__get_output_dir,
     METH_VARARGS | METH_KEYWORDS,                                                             Trainer__get_output_dir_doc },
    {"_save_atomically",   (PyCFunction)(void (*)(void))Trainer__save_atomically,
     METH_VARARGS | METH_KEYWORDS,                                                             Trainer__save_atomically_doc},
    {"_save_checkpoint",   (PyCFunction)(void (*)(void))Trainer__save_checkpoint,
     METH_VARARGS | METH_KEYWORDS,                                                             Trainer__save_checkpoint_doc},
    {"_wait_for_save",     (PyCFunction)(void (*)(void))Trainer__wait_for_save,
     METH_VARARGS | METH_KEYWORDS,                                                             Trainer__wait_for_save_doc  },
    {"save_model",         (PyCFunction)(void (*)(void))Trainer_save_model,
     METH_VARARGS | METH_KEYWORDS,                                                             Trainer_save_model_doc      },
    {NULL,                 NULL,                                                  0,           NULL                        },
};
