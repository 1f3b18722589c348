/* The structures of a run: the trainer's, which lasts as long as the object, and that
 * of one train(). Training, evaluation and checkpoints share them; whatever Python sees
 * lives in the instance's __dict__. */
#ifndef BINDING_ENGINE_RUN_H
#define BINDING_ENGINE_RUN_H

#include "binding/runtime/ctpy.h"
#include "binding/runtime/signals.h"
#include "core/base/owner.h"

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
    double grad_norm;        /* of the last update; NaN before the first */
    int agreed_signal;       /* that all ranks know of; 0: none */
    bool saving;             /* a checkpoint is in the making: in `staged` */
    bool saves;              /* this rank writes it: writer.folder is open */
    bool dummy_batch; /* a batch that runs again for the other ranks' collectives */
    bool in_update;   /* between the first micro-batch and the end of an update */
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
    bool stray_parameters;    /* some parameter of the model is not the optimizer's */
} ctpy_run;

#endif
