/* ctrainer._C.BMUF: workers that train apart and meet at the ends of blocks. */
#include "binding/bmuf/bmuf.h"

#include "core/device/device.h"

#include <string.h>

/* ---- lifetime ----------------------------------------------------------------------
 */

static PyObject *
BMUF_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        ct_bmuf_init(&((BMUF *)op)->core, &ct_device_cpu, NULL);
    }
    return op;
}

static int
BMUF_traverse(PyObject *op, visitproc visit, void *arg)
{
    BMUF *self = (BMUF *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->inner);
    Py_VISIT(self->communicator);
    return 0;
}

static int
BMUF_clear(PyObject *op)
{
    BMUF *self = (BMUF *)op;
    if (self->communicator != NULL) {
        bmuf_land(self);
    }
    Py_CLEAR(self->inner);
    Py_CLEAR(self->communicator);
    return 0;
}

static void
BMUF_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)BMUF_clear(op);
    ct_bmuf_fini(&((BMUF *)op)->core);
    type->tp_free(op);
    Py_DECREF(type);
}

static int
parse_look(const char *name, ct_block_look *look, bool *slowmo)
{
    static const char *const names[] = {[CT_BLOCK_PLAIN] = "plain",
                                        [CT_BLOCK_NBM] = "nbm",
                                        [CT_BLOCK_NESTEROV] = "nesterov"};
    *slowmo = strcmp(name, "slowmo") == 0;
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            *look = (ct_block_look)i;
            return 0;
        }
    }
    if (*slowmo) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "look is '%.100s'; expected plain, nbm, nesterov or slowmo", name);
    return -1;
}

static int
BMUF_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"optimizer",
                            "communicator",
                            "global_sync_iter",
                            "block_lr",
                            "block_momentum",
                            "look",
                            "average_sync",
                            "warmup_iterations",
                            "delta_bits",
                            "overlap_steps",
                            NULL};
    BMUF *self = (BMUF *)op;
    PyObject *inner, *communicator;
    const char *look = "plain";
    long long every = 50, warmup = 500, overlap = 0;
    int average = 0;
    bool slowmo = false;
    ct_bmuf_config config = {
        .lr = 1.0, .momentum = 0.875, .reach = 1.0, .delta_bits = 32};
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$LddspLiL:BMUF", names, &inner,
                                     &communicator, &every, &config.lr,
                                     &config.momentum, &look, &average, &warmup,
                                     &config.delta_bits, &overlap) ||
        parse_look(look, &config.look, &slowmo) < 0 ||
        ctpy_comm_borrow(ctpy_state_borrow(op), communicator) == NULL) {
        return -1;
    }
    config.sync_iter = every;
    config.warmup = warmup;
    config.overlap = overlap;
    if (ct_bmuf_check(&config, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    if (self->inner != NULL && bmuf_check_idle(self, "__init__()") < 0) {
        return -1;
    }
    if (self->communicator != NULL) {
        bmuf_land(self);
    }
    Py_XSETREF(self->inner, Py_NewRef(inner));
    Py_XSETREF(self->communicator, Py_NewRef(communicator));
    self->config = config;
    self->average_sync = average;
    self->slowmo = slowmo;
    self->num_updates = 0;
    self->started = false;
    return 0;
}

/* ---- updates ------------------------------------------------------------------------
 */

PyDoc_STRVAR(
    step_doc,
    "step($self, /, *args, **kwargs)\n--\n\n"
    "Call the optimizer's step(), and synchronise with the other ranks where a "
    "block ends.\n\n"
    "Returns what it returned. An update that raises is not counted. Raises\n"
    "RuntimeError naming the rank when another fails or stays away.");

static PyObject *
BMUF_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    BMUF *self = (BMUF *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    if (bmuf_check_idle(self, "step()") < 0) {
        return NULL;
    }
    PyObject *step = PyObject_GetAttr(self->inner, state->str_step);
    PyObject *answer = step == NULL ? NULL : PyObject_Call(step, args, kwargs);
    Py_XDECREF(step);
    if (answer != NULL) {
        self->num_updates++;
        if (bmuf_after_update(self) < 0) {
            Py_CLEAR(answer);
        }
    }
    return answer;
}

PyDoc_STRVAR(
    count_update_doc,
    "count_update($self, /)\n--\n\n"
    "Count an update that was made elsewhere, or skipped after an overflow,\n"
    "and synchronise with the other ranks where a block ends: they count on it.");

static PyObject *
BMUF_count_update(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    if (bmuf_check_idle(self, "count_update()") < 0) {
        return NULL;
    }
    self->num_updates++;
    return bmuf_after_update(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- what Python sees --------------------------------------------------------------
 */

PyDoc_STRVAR(get_num_updates_doc, "get_num_updates($self, /)\n--\n\n"
                                  "Return how many updates have been counted.");

static PyObject *
BMUF_get_num_updates(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLongLong(((BMUF *)op)->num_updates);
}

PyDoc_STRVAR(set_num_updates_doc, "set_num_updates($self, num_updates, /)\n--\n\n"
                                  "Set the number of updates, 0 or more.");

static PyObject *
BMUF_set_num_updates(PyObject *op, PyObject *arg)
{
    const long long n = PyLong_AsLongLong(arg);
    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (n < 0) {
        PyErr_Format(PyExc_ValueError, "num_updates must be at least 0, got %lld", n);
        return NULL;
    }
    ((BMUF *)op)->num_updates = n;
    Py_RETURN_NONE;
}

static PyObject *
BMUF_get_use_nbm(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((BMUF *)op)->config.look == CT_BLOCK_NBM);
}

static PyObject *
BMUF_get_world_size(PyObject *op, void *Py_UNUSED(closure))
{
    BMUF *self = (BMUF *)op;
    if (bmuf_check_idle(self, "world_size") < 0) {
        return NULL;
    }
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), self->communicator);
    return comm == NULL ? NULL : PyLong_FromLong(comm->world_size);
}

static PyGetSetDef BMUF_getset[] = {
    {"use_nbm",    BMUF_get_use_nbm,    NULL, "Nesterov's block momentum.",  NULL},
    {"world_size", BMUF_get_world_size, NULL, "Ranks that meet, 1: nobody.", NULL},
    {NULL,         NULL,                NULL, NULL,                          NULL},
};

static PyMemberDef BMUF_members[] = {
    {"_optimizer", T_OBJECT_EX, offsetof(BMUF, inner), READONLY,
     "The optimizer that updates."},
    {"communicator", T_OBJECT_EX, offsetof(BMUF, communicator), READONLY,
     "The group of those who meet."},
    {"sync_iter", T_LONGLONG, offsetof(BMUF, config.sync_iter), READONLY,
     "Updates in a block."},
    {"warmup_iteration", T_LONGLONG, offsetof(BMUF, config.warmup), READONLY,
     "Updates before the workers first meet."},
    {"block_momentum", T_DOUBLE, offsetof(BMUF, config.momentum), READONLY,
     "Momentum of blocks; 0: the models are averaged."},
    {"block_lr", T_DOUBLE, offsetof(BMUF, config.lr), READONLY,
     "Learning rate of blocks."},
    {"overlap_steps", T_LONGLONG, offsetof(BMUF, config.overlap), READONLY,
     "Updates after the end of a block in which its average is taken."},
    {"is_away", T_BOOL, offsetof(BMUF, core.is_away), READONLY,
     "Whether a block has ended whose average has not been taken yet."},
    {"delta_bits", T_INT, offsetof(BMUF, config.delta_bits), READONLY,
     "Bits in which distances travel: 32, or codes of 8 or 4."},
    {"average_sync", T_BOOL, offsetof(BMUF, average_sync), READONLY,
     "Whether the optimizers' moments are averaged where workers meet."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef BMUF_methods[] = {
    {"_adopt",           BMUF_adopt,                             METH_VARARGS,                 BMUF_adopt_doc          },
    {"_average_moments", BMUF_average_moments,                   METH_NOARGS,                  BMUF_average_moments_doc},
    {"_load_blocks",     BMUF_load_blocks,                       METH_VARARGS,                 BMUF_load_blocks_doc    },
    {"_load_residual",   BMUF_load_residual,                     METH_O,                       BMUF_load_residual_doc  },
    {"_save_residual",   BMUF_save_residual,                     METH_O,                       BMUF_save_residual_doc  },
    {"_save_blocks",     BMUF_save_blocks,                       METH_VARARGS,                 BMUF_save_blocks_doc    },
    {"_start",           BMUF_start,                             METH_NOARGS,                  BMUF_start_doc          },
    {"get_num_updates",  BMUF_get_num_updates,                   METH_NOARGS,                  get_num_updates_doc     },
    {"set_num_updates",  BMUF_set_num_updates,                   METH_O,                       set_num_updates_doc     },
    {"finish",           BMUF_finish,                            METH_NOARGS,                  BMUF_finish_doc         },
    {"_load_left",       BMUF_load_left,                         METH_O,                       BMUF_load_left_doc      },
    {"_save_left",       BMUF_save_left,                         METH_O,                       BMUF_save_left_doc      },
    {"count_update",     BMUF_count_update,                      METH_NOARGS,                  count_update_doc        },
    {"step",             (PyCFunction)(void (*)(void))BMUF_step, METH_VARARGS | METH_KEYWORDS,
     step_doc                                                                                                          },
    {NULL,               NULL,                                   0,                            NULL                    },
};

PyDoc_STRVAR(
    BMUF_doc,
    "BMUF(optimizer, communicator, *, global_sync_iter=50, block_lr=1.0,\n"
    "     block_momentum=0.875, look='plain', average_sync=False,\n"
    "     warmup_iterations=500, delta_bits=32, overlap_steps=0)\n--\n\n"
    "Blocks of updates over an optimizer; ctrainer.BMUF is its public face, which has\n"
    "the hooks _synced_tensors(), _moments(), average_params(), _reset_optimizer() "
    "and\n"
    "_after_sync().");

static PyType_Slot BMUF_slots[] = {
    {Py_tp_doc,      (void *)BMUF_doc},
    {Py_tp_new,      BMUF_new        },
    {Py_tp_init,     BMUF_init       },
    {Py_tp_traverse, BMUF_traverse   },
    {Py_tp_clear,    BMUF_clear      },
    {Py_tp_dealloc,  BMUF_dealloc    },
    {Py_tp_methods,  BMUF_methods    },
    {Py_tp_getset,   BMUF_getset     },
    {Py_tp_members,  BMUF_members    },
    {0,              NULL            },
};

PyType_Spec BMUF_spec = {
    .name = "ctrainer._C.BMUF",
    .basicsize = sizeof(BMUF),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = BMUF_slots,
};
