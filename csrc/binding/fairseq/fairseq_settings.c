/* FairseqTrainer: the settings of cfg that every update reads, taken over once.
 *
 * A read through OmegaConf takes 8 microseconds, and an update of fairseq's makes 41.
 */
#include "binding/fairseq/trainer.h"

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

const char FairseqTrainer__read_config_doc[] =
    "_read_config($self, /)\n--\n\n"
    "Take over what every update reads of cfg. Called by the constructor and by\n"
    "reinitialize(): a change of cfg after that has no effect on train_step().";

PyObject *
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

const char FairseqTrainer_reinitialize_doc[] =
    "reinitialize($self, /)\n--\n\n"
    "Forget schedule, optimizer and wrappers, as after a change of the parameters,\n"
    "and read cfg again.";

PyObject *
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

const char FairseqTrainer__set_seed_doc[] =
    "_set_seed($self, /)\n--\n\n"
    "Seed torch with cfg.common.seed plus the number of updates, so that a resumed\n"
    "run draws what one that was not stopped would.";

PyObject *
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
