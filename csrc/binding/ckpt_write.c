/* Writing one file at once, without a checkpoint around it: functions of the module. */
#include "binding/ckpt_tensors.h"
#include "core/ct_alloc.h"
#include "core/ct_io.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Writes the plan beside path and renames it there, so that path is never half a file.
 */
static ct_status
write_plan(ct_plan *plan, const char *path, ct_error *err)
{
    size_t n = strlen(path) + sizeof ".ctrainer-saving";
    char *beside = ct_alloc(n);
    if (beside == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to write %s", path);
    }
    (void)snprintf(beside, n, "%s.ctrainer-saving", path);
    ct_plan_seal(plan);
    ct_status status = ct_plan_write(plan, beside, err);
    if (status == CT_OK) {
        status = ct_sync_file(beside, err);
    }
    if (status == CT_OK && rename(beside, path) < 0) {
        status = ct_fail_io(err, errno, "write", path);
    }
    if (status != CT_OK) {
        (void)remove(beside);
    }
    ct_free(beside);
    return status;
}

/* Writes the plan that `status` and `err` speak of, frees it, and returns None or NULL.
 */
static PyObject *
write_steal(ct_plan *plan, ct_status status, PyObject *path, ct_error *err)
{
    if (status == CT_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = write_plan(plan, PyBytes_AS_STRING(path), err);
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
    "Write a dict of named tensors or arrays as a safetensors file, whole or not at "
    "all.";

PyObject *
ctpy_write_safetensors(PyObject *module, PyObject *args)
{
    PyObject *given, *dict, *metadata, *path = NULL, *answer = NULL;
    ctpy_tensors tensors = {0};
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
                                      "at all.";

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
        (records = ctpy_records_from(PyModule_GetState(module), list)) != NULL) {
        ct_error err;
        ct_plan plan = {0};
        ct_status status =
            ct_zip_plan(&plan, records, (size_t)PyList_GET_SIZE(list), &err);
        answer = write_steal(&plan, status, path, &err);
    }
    ct_free(records);
    Py_XDECREF(list);
    Py_DECREF(path);
    return answer;
}
