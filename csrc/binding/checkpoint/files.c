/* Functions of the module that read and verify the files of checkpoints.
 *
 * Every byte is summed in the pass that reads it. Names, dtypes and shapes are compared
 * before a tensor of the caller's is touched; checksums are known only afterwards. */
#include "binding/checkpoint/tensors.h"

#include "core/base/alloc.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/staging.h"
#include "core/checkpoint/zip.h"

#include <stdbool.h>
#include <string.h>

/* ---- expectations ---------------------------------------------------------------- */

/* The expected size and checksum of a file; `known` NULL: nothing is expected. */
typedef struct expectation {
    ct_expected buffer;
    const ct_expected *known;
} expectation;

/* Of PyArg_ParseTuple: None or a tuple (bytes, crc32c). */
static int
expectation_from(PyObject *op, void *arg)
{
    expectation *e = arg;
    unsigned long long bytes;
    unsigned int crc;
    e->known = NULL;
    if (op == Py_None) {
        return 1;
    }
    if (!PyTuple_Check(op)) {
        PyErr_SetString(PyExc_TypeError, "expected must be None or (bytes, crc32c)");
        return 0;
    }
    if (!PyArg_ParseTuple(op, "KI;expected must be (bytes, crc32c)", &bytes, &crc)) {
        return 0;
    }
    e->buffer = (ct_expected){bytes, crc};
    /* Into the struct itself, which the caller does not move. */
    e->known = &e->buffer;
    return 1;
}

/* ---- safetensors ----------------------------------------------------------------- */

static PyObject *
text_to_str(ct_text text)
{
    return PyUnicode_DecodeUTF8(text.data, (Py_ssize_t)text.n, NULL);
}

static ct_st_file *
open_file(PyObject *path, const ct_expected *expected)
{
    ct_st_file *file = NULL;
    ct_status status;
    ct_error err;
    Py_BEGIN_ALLOW_THREADS
    status = ct_st_open(&file, PyBytes_AS_STRING(path), expected, &err);
    Py_END_ALLOW_THREADS
    if (status != CT_OK) {
        (void)ctpy_raise(&err);
    }
    return file;
}

static PyObject *
metadata_to_dict(const ct_st_file *file)
{
    size_t n;
    const ct_st_pair *pairs = ct_st_metadata_borrow(file, &n);
    PyObject *dict = PyDict_New();
    for (size_t i = 0; i < n && dict != NULL; i++) {
        PyObject *key = text_to_str(pairs[i].key), *value = text_to_str(pairs[i].value);
        if (key == NULL || value == NULL || PyDict_SetItem(dict, key, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
        Py_XDECREF(key);
    }
    return dict;
}

static PyObject *
shape_to_tuple(const ct_st_tensor *tensor)
{
    PyObject *shape = PyTuple_New((Py_ssize_t)tensor->ndim);
    for (size_t i = 0; i < tensor->ndim && shape != NULL; i++) {
        PyObject *extent = PyLong_FromUnsignedLongLong(tensor->shape[i]);
        if (extent == NULL || PyTuple_SetItem(shape, (Py_ssize_t)i, extent) < 0) {
            Py_CLEAR(shape);
        }
    }
    return shape;
}

/* (name, dtype, shape, bytes) */
static PyObject *
tensor_to_tuple(const ct_st_tensor *tensor)
{
    const ct_text name = tensor->name, tag = tensor->tag;
    PyObject *shape = shape_to_tuple(tensor);
    return shape == NULL
               ? NULL
               : Py_BuildValue("s#s#NK", name.data, (Py_ssize_t)name.n, tag.data,
                               (Py_ssize_t)tag.n, shape,
                               (unsigned long long)(tensor->end - tensor->begin));
}

static PyObject *
tensors_to_list(const ct_st_file *file)
{
    size_t n;
    const ct_st_tensor *tensors = ct_st_tensors_borrow(file, &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < n && list != NULL; i++) {
        PyObject *item = tensor_to_tuple(&tensors[i]);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

static const char ctpy_safetensors_index_doc[] =
    "safetensors_index($module, path, check=False, expected=None, /)\n--\n\n"
    "Return (metadata, [(name, dtype, shape, bytes), ...]) of a safetensors file.\n\n"
    "Raises ValueError, naming the file, when it is not whole. With check, the data "
    "is\n"
    "read and compared with the checksum in the metadata, if there is one; with\n"
    "expected, (bytes, crc32c), the whole file is compared with that, too.";

/* Reads the data to no targets, if it is to be checked. */
static int
check_data(const ct_st_file *file, int check, const ct_expected *expected)
{
    ct_error err;
    ct_status status = CT_OK;
    if (check) {
        /* Reads the whole file. */
        Py_BEGIN_ALLOW_THREADS
        status = ct_st_read(file, NULL, true, expected, &err);
        Py_END_ALLOW_THREADS
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static PyObject *
ctpy_safetensors_index(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path = NULL, *metadata = NULL, *pair = NULL;
    int check = 0;
    expectation e = {.known = NULL};
    if (!PyArg_ParseTuple(args, "O&|pO&:safetensors_index", PyUnicode_FSConverter,
                          &path, &check, expectation_from, &e)) {
        return NULL;
    }
    ct_st_file *file = open_file(path, e.known);
    if (file != NULL && check_data(file, check, e.known) == 0 &&
        (metadata = metadata_to_dict(file)) != NULL) {
        pair = Py_BuildValue("NN", metadata, tensors_to_list(file));
    }
    ct_st_close(file);
    Py_DECREF(path);
    return pair;
}

/* Compares a tensor of the file with the tensor to read into. */
static int
check_fit(PyObject *path, const ct_st_tensor *stored, const ct_st_entry *entry)
{
    if (ct_text_is(stored->tag, entry->tag) && stored->ndim == entry->ndim &&
        (entry->ndim == 0 || /* and then there is no shape */
         memcmp(stored->shape, entry->shape, entry->ndim * sizeof(uint64_t)) == 0) &&
        stored->end - stored->begin == entry->bytes) {
        return 0;
    }
    PyObject *name = text_to_str(stored->name), *tag = text_to_str(stored->tag);
    PyObject *shape = shape_to_tuple(stored);
    if (name != NULL && tag != NULL && shape != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%s: tensor '%U' is %U of shape %R there, which does not fit the "
                     "%s it is to be read into",
                     PyBytes_AS_STRING(path), name, tag, shape, entry->tag);
    }
    Py_XDECREF(shape);
    Py_XDECREF(tag);
    Py_XDECREF(name);
    return -1;
}

/* The targets of the file's tensors; `wanted` also marks empty tensors, which have no
 * address. */
typedef struct load {
    void **targets;
    bool *wanted;
    PyObject *missing, *unexpected; /* lists of names */
} load;

static void
load_fini(load *l)
{
    Py_CLEAR(l->unexpected);
    Py_CLEAR(l->missing);
    ct_free(l->wanted);
    ct_free((void *)l->targets);
}

static int
load_init(load *l, const ct_st_file *file)
{
    size_t n;
    /* One place for every tensor of the file, wanted or not: the data is read in its
     * order. */
    (void)ct_st_tensors_borrow(file, &n);
    l->targets = (void **)ct_calloc(n + 1, sizeof(void *));
    l->wanted = ct_calloc(n + 1, sizeof(bool));
    l->missing = PyList_New(0);
    l->unexpected = PyList_New(0);
    if (l->targets == NULL || l->wanted == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    return l->missing == NULL || l->unexpected == NULL ? -1 : 0;
}

/* Finds the file's tensor for each wanted tensor; names without one are missing. */
static int
match(PyObject *path, const ct_st_file *file, const ctpy_tensors *tensors, load *l)
{
    size_t n;
    const ct_st_tensor *all = ct_st_tensors_borrow(file, &n);
    for (size_t i = 0; i < tensors->n; i++) {
        const ct_st_entry *entry = &tensors->entries[i];
        const ct_st_tensor *stored = ct_st_find_borrow(file, entry->name);
        if (stored == NULL) {
            PyObject *pair = PyList_GET_ITEM(tensors->items, (Py_ssize_t)i);
            if (PyList_Append(l->missing, PyTuple_GET_ITEM(pair, 0)) < 0) {
                return -1;
            }
            continue;
        }
        /* Before any byte is read: a wrong shape leaves all tensors as they were. */
        if (check_fit(path, stored, entry) < 0) {
            return -1;
        }
        l->targets[stored - all] = (void *)entry->data;
        l->wanted[stored - all] = true;
    }
    return 0;
}

static int
list_unexpected(const ct_st_file *file, const load *l)
{
    size_t n;
    const ct_st_tensor *all = ct_st_tensors_borrow(file, &n);
    for (size_t i = 0; i < n; i++) {
        PyObject *name = l->wanted[i] ? NULL : text_to_str(all[i].name);
        int failed =
            !l->wanted[i] && (name == NULL || PyList_Append(l->unexpected, name) < 0);
        Py_XDECREF(name);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

static int
reject_differences(PyObject *path, const load *l)
{
    if (PyList_GET_SIZE(l->missing) == 0 && PyList_GET_SIZE(l->unexpected) == 0) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "%s: the file lacks %R and has %R, which were not asked for; pass "
                 "strict=False to read what both have",
                 PyBytes_AS_STRING(path), l->missing, l->unexpected);
    return -1;
}

/* Everything is checked before the first byte is read into a tensor. */
static PyObject *
load_file(PyObject *path, const ct_st_file *file, const ctpy_tensors *tensors,
          int strict, int check, const ct_expected *expected)
{
    load l = {0};
    ct_error err;
    PyObject *answer = NULL;
    if (load_init(&l, file) == 0 && match(path, file, tensors, &l) == 0 &&
        list_unexpected(file, &l) == 0 &&
        (!strict || reject_differences(path, &l) == 0)) {
        ct_status status;
        Py_BEGIN_ALLOW_THREADS
        status = ct_st_read(file, l.targets, check != 0, expected, &err);
        Py_END_ALLOW_THREADS
        answer = status == CT_OK ? PyTuple_Pack(2, l.missing, l.unexpected)
                                 : ctpy_raise(&err);
    }
    load_fini(&l);
    return answer;
}

static const char ctpy_load_safetensors_into_doc[] =
    "load_safetensors_into($module, path, tensors, strict, check, expected=None, /)\n"
    "--\n\n"
    "Read a safetensors file straight into the memory of a dict of named tensors.\n\n"
    "Returns (names the file lacks, names that were not asked for); with strict, "
    "either\n"
    "raises ValueError, as does a dtype or shape that differs, before anything is\n"
    "changed. With check, the data is compared with the checksum that ctrainer "
    "writes;\n"
    "with expected, (bytes, crc32c), the whole file is compared with that, too. "
    "ValueError\n"
    "then, but the tensors have been overwritten.";

static PyObject *
ctpy_load_safetensors_into(PyObject *module, PyObject *args)
{
    PyObject *dict, *answer = NULL, *path = NULL;
    int strict, check;
    ctpy_tensors tensors = {.writable = true};
    expectation e = {.known = NULL};
    if (!PyArg_ParseTuple(args, "O&Opp|O&:load_safetensors_into", PyUnicode_FSConverter,
                          &path, &dict, &strict, &check, expectation_from, &e)) {
        return NULL;
    }
    /* Owned until the file has been read, as the GIL is released meanwhile. */
    if (ctpy_tensors_from(PyModule_GetState(module), dict, &tensors) == 0) {
        ct_st_file *file = open_file(path, e.known);
        if (file != NULL) {
            answer = load_file(path, file, &tensors, strict, check, e.known);
        }
        ct_st_close(file);
    }
    ctpy_tensors_fini(&tensors);
    Py_DECREF(path);
    return answer;
}

/* ---- folders --------------------------------------------------------------------- */

static const char ctpy_recover_saves_doc[] =
    "recover_saves($module, folder, /)\n--\n\n"
    "Restore the names of checkpoints that a process was replacing in folder when it\n"
    "was killed, and remove what else dead processes left of saves there.";

static PyObject *
ctpy_recover_saves(PyObject *Py_UNUSED(module), PyObject *arg)
{
    PyObject *path = ctpy_path_from(arg);
    if (path == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    ct_staging_recover(PyBytes_AS_STRING(path));
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    Py_RETURN_NONE;
}

/* Collects problems as text: there is no GIL. */
static ct_status
collect(void *arg, const char *problem, ct_error *err)
{
    return ct_buf_add(arg, problem, strlen(problem) + 1, err);
}

static PyObject *
texts_to_list(const ct_buf *buf)
{
    PyObject *list = PyList_New(0);
    for (size_t at = 0; at < buf->n && list != NULL;) {
        const char *text = (const char *)buf->data + at;
        /* Names of files need not be UTF-8. */
        PyObject *item = PyUnicode_DecodeFSDefault(text);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
        at += strlen(text) + 1;
    }
    return list;
}

static const char ctpy_verify_manifest_doc[] =
    "verify_manifest($module, folder, /)\n--\n\n"
    "Compare a checkpoint's files with its manifest; return the problems, as str.\n\n"
    "Raises FileNotFoundError when it has no manifest, ValueError when that is "
    "damaged.";

static PyObject *
ctpy_verify_manifest(PyObject *Py_UNUSED(module), PyObject *arg)
{
    ct_error err;
    ct_status status;
    ct_buf problems = {0};
    PyObject *list = NULL, *path = ctpy_path_from(arg);
    if (path == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_manifest_verify(PyBytes_AS_STRING(path), collect, &problems, &err);
    Py_END_ALLOW_THREADS
    list = status == CT_OK ? texts_to_list(&problems) : ctpy_raise(&err);
    ct_buf_fini(&problems);
    Py_DECREF(path);
    return list;
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

static const char ctpy_read_manifest_doc[] =
    "read_manifest($module, folder, /)\n--\n\n"
    "Return {name: (bytes, crc32c)} of the files that a checkpoint's manifest "
    "lists.\n\n"
    "Raises FileNotFoundError when it has no manifest, ValueError when that is "
    "damaged,\n"
    "lists no file, or one outside of the folder.";

static PyObject *
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

/* ---- whole files ----------------------------------------------------------------- */

/* The whole source as bytes. */
static PyObject *
read_whole(const ct_source *source, unsigned long long limit,
           const ct_expected *expected)
{
    ct_error err;
    ct_status status;
    /* Before the allocation: the file may be of any size. */
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

static const char ctpy_read_file_doc[] =
    "read_file($module, path, limit, expected, /)\n--\n\n"
    "Return the bytes of a regular file, read once.\n\n"
    "expected: None, or (bytes, crc32c), as read_manifest() gives them. Raises "
    "ValueError\n"
    "where the file has more than limit bytes, is no regular file or differs from "
    "what is\n"
    "expected; OSError where it cannot be read.";

static PyObject *
ctpy_read_file(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path = NULL, *content = NULL;
    unsigned long long limit;
    expectation e;
    ct_source source;
    ct_error err;
    ct_status status;
    if (!PyArg_ParseTuple(args, "O&KO&:read_file", PyUnicode_FSConverter, &path, &limit,
                          expectation_from, &e)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_source_open(&source, PyBytes_AS_STRING(path), e.known, &err);
    Py_END_ALLOW_THREADS
    if (status == CT_OK) {
        /* A bytes object cannot be longer than this. */
        content = read_whole(&source, limit < PY_SSIZE_T_MAX ? limit : PY_SSIZE_T_MAX,
                             e.known);
        ct_source_close(&source);
    }
    else {
        (void)ctpy_raise(&err);
    }
    Py_DECREF(path);
    return content;
}

/* ---- archives -------------------------------------------------------------------- */

enum {
    ALIGNMENT = 64 /* of a record in memory, as torch's own */
};

/* An open archive: a file or memory. */
typedef struct archive {
    PyObject *path;
    Py_buffer view;
    ct_source source;
    ct_zip_index index;
    expectation expected;
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

/* Opens the archive at a->path, or with `content` (may be NULL) that memory under this
 * name. 1; 0 for content that does not begin as an archive; -1 with an exception. */
static int
archive_open(archive *a, PyObject *content)
{
    ct_error err;
    ct_status status = CT_OK;
    bool is_zip = false;
    const char *path = PyBytes_AS_STRING(a->path);
    if (content != NULL && PyObject_GetBuffer(content, &a->view, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    if (content == NULL) {
        status = ct_source_open(&a->source, path, a->expected.known, &err);
    }
    else {
        a->source = (ct_source){.path = path,
                                .memory = a->view.buf,
                                .fd = -1,
                                .bytes = (uint64_t)a->view.len};
    }
    /* torch before 1.6 wrote pickles without an archive, which are the caller's to
     * read. */
    if (status == CT_OK && (is_zip = ct_zip_is(&a->source))) {
        status = ct_zip_index_read(&a->index, &a->source, &err);
    }
    Py_END_ALLOW_THREADS
    return status == CT_OK ? is_zip : ctpy_raise_int(&err);
}

/* A record's name without its first part, the file's stem, which torch.save puts before
 * all names. */
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

/* Sets dict[name of the record] to value, taken over. Names may become equal without
 * their first parts. */
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

/* Aligned memory of n bytes, as a memoryview that owns it. */
static PyObject *
new_memory(uint64_t n, void **target)
{
    PyObject *bytes =
        n > PY_SSIZE_T_MAX - ALIGNMENT
            ? PyErr_NoMemory()
            : PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)n + ALIGNMENT);
    PyObject *view = bytes == NULL ? NULL : PyMemoryView_FromObject(bytes),
             *part = NULL;
    if (view != NULL) {
        /* Storages that torch allocates have this alignment, too. */
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
read_records(const archive *a, void *const *targets)
{
    ct_error err;
    ct_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ct_zip_read(&a->index, &a->source, targets, a->expected.known, &err);
    Py_END_ALLOW_THREADS
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* {name: memory} of the records. */
static PyObject *
archive_to_dict(const archive *a)
{
    PyObject *dict = PyDict_New();
    void **targets = (void **)ct_calloc(a->index.n + 1, sizeof(void *));
    if (targets == NULL) {
        (void)PyErr_NoMemory();
        Py_CLEAR(dict);
    }
    for (size_t i = 0; i < a->index.n && dict != NULL; i++) {
        const ct_zip_entry *entry = &a->index.entries[i];
        if (set_record(dict, a, entry, new_memory(entry->bytes, &targets[i])) < 0) {
            Py_CLEAR(dict);
        }
    }
    /* All memory is there before the first byte is read: the file is read once, in
     * order. */
    if (dict != NULL && read_records(a, targets) < 0) {
        Py_CLEAR(dict);
    }
    ct_free((void *)targets);
    return dict;
}

static const char ctpy_read_archive_doc[] =
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

static PyObject *
ctpy_read_archive(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *content, *dict = NULL;
    archive a = {.source = {.fd = -1}};
    if (!PyArg_ParseTuple(args, "O&OO&:read_archive", PyUnicode_FSConverter, &a.path,
                          &content, expectation_from, &a.expected)) {
        return NULL;
    }
    int opened = archive_open(&a, content == Py_None ? NULL : content);
    if (opened >= 0) {
        dict = opened == 1 ? archive_to_dict(&a) : Py_NewRef(Py_None);
    }
    archive_fini(&a);
    return dict;
}

/* {name: (offset, bytes)} of the records, after a comparison of all data with its
 * checksums. */
static PyObject *
places_of(const archive *a)
{
    PyObject *dict = read_records(a, NULL) < 0 ? NULL : PyDict_New();
    for (size_t i = 0; i < a->index.n && dict != NULL; i++) {
        const ct_zip_entry *entry = &a->index.entries[i];
        PyObject *place = Py_BuildValue("(KK)", (unsigned long long)entry->offset,
                                        (unsigned long long)entry->bytes);
        if (set_record(dict, a, entry, place) < 0) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

static const char ctpy_archive_index_doc[] =
    "archive_index($module, path, expected, /)\n--\n\n"
    "Return {name: (offset, bytes)} of the records of a file of torch.save, whose data "
    "is\n"
    "compared with its checksums and stays in the file; see read_archive().";

static PyObject *
ctpy_archive_index(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *dict = NULL;
    archive a = {.source = {.fd = -1}};
    if (!PyArg_ParseTuple(args, "O&O&:archive_index", PyUnicode_FSConverter, &a.path,
                          expectation_from, &a.expected)) {
        return NULL;
    }
    int opened = archive_open(&a, NULL);
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

/* ---- the table ------------------------------------------------------------------- */

PyMethodDef ctpy_checkpoint_files_functions[] = {
    {"archive_index",         ctpy_archive_index,         METH_VARARGS, ctpy_archive_index_doc  },
    {"load_safetensors_into", ctpy_load_safetensors_into, METH_VARARGS,
     ctpy_load_safetensors_into_doc                                                             },
    {"read_archive",          ctpy_read_archive,          METH_VARARGS, ctpy_read_archive_doc   },
    {"read_file",             ctpy_read_file,             METH_VARARGS, ctpy_read_file_doc      },
    {"read_manifest",         ctpy_read_manifest,         METH_O,       ctpy_read_manifest_doc  },
    {"recover_saves",         ctpy_recover_saves,         METH_O,       ctpy_recover_saves_doc  },
    {"safetensors_index",     ctpy_safetensors_index,     METH_VARARGS,
     ctpy_safetensors_index_doc                                                                 },
    {"verify_manifest",       ctpy_verify_manifest,       METH_O,       ctpy_verify_manifest_doc},
    {NULL,                    NULL,                       0,            NULL                    },
};
