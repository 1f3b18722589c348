/* A unit's forward and backward passes: when its parameters are gathered, prefetched
 * and released, and when its gradients are reduced.
 *
 * A unit's parameters stay gathered until autograd has run every node that reads them;
 * a unit's gradients are reduced once, when the last of them has arrived or the
 * backward ends. A pass that raises leaves every unit of the root idle and released. */
#include "binding/fsdp/unit.h"
#include "binding/runtime/buffer.h"

#include "core/base/region.h"
#include "core/base/wait.h"

/* ---- checks ---------------------------------------------------------------------- */

/* 0 if the unit's state is among `states` (bits 1 << state); else -1 with the
 * ValueError of assert_state. */
static int
expect(FSDPUnit *self, unsigned states)
{
    const bool known = self->state >= FSDP_IDLE && self->state <= FSDP_BACKWARD_POST;
    if (known && (states >> self->state & 1) != 0) {
        return 0;
    }
    PyObject *wanted = PyList_New(0);
    for (int s = FSDP_IDLE; wanted != NULL && s <= FSDP_BACKWARD_POST; s++) {
        PyObject *number = (states >> s & 1) != 0 ? PyLong_FromLong(s) : NULL;
        if (number != NULL && PyList_Append(wanted, number) < 0) {
            Py_CLEAR(wanted);
        }
        Py_XDECREF(number);
    }
    PyObject *answer =
        wanted == NULL
            ? NULL
            : ctpy_call_hook((PyObject *)self,
                             fsdp_state_borrow(self)->str_assert_state, &wanted, 1);
    if (answer != NULL) {
        PyErr_Format(PyExc_ValueError, "the unit is in state %d", self->state);
    }
    Py_XDECREF(answer);
    Py_XDECREF(wanted);
    return -1;
}

static int
check_all_unused(FSDPUnit *root)
{
    PyObject *units = Py_XNewRef(root->units);
    const Py_ssize_t n = fsdp_count_units(root);
    int result = units == NULL ? fsdp_check_unused(root) : 0;
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result = fsdp_check_unused((FSDPUnit *)PyList_GET_ITEM(units, i));
    }
    Py_XDECREF(units);
    return result;
}

/* ---- memory before and after a pass ---------------------------------------------- */

static void
discard_cache(FSDPUnit *root)
{
    Py_BEGIN_ALLOW_THREADS
    ct_block_cache_discard(&root->ledger.cache);
    Py_END_ALLOW_THREADS
}

/* Frees cached blocks and malloc's free pages before a peak of memory. */
static void
return_memory(FSDPUnit *root)
{
    if (root->return_memory) {
        discard_cache(root);
        ct_malloc_trim();
        root->resident = ct_memory_resident();
    }
}

/* The backward frees the activations, but in pieces that malloc may keep. Free pieces
 * are harmless while the next unit's gradients fit below the size of the process at the
 * start of the backward: about half of the units' peak are gradients. */
static void
return_growth(FSDPUnit *root)
{
    const size_t room = root->ledger.peak / 2;
    if (root->return_memory && ct_memory_resident() + room > root->resident) {
        ct_malloc_trim();
    }
}

/* ---- prefetching ----------------------------------------------------------------- */

static void
order_begin(fsdp_order *order)
{
    Py_XSETREF(order->before, order->now);
    order->now = NULL;
}

static PyObject *
last_borrow(PyObject *list)
{
    const Py_ssize_t n = list == NULL ? 0 : PyList_GET_SIZE(list);
    return n == 0 ? NULL : PyList_GET_ITEM(list, n - 1);
}

static void
drop_each(FSDPUnit *root, size_t begun, void (*drop)(FSDPUnit *))
{
    PyObject *units = Py_XNewRef(root->units);
    const Py_ssize_t n = begun == 0 ? 0 : fsdp_count_units(root);
    for (Py_ssize_t i = 0; i < n; i++) {
        drop((FSDPUnit *)PyList_GET_ITEM(units, i));
    }
    Py_XDECREF(units);
}

static void
drop_prefetches(FSDPUnit *root)
{
    drop_each(root, root->ledger.begun, fsdp_drop_prefetch);
}

/* At the end of a pass, when shards may change. */
static void
drop_ahead(FSDPUnit *root)
{
    drop_each(root, root->ledger.reads, fsdp_drop_read);
    drop_prefetches(root);
}

/* Notes that the pass has reached this unit. Drops prefetches of other units. */
static int
order_reach(FSDPUnit *self, fsdp_order *order)
{
    if (last_borrow(order->now) == (PyObject *)self) {
        return 0;
    }
    if (!self->core.begun) {
        drop_prefetches(fsdp_root_borrow(self));
    }
    if (order->now == NULL) {
        order->now = PyList_New(0);
    }
    return order->now == NULL ? -1 : PyList_Append(order->now, (PyObject *)self);
}

/* The place in order->before of the unit that comes next; the list's length where the
 * last pass ended here or was at another unit, or there was none. */
static Py_ssize_t
next_place(const fsdp_order *order)
{
    const Py_ssize_t n = order->now == NULL ? 0 : PyList_GET_SIZE(order->now);
    const Py_ssize_t all = order->before == NULL ? 0 : PyList_GET_SIZE(order->before);
    const bool repeats =
        n != 0 && n < all &&
        PyList_GET_ITEM(order->before, n - 1) == PyList_GET_ITEM(order->now, n - 1);
    return repeats ? n : all;
}

static FSDPUnit *
unit_at_borrow(const fsdp_order *order, Py_ssize_t place)
{
    PyObject *units = order->before;
    return units != NULL && place < PyList_GET_SIZE(units)
               ? (FSDPUnit *)PyList_GET_ITEM(units, place)
               : NULL;
}

/* Quantized gathers cannot be begun; a lone gather has nobody to wait for. A unit of
 * another root, or without shards, is gathered when needed, or raises then. */
static bool
can_begin(FSDPUnit *self, FSDPUnit *root)
{
    const ct_fsdp_config *config = &self->core.config;
    return !self->core.gathered && config->gather_bits == 0 && !config->lone_gather &&
           self->core.n_groups != 0 && self->shards != NULL &&
           fsdp_root_borrow(self) == root;
}

/* Begins to read the shards in files of the units that came next in the last pass. 0,
 * or -1. */
static int
fsdp_read_ahead(FSDPUnit *self, const fsdp_order *order)
{
    FSDPUnit *root = fsdp_root_borrow(self), *next;
    int result = 0;
    for (Py_ssize_t i = next_place(order);
         result == 0 && root->ledger.reads < self->read_ahead &&
         (next = unit_at_borrow(order, i)) != NULL;
         i++) {
        Py_INCREF((PyObject *)next);
        result = fsdp_root_borrow(next) == root ? fsdp_begin_read(next) : 0;
        Py_DECREF((PyObject *)next);
    }
    return result;
}

/* Prefetches the unit that came next in the last pass, if both passes agree so far and
 * no other prefetch is under way. Collective. 0, or -1 with no prefetch begun. */
static int
fsdp_prefetch(FSDPUnit *self, const fsdp_order *order)
{
    FSDPUnit *root = fsdp_root_borrow(self);
    FSDPUnit *next = unit_at_borrow(order, next_place(order));
    if (next == NULL || root->ledger.begun != 0 || !can_begin(next, root)) {
        return 0;
    }
    Py_INCREF((PyObject *)next);
    const int result = fsdp_begin_gather(next);
    Py_DECREF((PyObject *)next);
    return result;
}

/* ---- roots ----------------------------------------------------------------------- */

static void
take_root(FSDPUnit *self, FSDPUnit *root)
{
    Py_XSETREF(self->root, self == root ? NULL : Py_NewRef((PyObject *)root));
    ct_fsdp_set_ledger(&self->core, &root->ledger);
}

static const char FSDPUnit_set_units_doc[] =
    "set_units($self, units, /)\n--\n\n"
    "Make this unit the root of the given ones, among which it is itself.";

static PyObject *
FSDPUnit_set_units(PyObject *op, PyObject *units)
{
    PyTypeObject *type = fsdp_state_borrow((FSDPUnit *)op)->FSDPUnit;
    PyObject *list = PySequence_List(units);
    if (list == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *unit = PyList_GET_ITEM(list, i);
        if (!PyObject_TypeCheck(unit, type)) {
            PyErr_Format(PyExc_TypeError, "expected units, got a %.200s",
                         Py_TYPE(unit)->tp_name);
            Py_DECREF(list);
            return NULL;
        }
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        take_root((FSDPUnit *)PyList_GET_ITEM(list, i), (FSDPUnit *)op);
    }
    Py_XSETREF(((FSDPUnit *)op)->units, list);
    Py_RETURN_NONE;
}

static const char FSDPUnit_forget_root_doc[] =
    "forget_root($self, /)\n--\n\n"
    "Stand alone again, until set_units() of a root takes the unit.";

static PyObject *
FSDPUnit_forget_root(PyObject *op, PyObject *Py_UNUSED(unused))
{
    FSDPUnit *self = (FSDPUnit *)op;
    drop_ahead(self);
    fsdp_order_forget(&self->forwards);
    fsdp_order_forget(&self->backwards);
    Py_CLEAR(self->in_use);
    take_root(self, self);
    Py_CLEAR(self->units);
    Py_RETURN_NONE;
}

/* ---- a backward that did not end ------------------------------------------------- */

static void
forget_seen(FSDPUnit *self)
{
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].seen = false;
    }
    self->n_seen = 0;
}

static void
make_idle(FSDPUnit *self)
{
    forget_seen(self);
    self->first_node = FSDP_NO_SEQUENCE;
    self->entered = self->complete = false;
    self->state = FSDP_IDLE;
}

static void
settle_quietly(FSDPUnit *self)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (fsdp_settle(self) < 0) {
        PyErr_Clear(); /* the group's next collective fails, too */
    }
    PyErr_Restore(type, value, trace);
}

/* Makes all units of a root idle, as if no backward had begun. Keeps the exception. */
static void
abandon(FSDPUnit *root)
{
    for (Py_ssize_t i = 0; i < fsdp_count_units(root); i++) {
        FSDPUnit *unit = (FSDPUnit *)PyList_GET_ITEM(root->units, i);
        fsdp_drop_read(unit);
        fsdp_release(unit);
        ct_fsdp_drop_secondary(&unit->core);
        fsdp_drop_grads(unit);
        settle_quietly(unit);
        make_idle(unit);
    }
    Py_CLEAR(root->in_use);
    root->queued = root->several_threads = false;
}

/* For a thread without a task of autograd: a thread that a module has started for
 * recomputation belongs to the backward, too. */
static int
is_under_way(const FSDPUnit *root)
{
    PyObject *end = PyObject_CallNoArgs(root->ending);
    const int alive = end == NULL ? -1 : !Py_IsNone(end);
    Py_XDECREF(end);
    return alive;
}

/* The number of autograd's running task, FSDP_NO_TASK outside of a backward. Later
 * tasks have higher numbers. 0, or -1 with an exception. */
static int
current_task(FSDPUnit *self, long *task)
{
    PyObject *id = ctpy_call_hook(
        (PyObject *)self, fsdp_state_borrow(self)->str__current_graph_task_id, NULL, 0);
    *task = id == NULL ? FSDP_NO_TASK : PyLong_AsLong(id);
    Py_XDECREF(id);
    return PyErr_Occurred() ? -1 : 0;
}

/* A number that no earlier thread had. */
static uint64_t
this_thread(void)
{
    return PyThreadState_GetID(PyThreadState_Get());
}

/* The thread that called a backward comes here after the backward. Where a GPU's has
 * failed, torch's thread has the objects a moment longer. */
static int
outlasts_failure(const FSDPUnit *root)
{
    const ct_deadline end = ct_deadline_after(10.0);
    int alive = is_under_way(root);
    while (alive > 0 && this_thread() == root->forward_thread &&
           ct_deadline_left(end) > 0.0) {
        Py_BEGIN_ALLOW_THREADS
        ct_deadline_nap(end, 1e-3);
        Py_END_ALLOW_THREADS
        alive = PyErr_CheckSignals() < 0 ? -1 : is_under_way(root);
    }
    return alive;
}

/* 1 while a backward of this root is under way, 0, or -1. Abandons a backward that has
 * ended with an exception. */
static int
in_backward_of(FSDPUnit *root)
{
    long task;
    if (!root->queued) {
        return 0;
    }
    if (current_task(root, &task) < 0) {
        return -1;
    }
    const int alive = task < 0 ? outlasts_failure(root) : 1;
    if (alive == 0) {
        abandon(root);
    }
    return alive;
}

static const char FSDPUnit_recover_doc[] =
    "recover($self, /)\n--\n\n"
    "Forget a backward that ended with an exception: release gathered parameters, "
    "and\ndrop gradients that have not been reduced.";

static PyObject *
FSDPUnit_recover(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return in_backward_of(fsdp_root_borrow((FSDPUnit *)op)) < 0 ? NULL
                                                                : Py_NewRef(Py_None);
}

static const char FSDPUnit_abandon_doc[] =
    "abandon($self, /)\n--\n\n"
    "Forget a pass that has failed, and all passes since the last reduction: what\n"
    "recover() does, without gradients of no_sync(), in the order of a first pass. "
    "All\n"
    "ranks call it, each wherever its pass was.";

static PyObject *
FSDPUnit_abandon(PyObject *op, PyObject *Py_UNUSED(unused))
{
    FSDPUnit *root = fsdp_root_borrow((FSDPUnit *)op);
    drop_ahead(root);
    abandon(root);
    fsdp_order_forget(&root->forwards);
    fsdp_order_forget(&root->backwards);
    for (Py_ssize_t i = 0; i < fsdp_count_units(root); i++) {
        ((FSDPUnit *)PyList_GET_ITEM(root->units, i))->core.label.call = 0;
    }
    Py_RETURN_NONE;
}

/* ---- release in the backward -----------------------------------------------------
 *
 * autograd numbers its nodes as they are made and runs ready nodes from the highest
 * number down. A node's gradient comes from nodes made after it, so each node of a
 * thread runs after all nodes with higher numbers. The nodes that read a unit's
 * parameters are made in the unit's forward, whatever gradient they are for: of its own
 * parameters, of inner units, of tensors from outside, or of recomputed activations.
 * When a node older than the forward runs, all of them have run.
 *
 * Each thread numbers its own nodes, and numbers of two threads cannot be compared. A
 * unit is therefore compared with nodes of its forward's thread only; a unit with
 * forwards in several threads stays gathered to the end of the backward. A reentrant
 * checkpoint on a device makes its nodes in a thread of autograd's, and runs them in a
 * graph task of its own, within the checkpoint's node. The units of that task can be
 * released when a task with a lower number runs.
 *
 * The nodes of leaves run as soon as they are ready and say nothing about others. */

/* Notes the thread in which autograd numbers the nodes of the forwards below a root.
 */
static void
note_thread(FSDPUnit *root)
{
    const uint64_t thread = this_thread();
    const uint64_t before = root->forward_thread;
    root->forward_thread = thread;
    root->several_threads |= before != FSDP_NO_THREAD && before != thread;
}

/* The thread of the root's forwards, FSDP_NO_THREAD where there are several. */
static uint64_t
forward_thread_of(const FSDPUnit *root)
{
    return root->several_threads ? FSDP_NO_THREAD : root->forward_thread;
}

/* op.name() as a number. 0 or -1. */
static int
call_number(PyObject *op, PyObject *name, uint64_t *number)
{
    PyObject *answer = ctpy_call_hook(op, name, NULL, 0);
    *number = answer == NULL ? 0 : PyLong_AsUnsignedLongLong(answer);
    Py_XDECREF(answer);
    return PyErr_Occurred() ? -1 : 0;
}

/* The number of the next node that autograd makes on this thread. */
static int
next_node(FSDPUnit *self, uint64_t *number)
{
    return call_number((PyObject *)self, fsdp_state_borrow(self)->str__get_sequence_nr,
                       number);
}

/* The number of the running node, FSDP_NO_SEQUENCE outside of a backward. */
static int
current_node(FSDPUnit *self, uint64_t *number)
{
    ctpy_state *state = fsdp_state_borrow(self);
    PyObject *node =
        ctpy_call_hook((PyObject *)self, state->str__current_autograd_node, NULL, 0);
    int result = node == NULL ? -1 : 0;
    *number = FSDP_NO_SEQUENCE;
    if (node != NULL && !Py_IsNone(node)) {
        result = call_number(node, state->str__sequence_nr, number);
    }
    Py_XDECREF(node);
    return result;
}

/* Missing gradients belong to another forward, and a release would only bring another
 * gather. Without a reduction parameters stay if they stay after the forward. */
static bool
may_release(const FSDPUnit *self)
{
    return (self->complete || self->n_leaves == self->n_frozen) &&
           (self->require_sync || self->reshard_after_forward);
}

/* Whether the running node, `number` of this thread, comes after all nodes that read
 * the unit's parameters. 1, 0, or -1 with an exception. */
static int
has_run(FSDPUnit *self, uint64_t number, uint64_t thread)
{
    long task = FSDP_NO_TASK;
    if (self->thread == thread) {
        return number < self->first_node;
    }
    if (self->task == FSDP_NO_TASK) {
        return 0;
    }
    return current_task(self, &task) < 0 ? -1 : task < self->task;
}

/* 1 where a release leaves room for a prefetch, 0, or -1. Without a reduction ranks may
 * come here in different orders, or not at all: no collective may begin then. */
static int
fsdp_release_done(FSDPUnit *root, uint64_t thread)
{
    uint64_t number = 0;
    bool known = false; /* to ask takes longer than all else here */
    int released = 0;
    Py_ssize_t i = root->in_use == NULL ? 0 : PyList_GET_SIZE(root->in_use);
    if (thread == FSDP_NO_THREAD) {
        return 0;
    }
    while (i-- > 0) {
        FSDPUnit *unit = (FSDPUnit *)PyList_GET_ITEM(root->in_use, i);
        if (!may_release(unit)) {
            continue;
        }
        if (!known && current_node(root, &number) < 0) {
            return -1;
        }
        known = true;
        const int over = has_run(unit, number, thread);
        if (over == 1) {
            released = released || (unit->require_sync && unit->backward_post);
            unit->first_node = FSDP_NO_SEQUENCE;
            fsdp_release(unit);
        }
        if (over < 0 ||
            (over == 1 && PyList_SetSlice(root->in_use, i, i + 1, NULL) < 0)) {
            return -1;
        }
    }
    return released;
}

static const char FSDPUnit_input_done_doc[] =
    "input_done($self, grad, /)\n--\n\n"
    "The hook of inputs: release the parameters that no node will read.";

static PyObject *
FSDPUnit_input_done(PyObject *op, PyObject *Py_UNUSED(grad))
{
    FSDPUnit *self = (FSDPUnit *)op, *root = fsdp_root_borrow(self);
    const int released = fsdp_release_done(root, forward_thread_of(root));
    const bool failed =
        released < 0 || (released > 0 && fsdp_prefetch(self, &root->backwards) < 0);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- the backward pass reaches a unit -------------------------------------------- */

enum {
    IN_BACKWARD = 1 << FSDP_BACKWARD_PRE | 1 << FSDP_BACKWARD_POST
};

/* Asks torch, once, to call finish() at the end of the backward. The memory that the
 * forward keeps is at its largest now. */
static int
queue_finish(FSDPUnit *root)
{
    if (root->queued) {
        return 0;
    }
    PyObject *done =
        ctpy_call_hook((PyObject *)root, fsdp_state_borrow(root)->str__queue, NULL, 0);
    root->queued = done != NULL;
    Py_XSETREF(root->ending, done);
    if (root->queued) {
        order_begin(&root->backwards);
        return_memory(root);
    }
    return done == NULL ? -1 : 0;
}

/* Notes the unit as gathered, until fsdp_release_done() releases it. */
static int
use(FSDPUnit *self, FSDPUnit *root, uint64_t first_node, uint64_t thread)
{
    const bool known = self->first_node != FSDP_NO_SEQUENCE;
    const bool several = known && thread != self->thread;
    long task = FSDP_NO_TASK;
    if ((root->in_use == NULL && (root->in_use = PyList_New(0)) == NULL) ||
        (thread != root->forward_thread && current_task(self, &task) < 0) ||
        (!known && PyList_Append(root->in_use, (PyObject *)self) < 0)) {
        return -1;
    }
    self->first_node = first_node < self->first_node ? first_node : self->first_node;
    self->thread = several ? FSDP_NO_THREAD : thread;
    self->task = several ? FSDP_NO_TASK : task;
    return 0;
}

static int
enter(FSDPUnit *self, uint64_t first_node, uint64_t thread, PyObject *tensors)
{
    FSDPUnit *root = fsdp_root_borrow(self);
    fsdp_order *order = &root->backwards;
    const bool is_first = !self->entered;
    if (queue_finish(root) < 0 || (is_first && fsdp_note_frozen(self, tensors) < 0) ||
        (is_first && order_reach(self, order) < 0)) {
        return -1;
    }
    const int released = fsdp_release_done(root, thread);
    const bool prefetches = released > 0 || (is_first && self->backward_pre);
    if (released < 0 || fsdp_gather(self) < 0 ||
        use(self, root, first_node, thread) < 0 ||
        (is_first && fsdp_read_ahead(self, order) < 0) ||
        (prefetches && fsdp_prefetch(self, order) < 0) ||
        (is_first && expect(self, 1 << FSDP_IDLE | 1 << FSDP_BACKWARD_PRE) < 0)) {
        return -1;
    }
    self->entered = true;
    if (self->state == FSDP_IDLE) {
        self->state = FSDP_BACKWARD_PRE;
    }
    return expect(self, IN_BACKWARD);
}

/* given: the unit, its forward's first node, thread and tensors. */
static PyObject *
enter_backward(PyObject *given, PyObject *Py_UNUSED(grad))
{
    FSDPUnit *self = (FSDPUnit *)PyTuple_GET_ITEM(given, 0);
    const uint64_t first_node = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, 1));
    const uint64_t thread = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, 2));
    PyObject *tensors = PyTuple_GET_ITEM(given, 3);
    return enter(self, first_node, thread, tensors) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef enter_backward_def = {"enter_backward", enter_backward, METH_O,
                                         NULL};

/* The hook of the outputs of a forward that began at node first_node: gathers the
 * parameters for the backward. It has the tensors, which refer to the unit: their hooks
 * would keep a unit that had them. */
static PyObject *
fsdp_output_hook(FSDPUnit *self, uint64_t first_node, PyObject *tensors)
{
    PyObject *given = Py_BuildValue("OKKO", self, (unsigned long long)first_node,
                                    (unsigned long long)this_thread(), tensors);
    PyObject *hook = given == NULL ? NULL : PyCFunction_New(&enter_backward_def, given);
    Py_XDECREF(given);
    return hook;
}

/* ---- the tensors of inputs and outputs ------------------------------------------- */

typedef struct visit {
    ctpy_state *state;
    PyObject *hook;
    PyObject *met; /* the set of the ids of hooked tensors */
} visit;

/* A tensor that is returned twice gets one hook. */
static int
is_new(const visit *v, PyObject *tensor)
{
    const Py_ssize_t before = PySet_GET_SIZE(v->met);
    PyObject *id = PyLong_FromVoidPtr(tensor);
    const int added = id == NULL ? -1 : PySet_Add(v->met, id);
    Py_XDECREF(id);
    return added < 0 ? -1 : PySet_GET_SIZE(v->met) > before;
}

static int
visit_tensor(visit *v, PyObject *tensor)
{
    const int wanted = fsdp_requires_grad(v->state, tensor);
    const int fresh = wanted == 1 ? is_new(v, tensor) : wanted;
    if (fresh < 1) {
        return fresh;
    }
    PyObject *handle = ctpy_call_hook(tensor, v->state->str_register_hook, &v->hook, 1);
    Py_XDECREF(handle);
    return handle == NULL ? -1 : 0;
}

static int visit_object(visit *v, PyObject *op);

static int
visit_items(visit *v, PyObject *items_steal)
{
    int result = items_steal == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; result == 0 && i < PySequence_Fast_GET_SIZE(items_steal);
         i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items_steal, i));
        result = visit_object(v, item);
        Py_DECREF(item);
    }
    Py_XDECREF(items_steal);
    return result;
}

/* 1 for a mapping, such as a UserDict or transformers' batches, else 0, or -1. */
static int
is_mapping(const visit *v, PyObject *op)
{
    PyObject *keys, *values;
    int found = PyMapping_Check(op) && !PyType_Check(op)
                    ? ctpy_lookup(op, v->state->str_keys, &keys)
                    : 0;
    if (found < 1) {
        return found;
    }
    found = PyCallable_Check(keys) ? ctpy_lookup(op, v->state->str_values, &values) : 0;
    if (found == 1) {
        found = PyCallable_Check(values);
        Py_DECREF(values);
    }
    Py_DECREF(keys);
    return found;
}

/* The fields of a dataclass; another object is no container. */
static int
visit_fields(visit *v, PyObject *op)
{
    PyObject *fields, *values;
    int found = ctpy_lookup(op, v->state->str___dataclass_fields__, &fields);
    if (found < 1 || PyType_Check(op)) {
        if (found == 1) {
            Py_DECREF(fields);
        }
        return found < 0 ? -1 : 0;
    }
    Py_DECREF(fields);
    found = ctpy_lookup(op, v->state->str___dict__, &values);
    if (found < 1) {
        return found;
    }
    PyObject *items = PyMapping_Values(values);
    Py_DECREF(values);
    return visit_items(v, items);
}

static int
visit_object(visit *v, PyObject *op)
{
    if (op == Py_None || PyUnicode_CheckExact(op) || PyLong_Check(op) ||
        PyFloat_CheckExact(op)) {
        return 0;
    }
    const int is_tensor = ctpy_is_torch_tensor(v->state, op);
    if (is_tensor != 0) {
        return is_tensor < 0 ? -1 : visit_tensor(v, op);
    }
    if (Py_EnterRecursiveCall(" while looking for tensors") != 0) {
        return -1;
    }
    int result;
    if (PyTuple_Check(op) || PyList_Check(op) || PyAnySet_Check(op)) {
        result = visit_items(v, PySequence_Tuple(op));
    }
    else {
        const int maps = PyDict_Check(op) ? 1 : is_mapping(v, op);
        result = maps < 0    ? -1
                 : maps == 1 ? visit_items(v, PyMapping_Values(op))
                             : visit_fields(v, op);
    }
    Py_LeaveRecursiveCall();
    return result;
}

/* Calls tensor.register_hook(hook) once for every tensor that requires a gradient. */
static int
hook_tensors(FSDPUnit *self, PyObject *tensors, PyObject *hook_steal)
{
    visit v = {fsdp_state_borrow(self), hook_steal, PySet_New(NULL)};
    const int result =
        hook_steal == NULL || v.met == NULL ? -1 : visit_object(&v, tensors);
    Py_XDECREF(v.met);
    Py_XDECREF(hook_steal);
    return result;
}

static int
hook_inputs(FSDPUnit *self, PyObject *inputs)
{
    PyObject *name = fsdp_state_borrow(self)->str_input_done;
    return inputs == NULL
               ? 0
               : hook_tensors(self, inputs, PyObject_GetAttr((PyObject *)self, name));
}

/* ---- the forward ----------------------------------------------------------------- */

static bool
has_grads(const FSDPUnit *self)
{
    bool found = false;
    for (size_t i = 0; !found && i < self->n_leaves; i++) {
        found = self->leaves[i].filled;
    }
    return found;
}

/* Releases the parameters that an evaluation or an update has left, gathered or in
 * secondary shards: shards may have changed since. Gradients that wait for a reduction
 * prove that they have not. */
static void
release_old(FSDPUnit *root)
{
    for (Py_ssize_t i = 0; i < fsdp_count_units(root); i++) {
        FSDPUnit *unit = (FSDPUnit *)PyList_GET_ITEM(root->units, i);
        if (!has_grads(unit)) {
            fsdp_release(unit);
            ct_fsdp_drop_secondary(&unit->core);
        }
    }
}

static int
grad_enabled(FSDPUnit *self)
{
    PyObject *answer = ctpy_call_hook(
        (PyObject *)self, fsdp_state_borrow(self)->str_is_grad_enabled, NULL, 0);
    const int enabled = answer == NULL ? -1 : answer == Py_True;
    Py_XDECREF(answer);
    return enabled;
}

/* Gathers the parameters and prefetches the next unit's. Outside of a root's forward or
 * backward nothing would end a prefetch. */
static int
take_turn(FSDPUnit *self, FSDPUnit *root, int in_backward)
{
    fsdp_order *order = in_backward ? &root->backwards : &root->forwards;
    if (!in_backward && root->state != FSDP_FORWARD) {
        return fsdp_gather(self);
    }
    const int released =
        in_backward ? fsdp_release_done(root, forward_thread_of(root)) : 0;
    const bool prefetches =
        released > 0 || (in_backward ? self->backward_pre : self->forward_prefetch);
    if (released < 0 || order_reach(self, order) < 0 || fsdp_gather(self) < 0 ||
        fsdp_read_ahead(self, order) < 0) {
        return -1;
    }
    return prefetches ? fsdp_prefetch(self, order) : 0;
}

/* The outputs and the loss follow the last inner unit, on top of all that the units
 * keep for the backward. The last unit is known from the forward before. */
static void
note_end(const FSDPUnit *self, FSDPUnit *root)
{
    if (self != root) {
        root->last_inner = self;
        if (self == root->last_before) {
            return_memory(root);
        }
    }
}

/* For the backward of this forward. */
static int
keep_secondary(FSDPUnit *self)
{
    const ct_comm *comm = ctpy_comm_borrow(fsdp_state_borrow(self), self->communicator);
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    FSDP_BEGIN_WORK(self)
    status = ct_fsdp_keep_secondary(&self->core, comm, &err);
    FSDP_END_WORK(self)
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Runs the module with gathered parameters. In a backward, for an activation
 * checkpoint, they stay gathered: the gradients of this module come next. */
static PyObject *
run(FSDPUnit *self, FSDPUnit *root, PyObject *fn, PyObject *args, PyObject *kwargs,
    PyObject *tensors, PyObject *attributes, int in_backward)
{
    PyObject *out = NULL;
    uint64_t first_node = FSDP_NO_SEQUENCE;
    const int grads = grad_enabled(self);
    if (grads > 0 && !in_backward) {
        note_thread(root);
    }
    if (grads >= 0 && take_turn(self, root, in_backward) == 0 &&
        (!grads || next_node(self, &first_node) == 0) &&
        (!grads || in_backward ||
         (hook_inputs(self, args) == 0 && hook_inputs(self, kwargs) == 0))) {
        out = fsdp_call(self, fn, args, kwargs, attributes, grads != 0);
    }
    if (out != NULL && grads && !in_backward && self->reshard_after_forward &&
        keep_secondary(self) < 0) {
        Py_CLEAR(out);
    }
    if (!in_backward && (out == NULL || self->reshard_after_forward)) {
        fsdp_release(self);
    }
    if (out != NULL && grads && !in_backward) {
        note_end(self, root);
    }
    if (out != NULL && grads == 0 && !in_backward && self == root &&
        check_all_unused(root) < 0) {
        Py_CLEAR(out); /* no backward will find it */
    }
    if (out != NULL && grads &&
        hook_tensors(self, out, fsdp_output_hook(self, first_node, tensors)) < 0) {
        Py_CLEAR(out);
    }
    return out;
}

/* Offloaded shards may be written to from here on. 0, or -1 with an exception. */
static int
await_units(FSDPUnit *self)
{
    PyObject *units = Py_XNewRef(self->units);
    int result = 0;
    /* Backwards: where copies share a stream, the first wait is for all. */
    for (Py_ssize_t i = fsdp_count_units(self); i-- > 0;) {
        FSDPUnit *unit = (FSDPUnit *)PyList_GET_ITEM(units, i);
        if (result < 0) {
            fsdp_await_quietly(unit);
        }
        else {
            result = fsdp_await_copies(unit);
        }
    }
    Py_XDECREF(units);
    if (result < 0) {
        fsdp_await_quietly(self);
    }
    return result < 0 ? -1 : fsdp_await_copies(self);
}

/* The result of a forward that waits for the copies, too. */
static PyObject *
end_forward(FSDPUnit *self, PyObject *out_steal)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (await_units(self) < 0 && type == NULL) {
        Py_CLEAR(out_steal);
        return NULL;
    }
    PyErr_Restore(type, value, trace);
    return out_steal;
}

static const char FSDPUnit_forward_doc[] =
    "forward($self, fn, args, kwargs, tensors, attributes, /)\n--\n\n"
    "Return fn(*args, **kwargs), run with the unit's parameters gathered.\n\n"
    "tensors: for each parameter that add_parameter() has named, and then for frozen\n"
    "ones, what optimizers have of it and itself. Where requires_grad of one of them\n"
    "has changed, _settle_trained() says which of the named ones are frozen now.\n"
    "attributes: for each attribute that is a parameter, the __dict__ that has it,\n"
    "its name, the parameter and its data_ptr(). _check_parameters(index) is called\n"
    "for each that fn has replaced, moved or changed in place, and raises or restores\n"
    "it; _check_parameters(-1), which compares all with the shards, after the first\n"
    "fn that runs with gradients, and after each where released parameters are\n"
    "poisoned.\n\n"
    "They are released afterwards if reshard_after_forward, and gathered again when\n"
    "the gradient of an output arrives. Collective. An exception leaves the unit as\n"
    "it was before.";

static PyObject *
FSDPUnit_forward(PyObject *op, PyObject *args)
{
    FSDPUnit *self = (FSDPUnit *)op;
    PyObject *fn, *inputs, *kwargs, *tensors, *attributes;
    if (!PyArg_ParseTuple(args, "OO!O!O!O!:forward", &fn, &PyTuple_Type, &inputs,
                          &PyDict_Type, &kwargs, &PyTuple_Type, &tensors, &PyTuple_Type,
                          &attributes)) {
        return NULL;
    }
    PyObject *root = Py_NewRef((PyObject *)fsdp_root_borrow(self));
    const int in_backward = in_backward_of((FSDPUnit *)root);
    PyObject *out = NULL;
    const bool settled = in_backward != 0 || fsdp_note_frozen(self, tensors) == 0;
    if (in_backward >= 0 && settled) {
        if (!in_backward && root == op) {
            release_old(self);
            self->last_before = self->last_inner;
            order_begin(&self->forwards);
        }
        const int before = in_backward ? self->state : FSDP_IDLE;
        self->state = FSDP_FORWARD;
        self->core.label.call += !in_backward; /* shows other ranks a skipped batch */
        out = run(self, (FSDPUnit *)root, fn, inputs, kwargs, tensors, attributes,
                  in_backward);
        self->state = before;
        if (!in_backward && root == op) {
            drop_ahead(self);
        }
        if (!in_backward && ((FSDPUnit *)root)->state != FSDP_FORWARD) {
            out = end_forward(self, out);
        }
    }
    Py_DECREF(root);
    return out;
}

/* ---- the gradients --------------------------------------------------------------- */

static int
complete(FSDPUnit *self)
{
    forget_seen(self);
    self->complete = true;
    const int result = self->require_sync ? fsdp_reduce(self) : 0;
    return_growth(fsdp_root_borrow(self));
    return result;
}

static int
reject_second_order(const ctpy_state *state, PyObject *grad)
{
    const int wanted = fsdp_requires_grad(state, grad);
    if (wanted == 1) {
        PyErr_SetString(PyExc_RuntimeError,
                        "FSDP only works with gradients that don't require gradients");
    }
    return wanted == 0 ? 0 : -1;
}

/* Copies a gradient to the flat gradient, so that autograd's tensor can be freed. */
static int
store(FSDPUnit *self, fsdp_leaf *leaf, PyObject *grad)
{
    ctpy_state *state = fsdp_state_borrow(self);
    ct_span span;
    ct_status status;
    ct_error err;
    if (reject_second_order(state, grad) < 0 ||
        fsdp_span_from(self, grad, "a gradient", 0, false, &span) < 0 ||
        fsdp_use_stream(self) < 0) {
        return -1;
    }
    if (span.n != leaf->n) {
        PyErr_Format(PyExc_ValueError,
                     "a gradient has %zu elements, and its parameter %zu", span.n,
                     leaf->n);
        return -1;
    }
    FSDP_BEGIN_WORK(self)
    status = ct_fsdp_take_grad(&self->core, leaf->group, leaf->at, &span, leaf->filled,
                               !self->require_sync, &err);
    FSDP_END_WORK(self)
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* The next backward must not add to a rejected gradient. */
static int
drop(PyObject *param, PyObject *name, int result)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const int dropped = PyObject_SetAttr(param, name, Py_None);
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
    }
    return result < 0 ? result : dropped;
}

static int
take(FSDPUnit *self, fsdp_leaf *leaf, PyObject *param)
{
    PyObject *name = fsdp_state_borrow(self)->str_grad;
    PyObject *grad = PyObject_GetAttr(param, name);
    int result = grad == NULL ? -1 : 0;
    if (result == 0 && !Py_IsNone(grad)) {
        result = store(self, leaf, grad);
        leaf->filled = leaf->filled || result == 0;
        result = drop(param, name, result);
    }
    Py_XDECREF(grad);
    return result;
}

static const char FSDPUnit_take_grad_doc[] =
    "take_grad($self, index, param, /)\n--\n\n"
    "The hook of a parameter whose gradient has been accumulated: take it over.\n\n"
    "index: what add_parameter() gave. The last one of a unit releases the parameters\n"
    "and reduces the gradients. Raises RuntimeError for gradients that require\n"
    "gradients, ValueError outside of the unit's backward.";

static PyObject *
FSDPUnit_take_grad(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    FSDPUnit *self = (FSDPUnit *)op;
    const Py_ssize_t index = n == 2 ? PyLong_AsSsize_t(args[0]) : -1;
    if (index < 0 || (size_t)index >= self->n_leaves) {
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_ValueError,
                                               "take_grad() takes the index of a "
                                               "parameter in [0, %zu) and it",
                                               self->n_leaves);
    }
    if ((self->state == FSDP_IDLE && fsdp_check_unused(self) < 0) ||
        expect(self, IN_BACKWARD) < 0) {
        return NULL;
    }
    fsdp_leaf *leaf = &self->leaves[index];
    self->state = FSDP_BACKWARD_POST;
    self->complete = false;
    if (take(self, leaf, args[1]) < 0) {
        return NULL;
    }
    self->n_seen += !leaf->seen;
    leaf->seen = true;
    const bool all = self->n_seen + self->n_frozen == self->n_leaves;
    return all && complete(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the end of the backward ----------------------------------------------------- */

static int
finish_unit(FSDPUnit *self)
{
    make_idle(self);
    if (self->require_sync || self->reshard_after_forward) {
        fsdp_release(self);
    }
    if (self->require_sync) { /* an update may follow */
        ct_fsdp_drop_secondary(&self->core);
    }
    return self->require_sync && has_grads(self) ? fsdp_reduce(self) : 0;
}

static const char FSDPUnit_finish_doc[] =
    "finish($self, /)\n--\n\n"
    "End the backward of a root: reduce the gradients of units that have not got all\n"
    "of them, missing ones as zeros, and make every unit idle. Collective.";

static PyObject *
FSDPUnit_finish(PyObject *op, PyObject *Py_UNUSED(unused))
{
    FSDPUnit *root = (FSDPUnit *)op;
    PyObject *units = Py_XNewRef(root->units);
    int result = 0;
    const Py_ssize_t n = units == NULL ? 0 : PyList_GET_SIZE(units);
    drop_ahead(root); /* shards may change from here on */
    result = check_all_unused(root);
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result = finish_unit((FSDPUnit *)PyList_GET_ITEM(units, i));
    }
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result = fsdp_settle((FSDPUnit *)PyList_GET_ITEM(units, i));
    }
    Py_XDECREF(units);
    if (result < 0) {
        abandon(root);
        return NULL;
    }
    Py_CLEAR(root->in_use);
    root->queued = root->several_threads = false;
    if (root->return_memory) {
        discard_cache(root);
    }
    Py_RETURN_NONE;
}

#define METHOD(name, flags)                                                            \
    {#name, (PyCFunction)(void (*)(void))FSDPUnit_##name, flags, FSDPUnit_##name##_doc}

PyMethodDef FSDPUnit_fsdp_passes_methods[] = {
    METHOD(abandon, METH_NOARGS),
    METHOD(finish, METH_NOARGS),
    METHOD(forget_root, METH_NOARGS),
    METHOD(forward, METH_VARARGS),
    METHOD(input_done, METH_O),
    METHOD(recover, METH_NOARGS),
    METHOD(set_units, METH_O),
    METHOD(take_grad, METH_FASTCALL),
    {NULL, NULL, 0, NULL},
};
