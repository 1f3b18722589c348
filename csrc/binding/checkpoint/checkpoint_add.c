/* CheckpointWriter: the methods that add files to the open save. */
#include "binding/checkpoint/writer.h"
#include "binding/checkpoint/tensors.h"
#include "core/base/alloc.h"

/* Hands a plan over and returns None, or NULL with an exception. */
static PyObject *
add_plan_steal(PyObject *op, PyObject *name, ct_plan *plan, int snapshot)
{
    ct_error err = {0};
    ct_writer *core = NULL;
    PyObject *path = ctpy_path_from(name);
    ct_status status =
        path == NULL ? CT_EHOST : ct_plan_set_name(plan, PyBytes_AS_STRING(path), &err);
    Py_XDECREF(path);
    if (status != CT_OK || (core = ctpy_writer_enter(op)) == NULL) {
        ct_plan_fini(plan);
        return status == CT_OK || path == NULL ? NULL : ctpy_raise(&err);
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_writer_add(core, plan, snapshot != 0, &err);
    Py_END_ALLOW_THREADS
    return ctpy_writer_leave(op, status, &err);
}

const char CheckpointWriter_add_safetensors_doc[] =
    "add_safetensors($self, name, tensors, metadata=None, *, snapshot=True)\n--\n\n"
    "Add a safetensors file of a dict of named tensors or arrays.\n\n"
    "They must be contiguous and on the CPU. A value may also be (uint8 array of its\n"
    "bytes, dtype such as 'F8_E4M3', shape). With snapshot they are copied, and may\n"
    "change once this returns; without it the file is written before it returns.";

PyObject *
CheckpointWriter_add_safetensors(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "tensors", "metadata", "snapshot", NULL};
    PyObject *name, *dict, *metadata = Py_None, *answer = NULL, *none = NULL;
    int snapshot = 1;
    size_t n = 0;
    ct_st_pair *pairs = NULL;
    ctpy_tensors tensors = {0};
    ct_plan plan = {0};
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O$p:add_safetensors", names,
                                     &name, &dict, &metadata, &snapshot)) {
        return NULL;
    }
    if (metadata == Py_None && (metadata = none = PyDict_New()) == NULL) {
        return NULL;
    }
    if (!PyDict_Check(metadata)) {
        PyErr_SetString(PyExc_TypeError, "metadata must be a dict or None");
        goto done;
    }
    if (ctpy_tensors_from(ctpy_state_borrow(op), dict, 0, &tensors) < 0 ||
        (pairs = ctpy_pairs_from(metadata, &n)) == NULL) {
        goto done;
    }
    if (ct_st_plan(&plan, tensors.entries, tensors.n, pairs, n, &err) != CT_OK) {
        ct_plan_fini(&plan);
        (void)ctpy_raise(&err);
        goto done;
    }
    answer = add_plan_steal(op, name, &plan, snapshot);
done:
    ct_free(pairs);
    ctpy_tensors_fini(&tensors);
    Py_XDECREF(none);
    return answer;
}

const char CheckpointWriter_add_archive_doc[] =
    "add_archive($self, name, records, *, snapshot=True)\n--\n\n"
    "Add an archive as torch.save lays it out, of (record name, data) pairs.\n\n"
    "data is bytes, or a contiguous tensor or array on the CPU.";

PyObject *
CheckpointWriter_add_archive(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "records", "snapshot", NULL};
    PyObject *name, *given, *answer = NULL, *list = NULL;
    int snapshot = 1;
    ct_zip_record *records = NULL;
    ct_plan plan = {0};
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$p:add_archive", names, &name,
                                     &given, &snapshot) ||
        (list = PySequence_List(given)) == NULL) {
        return NULL;
    }
    size_t n = (size_t)PyList_GET_SIZE(list);
    records = ctpy_records_from(ctpy_state_borrow(op), list, false);
    if (records == NULL) {
        goto done;
    }
    if (ct_zip_plan(&plan, records, n, &err) != CT_OK) {
        ct_plan_fini(&plan);
        (void)ctpy_raise(&err);
        goto done;
    }
    answer = add_plan_steal(op, name, &plan, snapshot);
done:
    ctpy_records_free(records, list);
    Py_DECREF(list);
    return answer;
}

const char CheckpointWriter_add_bytes_doc[] = "add_bytes($self, name, data, /)\n--\n\n"
                                              "Add a file of these bytes.";

PyObject *
CheckpointWriter_add_bytes(PyObject *op, PyObject *args)
{
    PyObject *name;
    Py_buffer view;
    ct_buf buf = {0};
    ct_plan plan = {0};
    ct_error err;
    if (!PyArg_ParseTuple(args, "Oy*:add_bytes", &name, &view)) {
        return NULL;
    }
    ct_status status = ct_buf_add(&buf, view.buf, (size_t)view.len, &err);
    PyBuffer_Release(&view);
    if (status == CT_OK) {
        status = ct_plan_add_buf(&plan, &buf, &err);
    }
    if (status != CT_OK) {
        ct_buf_fini(&buf);
        ct_plan_fini(&plan);
        return ctpy_raise(&err);
    }
    return add_plan_steal(op, name, &plan, 1);
}
