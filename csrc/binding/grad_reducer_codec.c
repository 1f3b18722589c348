/* How a reducer's gradients travel. */
#include "binding/grad_reducer.h"

#include "core/ct_alloc.h"
#include "core/ct_codec_codes.h"
#include "core/ct_codec_half.h"
#include "core/ct_power_sgd.h"

#include <string.h>

/* The first dimension of each parameter, 1 for a scalar. */
static int
read_rows(const GradReducer *self, size_t *rows, size_t *lengths)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->params); i++) {
        lengths[i] = self->core.params[i].place.n;
        const Py_ssize_t n =
            lengths[i] < 2 ? 1 : PyObject_Size(PyTuple_GET_ITEM(self->params, i));
        if (n < 0) {
            return -1;
        }
        rows[i] = (size_t)n;
    }
    return 0;
}

static int
new_power_sgd(const GradReducer *self, const ct_power_sgd_config *config,
              ct_codec **codec)
{
    const size_t n = (size_t)PyTuple_GET_SIZE(self->params);
    size_t *rows = ct_calloc(2 * n + 1, sizeof *rows);
    ct_error err;
    int result = -1;
    if (rows == NULL) {
        PyErr_NoMemory();
    }
    else if (read_rows(self, rows, rows + n) == 0) {
        result = ct_power_sgd_new(codec, self->core.device, self->core.stream, config,
                                  &self->core.plan, rows, rows + n, &err) == CT_OK
                     ? 0
                     : ctpy_raise_int(&err);
    }
    ct_free(rows);
    return result;
}

static int
new_codec(const GradReducer *self, const char *name, ct_power_sgd_config *config,
          ct_codec **codec)
{
    const ct_reducer *core = &self->core;
    const bool fp16 = strcmp(name, "fp16") == 0;
    ct_error err;
    *codec = NULL;
    if (strcmp(name, "no") == 0) {
        return 0;
    }
    if (fp16 || strcmp(name, "bf16") == 0) {
        return ct_codec_half_new(codec, core->device, core->stream,
                                 fp16 ? CT_F16 : CT_BF16, core->plan.n_buckets,
                                 &err) == CT_OK
                   ? 0
                   : ctpy_raise_int(&err);
    }
    if (strcmp(name, "int8") == 0) {
        return ct_codec_codes_new(codec, core->device, core->stream,
                                  core->plan.n_buckets, &err) == CT_OK
                   ? 0
                   : ctpy_raise_int(&err);
    }
    config->batched = strcmp(name, "batched_power_sgd") == 0;
    if (config->batched || strcmp(name, "power_sgd") == 0) {
        return new_power_sgd(self, config, codec);
    }
    PyErr_Format(PyExc_ValueError,
                 "gradients cannot be compressed by '%.100s'; expected no, fp16, bf16, "
                 "int8, "
                 "power_sgd or batched_power_sgd",
                 name);
    return -1;
}

const char GradReducer_compress_doc[] =
    "compress($self, how, *, rank=1, start_iter=1000, min_compression_rate=2.0)\n"
    "--\n\n"
    "Choose how gradients travel from now on, the same on every rank.\n\n"
    "how: 'no', whole; 'fp16' or 'bf16', in 16 bits; 'int8', in 8,\n"
    "what is lost being added to the next; 'power_sgd', by bucket\n"
    "'batched_power_sgd', as products of matrices of `rank` columns, from pass\n"
    "start_iter on, where that makes them min_compression_rate times smaller. What\n"
    "was remembered for the one before is dropped.\n\n"
    "Raises ValueError for options out of range, RuntimeError in a backward pass.\n\n"
    "Source: Vogels, Karimireddy and Jaggi, \"PowerSGD\", 2019.";

PyObject *
GradReducer_compress(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"how", "rank", "start_iter", "min_compression_rate", NULL};
    GradReducer *self = (GradReducer *)op;
    ct_power_sgd_config config = ct_power_sgd_default();
    Py_ssize_t rank = 1;
    long long start = 1000;
    const char *how;
    ct_codec *codec;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|$nLd:compress", names, &how,
                                     &rank, &start, &config.min_rate)) {
        return NULL;
    }
    if (rank < 1 || start < 0) {
        return PyErr_Format(
            PyExc_ValueError,
            "rank is %zd and start_iter %lld; expected at least 1 and 0", rank, start);
    }
    config.rank = (size_t)rank;
    config.start_iter = (uint64_t)start;
    if (self->core.active) {
        PyErr_SetString(PyExc_RuntimeError,
                        "compress() in the middle of a backward pass");
        return NULL;
    }
    if (new_codec(self, how, &config, &codec) < 0) {
        return NULL;
    }
    if (self->owners != NULL && codec != NULL && !codec->ops->for_owners) {
        codec->ops->free(codec);
        return PyErr_Format(PyExc_ValueError,
                            "gradients that go to their owners alone cannot be "
                            "compressed by '%.100s'; expected no, fp16 or bf16",
                            how);
    }
    if (self->codec != NULL) {
        self->codec->ops->free(self->codec);
    }
    self->codec = codec;
    self->core.codec = codec == NULL ? &ct_codec_whole : codec;
    Py_RETURN_NONE;
}
