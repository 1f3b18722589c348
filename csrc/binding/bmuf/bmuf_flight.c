/* Blocks whose average is taken some updates after they have ended. */
#include "binding/bmuf/bmuf.h"

static Communicator *
group_of(const BMUF *self)
{
    return (Communicator *)self->communicator;
}

/* An open communicator is not closed while it works for us. */
static void
hold_group(BMUF *self)
{
    const bool wanted = self->core.is_under_way;
    if (wanted != self->holds) {
        group_of(self)->busy += wanted ? 1 : -1;
        self->holds = wanted;
    }
}

static ct_status
pass_depart(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_depart(&self->core, comm, list, err);
}

static ct_status
pass_arrive(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_arrive(&self->core, &self->meeting, comm, list, err);
}

int
bmuf_depart(BMUF *self, ctpy_state *state)
{
    const int result = bmuf_run(self, state->str__synced_tensors, pass_depart);
    hold_group(self);
    return result;
}

/* So many updates after the block has ended, or where the count has been moved on. */
bool
bmuf_is_due(const BMUF *self)
{
    const int64_t since = self->num_updates % self->config.sync_iter;
    return self->core.is_away && (since == 0 || since >= self->config.overlap);
}

int
bmuf_arrive(BMUF *self, ctpy_state *state)
{
    if (bmuf_settle(self, state) < 0) {
        return -1;
    }
    const int result = bmuf_run(self, state->str__synced_tensors, pass_arrive);
    hold_group(self);
    return result < 0 ? -1 : bmuf_after_block(self, state);
}

void
bmuf_land(BMUF *self)
{
    if (self->holds) {
        ct_comm *comm = group_of(self)->comm;
        Py_BEGIN_ALLOW_THREADS
        ct_bmuf_land(&self->core, comm);
        Py_END_ALLOW_THREADS
        hold_group(self);
    }
    self->core.is_away = false;
}

const char BMUF_finish_doc[] =
    "finish($self, /)\n--\n\n"
    "Take the average of a block that ended less than overlap_steps updates ago: all\n"
    "ranks call it, as after the last update. Without such a block nothing happens.";

PyObject *
BMUF_finish(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    if (bmuf_check_idle(self, "finish()") < 0 ||
        (self->core.is_away && bmuf_arrive(self, ctpy_state_borrow(op)) < 0)) {
        return NULL;
    }
    Py_RETURN_NONE;
}
