/* ctrainer._C.FairseqTrainer: what the files of the type share.
 *
 * Everything that Python sees lives in the instance's __dict__, under the names that
 * fairseq's Trainer has. The struct holds the settings that every update reads, taken
 * from cfg once by _read_config(). */
#ifndef BINDING_FAIRSEQ_TRAINER_H
#define BINDING_FAIRSEQ_TRAINER_H

#include "binding/runtime/ctpy.h"
#include "binding/engine/adapt.h"

#include "core/comm/comm.h"

#include <stdbool.h>

typedef struct fairseq_settings {
    int64_t seed;             /* common.seed */
    double clip_norm;         /* optimization.clip_norm; 0: no clipping */
    int64_t empty_cache_freq; /* common.empty_cache_freq; 0: never */
    int64_t amp_batch_retries;
    int64_t world_size; /* of the data-parallel group */
    int64_t fp16, bf16, amp, converts_on_cpu, store_ema, bmuf; /* truth values */
    bool cuda;
    bool slowmo;           /* distributed_training.ddp_backend is "slowmo" */
    bool original_dummies; /* a dummy in the last place voids the whole update */
    bool criterion_trains; /* the criterion has parameters */
} fairseq_settings;

typedef struct FairseqTrainer {
    PyObject_HEAD
    fairseq_settings settings;
    PyObject *step_keywords; /* names of task.train_step's arguments, ema_model last */
    int depth;               /* of train_step() within itself, as amp's retries are */
    bool handled;            /* the exception under way has been reported */
    ct_label step; /* what the sums that are exchanged are for; tag 0: for nothing */
} FairseqTrainer;

/* One train_step(), on its stack. */
typedef struct fairseq_update {
    PyObject *samples;     /* a list; borrowed */
    PyObject *start;       /* states of the generators before it, for crash.pt */
    PyObject *ema_model;   /* for task.train_step, or NULL */
    PyObject *outputs;     /* list of the logging outputs of real samples */
    PyObject *dummies;     /* and of dummy ones */
    PyObject *sample_size; /* a number or a tensor */
    PyObject *grad_norm;   /* what clip_grad_norm() returned, or NULL */
    Py_ssize_t place;      /* of the sample under way; -1 outside the samples */
    int64_t ooms;          /* samples dropped for lack of memory; then of all ranks */
    int64_t real;          /* samples that counted, of all ranks */
    bool last_is_dummy, overflow, raise_oom;
    bool synced; /* the sums are those of all ranks */
} fairseq_update;

/* ---- binding/fairseq/calls.c: what is called of Python
 * ------------------------------------
 */

/* metrics.function(*args), with args as Py_BuildValue makes the tuple of `format`. 0
 * or -1. */
int fairseq_metric(PyObject *op, const char *function, const char *format, ...);

/* Opens metrics.aggregate(*name); the context, and what it yields in *meters (may be
 * NULL). fairseq_leave closes it the same way whether an exception is set or not, which
 * stays set: a context that forgets its `finally` is left all the same. */
PyObject *fairseq_enter(PyObject *op, const char *name, PyObject **meters);
int fairseq_leave(PyObject *op, PyObject *context);

/* Logs a line under the trainer's logger: level is "info", "warning" or "error". */
int fairseq_tell(PyObject *op, const char *level, const char *format, ...);

/* Is an exception set, a RuntimeError, whose text says "out of memory"? It stays. */
bool fairseq_is_oom(void);

/* Calls op.name(*arguments) with the exception that is set taken away, the exception
 * the first argument, and then sets it again; what the hook raises is reported with it
 * and dropped. */
void fairseq_report(PyObject *op, PyObject *name, PyObject *const *more, size_t n);

/* op.name() for its effect. 0 or -1. */
int fairseq_do(PyObject *op, PyObject *name);

/* ---- the parts of train_step() ----------------------------------------------------
 */

/* binding/fairseq/update.c: from gradients to parameters. 1: done, u->overflow tells
 * how; 0: *again is what the repetition that amp asked for returned; -1. */
int fairseq_run_update(PyObject *op, fairseq_update *u, PyObject **again);

/* binding/fairseq/update.c: counters, average, metrics. The logging output, or NULL. */
PyObject *fairseq_finish_update(PyObject *op, fairseq_update *u);

/* ---- several ranks: binding/fairseq/ranks.c
 * ----------------------------------------------
 */

/* Replaces sums and logs of the update by those of all ranks. 0 or -1. */
int fairseq_sync_update(PyObject *op, fairseq_update *u);

/* The same of a sample of validation; 0 or -1, and then both are still the caller's. */
int
fairseq_sync_valid(PyObject *op, PyObject **logs, PyObject **sample_size, bool dummy);

/* Enters model.no_sync(), for fairseq_leave; *context is NULL where it has none. */
int fairseq_no_sync(PyObject *op, PyObject **context);

/* 1: other ranks wait for this one's gradients during the backward pass of the last
 * sample; 0: not; -1. */
int fairseq_exchanges_early(PyObject *op);

#endif
