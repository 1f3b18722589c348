/* How a reducer's gradients are sent. */
#include "binding/ddp/reducer.h"

#include "core/ddp/codec_half.h"

#include <string.h>

const char GradReducer_compress_doc[] =
    "compress($self, how, /)\n--\n\n"
    "Choose how gradients are sent from now on, the same on every rank.\n\n"
    "how: 'no', as they are; 'fp16' or 'bf16', in 16 bits.\n\n"
    "Raises ValueError for another one, RuntimeError in a backward pass.";

PyObject *
GradReducer_compress(PyObject *op, PyObject *how)
{
    GradReducer *self = (GradReducer *)op;
    const ct_reducer *core = &self->core;
    const char *name = PyUnicode_AsUTF8(how);
    ct_codec *codec = NULL;
    ct_error err;
    if (name == NULL) {
        return NULL;
    }
    const bool fp16 = strcmp(name, "fp16") == 0, bf16 = strcmp(name, "bf16") == 0;
    if (!fp16 && !bf16 && strcmp(name, "no") != 0) {
        return PyErr_Format(PyExc_ValueError,
                            "gradients cannot be compressed by '%.100s'; expected no, "
                            "fp16 or bf16",
                            name);
    }
    if (core->active) {
        PyErr_SetString(PyExc_RuntimeError,
                        "compress() in the middle of a backward pass");
        return NULL;
    }
    if ((fp16 || bf16) &&
        ct_codec_half_new(&codec, core->device, core->stream, fp16 ? CT_F16 : CT_BF16,
                          core->plan.n_buckets, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    if (self->codec != NULL) {
        self->codec->ops->free(self->codec);
    }
    self->codec = codec;
    self->core.codec = codec == NULL ? &ct_codec_whole : codec;
    Py_RETURN_NONE;
}
