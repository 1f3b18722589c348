/* Tensors and arrays to spans: who owns the memory is asked, never imported.
 *
 * torch's types are found through sys.modules, so a process without torch never pays
 * for it. NumPy arrays are read through the structure that its ABI fixes; no table of
 * functions is needed for that, so none is kept. */
#include "binding/runtime/buffer.h"
#include "binding/optim/grads.h"

#include <stdbool.h>
#include <string.h>

PyObject *
ctpy_place_text(const ctpy_place *place)
{
    if (place->group < 0) {
        return PyUnicode_FromString(place->what);
    }
    return PyUnicode_FromFormat("param_groups[%zd]['params'][%zd]%s", place->group,
                                place->index, place->what);
}

/* module.name if the module is imported and has it; NULL without an exception if not.
 * A half-imported module simply has nothing yet. */
static PyObject *
find_object(const char *module_name, const char *name)
{
    PyObject *found = NULL, *key = PyUnicode_FromString(module_name);
    PyObject *module = key == NULL ? NULL : PyImport_GetModule(key);
    if (module != NULL) {
        found = PyObject_GetAttrString(module, name);
    }
    if (found == NULL) {
        (void)ctpy_forgive();
    }
    Py_XDECREF(module);
    Py_XDECREF(key);
    return found;
}

/* Looks up the types that are imported by now. Returns -1 only when out of memory. */
static int
find_types(ctpy_state *state)
{
    if (state->numpy_ndarray == NULL) {
        state->numpy_ndarray = find_object("numpy", "ndarray");
    }
    if (state->torch_tensor == NULL && !PyErr_Occurred()) {
        PyObject *parameter = find_object("torch.nn", "Parameter");
        PyObject *tensor = parameter == NULL ? NULL : find_object("torch", "Tensor");
        if (tensor != NULL) {
            state->dlpack = ctpy_exchange_table(tensor);
        }
        if (tensor != NULL && !PyErr_Occurred()) {
            Py_XSETREF(state->torch_parameter, Py_NewRef(parameter));
            state->torch_tensor = Py_NewRef(tensor);
        }
        Py_XDECREF(tensor);
        Py_XDECREF(parameter);
    }
    return PyErr_Occurred() ? -1 : 0;
}

int
ctpy_is_torch_tensor(ctpy_state *state, PyObject *op)
{
    if (Py_IS_TYPE(op, (PyTypeObject *)state->torch_tensor)) {
        return 1;
    }
    if (state->torch_tensor == NULL && find_types(state) < 0) {
        return -1;
    }
    return state->torch_tensor == NULL ? 0
                                       : PyObject_IsInstance(op, state->torch_tensor);
}

ctpy_problem
ctpy_span_check(const ct_span *span, int contiguous)
{
    if (span->dtype == CT_DTYPE_COUNT) {
        return CTPY_PROBLEM_DTYPE;
    }
    if (span->n > 0 && span->data == NULL) {
        return CTPY_PROBLEM_STORAGE;
    }
    return contiguous && (uintptr_t)span->data % ct_dtype_size(span->dtype) == 0
               ? CTPY_PROBLEM_NONE
               : CTPY_PROBLEM_STRIDES;
}

/* ---- errors ---------------------------------------------------------------------- */

/* How a problem reads: the exception, which attribute of the object it quotes, and
 * the sentence, with %U for the place and %S for the attribute. */
typedef struct message {
    PyObject *type;
    const char *attribute, *format;
} message;

static message
message_of(ctpy_problem what)
{
    switch (what) {
    case CTPY_PROBLEM_DEVICE:
        return (message){PyExc_ValueError, "device",
                         "%U is on device %S; expected cpu: move it with .cpu(), or "
                         "use torch.optim with fused=True on that device"};
    case CTPY_PROBLEM_DTYPE:
        return (message){PyExc_TypeError, "dtype",
                         "%U has dtype %S; expected float32, float64, bfloat16, "
                         "float16, int64, int32, int16, int8, uint8 or bool, in native "
                         "byte order"};
    case CTPY_PROBLEM_STRIDES:
        return (message){PyExc_ValueError, "shape",
                         "%U of shape %S is not contiguous and aligned: copy it with "
                         ".contiguous(), an array with numpy.ascontiguousarray()"};
    case CTPY_PROBLEM_STORAGE:
        return (message){PyExc_ValueError, "shape",
                         "%U of shape %S has no memory: its storage was released; fill "
                         "it again before it is used"};
    default:
        return (message){PyExc_ValueError, "layout",
                         "torch gives no address for %U, whose layout is %S; expected "
                         "a dense tensor in the CPU's memory: convert a sparse one "
                         "with .to_dense(), allocate a meta one with "
                         ".to_empty(device='cpu')"};
    }
}

static int
raise_type(const ctpy_state *state, PyObject *op, PyObject *text)
{
    int is_tensor =
        state->torch_tensor == NULL ? 0 : PyObject_IsInstance(op, state->torch_tensor);
    if (is_tensor > 0) {
        PyErr_Format(PyExc_TypeError,
                     "%U is a %S, a subclass of torch.Tensor, whose memory cannot be "
                     "read; expected torch.Tensor or torch.nn.Parameter itself: pass "
                     "its local or plain tensor, or use torch.optim",
                     text, Py_TYPE(op));
    }
    else if (is_tensor == 0) {
        PyErr_Format(PyExc_TypeError,
                     "%U is a %.200s; expected a torch.Tensor, a torch.nn.Parameter or "
                     "a numpy.ndarray",
                     text, Py_TYPE(op)->tp_name);
    }
    return -1;
}

static int
raise_problem(ctpy_state *state, PyObject *op, const ctpy_place *place,
              ctpy_problem what)
{
    if (what == CTPY_PROBLEM_ADDRESS) {
        if (!ctpy_forgive()) { /* torch's own text is a page of C++ frames */
            return -1;
        }
    }
    const message how = message_of(what);
    PyObject *text = ctpy_place_text(place), *value = NULL;
    if (text != NULL && what == CTPY_PROBLEM_TYPE) {
        (void)raise_type(state, op, text);
    }
    else if (text != NULL) {
        value = PyObject_GetAttrString(op, how.attribute);
    }
    if (value != NULL) {
        PyErr_Format(how.type, how.format, text, value);
    }
    Py_XDECREF(value);
    Py_XDECREF(text);
    return -1;
}

/* ---- what the other files call --------------------------------------------------- */

static int
view_of(ctpy_state *state, PyObject *op, const ctpy_place *place, bool takes_cuda,
        ctpy_view *view)
{
    PyObject *type = (PyObject *)Py_TYPE(op);
    ctpy_problem found = CTPY_PROBLEM_TYPE;
    if (type != state->torch_parameter && type != state->torch_tensor &&
        type != state->numpy_ndarray && find_types(state) < 0) {
        return -1;
    }
    if (type == state->torch_parameter || type == state->torch_tensor) {
        found = state->dlpack != NULL ? ctpy_view_exchange(state->dlpack, op, view)
                                      : ctpy_view_methods(op, view);
    }
    else if (type == state->numpy_ndarray) {
        found = ctpy_view_array(op, view);
    }
    if (found == CTPY_PROBLEM_NONE && view->on_cuda && !takes_cuda) {
        found = CTPY_PROBLEM_DEVICE;
    }
    return found == CTPY_PROBLEM_NONE ? 0 : raise_problem(state, op, place, found);
}

int
ctpy_view_of(ctpy_state *state, PyObject *op, const ctpy_place *place, ctpy_view *view)
{
    return view_of(state, op, place, false, view);
}

int
ctpy_view_anywhere(ctpy_state *state, PyObject *op, const ctpy_place *place,
                   ctpy_view *view)
{
    return view_of(state, op, place, true, view);
}

static int
same_order(const ctpy_view *a, const ctpy_view *b)
{
    if (a->strides == NULL || b->strides == NULL) {
        return a->strides == b->strides;
    }
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] != 1 && a->strides[i] != b->strides[i]) {
            return 0;
        }
    }
    return 1;
}

int
ctpy_view_matches(const ctpy_view *a, const ctpy_view *b)
{
    if (a->span.n != b->span.n || a->span.dtype != b->span.dtype) {
        return 0;
    }
    if (a->shape == NULL || b->shape == NULL) {
        return 1;
    }
    return a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim) == 0 &&
           same_order(a, b);
}

int
ctpy_span_from(ctpy_state *state, PyObject *op, const char *what, int writable,
               ct_span *span)
{
    return ctpy_span_on(state, op, what, writable, 0, span);
}

int
ctpy_span_on(ctpy_state *state, PyObject *op, const char *what, int writable,
             int on_cuda, ct_span *span)
{
    const ctpy_place place = {what, -1, -1};
    ctpy_view view;
    if (view_of(state, op, &place, on_cuda != 0, &view) < 0) {
        return -1;
    }
    if (on_cuda && !view.on_cuda) {
        PyErr_Format(PyExc_ValueError,
                     "%s is in the host's memory; expected that of the GPU: move it "
                     "with .cuda()",
                     what);
        return -1;
    }
    if (view.strides != NULL) {
        return raise_problem(state, op, &place, CTPY_PROBLEM_STRIDES);
    }
    if (writable && view.readonly) {
        PyErr_Format(PyExc_ValueError,
                     "%s is a read-only array; expected one that can be written: copy "
                     "it with .copy()",
                     what);
        return -1;
    }
    *span = view.span;
    return 0;
}
