/* Steps that all ranks take together, and fail together. */
#ifndef CTPY_TRAINER_ACCOUNT_H
#define CTPY_TRAINER_ACCOUNT_H

#include "binding/trainer/trainer.h"

/* Tells the others how this rank has fared in what it was doing: with an exception set
 * that it failed, else what they get of it, bytes (NULL: none). Returns the payloads of
 * all ranks, a list in rank order; NULL with an exception when any has failed: this
 * rank's own, or a RuntimeError that names the rank, `doing` and its error. Alone it is
 * the list of its own payload. */
PyObject *ctpy_account(PyObject *op, const char *doing, PyObject *payload);

/* Puts "doing: " before the text of the RuntimeError or ValueError that is set. */
void ctpy_name_doing(const char *doing);

#endif
