/* FairseqTrainer: calls of Python that several of its parts make. */
#include "binding/fairseq/trainer.h"

#include <string.h>

static PyObject *
call_metric(PyObject *op, const char *function, PyObject *args)
{
    PyObject *metrics = PyObject_GetAttr(op, ctpy_state_borrow(op)->str__metrics);
    PyObject *found =
        metrics == NULL ? NULL : PyObject_GetAttrString(metrics, function);
    PyObject *answer = found == NULL ? NULL : PyObject_CallObject(found, args);
    Py_XDECREF(found);
    Py_XDECREF(metrics);
    return answer;
}

int
fairseq_metric(PyObject *op, const char *function, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    PyObject *args = Py_VaBuildValue(format, list);
    va_end(list);
    PyObject *answer = args == NULL ? NULL : call_metric(op, function, args);
    Py_XDECREF(args);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

PyObject *
fairseq_enter(PyObject *op, const char *name, PyObject **meters)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *args = name == NULL ? PyTuple_New(0) : Py_BuildValue("(s)", name);
    PyObject *context = args == NULL ? NULL : call_metric(op, "aggregate", args);
    Py_XDECREF(args);
    PyObject *yielded = context == NULL
                            ? NULL
                            : PyObject_CallMethodNoArgs(context, names->str___enter__);
    if (yielded == NULL) {
        Py_CLEAR(context);
    }
    else if (meters != NULL) {
        *meters = Py_NewRef(yielded);
    }
    Py_XDECREF(yielded);
    return context;
}

int
fairseq_leave(PyObject *op, PyObject *context)
{
    PyObject *type, *value, *trace;
    PyObject *stack[] = {context, Py_None, Py_None, Py_None};
    PyErr_Fetch(&type, &value, &trace);
    PyObject *answer =
        PyObject_VectorcallMethod(ctpy_state_borrow(op)->str___exit__, stack, 4, NULL);
    Py_XDECREF(answer);
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
    }
    return answer == NULL || type != NULL ? -1 : 0;
}

int
fairseq_tell(PyObject *op, const char *level, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    PyObject *text = PyUnicode_FromFormatV(format, list);
    va_end(list);
    PyObject *word = PyUnicode_FromString(level);
    PyObject *stack[] = {op, word, text};
    PyObject *answer = text == NULL || word == NULL
                           ? NULL
                           : PyObject_VectorcallMethod(ctpy_state_borrow(op)->str__tell,
                                                       stack, 3, NULL);
    Py_XDECREF(word);
    Py_XDECREF(text);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

bool
fairseq_is_oom(void)
{
    PyObject *type, *value, *trace;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        return false;
    }
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = PyObject_Str(value);
    const char *utf8 = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    const bool found = utf8 != NULL && strstr(utf8, "out of memory") != NULL;
    Py_XDECREF(text);
    PyErr_Restore(type, value, trace); /* over whatever str() raised */
    return found;
}

void
fairseq_report(PyObject *op, PyObject *name, PyObject *const *more, size_t n)
{
    PyObject *type, *value, *trace, *stack[CTPY_HOOK_MAX_ARGS];
    assert(n < CTPY_HOOK_MAX_ARGS);
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        (void)PyException_SetTraceback(value, trace);
    }
    stack[0] = value;
    for (size_t i = 0; i < n; i++) {
        stack[1 + i] = more[i];
    }
    PyObject *answer = ctpy_call_hook(op, name, stack, 1 + n);
    if (answer == NULL) {
        PyErr_WriteUnraisable(op);
    }
    Py_XDECREF(answer);
    PyErr_Restore(type, value, trace);
}

int
fairseq_do(PyObject *op, PyObject *name)
{
    PyObject *answer = PyObject_CallMethodNoArgs(op, name);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}
