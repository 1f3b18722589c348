/* FairseqTrainer: a sample before the task sees it, and the dummy in its place. */
#include "binding/fairseq/trainer.h"

static PyObject *
refuse_dummy(void)
{
    PyErr_SetString(
        PyExc_Exception,
        "Trying to use an uninitialized 'dummy' batch. This usually indicates that the "
        "total number of batches is smaller than the number of participating GPUs. Try "
        "reducing the batch size or using fewer GPUs.");
    return NULL;
}

/* Is it the word that stands for a dummy batch which is still to be found? */
static bool
is_word(PyObject *sample)
{
    return PyUnicode_Check(sample) &&
           PyUnicode_CompareWithASCIIString(sample, "DUMMY") == 0;
}

/* None or without elements: 1; else 0; -1 with an exception. */
static int
is_empty(PyObject *sample)
{
    const Py_ssize_t length = sample == Py_None ? 0 : PyObject_Size(sample);
    return length < 0 ? -1 : length == 0;
}

/* The dummy batch, prepared. */
static PyObject *
take_dummy(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *dummy = PyObject_GetAttr(op, names->str__dummy_batch), *prepared = NULL;
    int none = dummy == NULL ? -1 : is_empty(dummy);
    if (none == 1) {
        PyErr_Format(PyExc_AssertionError, "Invalid dummy batch: %S", dummy);
    }
    else if (none == 0) {
        PyObject *stack[] = {dummy, Py_True};
        PyObject *pair = ctpy_call_hook(op, names->str__prepare_sample, stack, 2);
        PyObject *first = pair == NULL ? NULL : PySequence_GetItem(pair, 0);
        prepared = first == NULL ? NULL : Py_BuildValue("(OO)", first, Py_True);
        Py_XDECREF(first);
        Py_XDECREF(pair);
    }
    Py_XDECREF(dummy);
    return prepared;
}

/* The hook _convert_sample(), where this run has something for it to do. */
static PyObject *
convert(PyObject *op, PyObject *sample)
{
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    if (!s->fp16 && !s->bf16 && !s->cuda) {
        return Py_NewRef(sample);
    }
    return PyObject_CallMethodOneArg(op, ctpy_state_borrow(op)->str__convert_sample,
                                     sample);
}

static int
remember_dummy(PyObject *op, PyObject *sample)
{
    PyObject *name = ctpy_state_borrow(op)->str__dummy_batch;
    PyObject *dummy = PyObject_GetAttr(op, name);
    int result = dummy == NULL ? -1 : 0;
    if (dummy != NULL && is_word(dummy)) {
        result = PyObject_SetAttr(op, name, sample);
    }
    Py_XDECREF(dummy);
    return result;
}

const char FairseqTrainer__prepare_sample_doc[] =
    "_prepare_sample($self, sample, is_dummy=False)\n--\n\n"
    "Return (sample in the run's precision and on its device, whether it is a dummy).\n"
    "\n"
    "None or an empty sample is replaced by the dummy batch.";

PyObject *
FairseqTrainer__prepare_sample(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sample", "is_dummy", NULL};
    PyObject *sample;
    int is_dummy = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:_prepare_sample", names,
                                     &sample, &is_dummy)) {
        return NULL;
    }
    if (is_word(sample)) {
        return refuse_dummy();
    }
    int empty = is_empty(sample);
    if (empty != 0) {
        return empty < 0 ? NULL : take_dummy(op);
    }
    PyObject *prepared = convert(op, sample);
    if (prepared == NULL || remember_dummy(op, prepared) < 0) {
        Py_XDECREF(prepared);
        return NULL;
    }
    return Py_BuildValue("(NO)", prepared, Py_False);
}

const char FairseqTrainer_reset_dummy_batch_doc[] =
    "reset_dummy_batch($self, batch, /)\n--\n\n"
    "Set the batch that stands in for an empty one; 'DUMMY': the first real one.";

PyObject *
FairseqTrainer_reset_dummy_batch(PyObject *op, PyObject *batch)
{
    return PyObject_SetAttr(op, ctpy_state_borrow(op)->str__dummy_batch, batch) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

int
fairseq_prepare(PyObject *op, PyObject *sample, PyObject **prepared, int *dummy)
{
    PyObject *pair = PyObject_CallMethodOneArg(
        op, ctpy_state_borrow(op)->str__prepare_sample, sample);
    if (pair == NULL) {
        return -1;
    }
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(PyExc_TypeError,
                     "_prepare_sample() returned %R; expected (sample, is_dummy)",
                     pair);
        Py_DECREF(pair);
        return -1;
    }
    *prepared = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
    *dummy = PyObject_IsTrue(PyTuple_GET_ITEM(pair, 1));
    Py_DECREF(pair);
    if (*dummy < 0) {
        Py_CLEAR(*prepared);
        return -1;
    }
    return 0;
}
