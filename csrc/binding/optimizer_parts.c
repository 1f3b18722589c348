/* Parameters of which a rank has a part, as optimizers see them. */
#include "binding/optimizer.h"

/* Whether param._is_part is true; -1 with an exception. */
static int
is_part(OptimEngine *self, PyObject *param)
{
    PyObject *answer = PyObject_GetAttr(param, self->state->str__is_part);
    if (answer == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        return 0;
    }
    const int truth = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return truth;
}

int
optim_refuse_parts(OptimEngine *self)
{
    const ct_optim_group *groups = ct_optim_groups_borrow(self->core);
    for (size_t k = 0; k < self->n_slots; k++) {
        const optim_slot *slot = &self->slots[k];
        const ct_optim_group *group = &groups[slot->group];
        const int refused =
            ct_optim_group_is_whole(group) ? is_part(self, slot->param) : 0;
        if (refused > 0) {
            PyErr_Format(
                PyExc_ValueError,
                "param_groups[%u]['params'][%zd] is a part of a parameter "
                "that is sharded, and %s looks at a whole one, its norm or its "
                "rows and columns: use an optimizer that works element by "
                "element, such as AdamW, or do not shard",
                slot->group, slot->index, ct_optim_kind_name(group->kind));
        }
        if (refused != 0) {
            return -1;
        }
    }
    return 0;
}
