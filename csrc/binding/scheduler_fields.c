/* C fields of schedulers to and from state_dicts. */
#include "binding/scheduler.h"

#include <string.h>

const char *const scheduler_modes[2] = {"min", "max"};
const char *const scheduler_threshold_modes[2] = {"rel", "abs"};

/* The place of word among a field's two, or -1 with a ValueError that names it. */
static int
find_word(const char *name, const char *const *words, const char *word)
{
    for (int w = 0; w < 2; w++) {
        if (strcmp(words[w], word) == 0) {
            return w;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s is '%.60s'; expected '%s' or '%s'", name, word,
                 words[0], words[1]);
    return -1;
}

int
scheduler_rule(const char *mode, const char *threshold_mode, ct_metric_rule *rule)
{
    rule->maximise = find_word("mode", scheduler_modes, mode);
    if (rule->maximise < 0) {
        return -1;
    }
    rule->absolute =
        find_word("threshold_mode", scheduler_threshold_modes, threshold_mode);
    return rule->absolute < 0 ? -1 : 0;
}

static PyObject *
field_value(const scheduler_field *field, const void *base)
{
    const void *at = (const char *)base + field->offset;
    switch (field->form) {
    case FIELD_REAL:
        return PyFloat_FromDouble(*(const double *)at);
    case FIELD_INTEGER:
        return PyLong_FromLongLong(*(const int64_t *)at);
    case FIELD_FLAG:
        return PyBool_FromLong(*(const int *)at);
    case FIELD_WORD:
        break;
    }
    return PyUnicode_FromString(field->words[*(const int *)at]);
}

int
scheduler_fields_save(const scheduler_field *fields, const void *base, PyObject *dict)
{
    for (const scheduler_field *f = fields; f->name != NULL; f++) {
        PyObject *value = field_value(f, base);
        int failed = value == NULL || PyDict_SetItemString(dict, f->name, value) < 0;
        Py_XDECREF(value);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

static int
load_word(const scheduler_field *field, int *at, PyObject *value)
{
    const char *word = PyUnicode_Check(value) ? PyUnicode_AsUTF8(value) : NULL;
    if (word == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "%s is a %.200s; expected a str", field->name,
                         Py_TYPE(value)->tp_name);
        }
        return -1;
    }
    *at = find_word(field->name, field->words, word);
    return *at < 0 ? -1 : 0;
}

static int
load_field(const scheduler_field *field, void *base, PyObject *value)
{
    void *at = (char *)base + field->offset;
    switch (field->form) {
    case FIELD_REAL:
        *(double *)at = PyFloat_AsDouble(value);
        break;
    case FIELD_INTEGER:
        *(int64_t *)at = PyLong_AsLongLong(value);
        break;
    case FIELD_FLAG:
        *(int *)at = PyObject_IsTrue(value);
        break;
    case FIELD_WORD:
        return load_word(field, at, value);
    }
    return PyErr_Occurred() ? -1 : 0;
}

int
scheduler_fields_load(const scheduler_field *fields, void *base, PyObject *state)
{
    int result = 0;
    for (const scheduler_field *f = fields; result == 0 && f->name != NULL; f++) {
        PyObject *value = PyMapping_GetItemString(state, f->name);
        result = value == NULL ? -1 : load_field(f, base, value);
        Py_XDECREF(value);
    }
    return result;
}

PyObject *
scheduler_state_rates(PyObject *state, const char *key, Py_ssize_t n)
{
    PyObject *found = PyMapping_GetItemString(state, key);
    PyObject *rates = found == NULL ? NULL : PySequence_List(found);
    Py_XDECREF(found);
    if (rates != NULL && PyList_GET_SIZE(rates) != n) {
        PyErr_Format(PyExc_ValueError,
                     "state_dict['%s'] has %zd rates; the optimizer has %zd groups",
                     key, PyList_GET_SIZE(rates), n);
        Py_CLEAR(rates);
    }
    for (Py_ssize_t g = 0; rates != NULL && g < n; g++) {
        PyObject *rate = PyNumber_Float(PyList_GET_ITEM(rates, g));
        if (rate == NULL || PyList_SetItem(rates, g, rate) < 0) {
            Py_CLEAR(rates);
        }
    }
    return rates;
}
