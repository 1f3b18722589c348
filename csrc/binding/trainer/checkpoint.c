/* Trainer: a checkpoint as one transaction around the hooks that write it. */
#include "binding/trainer/checkpoint.h"

typedef PyObject *save_fn(PyObject *op, PyObject *model, PyObject *trial);

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

const char Trainer__save_atomically_doc[] =
    "_save_atomically($self, model, trial=None)\n--\n\n"
    "Call _save_checkpoint(model, trial) so that all it writes appears as one "
    "folder.\n\n"
    "Returns when the snapshot is taken; _wait_for_save() waits for the disk.";

PyObject *
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

const char Trainer__save_checkpoint_doc[] =
    "_save_checkpoint($self, model, trial=None, metrics=None)\n--\n\n"
    "Save the model, optimizer, schedule, generators and state as checkpoint-N.\n\n"
    "Hook; called by the trainer inside a save that makes the folder appear whole. An\n"
    "override may call super() and add files to _get_output_dir(trial)/checkpoint-N.\n"
    "Called by the user, it returns when the folder is in place.";

PyObject *
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

const char Trainer_save_model_doc[] =
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

PyObject *
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

const char Trainer__get_output_dir_doc[] =
    "_get_output_dir($self, trial=None)\n--\n\n"
    "Return the folder that checkpoints are written to.\n\n"
    "While one is being made that is a temporary folder; what is put into its\n"
    "checkpoint-N becomes part of the checkpoint.";

PyObject *
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

const char Trainer__wait_for_save_doc[] =
    "_wait_for_save($self, /, release=False)\n--\n\n"
    "Return when the last checkpoint is on the disk; raise OSError if it failed.\n\n"
    "With release, give the memory of the snapshots back.";

PyObject *
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

const char Trainer__checkpoint_writer_doc[] =
    "_checkpoint_writer($self, /)\n--\n\n"
    "Return the CheckpointWriter of this trainer.";

PyObject *
Trainer__checkpoint_writer(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return Py_XNewRef(ctpy_ckpt_writer_borrow(op));
}
