/* Writing one file at once, without a checkpoint around it: functions of the module. */
#include "binding/checkpoint/tensors.h"
#include "core/base/alloc.h"

/* Writes the plan that `status` and `err` speak of, frees it, and returns None or NULL.
 */
static PyObject *
write_steal(ct_plan *plan, ct_status status, PyObject *path, ct_error *err)
{
    if (status == CT_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = ct_plan_publish(plan, PyBytes_AS_STRING(path), err);
        Py_END_ALLOW_THREADS
    }
    ct_plan_fini(plan);
    if (status != CT_OK) {
        return ctpy_raise(err);
    }
    Py_RETURN_NONE;
}

const char ctpy_write_safetensors_doc[] =
    "write_safetensors($module, path, tensors, metadata, /)\n--\n\n"
    "Write a dict of named tensors or arrays as a safetensors file, whole or not at\n"
    "all.\n\n"
    "In the place of one may be (data, dtype, shape), where data is uint8, or a tuple "
    "of\n"
    "excerpts (path as bytes, offset, n) of other files, or (None, 0, n) for n zeros, "
    "in\n"
    "bytes: they are read a block at a time.";

PyObject *
ctpy_write_safetensors(PyObject *module, PyObject *args)
{
    PyObject *given, *dict, *metadata, *path = NULL, *answer = NULL;
    ctpy_tensors tensors = {.may_excerpt = true};
    ct_st_pair *pairs = NULL;
    size_t n = 0;
    if (!PyArg_ParseTuple(args, "OOO!:write_safetensors", &given, &dict, &PyDict_Type,
                          &metadata) ||
        (path = ctpy_path_from(given)) == NULL) {
        return NULL;
    }
    if (ctpy_tensors_from(PyModule_GetState(module), dict, 0, &tensors) == 0 &&
        (pairs = ctpy_pairs_from(metadata, &n)) != NULL) {
        ct_error err;
        ct_plan plan = {0};
        ct_status status =
            ct_st_plan(&plan, tensors.entries, tensors.n, pairs, n, &err);
        answer = write_steal(&plan, status, path, &err);
    }
    ct_free(pairs);
    ctpy_tensors_fini(&tensors);
    Py_DECREF(path);
    return answer;
}

const char ctpy_write_archive_doc[] = "write_archive($module, path, records, /)\n--\n\n"
                                      "Write (record name, data) pairs as an archive "
                                      "that torch.load reads, whole or not\n"
                                      "at all. Data may be a tuple of excerpts, as "
                                      "write_safetensors takes them.";

PyObject *
ctpy_write_archive(PyObject *module, PyObject *args)
{
    PyObject *given, *items, *path = NULL, *list = NULL, *answer = NULL;
    ct_zip_record *records = NULL;
    if (!PyArg_ParseTuple(args, "OO:write_archive", &given, &items) ||
        (path = ctpy_path_from(given)) == NULL) {
        return NULL;
    }
    if ((list = PySequence_List(items)) != NULL &&
        (records = ctpy_records_from(PyModule_GetState(module), list, true)) != NULL) {
        ct_error err;
        ct_plan plan = {0};
        ct_status status =
            ct_zip_plan(&plan, records, (size_t)PyList_GET_SIZE(list), &err);
        answer = write_steal(&plan, status, path, &err);
    }
    ctpy_records_free(records, list);
    Py_XDECREF(list);
    Py_DECREF(path);
    return answer;
}
