/* Trainer: prediction_step, one batch without gradients.
 *
 * A batch with labels goes through compute_loss, so that an override is evaluated as in
 * training; another batch through the model alone. All returned tensors are detached.
 */
#include "binding/engine/adapt.h"
#include "binding/engine/adapt.h"
#include "binding/runtime/buffer.h"

/* The state of one call of prediction_step. */
typedef struct eval_step {
    PyObject *op, *model; /* borrowed */
    PyObject *inputs;     /* owned: after _prepare_inputs */
    PyObject *labels;     /* owned: detached, or None */
    PyObject *ignore;     /* owned: list of keys of outputs that are no predictions */
    PyObject *loss;       /* owned: detached, or NULL without a loss */
    int with_loss;        /* the batch has labels, or the model a loss without */
    int loss_only;
} eval_step;

/* None for a batch without such an entry. */
static PyObject *
input(PyObject *inputs, PyObject *key)
{
    int failed;
    PyObject *found = ctpy_batch_entry(inputs, key, &failed);
    return found == NULL && !failed ? Py_NewRef(Py_None) : found;
}

/* The batch's values for label_names, as a tuple; *all says that each is there. */
static PyObject *
take_labels(PyObject *inputs, PyObject *label_names, int *all)
{
    PyObject *keys = PySequence_Tuple(label_names), *values = NULL;
    const Py_ssize_t n = keys == NULL ? 0 : PyTuple_GET_SIZE(keys);
    *all = n > 0;
    if (keys != NULL) {
        values = PyTuple_New(n);
    }
    for (Py_ssize_t i = 0; values != NULL && i < n; i++) {
        PyObject *value = input(inputs, PyTuple_GET_ITEM(keys, i));
        if (value == NULL) {
            Py_CLEAR(values);
            break;
        }
        *all = *all && value != Py_None;
        PyTuple_SET_ITEM(values, i, value);
    }
    Py_XDECREF(keys);
    return values;
}

/* Does the model return a loss without labels, as CLIP does when asked to? */
static int
returns_loss(PyObject *op, PyObject *inputs, const ctpy_state *names)
{
    PyObject *said = input(inputs, names->str_return_loss);
    if (said == Py_None) {
        Py_SETREF(said, PyObject_GetAttr(op, names->str_can_return_loss));
    }
    int result = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    return result;
}

/* A list: the caller's keys, or those of the model's configuration. */
static PyObject *
ignored_keys(PyObject *op, PyObject *given, const ctpy_state *names)
{
    int failed;
    PyObject *model, *config, *keys = NULL;
    if (given != Py_None) {
        return PySequence_List(given);
    }
    if ((model = PyObject_GetAttr(op, names->str_model)) == NULL) {
        return NULL;
    }
    config = ctpy_get_optional(model, names->str_config, &failed);
    Py_DECREF(model);
    if (config == NULL) {
        return failed ? NULL : PyList_New(0);
    }
    keys = ctpy_get_optional(config, names->str_keys_to_ignore_at_inference, &failed);
    Py_DECREF(config);
    if (keys == NULL) {
        return failed ? NULL : Py_BuildValue("[O]", names->str_past_key_values);
    }
    Py_SETREF(keys, PySequence_List(keys));
    return keys;
}

static void
step_fini(eval_step *s)
{
    Py_CLEAR(s->inputs);
    Py_CLEAR(s->labels);
    Py_CLEAR(s->ignore);
    Py_CLEAR(s->loss);
}

/* The labels, taken before compute_loss may pop the entries. A single label stands
 * alone. */
static PyObject *
detached_labels(PyObject *inputs, PyObject *label_names, const ctpy_state *names)
{
    int all;
    PyObject *values = take_labels(inputs, label_names, &all), *labels = NULL;
    if (values != NULL) {
        labels = ctpy_detach_all(values, names);
        Py_DECREF(values);
    }
    if (labels != NULL && PyTuple_GET_SIZE(labels) == 1) {
        Py_SETREF(labels, Py_NewRef(PyTuple_GET_ITEM(labels, 0)));
    }
    return labels;
}

/* A batch that is no mapping can be run by an override of compute_loss alone. */
static int
decide_loss(eval_step *s, PyObject *inputs, PyObject *label_names,
            const ctpy_state *names)
{
    const int kind = ctpy_kind_of(inputs);
    if (kind != CTPY_MAPPING) {
        s->with_loss = 1;
        return kind < 0 ? -1 : 0;
    }
    PyObject *given = take_labels(inputs, label_names, &s->with_loss);
    if (given == NULL) {
        return -1;
    }
    if (PyTuple_GET_SIZE(given) == 0) {
        s->with_loss = returns_loss(s->op, inputs, names);
    }
    Py_DECREF(given);
    return s->with_loss < 0 ? -1 : 0;
}

static int
step_begin(eval_step *s, PyObject *inputs, PyObject *ignore, const ctpy_state *names)
{
    PyObject *label_names = PyObject_GetAttr(s->op, names->str_label_names);
    int result = -1;
    if (label_names == NULL || decide_loss(s, inputs, label_names, names) < 0 ||
        (s->inputs = PyObject_CallMethodOneArg(s->op, names->str__prepare_inputs,
                                               inputs)) == NULL ||
        (s->ignore = ignored_keys(s->op, ignore, names)) == NULL) {
        goto done;
    }
    s->labels = s->with_loss ? detached_labels(s->inputs, label_names, names)
                             : Py_NewRef(Py_None);
    result = s->labels == NULL ? -1 : 0;
done:
    Py_XDECREF(label_names);
    return result;
}

/* The hook's count of the batch's targets, for compute_loss. */
static PyObject *
count_items(const eval_step *s, const ctpy_state *names)
{
    PyObject *count = NULL, *device = NULL, *batches = NULL;
    PyObject *args = PyObject_GetAttr(s->op, names->str_args);
    if (args != NULL && (device = PyObject_GetAttr(args, names->str_device)) != NULL &&
        (batches = Py_BuildValue("[O]", s->inputs)) != NULL) {
        PyObject *stack[] = {s->op, batches, device};
        count = PyObject_VectorcallMethod(names->str__get_num_items_in_batch, stack, 3,
                                          NULL);
    }
    Py_XDECREF(batches);
    Py_XDECREF(device);
    Py_XDECREF(args);
    return count;
}

/* A hook's loss without the graph; of several elements, the mean. */
static PyObject *
bare_loss(PyObject *loss, const ctpy_state *names)
{
    const int tensor = ctpy_is_tensor(loss);
    if (tensor <= 0) {
        return tensor < 0 ? NULL : Py_NewRef(loss);
    }
    PyObject *shape = NULL, *bare = PyObject_CallMethodNoArgs(loss, names->str_detach);
    if (bare != NULL && (shape = PyObject_GetAttr(bare, names->str_shape)) != NULL) {
        const Py_ssize_t ndim = PyObject_Size(shape);
        Py_DECREF(shape);
        if (ndim > 0) {
            Py_SETREF(bare, PyObject_CallMethodNoArgs(bare, names->str_mean));
        }
        if (ndim >= 0) {
            return bare;
        }
    }
    Py_XDECREF(bare);
    return NULL;
}

/* compute_loss(..., return_outputs=True): sets s->loss, returns the outputs. */
static PyObject *
loss_and_outputs(eval_step *s, const ctpy_state *names)
{
    PyObject *outputs = NULL, *pair = NULL, *keywords = NULL;
    PyObject *count = count_items(s, names);
    if (count == NULL ||
        (keywords = PyTuple_Pack(2, names->str_return_outputs,
                                 names->str_num_items_in_batch)) == NULL) {
        goto done;
    }
    PyObject *stack[] = {s->model, s->inputs, Py_True, count};
    pair = ctpy_call_adapted(s->op, names->str_compute_loss, stack, 2, keywords);
    if (pair == NULL) {
        goto done;
    }
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(PyExc_TypeError,
                     "compute_loss(..., return_outputs=True) must return (loss, "
                     "outputs), got a %.100s; evaluation needs the outputs",
                     Py_TYPE(pair)->tp_name);
        goto done;
    }
    s->loss = bare_loss(PyTuple_GET_ITEM(pair, 0), names);
    outputs = s->loss == NULL ? NULL : Py_NewRef(PyTuple_GET_ITEM(pair, 1));
done:
    Py_XDECREF(keywords);
    Py_XDECREF(pair);
    Py_XDECREF(count);
    return outputs;
}

/* args.past_index, of models such as XLNet: op._past is the output of that index. The
 * index counts the loss, and these outputs have no loss. */
static int
keep_past(PyObject *op, PyObject *outputs, const ctpy_state *names)
{
    int failed = 1;
    PyObject *args = PyObject_GetAttr(op, names->str_args), *found = NULL;
    if (args != NULL) {
        found = ctpy_get_optional(args, names->str_past_index, &failed);
        Py_DECREF(args);
    }
    if (found == NULL) {
        return failed ? -1 : 0;
    }
    const Py_ssize_t index = PyLong_AsSsize_t(found);
    Py_DECREF(found);
    if (index < 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *at = PyLong_FromSsize_t(index - 1);
    PyObject *past = at == NULL ? NULL : PyObject_GetItem(outputs, at);
    int result = past == NULL ? -1 : PyObject_SetAttr(op, names->str__past, past);
    Py_XDECREF(past);
    Py_XDECREF(at);
    return result;
}

/* model(**inputs), with the output that an old model wants back kept. */
static PyObject *
outputs_alone(eval_step *s, const ctpy_state *names)
{
    PyObject *none = PyTuple_New(0), *keywords = PyDict_New(), *outputs = NULL;
    if (none != NULL && keywords != NULL && PyDict_Update(keywords, s->inputs) == 0) {
        outputs = PyObject_Call(s->model, none, keywords);
    }
    Py_XDECREF(keywords);
    Py_XDECREF(none);
    if (outputs != NULL && keep_past(s->op, outputs, names) < 0) {
        Py_CLEAR(outputs);
    }
    return outputs;
}

static PyObject *
run_forward(eval_step *s, const ctpy_state *names)
{
    return s->with_loss ? loss_and_outputs(s, names) : outputs_alone(s, names);
}

static PyObject *
run_in_loss_context(eval_step *s, const ctpy_state *names)
{
    PyObject *context;
    if (ctpy_enter_loss_context(s->op, &context) < 0) {
        return NULL;
    }
    return ctpy_leave_context_steal(context, names->str___exit__,
                                    run_forward(s, names));
}

static PyObject *
run_without_gradients(eval_step *s, const ctpy_state *names)
{
    PyObject *context, *adapter = ctpy_adapter(s->op);
    if (adapter == NULL) {
        return NULL;
    }
    context = ctpy_enter_context_steal(
        PyObject_CallMethodNoArgs(adapter, names->str_no_grad), names->str___enter__);
    Py_DECREF(adapter);
    return context == NULL ? NULL
                           : ctpy_leave_context_steal(context, names->str___exit__,
                                                      run_in_loss_context(s, names));
}

/* Values of the outputs that are predictions, as a tuple. */
static PyObject *
predictions_of_mapping(const eval_step *s, PyObject *outputs, const ctpy_state *names)
{
    PyObject *keys = NULL, *list = PyList_New(0), *result = NULL;
    PyObject *values = ctpy_children(outputs, CTPY_MAPPING, &keys);
    if (values == NULL || list == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
        PyObject *key = PyTuple_GET_ITEM(keys, i);
        int skip = PySequence_Contains(s->ignore, key);
        if (skip == 0 && s->with_loss) {
            skip = PyObject_RichCompareBool(key, names->str_loss, Py_EQ);
        }
        if (skip < 0 ||
            (!skip && PyList_Append(list, PyTuple_GET_ITEM(values, i)) < 0)) {
            goto done;
        }
    }
    result = PyList_AsTuple(list);
done:
    Py_XDECREF(values);
    Py_XDECREF(keys);
    Py_XDECREF(list);
    return result;
}

/* The predictions among the outputs; a single prediction stands alone. A bare tensor is
 * a prediction: transformers would take the first row for the loss. */
static PyObject *
predictions(const eval_step *s, PyObject *outputs, const ctpy_state *names)
{
    PyObject *chosen = NULL, *detached = NULL;
    const int kind = ctpy_kind_of(outputs);
    if (kind < 0) {
        return NULL;
    }
    if (kind == CTPY_MAPPING) {
        chosen = predictions_of_mapping(s, outputs, names);
    }
    else if (kind == CTPY_SEQUENCE && s->with_loss) {
        chosen = PySequence_GetSlice(outputs, 1, PY_SSIZE_T_MAX);
    }
    else {
        chosen = Py_NewRef(outputs);
    }
    if (chosen != NULL) {
        detached = ctpy_detach_all(chosen, names);
        Py_DECREF(chosen);
    }
    if (detached != NULL && ctpy_kind_of(detached) == CTPY_SEQUENCE &&
        PySequence_Size(detached) == 1) {
        Py_SETREF(detached, PySequence_GetItem(detached, 0));
    }
    return detached;
}

static const char Trainer_prediction_step_doc[] =
    "prediction_step($self, model, inputs, prediction_loss_only, ignore_keys=None)\n"
    "--\n\n"
    "Run one batch without gradients; return (loss, predictions, labels), detached.\n\n"
    "The loss is None for a batch without labels; with prediction_loss_only so are\n"
    "the other two. Predictions are the model's outputs but for the loss and the\n"
    "ignore_keys (default: model.config.keys_to_ignore_at_inference).";

static PyObject *
Trainer_prediction_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"model", "inputs", "prediction_loss_only", "ignore_keys",
                               NULL};
    const ctpy_state *names = ctpy_state_borrow(op);
    eval_step s = {.op = op};
    PyObject *inputs, *loss_only, *ignore = Py_None, *result = NULL;
    PyObject *outputs = NULL, *logits = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|O:prediction_step", keywords,
                                     &s.model, &inputs, &loss_only, &ignore) ||
        (s.loss_only = PyObject_IsTrue(loss_only)) < 0 ||
        step_begin(&s, inputs, ignore, names) < 0 ||
        (outputs = run_without_gradients(&s, names)) == NULL) {
        goto done;
    }
    PyObject *loss = s.loss == NULL ? Py_None : s.loss;
    if (s.loss_only) {
        result = PyTuple_Pack(3, loss, Py_None, Py_None);
    }
    else if ((logits = predictions(&s, outputs, names)) != NULL) {
        result = PyTuple_Pack(3, loss, logits, s.labels);
    }
done:
    Py_XDECREF(logits);
    Py_XDECREF(outputs);
    step_fini(&s);
    return result;
}

PyMethodDef Trainer_evaluate_step_methods[] = {
    {"prediction_step", (PyCFunction)(void (*)(void))Trainer_prediction_step,
     METH_VARARGS | METH_KEYWORDS,                                               Trainer_prediction_step_doc},
    {NULL,              NULL,                                                 0, NULL                       },
};
