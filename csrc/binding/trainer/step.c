/* A micro-batch of a Trainer: inputs to the device, the loss, backward, and the count
 * of the work.
 *
 * Each method is transformers' hook of that name, looked up on the instance by its
 * caller. */
#include "binding/runtime/buffer.h"
#include "binding/trainer/trainer.h"

static const char Trainer__prepare_inputs_doc[] =
    "_prepare_inputs($self, inputs, /)\n--\n\n"
    "Bring one batch to the model's device; a mapping is returned as a new one.\n\n"
    "Whatever the data_collator gives is taken: what is no tensor, nor a mapping, "
    "list\n"
    "or tuple of them, is returned as it is. Raises ValueError for an empty batch, "
    "and\n"
    "names the columns that the model's forward accepts.";

/* Whether the batch is a container without items. */
static int
is_empty(PyObject *batch)
{
    const int kind = ctpy_kind_of(batch);
    if (kind != CTPY_MAPPING && kind != CTPY_SEQUENCE) {
        return kind < 0 ? -1 : 0;
    }
    const Py_ssize_t n = PyObject_Size(batch);
    return n < 0 ? -1 : n == 0;
}

static PyObject *
Trainer__prepare_inputs(PyObject *op, PyObject *inputs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *ready =
        ((Trainer *)op)->inputs_stay && PyDict_CheckExact(inputs)
            ? PyDict_Copy(inputs) /* hooks may pop from it */
            : PyObject_CallMethodOneArg(op, names->str__prepare_input, inputs);
    const int empty = ready == NULL ? -1 : is_empty(ready);
    if (empty != 0) {
        Py_CLEAR(ready);
    }
    return empty > 0 ? ctpy_call_function("ctrainer.trainer.reports", "empty_batch",
                                          "(O)", op)
                     : ready;
}

/* The keywords of model(**inputs): a copy of the mapping, with the count of items for a
 * model that accepts the count. */
static PyObject *
model_keywords(PyObject *op, PyObject *inputs, PyObject *count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int accepts;
    const int kind = ctpy_kind_of(inputs);
    if (kind < 0) {
        return NULL;
    }
    if (kind != CTPY_MAPPING) {
        PyErr_Format(PyExc_TypeError,
                     "compute_loss expects a batch that maps the names of the model's "
                     "arguments to tensors, got %.100s; return dicts from the dataset "
                     "or the data_collator, or override compute_loss",
                     Py_TYPE(inputs)->tp_name);
        return NULL;
    }
    if (ctpy_get_bool(op, names->str_model_accepts_loss_kwargs, &accepts) < 0) {
        return NULL;
    }
    PyObject *keywords = PyDict_New();
    if (keywords == NULL || PyDict_Update(keywords, inputs) < 0 ||
        (accepts && count != Py_None &&
         PyDict_SetItem(keywords, names->str_num_items_in_batch, count) < 0)) {
        Py_CLEAR(keywords);
    }
    return keywords;
}

/* inputs.pop("labels") where the trainer computes the loss, else NULL. *failed: an
 * exception is set. */
static PyObject *
take_labels(PyObject *op, PyObject *inputs, int *failed)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *smoother = PyObject_GetAttr(op, names->str_label_smoother);
    PyObject *function = PyObject_GetAttr(op, names->str_compute_loss_func);
    PyObject *labels = NULL;
    *failed = smoother == NULL || function == NULL;
    if (!*failed && (smoother != Py_None || function != Py_None)) {
        PyObject *there = ctpy_batch_entry(inputs, names->str_labels, failed);
        if (there != NULL) {
            labels =
                PyObject_CallMethodOneArg(inputs, names->str_pop, names->str_labels);
            *failed = labels == NULL;
            Py_DECREF(there);
        }
    }
    Py_XDECREF(smoother);
    Py_XDECREF(function);
    return labels;
}

static PyObject *
loss_of_outputs(PyObject *outputs, PyObject *inputs, ctpy_state *names)
{
    if (!PyDict_Check(outputs)) {
        return PySequence_GetItem(outputs, 0);
    }
    PyObject *loss = PyObject_GetItem(outputs, names->str_loss);
    if (loss == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
        loss = ctpy_call_function("ctrainer.trainer.reports", "no_loss", "(OO)",
                                  outputs, inputs);
    }
    return loss;
}

/* Whether the loss has used the count of items: 1, 0 or -1. A plain number, from an
 * override of get_batch_samples, counts as used. */
static int
was_read(PyObject *count, ctpy_state *names)
{
    int failed;
    PyObject *read = ctpy_get_optional(count, names->str_was_read, &failed);
    const int answer = failed ? -1 : read == NULL ? 1 : PyObject_IsTrue(read);
    Py_XDECREF(read);
    return answer;
}

/* loss * factor; NULL with an exception if either is NULL. Takes both over. */
static PyObject *
multiply_steal(PyObject *loss, PyObject *factor)
{
    PyObject *product =
        loss == NULL || factor == NULL ? NULL : PyNumber_Multiply(loss, factor);
    Py_XDECREF(factor);
    Py_XDECREF(loss);
    return product;
}

/* Multiplies a loss that was divided by the targets of all ranks by world_size, since
 * the mean of the gradients divides by world_size once more. */
static PyObject *
undo_mean_steal(PyObject *op, PyObject *loss, PyObject *count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const int ranks = ctpy_trainer_world_size(op);
    int of_all;
    if (loss == NULL || ranks == 1 || count == Py_None) {
        return loss;
    }
    const int read = ranks < 0 ? -1 : was_read(count, names);
    if (read < 0 ||
        ctpy_field_bool(op, names->str_args, names->str_average_tokens_across_devices,
                        &of_all) < 0) {
        Py_DECREF(loss);
        return NULL;
    }
    return read && of_all ? multiply_steal(loss, PyLong_FromLong(ranks)) : loss;
}

/* The loss from compute_loss_func, label smoothing or the model's outputs. */
static PyObject *
choose_loss(PyObject *op, PyObject *outputs, PyObject *inputs, PyObject *labels,
            PyObject *count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *function = PyObject_GetAttr(op, names->str_compute_loss_func);
    PyObject *loss = NULL, *shifts = NULL;
    PyObject *stack[] = {outputs, labels == NULL ? Py_None : labels, count, count};
    if (function == NULL) {
        return NULL;
    }
    if (function != Py_None) {
        loss = PyObject_Vectorcall(function, stack, 2, names->kw_num_items_in_batch);
    }
    else if (labels == NULL) {
        loss = loss_of_outputs(outputs, inputs, names);
    }
    else if ((shifts = PyObject_GetAttr(op, names->str__loss_shifts_labels)) != NULL) {
        Py_SETREF(function, PyObject_GetAttr(op, names->str_label_smoother));
        stack[2] = shifts;
        loss = function == NULL ? NULL
                                : PyObject_Vectorcall(function, stack, 3,
                                                      names->kw_num_items_in_batch);
    }
    Py_XDECREF(shifts);
    Py_XDECREF(function);
    return loss;
}

static const char Trainer_compute_loss_doc[] =
    "compute_loss($self, model, inputs, return_outputs=False, "
    "num_items_in_batch=None)\n"
    "--\n\n"
    "Return the loss of one micro-batch, a scalar with gradients.\n\n"
    "inputs is a mapping of the model's arguments. The loss is outputs['loss'] or\n"
    "outputs[0], the label smoother's, or compute_loss_func(outputs, labels,\n"
    "num_items_in_batch=...). num_items_in_batch counts the predicted targets of the\n"
    "whole update; a loss that divides its sum by it is right under gradient\n"
    "accumulation as it is, any other is weighted by the trainer. With\n"
    "return_outputs: (loss, outputs). Raises ValueError when the model returns no\n"
    "loss.";

static PyObject *
Trainer_compute_loss(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"model", "inputs", "return_outputs",
                               "num_items_in_batch", NULL};
    PyObject *model, *inputs, *count = Py_None, *result = NULL;
    PyObject *labels = NULL, *given = NULL, *outputs = NULL, *loss = NULL;
    int return_outputs = 0, failed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|pO:compute_loss", keywords,
                                     &model, &inputs, &return_outputs, &count)) {
        return NULL;
    }
    labels = take_labels(op, inputs, &failed);
    if (failed || (given = model_keywords(op, inputs, count)) == NULL ||
        (outputs = PyObject_VectorcallDict(model, NULL, 0, given)) == NULL ||
        (loss = undo_mean_steal(op, choose_loss(op, outputs, inputs, labels, count),
                                count)) == NULL) {
        goto done;
    }
    result = return_outputs ? PyTuple_Pack(2, loss, outputs) : Py_NewRef(loss);
done:
    Py_XDECREF(loss);
    Py_XDECREF(outputs);
    Py_XDECREF(given);
    Py_XDECREF(labels);
    return result;
}

/* Enters compute_loss_context_manager(); *context is the context to leave, or NULL
 * without an override, whose context does nothing. */
static int
enter_loss_context(PyObject *op, PyObject **context)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int plain = ctpy_is_default(op, names->str_compute_loss_context_manager);
    *context = NULL;
    if (plain > 0) {
        plain = ctpy_is_default(op, names->str_autocast_smart_context_manager);
    }
    if (plain != 0) {
        return plain < 0 ? -1 : 0;
    }
    *context = ctpy_enter_context_steal(
        PyObject_CallMethodNoArgs(op, names->str_compute_loss_context_manager),
        names->str___enter__);
    return *context == NULL ? -1 : 0;
}

/* compute_loss inside compute_loss_context_manager(), each looked up on the trainer. */
static PyObject *
loss_in_context(PyObject *op, PyObject *model, PyObject *inputs, PyObject *count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *stack[] = {model, inputs, count};
    PyObject *context;
    if (enter_loss_context(op, &context) < 0) {
        return NULL;
    }
    return ctpy_leave_context_steal(context, names->str___exit__,
                                    ctpy_call_adapted(op, names->str_compute_loss,
                                                      stack, 2,
                                                      names->kw_num_items_in_batch));
}

/* Whether the loss is weighted already: the count was used, or compute_loss_func is a
 * value that is no function, by which TRL's trainers say so. */
static int
is_weighted(PyObject *op, PyObject *count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    bool said;
    if (ctpy_get_flag(op, names->str_loss_is_scaled_for_ga, &said) < 0) {
        return -1;
    }
    PyObject *function = PyObject_GetAttr(op, names->str_compute_loss_func);
    if (function == NULL) {
        return -1;
    }
    said = said || (function != Py_None && !PyCallable_Check(function));
    Py_DECREF(function);
    return said || count == Py_None ? said : was_read(count, names);
}

/* Multiplies the loss by the weight of the micro-batch in its update; outside of an
 * update, where a user calls training_step, by 1 / current_gradient_accumulation_steps.
 */
static PyObject *
weigh_steal(PyObject *op, PyObject *loss)
{
    Trainer *self = (Trainer *)op;
    double share = self->share;
    int64_t n = 1;
    if (!self->in_update) {
        PyObject *name = ctpy_state_borrow(op)->str_current_gradient_accumulation_steps;
        if (ctpy_get_int64(op, name, &n) < 0) {
            Py_DECREF(loss);
            return NULL;
        }
        share = n > 0 ? 1.0 / (double)n : 1.0;
    }
    return share == 1.0 ? loss : multiply_steal(loss, PyFloat_FromDouble(share));
}

/* Backward of loss times the loss scale (fp16). */
static int
run_backward(PyObject *op, PyObject *loss)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *scaler = ctpy_field(((Trainer *)op)->loss_scaler);
    PyObject *scaled = Py_NewRef(loss);
    if (scaler != NULL) {
        scaled = multiply_steal(scaled, PyObject_GetAttr(scaler, names->str_scale));
        Py_DECREF(scaler);
    }
    if (scaled == NULL) {
        return -1;
    }
    const int result =
        ctpy_drop_steal(PyObject_CallMethodNoArgs(scaled, names->str_backward));
    Py_DECREF(scaled);
    return result;
}

/* Weights the loss, runs backward and returns the loss without its graph. The mean loss
 * of a micro-batch without targets is 0 / 0 and adds nothing to the update; on several
 * ranks backward runs on 0, since the other ranks' exchange of gradients waits for the
 * pass. */
static PyObject *
settle_steal(PyObject *op, PyObject *loss, PyObject *count)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *detached = NULL;
    const int ranks = ctpy_trainer_world_size(op);
    const int weighted = ranks < 0 ? -1 : is_weighted(op, count);
    const bool nothing = weighted == 0 && self->in_update && self->share == 0.0;
    bool failed = weighted < 0;
    if (!failed && (!nothing || ranks > 1)) {
        failed = (!weighted && (loss = weigh_steal(op, loss)) == NULL) ||
                 run_backward(op, loss) < 0;
    }
    if (!failed) {
        detached = nothing ? ctpy_ask_adapter(op, names->str_no_loss, &loss, 1)
                           : PyObject_CallMethodNoArgs(loss, names->str_detach);
    }
    Py_XDECREF(loss);
    return detached;
}

static const char Trainer_training_step_doc[] =
    "training_step($self, model, inputs, num_items_in_batch=None)\n--\n\n"
    "Run forward and backward on one micro-batch; return its loss, detached.\n\n"
    "Calls _prepare_inputs, compute_loss_context_manager and compute_loss. The loss\n"
    "returned is weighted by the micro-batch's share of the update, so that the sum\n"
    "over an update is the loss of its whole batch.";

static PyObject *
Trainer_training_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"model", "inputs", "num_items_in_batch", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *model, *inputs, *count = Py_None, *ready, *loss;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O:training_step", keywords,
                                     &model, &inputs, &count) ||
        ctpy_ensure_train_mode(op, model) < 0) {
        return NULL;
    }
    ready = PyObject_CallMethodOneArg(op, names->str__prepare_inputs, inputs);
    if (ready == NULL) {
        return NULL;
    }
    loss = loss_in_context(op, model, ready, count);
    Py_DECREF(ready);
    return loss == NULL ? NULL : settle_steal(op, loss, count);
}

/* ---- the count of work ----------------------------------------------------------- */

static const char Trainer_floating_point_ops_doc[] =
    "floating_point_ops($self, inputs)\n--\n\n"
    "Return the estimated operations of forward and backward on inputs: 6 times the\n"
    "tokens times the parameters without embeddings; 0 for a model that cannot say, "
    "and\n"
    "for a batch without the model's main input by name.";

static PyObject *
Trainer_floating_point_ops(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"inputs", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    const double factor = ((Trainer *)op)->flos_per_token;
    double n = 0.0;
    int failed = 0;
    PyObject *inputs, *main_input = NULL, *found = NULL, *numel = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:floating_point_ops", keywords,
                                     &inputs)) {
        return NULL;
    }
    main_input = factor == 0.0 ? NULL : ctpy_field(((Trainer *)op)->main_input_name);
    if (main_input != NULL) {
        found = ctpy_batch_entry(inputs, main_input, &failed);
        numel =
            found == NULL ? NULL : ctpy_get_optional(found, names->str_numel, &failed);
        if (numel != NULL) {
            failed = ctpy_double_steal(PyObject_CallNoArgs(numel), &n);
            Py_DECREF(numel);
        }
    }
    Py_XDECREF(found);
    Py_XDECREF(main_input);
    return failed ? NULL : PyFloat_FromDouble(factor * n);
}

PyMethodDef Trainer_trainer_step_methods[] = {
    {"training_step",      (PyCFunction)(void (*)(void))Trainer_training_step,
     METH_VARARGS | METH_KEYWORDS,                                                          Trainer_training_step_doc     },
    {"compute_loss",       (PyCFunction)(void (*)(void))Trainer_compute_loss,
     METH_VARARGS | METH_KEYWORDS,                                                          Trainer_compute_loss_doc      },
    {"_prepare_inputs",    Trainer__prepare_inputs,                                 METH_O, Trainer__prepare_inputs_doc   },
    {"floating_point_ops", (PyCFunction)(void (*)(void))Trainer_floating_point_ops,
     METH_VARARGS | METH_KEYWORDS,                                                          Trainer_floating_point_ops_doc},
    {NULL,                 NULL,                                                    0,      NULL                          },
};
