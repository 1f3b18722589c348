/* tp_traverse, tp_clear and tp_dealloc of a type from the list of its Python objects,
 * FIELDS(V) with V(field) for each, so that no function can forget a field. */
#ifndef BINDING_RUNTIME_OBJECTS_H
#define BINDING_RUNTIME_OBJECTS_H

#include "binding/runtime/ctpy.h"

#define CTPY_VISIT_FIELD(field) Py_VISIT(self->field);
#define CTPY_CLEAR_FIELD(field) Py_CLEAR(self->field);

/* NOLINTBEGIN(bugprone-macro-parentheses): Type is the name of a type */
#define CTPY_TRAVERSE(Type, FIELDS)                                                    \
    static int Type##_traverse(PyObject *op, visitproc visit, void *arg)               \
    {                                                                                  \
        Type *self = (Type *)op;                                                       \
        Py_VISIT(Py_TYPE(op));                                                         \
        FIELDS(CTPY_VISIT_FIELD)                                                       \
        return 0;                                                                      \
    }

#define CTPY_TRAVERSE_CLEAR(Type, FIELDS)                                              \
    CTPY_TRAVERSE(Type, FIELDS)                                                        \
    static int Type##_clear(PyObject *op)                                              \
    {                                                                                  \
        Type *self = (Type *)op;                                                       \
        FIELDS(CTPY_CLEAR_FIELD)                                                       \
        return 0;                                                                      \
    }

/* NOLINTEND(bugprone-macro-parentheses) */

/* All three, of a type that owns nothing but Python objects. */
#define CTPY_LIFETIME(Type, FIELDS)                                                    \
    CTPY_TRAVERSE_CLEAR(Type, FIELDS)                                                  \
    static void Type##_dealloc(PyObject *op)                                           \
    {                                                                                  \
        ctpy_dealloc(op, Type##_clear);                                                \
    }

#endif
