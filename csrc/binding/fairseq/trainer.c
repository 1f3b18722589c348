/* ctrainer._C.FairseqTrainer: the type, its lazy attributes and its method table. */
#include "binding/fairseq/trainer.h"

/* The keywords of task.train_step, in the order of fairseq_task_step. */
static PyObject *
step_keywords(PyObject *op)
{
    ctpy_state *s = ctpy_state_borrow(op);
    return PyTuple_Pack(7, s->str_sample, s->str_model, s->str_criterion,
                        s->str_optimizer, s->str_update_num, s->str_ignore_grad,
                        s->str_ema_model);
}

PyDoc_STRVAR(
    FairseqTrainer_doc,
    "FairseqTrainer(*args, **kwargs)\n--\n\n"
    "fairseq's training step; ctrainer.fairseq.Trainer is its public class.\n"
    "\n"
    "Every method is called by attribute lookup on the instance, so overrides\n"
    "win.");

static PyObject *
FairseqTrainer_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                   PyObject *Py_UNUSED(kw))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        ((FairseqTrainer *)op)->step_keywords = step_keywords(op);
        if (((FairseqTrainer *)op)->step_keywords == NULL) {
            Py_CLEAR(op);
        }
    }
    return op;
}

static int
FairseqTrainer_init(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args),
                    PyObject *Py_UNUSED(kw))
{
    return 0;
}

static int
FairseqTrainer_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((FairseqTrainer *)op)->step_keywords);
    return 0;
}

static int
FairseqTrainer_clear(PyObject *op)
{
    Py_CLEAR(((FairseqTrainer *)op)->step_keywords);
    return 0;
}

static void
FairseqTrainer_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)FairseqTrainer_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- what is made on first use -----------------------------------------------------
 */

/* op.slot, which the hook op.maker() fills while it is None. */
static PyObject *
lazily(PyObject *op, PyObject *slot, PyObject *maker)
{
    PyObject *value = PyObject_GetAttr(op, slot);
    if (value == NULL || value != Py_None) {
        return value;
    }
    Py_DECREF(value);
    if (fairseq_do(op, maker) < 0) {
        return NULL;
    }
    value = PyObject_GetAttr(op, slot);
    if (value == Py_None) {
        PyErr_Format(PyExc_RuntimeError, "%U() of this trainer left %U None", maker,
                     slot);
        Py_CLEAR(value);
    }
    return value;
}

#define LAZY(name, slot, maker)                                                        \
    static PyObject *FairseqTrainer_##name(PyObject *op, void *Py_UNUSED(closure))     \
    {                                                                                  \
        ctpy_state *names = ctpy_state_borrow(op);                                     \
        return lazily(op, names->str_##slot, names->str_##maker);                      \
    }
LAZY(model, _wrapped_model, _wrap_model)
LAZY(criterion, _wrapped_criterion, _wrap_criterion)
LAZY(optimizer, _optimizer, _build_optimizer)
LAZY(lr_scheduler, _lr_scheduler, _build_optimizer)
LAZY(ema, _ema, _build_ema)
#undef LAZY

/* FairseqTrainer: the number of updates, the learning rate and plain accessors. */

static const char FairseqTrainer_get_num_updates_doc[] =
    "get_num_updates($self, /)\n--\n\nReturn the number of updates made.";

static PyObject *
FairseqTrainer_get_num_updates(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyObject_GetAttr(op, ctpy_state_borrow(op)->str__num_updates);
}

static const char FairseqTrainer_set_num_updates_doc[] =
    "set_num_updates($self, num_updates, /)\n--\n\n"
    "Set the number of updates, and with it the learning rate and the quantizer.";

static PyObject *
FairseqTrainer_set_num_updates(PyObject *op, PyObject *number)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *quantizer = NULL, *answer = NULL;
    if (PyObject_SetAttr(op, names->str__num_updates, number) == 0 &&
        fairseq_do(op, names->str_lr_step_update) == 0 &&
        (quantizer = PyObject_GetAttr(op, names->str_quantizer)) != NULL) {
        answer =
            quantizer == Py_None
                ? Py_NewRef(Py_None)
                : PyObject_CallMethodOneArg(quantizer, names->str_step_update, number);
    }
    Py_XDECREF(quantizer);
    if (answer == NULL ||
        fairseq_metric(op, "log_scalar", "(sOii)", "num_updates", number, 0, 200) < 0) {
        Py_CLEAR(answer);
    }
    Py_XDECREF(answer);
    return answer == NULL ? NULL : Py_NewRef(Py_None);
}

/* Logs lr_KEY; *first is the rate called "default", or else the first. */
static int
log_rate(PyObject *op, PyObject *key, PyObject *value, PyObject **first)
{
    const bool chosen =
        PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, "default") == 0;
    if (*first == NULL || chosen) {
        Py_XSETREF(*first, Py_NewRef(value));
    }
    PyObject *name = PyUnicode_FromFormat("lr_%S", key);
    int result = name == NULL
                     ? -1
                     : fairseq_metric(op, "log_scalar", "(OOii)", name, value, 0, 300);
    Py_XDECREF(name);
    return result;
}

static int
log_rates(PyObject *op, PyObject *rates, PyObject **first)
{
    PyObject *items = PyDict_Items(rates);
    int failed = items == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        failed = log_rate(op, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1),
                          first) < 0;
    }
    Py_XDECREF(items);
    return failed ? -1 : 0;
}

static const char FairseqTrainer_lr_step_update_doc[] =
    "lr_step_update($self, /)\n--\n\n"
    "Set the learning rate for the number of updates, log and return it.";

static PyObject *
FairseqTrainer_lr_step_update(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler), *rate = NULL;
    PyObject *updates = PyObject_CallMethodNoArgs(op, names->str_get_num_updates);
    PyObject *answer =
        scheduler == NULL || updates == NULL
            ? NULL
            : PyObject_CallMethodOneArg(scheduler, names->str_step_update, updates);
    Py_XDECREF(updates);
    Py_XDECREF(scheduler);
    if (answer == NULL) {
        return NULL;
    }
    if (!PyDict_Check(answer)) {
        rate = Py_NewRef(answer);
    }
    if (PyDict_Check(answer)
            ? log_rates(op, answer, &rate) < 0
            : fairseq_metric(op, "log_scalar", "(sOii)", "lr", rate, 0, 300) < 0) {
        Py_CLEAR(rate);
    }
    else if (rate == NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "lr_scheduler.step_update() returned a dict of no rates");
    }
    Py_DECREF(answer);
    return rate;
}

/* op.lr_scheduler.name(*args), and then the rate by the number of updates. */
static PyObject *
step_schedule(PyObject *op, PyObject *name, PyObject *const *args, size_t n)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler);
    PyObject *answer =
        scheduler == NULL ? NULL : ctpy_call_hook(scheduler, name, args, n);
    Py_XDECREF(scheduler);
    Py_XDECREF(answer);
    return answer == NULL ? NULL
                          : PyObject_CallMethodNoArgs(op, names->str_lr_step_update);
}

static const char FairseqTrainer_lr_step_doc[] =
    "lr_step($self, epoch, val_loss=None)\n--\n\n"
    "Set the learning rate at the end of an epoch, log and return it.";

static PyObject *
FairseqTrainer_lr_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"epoch", "val_loss", NULL};
    PyObject *stack[] = {NULL, Py_None};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:lr_step", names, &stack[0],
                                     &stack[1])) {
        return NULL;
    }
    return step_schedule(op, ctpy_state_borrow(op)->str_step, stack, 2);
}

static const char FairseqTrainer_lr_step_begin_epoch_doc[] =
    "lr_step_begin_epoch($self, epoch, /)\n--\n\n"
    "Set the learning rate at the beginning of an epoch, log and return it.";

static PyObject *
FairseqTrainer_lr_step_begin_epoch(PyObject *op, PyObject *epoch)
{
    return step_schedule(op, ctpy_state_borrow(op)->str_step_begin_epoch, &epoch, 1);
}

/* op.owner.name() */
static PyObject *
call_of(PyObject *op, PyObject *owner, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(op, owner);
    PyObject *answer = found == NULL ? NULL : PyObject_CallMethodNoArgs(found, name);
    Py_XDECREF(found);
    return answer;
}

static const char FairseqTrainer_get_lr_doc[] =
    "get_lr($self, /)\n--\n\nReturn the learning rate of the next update.";

static PyObject *
FairseqTrainer_get_lr(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    return call_of(op, names->str_optimizer, names->str_get_lr);
}

static const char FairseqTrainer_zero_grad_doc[] =
    "zero_grad($self, /)\n--\n\nDrop the gradients.";

static PyObject *
FairseqTrainer_zero_grad(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    return call_of(op, names->str_optimizer, names->str_zero_grad);
}

static const char FairseqTrainer_get_model_doc[] =
    "get_model($self, /)\n--\n\nReturn the model without its wrapper.";

static PyObject *
FairseqTrainer_get_model(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyObject_GetAttr(op, ctpy_state_borrow(op)->str__model);
}

static const char FairseqTrainer_get_criterion_doc[] =
    "get_criterion($self, /)\n--\n\nReturn the criterion without its wrapper.";

static PyObject *
FairseqTrainer_get_criterion(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyObject_GetAttr(op, ctpy_state_borrow(op)->str__criterion);
}

/* FairseqTrainer: the settings of cfg that every update reads, taken over once.
 *
 * A read through OmegaConf takes 8 microseconds, and an update of fairseq's makes 41.
 */

typedef struct setting {
    const char *section, *name;
    bool is_double;
    size_t offset;
    double fallback; /* fairseq's default, where cfg has no such key */
} setting;

#define INT64(section, name, field, fallback)                                          \
    {section, name, false, offsetof(fairseq_settings, field), fallback}

static const setting SETTINGS[] = {
    INT64("common", "seed", seed, 1),
    INT64("common", "empty_cache_freq", empty_cache_freq, 0),
    INT64("common", "amp_batch_retries", amp_batch_retries, 2),
    INT64("common", "fp16", fp16, 0),
    INT64("common", "bf16", bf16, 0),
    INT64("common", "amp", amp, 0),
    INT64("common", "on_cpu_convert_precision", converts_on_cpu, 0),
    INT64("ema", "store_ema", store_ema, 0),
    INT64("optimization", "use_bmuf", bmuf, 0),
    {"optimization", "clip_norm", true, offsetof(fairseq_settings, clip_norm), 0.0},
};

/* owner.name, or NULL without an exception where there is none. */
static PyObject *
optional(PyObject *owner, const char *name, int *failed)
{
    PyObject *key = PyUnicode_InternFromString(name);
    *failed = key == NULL;
    PyObject *found = key == NULL ? NULL : ctpy_get_optional(owner, key, failed);
    Py_XDECREF(key);
    return found;
}

static PyObject *
setting_of(PyObject *cfg, const char *section, const char *name, int *failed)
{
    PyObject *holder = optional(cfg, section, failed);
    PyObject *found = holder == NULL ? NULL : optional(holder, name, failed);
    Py_XDECREF(holder);
    return found;
}

static int
take(PyObject *value, const setting *s, fairseq_settings *settings)
{
    void *field = (char *)settings + s->offset;
    double number = s->fallback;
    if (value != NULL && !s->is_double) {
        const long long whole = PyLong_AsLongLong(value);
        *(int64_t *)field = whole;
        return whole == -1 && PyErr_Occurred() ? -1 : 0;
    }
    if (value != NULL) {
        number = PyFloat_AsDouble(value);
    }
    if (s->is_double) {
        *(double *)field = number;
    }
    else {
        *(int64_t *)field = (int64_t)number;
    }
    return number == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int
read_setting(PyObject *cfg, const setting *s, fairseq_settings *settings)
{
    int failed;
    PyObject *value = setting_of(cfg, s->section, s->name, &failed);
    if (failed) {
        return -1;
    }
    if (take(value, s, settings) < 0) {
        PyErr_Format(PyExc_TypeError, "cfg.%s.%s is %R; expected a number", s->section,
                     s->name, value);
        Py_XDECREF(value);
        return -1;
    }
    Py_XDECREF(value);
    return 0;
}

static int
read_backend(PyObject *cfg, fairseq_settings *settings)
{
    int failed;
    PyObject *backend = setting_of(cfg, "distributed_training", "ddp_backend", &failed);
    settings->slowmo = backend != NULL && PyUnicode_Check(backend) &&
                       PyUnicode_CompareWithASCIIString(backend, "slowmo") == 0;
    Py_XDECREF(backend);
    return failed ? -1 : 0;
}

static int
check(const fairseq_settings *settings)
{
    if (settings->clip_norm >= 0.0) {
        return 0;
    }
    PyErr_SetString(PyExc_ValueError,
                    "cfg.optimization.clip_norm is below 0 or NaN; expected a norm to "
                    "clip to, or 0 for none");
    return -1;
}

static const char FairseqTrainer__read_config_doc[] =
    "_read_config($self, /)\n--\n\n"
    "Take over what every update reads of cfg. Called by the constructor and by\n"
    "reinitialize(): a change of cfg after that has no effect on train_step().";

static PyObject *
FairseqTrainer__read_config(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    fairseq_settings made = {0};
    int cuda, original, trains, failed;
    PyObject *cfg = PyObject_GetAttr(op, names->str_cfg);
    failed =
        cfg == NULL || ctpy_get_bool(op, names->str_cuda, &cuda) < 0 ||
        ctpy_get_bool(op, names->str_original_dummies, &original) < 0 ||
        ctpy_get_bool(op, names->str__criterion_trains, &trains) < 0 ||
        ctpy_get_int64(op, names->str_data_parallel_world_size, &made.world_size) < 0 ||
        read_backend(cfg, &made) < 0;
    for (size_t i = 0; !failed && i < sizeof(SETTINGS) / sizeof(SETTINGS[0]); i++) {
        failed = read_setting(cfg, &SETTINGS[i], &made) < 0;
    }
    Py_XDECREF(cfg);
    if (failed || check(&made) < 0) {
        return NULL;
    }
    made.cuda = cuda;
    made.original_dummies = original;
    made.criterion_trains = trains;
    ((FairseqTrainer *)op)->settings = made;
    Py_RETURN_NONE;
}

static const char FairseqTrainer_reinitialize_doc[] =
    "reinitialize($self, /)\n--\n\n"
    "Forget schedule, optimizer and wrappers, as after a change of the parameters,\n"
    "and read cfg again.";

static PyObject *
FairseqTrainer_reinitialize(PyObject *op, PyObject *unused)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *slots[] = {names->str__lr_scheduler, names->str__optimizer,
                         names->str__wrapped_criterion, names->str__wrapped_model};
    for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++) {
        if (PyObject_SetAttr(op, slots[i], Py_None) < 0) {
            return NULL;
        }
    }
    return FairseqTrainer__read_config(op, unused);
}

static const char FairseqTrainer__set_seed_doc[] =
    "_set_seed($self, /)\n--\n\n"
    "Seed torch with cfg.common.seed plus the number of updates, so that a resumed\n"
    "run draws what one that was not stopped would.";

static PyObject *
FairseqTrainer__set_seed(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *updates = PyObject_CallMethodNoArgs(op, names->str_get_num_updates);
    PyObject *seed = PyLong_FromLongLong(((FairseqTrainer *)op)->settings.seed);
    PyObject *sum =
        updates == NULL || seed == NULL ? NULL : PyNumber_Add(seed, updates);
    PyObject *answer =
        sum == NULL ? NULL : PyObject_CallMethodOneArg(op, names->str__seed_torch, sum);
    Py_XDECREF(sum);
    Py_XDECREF(seed);
    Py_XDECREF(updates);
    return answer;
}

static PyGetSetDef FairseqTrainer_getset[] = {
    {"criterion",    FairseqTrainer_criterion,    NULL,
     "The criterion, wrapped for the distributed backend where it needs that.",               NULL},
    {"ema",          FairseqTrainer_ema,          NULL, "The average of the weights.",        NULL},
    {"lr_scheduler", FairseqTrainer_lr_scheduler, NULL, "The learning-rate schedule.",
     NULL                                                                                         },
    {"model",        FairseqTrainer_model,        NULL,
     "The model, wrapped for the distributed backend where it needs that.",                   NULL},
    {"optimizer",    FairseqTrainer_optimizer,    NULL, "The optimizer, built on first use.",
     NULL                                                                                         },
    {NULL,           NULL,                        NULL, NULL,                                 NULL},
};

static PyMethodDef FairseqTrainer_methods[] = {
    {"_read_config",        FairseqTrainer__read_config,                         METH_NOARGS,
     FairseqTrainer__read_config_doc                                                                                      },
    {"_set_seed",           FairseqTrainer__set_seed,                            METH_NOARGS, FairseqTrainer__set_seed_doc},
    {"reinitialize",        FairseqTrainer_reinitialize,                         METH_NOARGS,
     FairseqTrainer_reinitialize_doc                                                                                      },
    {"get_criterion",       FairseqTrainer_get_criterion,                        METH_NOARGS,
     FairseqTrainer_get_criterion_doc                                                                                     },
    {"get_lr",              FairseqTrainer_get_lr,                               METH_NOARGS, FairseqTrainer_get_lr_doc   },
    {"get_model",           FairseqTrainer_get_model,                            METH_NOARGS, FairseqTrainer_get_model_doc},
    {"get_num_updates",     FairseqTrainer_get_num_updates,                      METH_NOARGS,
     FairseqTrainer_get_num_updates_doc                                                                                   },
    {"lr_step",             (PyCFunction)(void (*)(void))FairseqTrainer_lr_step,
     METH_VARARGS | METH_KEYWORDS,                                                            FairseqTrainer_lr_step_doc  },
    {"lr_step_begin_epoch", FairseqTrainer_lr_step_begin_epoch,                  METH_O,
     FairseqTrainer_lr_step_begin_epoch_doc                                                                               },
    {"lr_step_update",      FairseqTrainer_lr_step_update,                       METH_NOARGS,
     FairseqTrainer_lr_step_update_doc                                                                                    },
    {"set_num_updates",     FairseqTrainer_set_num_updates,                      METH_O,
     FairseqTrainer_set_num_updates_doc                                                                                   },
    {"zero_grad",           FairseqTrainer_zero_grad,                            METH_NOARGS, FairseqTrainer_zero_grad_doc},
    {NULL,                  NULL,                                                0,           NULL                        },
};

static PyType_Slot FairseqTrainer_slots[] = {
    {Py_tp_doc,      (void *)FairseqTrainer_doc},
    {Py_tp_new,      FairseqTrainer_new        },
    {Py_tp_init,     FairseqTrainer_init       },
    {Py_tp_traverse, FairseqTrainer_traverse   },
    {Py_tp_clear,    FairseqTrainer_clear      },
    {Py_tp_dealloc,  FairseqTrainer_dealloc    },
    {Py_tp_methods,  FairseqTrainer_methods    },
    {Py_tp_getset,   FairseqTrainer_getset     },
    {0,              NULL                      },
};

PyType_Spec FairseqTrainer_spec = {
    .name = "ctrainer._C.FairseqTrainer",
    .basicsize = sizeof(FairseqTrainer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = FairseqTrainer_slots,
};
