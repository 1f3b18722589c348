/* ctrainer._C.Trainer: what the files of the type share.
 *
 * Everything that Python sees (model, args, state, control, optimizer, ...) lives in
 * the instance's __dict__, where users read, replace and delete it; C reads it by
 * interned name when it needs it and keeps no copy across a hook. The struct holds
 * only what Python has no name for. */
#ifndef CTPY_TRAINER_H
#define CTPY_TRAINER_H

#include "binding/runtime/ctpy.h"
#include "binding/runtime/signals.h"
#include "core/engine/noise.h"
#include "core/engine/probe.h"
#include "core/engine/step.h"

#include <stdbool.h>

/* binding/trainer/trainer_noise.c */
typedef struct ctpy_noise {
    ct_noise averages;
    ct_noise_sample sample;  /* the micro-batches of the update that is under way */
    double examples;         /* in it */
    ct_probe *probe;         /* NULL until it is needed */
    PyObject *device_copies; /* the same for gradients on a device: a list, or NULL */
} ctpy_noise;

typedef struct Trainer {
    PyObject_HEAD
    PyObject *signatures; /* dict: function -> what keywords it accepts; never NULL */
    PyObject
        *device_loss; /* losses that are not in host memory, summed there; or NULL */
    PyObject *grad_metrics; /* dict: what the next log tells of gradients besides their
                             * norm; NULL: nothing */
    PyObject *writer;       /* CheckpointWriter, or NULL before the first save */
    PyObject *staged; /* str: folder of the last save, while it was made; or NULL */
    PyObject *group;  /* Communicator of the ranks; NULL before it is needed */
    double share;     /* of the current micro-batch in its update; 0 outside one */
    /* The running sums of one logging window and of the run, in double. */
    double window_loss;      /* of the updates since the last log */
    int64_t window_bad;      /* updates since the last log whose loss was Inf or NaN */
    double total_loss;       /* of all windows logged so far */
    int64_t total_bad;       /* updates of all windows logged so far, likewise */
    int64_t window_start;    /* global_step at the last log */
    int64_t nonfinite_steps; /* updates skipped for Inf or NaN, since the last log */
    int64_t nonfinite_total; /* in the whole run */
    ctpy_noise noise;
    double grad_norm;  /* of the last update; NaN before the first */
    int agreed_signal; /* that all ranks know of; 0: none */
    bool saving;       /* a checkpoint is in the making: in `staged` */
    bool saves;        /* this rank writes it: writer.folder is open */
    bool spare;        /* this batch runs again only to keep the other ranks company */
    bool in_update;    /* between the first micro-batch and the end of an update */
} Trainer;

/* What does not change during one train(): made by the loop, on its stack. All borrowed
 * from there. */
typedef struct ctpy_run {
    ct_owner owner;           /* the process that trains, not a child of its own */
    PyObject *model;          /* what training_step is given */
    PyObject *trial;          /* hyper-parameter search, or None */
    PyObject *ignore_keys;    /* for evaluate, or None */
    PyObject *checkpoint;     /* path that the run resumes from, or None */
    PyObject *start_time;     /* float, seconds since the epoch */
    int64_t accumulation;     /* micro-batches an update */
    int64_t steps_in_epoch;   /* micro-batches an epoch */
    int64_t updates_in_epoch; /* updates an epoch */
    int64_t epoch;            /* the current one, from 0 */
    int64_t micro_step;       /* micro-batches of this epoch that are done */
    int64_t targets;          /* of the update, on all of several ranks; -1: unknown */
    bool layer_norms_due;     /* in the update that is under way, to be logged */
    bool noise_due;           /* likewise */
    bool stray_parameters;    /* some parameter of the model is not the optimizer's */
} ctpy_run;

/* op.name(*args, **keywords): the hook of that name, by attribute lookup, so that an
 * override wins. args holds nargs positional values and then one for each name of the
 * tuple kwnames (NULL for none), at most CTPY_HOOK_MAX_ARGS in all. A keyword that the
 * override does not accept is left out, so that those written for older releases run
 * too. Returns a new reference or NULL. */
PyObject *ctpy_call_adapted(PyObject *op, PyObject *name, PyObject *const *args,
                            size_t nargs, PyObject *kwnames);

/* Is op.name the method that this extension defines, not an override? 1, 0 or -1. */
int ctpy_is_default(PyObject *op, PyObject *name);

/* Enters compute_loss_context_manager(); *context is what to leave, or NULL where
 * nobody has overridden it. Returns 0, or -1 with an exception. */
int ctpy_enter_loss_context(PyObject *op, PyObject **context);

/* Attribute of op as a C value. Return 0, or -1 with an exception that names it. */
int ctpy_get_bool(PyObject *op, PyObject *name, int *value);
int ctpy_get_double(PyObject *op, PyObject *name, double *value);
int ctpy_get_int64(PyObject *op, PyObject *name, int64_t *value);
int ctpy_set_int64(PyObject *op, PyObject *name, int64_t value);
int ctpy_set_double(PyObject *op, PyObject *name, double value);

/* The attribute, a new reference; NULL without an exception where there is none. */
PyObject *ctpy_get_optional(PyObject *op, PyObject *name, int *failed);

/* op.name() where op has such a method: modules have modes, and so have some
 * optimizers. Returns 0, or -1 with an exception. */
int ctpy_call_if_there(PyObject *op, PyObject *name);

/* binding/engine/mode.c */

/* optimizer.train() or .eval(), by the mode's name, where it has modes. 0 or -1. */
int ctpy_set_optimizer_mode(PyObject *op, PyObject *mode);

/* *on: is the model in eval mode? Returns 1, 0 where it has no `training` to tell by,
 * or -1 with an exception. */
int ctpy_has_eval_mode(PyObject *model, const ctpy_state *names, bool *on);

/* model.train(), and the optimizer's, unless `model` and op.model are in that mode
 * already: asking costs 80 ns where setting it walks all modules. 0 or -1. */
int ctpy_ensure_train_mode(PyObject *op, PyObject *model);

/* The truth of the attribute; false where there is none. */
int ctpy_get_flag(PyObject *op, PyObject *name, bool *value);

/* op.outer.name as a C value: a field of args, state or control. */
int ctpy_field_bool(PyObject *op, PyObject *outer, PyObject *name, int *value);
int ctpy_field_int64(PyObject *op, PyObject *outer, PyObject *name, int64_t *value);

/* Fires a callback event and stores the control that comes back. extra: a dict or NULL.
 * Returns 0, or -1 with an exception. */
int ctpy_trainer_fire(PyObject *op, PyObject *event, PyObject *extra);

/* binding/trainer/trainer_batch.c: the next micro-batches and what they weigh. */

/* One update's worth of batches: a list, and the hook's count of items (or None). */
int ctpy_next_batches(PyObject *op, ctpy_run *run, PyObject *iterator,
                      PyObject **batches, PyObject **count);
/* Targets of one batch: labels that are not -100; -1 where it has no labels to count,
 * with *failed set on error. */
int64_t ctpy_count_targets(PyObject *op, PyObject *batch, int *failed);
/* The same of a list of batches; -1 for an empty one too. */
int64_t ctpy_count_batches(PyObject *op, PyObject *batches, int *failed);
/* Shares of the batches in the update's loss, in proportion to their targets; equal
 * without labels. On several ranks, where run->targets is known, in proportion to all
 * ranks' and times their number, by which their mean divides. shares has room for one
 * double a batch. */
int
ctpy_batch_shares(PyObject *op, const ctpy_run *run, PyObject *batches, double *shares);

/* binding/trainer/trainer_micro.c: the micro-batches of one update, and the update itself. Returns 1
 * when an update was made or skipped, 0 when a callback ended the epoch before, -1. */
int ctpy_run_update(PyObject *op, ctpy_run *run, PyObject *batches, PyObject *count);

/* binding/trainer/update.c: from the summed gradients to the end of the step. 0 or -1. */
int ctpy_finish_update(PyObject *op, ctpy_run *run);

/* binding/trainer/trainer_metrics.c: what of the update that begins is to be measured for the log. */
int ctpy_metrics_plan(PyObject *op, ctpy_run *run, PyObject *batches);

/* binding/trainer/checkpoint.c: calls the hook _save_checkpoint in a transaction; None or NULL. */
PyObject *ctpy_save_checkpoint(PyObject *op, PyObject *model, PyObject *trial);

/* binding/trainer/log.c */
int ctpy_add_loss(PyObject *op, PyObject *loss, double *value);
/* Brings what was summed on a device into the window. */
int ctpy_drain_device_loss(PyObject *op);
int ctpy_log_save_evaluate(PyObject *op, ctpy_run *run, PyObject *learning_rate);

#define CTPY_METHOD(name, flags)                                                       \
    extern const char Trainer_##name##_doc[];                                          \
    PyObject *Trainer_##name CTPY_SIGNATURE_##flags;
#define CTPY_SIGNATURE_NOARGS (PyObject * op, PyObject * unused)
#define CTPY_SIGNATURE_O (PyObject * op, PyObject * arg)
#define CTPY_SIGNATURE_KEYWORDS (PyObject * op, PyObject * args, PyObject * kwargs)
#include "binding/trainer/trainer_methods.def"
#undef CTPY_METHOD

#endif
