/* Reading files of checkpoints whole, each byte checked as it is read: functions of the
 * module. */
#include "binding/checkpoint/tensors.h"
#include "core/base/alloc.h"
#include "core/checkpoint/manifest.h"

#include <string.h>

enum {
    ALIGNMENT = 64 /* of a record in memory: what torch gives its own */
};

int
ctpy_expected_from(PyObject *op, ct_expected *room, const ct_expected **expected)
{
    unsigned long long bytes;
    unsigned int crc;
    *expected = NULL;
    if (op == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(op)) {
        PyErr_SetString(PyExc_TypeError, "expected must be None or (bytes, crc32c)");
        return -1;
    }
    if (!PyArg_ParseTuple(op, "KI;expected must be (bytes, crc32c)", &bytes, &crc)) {
        return -1;
    }
    *room = (ct_expected){bytes, crc};
    *expected = room;
    return 0;
}

static PyObject *
manifest_to_dict(const ct_manifest *manifest)
{
    PyObject *dict = PyDict_New();
    for (size_t i = 0; i < manifest->n && dict != NULL; i++) {
        const ct_manifest_file *file = &manifest->files[i];
        PyObject *pair =
            Py_BuildValue("(KI)", (unsigned long long)file->bytes, file->crc32c);
        if (pair == NULL || PyDict_SetItemString(dict, file->name, pair) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(pair);
    }
    return dict;
}

const char ctpy_read_manifest_doc[] =
    "read_manifest($module, folder, /)\n--\n\n"
    "Return {name: (bytes, crc32c)} of the files that a checkpoint's manifest "
    "lists.\n\n"
    "Raises FileNotFoundError when it has no manifest, ValueError when that is "
    "damaged,\n"
    "lists no file, or one outside of the folder.";

PyObject *
ctpy_read_manifest(PyObject *Py_UNUSED(module), PyObject *arg)
{
    ct_error err;
    ct_status status;
    ct_manifest manifest = {0};
    PyObject *path = ctpy_path_from(arg), *dict = NULL;
    if (path == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_manifest_read(&manifest, PyBytes_AS_STRING(path), &err);
    Py_END_ALLOW_THREADS
    dict = status == CT_OK ? manifest_to_dict(&manifest) : ctpy_raise(&err);
    ct_manifest_fini(&manifest);
    Py_DECREF(path);
    return dict;
}

/* The whole source as bytes. */
static PyObject *
read_whole(const ct_source *source, unsigned long long limit,
           const ct_expected *expected)
{
    ct_error err;
    ct_status status;
    if (source->bytes > limit) {
        return PyErr_Format(PyExc_ValueError,
                            "%s: is %llu bytes long; more than %llu are not read",
                            source->path, (unsigned long long)source->bytes, limit);
    }
    PyObject *content = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)source->bytes);
    if (content == NULL) {
        return NULL;
    }
    ct_extent whole = {.n = source->bytes, .target = PyBytes_AS_STRING(content)};
    Py_BEGIN_ALLOW_THREADS
    status = ct_source_read_extents(
        source, &whole, 1, expected == NULL ? CT_SUM_NONE : CT_SUM_CRC32C, &err);
    if (status == CT_OK && expected != NULL) {
        status = ct_source_judge(source, expected, whole.crc, &err);
    }
    Py_END_ALLOW_THREADS
    if (status != CT_OK) {
        Py_CLEAR(content);
        (void)ctpy_raise(&err);
    }
    return content;
}

const char ctpy_read_file_doc[] =
    "read_file($module, path, limit, expected, /)\n--\n\n"
    "Return the bytes of a regular file, read once.\n\n"
    "expected: None, or (bytes, crc32c), as read_manifest() gives them. Raises "
    "ValueError\n"
    "where the file has more than limit bytes, is no regular file or differs from "
    "what is\n"
    "expected; OSError where it cannot be read.";

PyObject *
ctpy_read_file(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *given, *pair, *path = NULL, *content = NULL;
    unsigned long long limit;
    ct_expected room;
    const ct_expected *expected;
    ct_source source;
    ct_error err;
    ct_status status;
    if (!PyArg_ParseTuple(args, "OKO:read_file", &given, &limit, &pair) ||
        ctpy_expected_from(pair, &room, &expected) < 0 ||
        (path = ctpy_path_from(given)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_source_open(&source, PyBytes_AS_STRING(path), expected, &err);
    Py_END_ALLOW_THREADS
    if (status == CT_OK) {
        content = read_whole(&source, limit < PY_SSIZE_T_MAX ? limit : PY_SSIZE_T_MAX,
                             expected);
        ct_source_close(&source);
    }
    else {
        (void)ctpy_raise(&err);
    }
    Py_DECREF(path);
    return content;
}

/* ---- archives */

/* An open archive: a file's or memory's. */
typedef struct archive {
    PyObject *path;
    Py_buffer view;
    ct_source source;
    ct_zip_index index;
    ct_expected room;
    const ct_expected *expected;
} archive;

static void
archive_fini(archive *a)
{
    ct_zip_index_fini(&a->index);
    ct_source_close(&a->source);
    if (a->view.obj != NULL) {
        PyBuffer_Release(&a->view);
    }
    Py_CLEAR(a->path);
}

/* Opens what `given` names, or with `content` (may be NULL) that memory under the name.
 * 1; 0 where it does not begin as an archive; -1 with an exception. */
static int
archive_open(archive *a, PyObject *given, PyObject *content, PyObject *expected)
{
    ct_error err;
    ct_status status = CT_OK;
    bool is_zip = false;
    *a = (archive){.source = {.fd = -1}};
    if (ctpy_expected_from(expected, &a->room, &a->expected) < 0 ||
        (a->path = ctpy_path_from(given)) == NULL ||
        (content != NULL && PyObject_GetBuffer(content, &a->view, PyBUF_SIMPLE) < 0)) {
        return -1;
    }
    const char *path = PyBytes_AS_STRING(a->path);
    Py_BEGIN_ALLOW_THREADS
    if (content == NULL) {
        status = ct_source_open(&a->source, path, a->expected, &err);
    }
    else {
        a->source = (ct_source){.path = path,
                                .memory = a->view.buf,
                                .fd = -1,
                                .bytes = (uint64_t)a->view.len};
    }
    if (status == CT_OK && (is_zip = ct_zip_is(&a->source))) {
        status = ct_zip_index_read(&a->index, &a->source, &err);
    }
    Py_END_ALLOW_THREADS
    if (status != CT_OK) {
        (void)ctpy_raise(&err);
        return -1;
    }
    return is_zip;
}

/* What follows the first part of a record's name, by which torch.save puts the stem of
 * the file before all of them. */
static PyObject *
record_name(const archive *a, const ct_zip_entry *entry)
{
    const char *slash = memchr(entry->name.data, '/', entry->name.n);
    const char *begin = slash == NULL ? entry->name.data : slash + 1;
    size_t n = entry->name.n - (size_t)(begin - entry->name.data);
    PyObject *name = PyUnicode_DecodeUTF8(begin, (Py_ssize_t)n, NULL);
    if (name == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError,
                     "%s: damaged archive: a record's name is no text", a->source.path);
    }
    return name;
}

/* Puts value, taken over, under the record's name; two parts before it may differ. */
static int
set_record(PyObject *dict, const archive *a, const ct_zip_entry *entry, PyObject *value)
{
    PyObject *name = value == NULL ? NULL : record_name(a, entry);
    int there = name == NULL ? -1 : PyDict_Contains(dict, name);
    if (there == 1) {
        PyErr_Format(PyExc_ValueError,
                     "%s: damaged archive: record '%U' is there twice", a->source.path,
                     name);
    }
    int failed = there != 0 || PyDict_SetItem(dict, name, value) < 0;
    Py_XDECREF(name);
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

/* Aligned memory of n bytes as a memoryview, which keeps it. */
static PyObject *
make_room(uint64_t n, void **target)
{
    PyObject *bytes =
        n > PY_SSIZE_T_MAX - ALIGNMENT
            ? PyErr_NoMemory()
            : PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)n + ALIGNMENT);
    PyObject *view = bytes == NULL ? NULL : PyMemoryView_FromObject(bytes),
             *part = NULL;
    if (view != NULL) {
        uintptr_t at = (uintptr_t)PyByteArray_AS_STRING(bytes);
        Py_ssize_t skip = (Py_ssize_t)((ALIGNMENT - at % ALIGNMENT) % ALIGNMENT);
        *target = PyByteArray_AS_STRING(bytes) + skip;
        part = PySequence_GetSlice(view, skip, skip + (Py_ssize_t)n);
    }
    Py_XDECREF(view);
    Py_XDECREF(bytes);
    return part;
}

static int
make_rooms(PyObject *dict, const archive *a, void **targets)
{
    for (size_t i = 0; i < a->index.n; i++) {
        const ct_zip_entry *entry = &a->index.entries[i];
        if (set_record(dict, a, entry, make_room(entry->bytes, &targets[i])) < 0) {
            return -1;
        }
    }
    return 0;
}

/* All records, each in memory of its own. */
static PyObject *
archive_to_dict(const archive *a)
{
    ct_error err;
    ct_status status;
    PyObject *dict = PyDict_New();
    void **targets = (void **)ct_calloc(a->index.n + 1, sizeof(void *));
    if (targets == NULL) {
        (void)PyErr_NoMemory();
    }
    if (dict == NULL || targets == NULL || make_rooms(dict, a, targets) < 0) {
        Py_CLEAR(dict);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        status = ct_zip_read(&a->index, &a->source, targets, a->expected, &err);
        Py_END_ALLOW_THREADS
        if (status != CT_OK) {
            Py_CLEAR(dict);
            (void)ctpy_raise(&err);
        }
    }
    ct_free((void *)targets);
    return dict;
}

const char ctpy_read_archive_doc[] =
    "read_archive($module, path, content, expected, /)\n--\n\n"
    "Return the records of a file of torch.save, {name: writable memory}, read "
    "once.\n\n"
    "Names are without their first part. content: None, or the file's bytes, path "
    "being\n"
    "its name then. expected: None, or (bytes, crc32c) of the file; without, every "
    "record\n"
    "is compared with its own checksum. None where the file does not begin as an "
    "archive\n"
    "does. Raises ValueError or OSError, naming the file, where it is damaged.";

PyObject *
ctpy_read_archive(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path, *content, *expected, *dict = NULL;
    archive a;
    if (!PyArg_ParseTuple(args, "OOO:read_archive", &path, &content, &expected)) {
        return NULL;
    }
    int opened = archive_open(&a, path, content == Py_None ? NULL : content, expected);
    if (opened == 1) {
        dict = archive_to_dict(&a);
    }
    else if (opened == 0) {
        dict = Py_NewRef(Py_None);
    }
    archive_fini(&a);
    return dict;
}

/* Compares all data with its checksums; {name: (offset, bytes)}. */
static PyObject *
places_of(const archive *a)
{
    ct_error err;
    ct_status status = CT_OK;
    PyObject *dict = PyDict_New();
    void **nowhere = (void **)ct_calloc(a->index.n + 1, sizeof(void *));
    if (nowhere == NULL) {
        (void)PyErr_NoMemory();
        Py_CLEAR(dict);
    }
    for (size_t i = 0; i < a->index.n && dict != NULL; i++) {
        const ct_zip_entry *entry = &a->index.entries[i];
        PyObject *place = Py_BuildValue("(KK)", (unsigned long long)entry->offset,
                                        (unsigned long long)entry->bytes);
        if (set_record(dict, a, entry, place) < 0) {
            Py_CLEAR(dict);
        }
    }
    if (dict != NULL) {
        Py_BEGIN_ALLOW_THREADS
        status = ct_zip_read(&a->index, &a->source, nowhere, a->expected, &err);
        Py_END_ALLOW_THREADS
    }
    if (status != CT_OK) {
        Py_CLEAR(dict);
        (void)ctpy_raise(&err);
    }
    ct_free((void *)nowhere);
    return dict;
}

const char ctpy_archive_index_doc[] =
    "archive_index($module, path, expected, /)\n--\n\n"
    "Return {name: (offset, bytes)} of the records of a file of torch.save, whose data "
    "is\n"
    "compared with its checksums and stays in the file; see read_archive().";

PyObject *
ctpy_archive_index(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path, *expected, *dict = NULL;
    archive a;
    if (!PyArg_ParseTuple(args, "OO:archive_index", &path, &expected)) {
        return NULL;
    }
    int opened = archive_open(&a, path, NULL, expected);
    if (opened == 1) {
        dict = places_of(&a);
    }
    else if (opened == 0) {
        PyErr_Format(PyExc_ValueError, "%s: is no file of torch.save since torch 1.6",
                     a.source.path);
    }
    archive_fini(&a);
    return dict;
}
