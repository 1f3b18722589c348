/* What OptimEngine.step is told, as the core takes it. */
#include "binding/optim/engine.h"

static int
parse_policy(PyObject *arg, ct_nonfinite *policy)
{
    static const char *const names[] = {
        [CT_NONFINITE_SKIP] = "skip",
        [CT_NONFINITE_STOP] = "stop",
        [CT_NONFINITE_KEEP] = "keep",
    };
    for (size_t i = 0; PyUnicode_Check(arg) && i < sizeof names / sizeof *names; i++) {
        if (PyUnicode_CompareWithASCIIString(arg, names[i]) == 0) {
            *policy = (ct_nonfinite)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "nonfinite is %R; expected 'skip', 'stop' or 'keep'",
                 arg);
    return -1;
}

static int
parse_positive(PyObject *arg, const char *name, double *value)
{
    *value = PyFloat_AsDouble(arg);
    if (*value == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    if (!(*value > 0.0)) {
        PyErr_Format(PyExc_ValueError, "%s is %R; expected a number > 0", name, arg);
        return -1;
    }
    return 0;
}

/* None leaves *value as it is. */
static int
parse_limit(PyObject *arg, const char *name, double *value)
{
    return Py_IsNone(arg) ? 0 : parse_positive(arg, name, value);
}

static int
parse_flag(PyObject *arg, bool *value)
{
    const int truth = PyObject_IsTrue(arg);
    *value = truth > 0;
    return truth < 0 ? -1 : 0;
}

int
optim_parse_options(PyObject *const *args, ct_step_config *config, double *loss_scale)
{
    *config = (ct_step_config){.zero_grads = false};
    return parse_limit(args[0], "max_norm", &config->clip.max_norm) < 0 ||
                   parse_positive(args[1], "loss_scale", loss_scale) < 0 ||
                   parse_policy(args[2], &config->nonfinite) < 0 ||
                   parse_flag(args[3], &config->zero_grads) < 0 ||
                   parse_positive(args[4], "norm_type", &config->clip.norm_type) < 0 ||
                   parse_limit(args[5], "clip_value", &config->clip.value) < 0 ||
                   parse_flag(args[6], &config->clip.by_group) < 0
               ? -1
               : 0;
}
