/* ctrainer._C.CallbackHandler: what its two files share. */
#ifndef CTPY_CALLBACK_HANDLER_H
#define CTPY_CALLBACK_HANDLER_H

#include "binding/runtime/ctpy.h"

/* What every event passes by keyword, in this order; attributes of the handler. */
#define CTPY_PASSED(F)                                                                 \
    F(model)                                                                           \
    F(processing_class)                                                                \
    F(optimizer)                                                                       \
    F(lr_scheduler)                                                                    \
    F(train_dataloader)                                                                \
    F(eval_dataloader)

/* `callbacks` is the list that users edit; `plans` maps a function to what
 * runtime.events.wanted said of it; `names` are those of CTPY_PASSED, as a tuple.
 * The last two are never NULL. */
#define CTPY_HANDLER_FIELDS(F) F(callbacks) F(plans) F(names) CTPY_PASSED(F)

typedef struct CallbackHandler {
    PyObject_HEAD
#define FIELD(name) PyObject *name;
    CTPY_HANDLER_FIELDS(FIELD)
#undef FIELD
} CallbackHandler;

enum {
    N_POSITIONAL = 3,
    N_PASSED = 6,
    MAX_EXTRA = 24
};

/* One event on its way through the callbacks. Values lie in `stack`: a slot that
 * vectorcall may use, then args, state and control, then one value per name. The
 * handler's own values are filled in anew for each callback; the extras follow them
 * and are borrowed from the caller of the event. */
typedef struct event_call {
    PyObject *event;
    PyObject
        *names; /* owned tuple: the handler's names that no extra shadows, extras */
    unsigned shadowed; /* bit i: the i-th of CTPY_PASSED comes with the extras */
    PyObject *stack[1 + N_POSITIONAL + N_PASSED + MAX_EXTRA];
} event_call;

/* Calls every callback that listens. Returns the control that they leave, a new
 * reference, or NULL with the exception of the first that failed. */
PyObject *ctpy_notify_all(CallbackHandler *self, event_call *call);

#endif
