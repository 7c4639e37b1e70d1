/* direct.c: a buffer's calls from Python in one step, as a CPython extension (smb._direct). A small
 * call over shared memory takes the engine 50 ns; through Python code and cffi it took 1 to 2 us.
 *
 * `Method` stands in front of a Python method of a subclass of `Direct`, whose objects hold a
 * `DirectTarget` in `_target`. A usual call (a numpy array of the buffer's dtype, contiguous, on a
 * buffer whose segments are known) is handed to the engine from here. For every other call nothing
 * is done here, and the Python method is called. The Python method is the definition, and this file
 * is the short path to the same result. When the engine refuses a call, the target's `go_on` gets
 * the call and its outcome: it decides and raises as for Python's own calls.
 *
 * Threads. All fields are read and written with the GIL. A call that may wait or takes long
 * releases the GIL and keeps a reference to the handle, because another thread may disarm the
 * target meanwhile.
 *
 * The engine's functions are pointers taken from smb._engine: this module does not link against the
 * engine's library.
 *
 * One compiled module serves every Python from 3.10 on: the build asks for the limited API of 3.10,
 * and the few declarations of later ones that this file needs are below. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "smb/client.h"

/* ---- what became part of the limited API after 3.10 ----------------------------------------- */

/* Headers hide these under the limited API of 3.10. Buffers are part of the stable ABI from 3.11,
 * vectorcall from 3.12. The releases before that, which change no more, export the same functions
 * with the same layouts. */
typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len, itemsize;
    int readonly, ndim;
    char *format;
    Py_ssize_t *shape, *strides, *suboffsets;
    void *internal;
} Py_buffer;

enum {
    BUFFER_WRITABLE = 0x1,
    BUFFER_FORMAT = 0x4,
    BUFFER_C_CONTIGUOUS = 0x20 | 0x10 | 0x8, /* with strides, which have dimensions */
};

#define TYPE_HAS_VECTORCALL (1UL << 11)
/* set in a vectorcall's number of arguments if the callee may write before the first of them */
#define ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))

typedef PyObject *(*vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);

PyAPI_FUNC(int) PyObject_GetBuffer(PyObject *, Py_buffer *, int);
PyAPI_FUNC(void) PyBuffer_Release(Py_buffer *);
PyAPI_FUNC(PyObject *) PyVectorcall_Call(PyObject *, PyObject *, PyObject *);

/* up to this size a call that needs no waiting takes 2 us at most: as long as handing the GIL
 * over */
enum { HOLD_GIL_BYTES = 64 << 10 };

typedef int (*transfer_function)(struct smb_buffer *, const struct smb_request *,
                                 struct smb_outcome *);
static transfer_function engine_transfer, engine_transfer_at_once;
static PyTypeObject *array_type; /* numpy.ndarray */
static PyTypeObject *switch_type, *target_type, *direct_type;
static PyObject *bound_method; /* types.MethodType */
static PyObject *name_offset, *name_count, *name_out, *name_scale, *name_wire;
static unsigned long forks; /* how many forks lie between this process and the first */

/* Replaces the object of a field, which may be NULL, by another one. */
static void set_field(PyObject **field, PyObject *value)
{
    PyObject *before = *field;
    *field = Py_NewRef(value);
    Py_XDECREF(before);
}

/* ---- signals, while a call waits ------------------------------------------------------------- */

/* an exception that a signal handler raised during a call of this thread; the thread's caller
 * raises it */
static _Thread_local PyObject *interrupt;

/* Call with the GIL. Runs the handlers of signals that have come. Does nothing on other threads
 * than the main one. */
static void run_handlers(void)
{
    if (PyErr_CheckSignals() != 0) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        if (value && trace)
            PyException_SetTraceback(value, trace);
        interrupt = value;
        Py_XDECREF(type);
        Py_XDECREF(trace);
    }
}

/* The engine's calls run without the GIL. Only the main thread runs Python's handlers. */
static int look(void)
{
    if (interrupt)
        return 1;
    if (getpid() != (pid_t)syscall(SYS_gettid))
        return 0;
    PyGILState_STATE state = PyGILState_Ensure();
    run_handlers();
    PyGILState_Release(state);
    return interrupt != NULL;
}

/* ---- whether the client is still open: one for all its buffers ------------------------------- */

typedef struct {
    PyObject_HEAD char open;
} Switch;

static PyMemberDef switch_members[] = {
    {"open", T_BOOL, offsetof(Switch, open), 0, "Whether calls may begin."},
    {NULL},
};

static PyType_Slot switch_slots[] = {
    {Py_tp_doc, "Turns all targets that were armed with it on and off."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_members, switch_members},
    {0, NULL},
};

static PyType_Spec switch_spec = {
    .name = "smb._direct.Switch",
    .basicsize = sizeof(Switch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = switch_slots,
};

/* ---- the target of direct calls -------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD PyObject *go_on; /* called with a call that failed */
    PyObject *handle;              /* keeps `buffer` alive; NULL: not armed */
    Switch *client;
    Switch *quiet; /* closed while the buffer has async calls, which have their turn first */
    struct smb_buffer *buffer;
    PyObject *shape; /* a tuple of integers */
    Py_ssize_t dimensions;
    uint64_t size; /* elements */
    uint32_t itemsize, timeout_ms;
    char format; /* code of the buffer protocol */
    unsigned long forks;
} DirectTarget;

static int target_traverse(DirectTarget *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->go_on);
    Py_VISIT(self->handle);
    Py_VISIT(self->client);
    Py_VISIT(self->quiet);
    Py_VISIT(self->shape);
    return 0;
}

static PyObject *target_disarm(DirectTarget *self, PyObject *Py_UNUSED(ignored))
{
    Py_CLEAR(self->handle);
    Py_CLEAR(self->client);
    Py_CLEAR(self->quiet);
    Py_CLEAR(self->shape);
    Py_RETURN_NONE;
}

static int target_clear(DirectTarget *self)
{
    Py_DECREF(target_disarm(self, NULL));
    Py_CLEAR(self->go_on);
    return 0;
}

static void target_dealloc(DirectTarget *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    target_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyObject *target_arm(DirectTarget *self, PyObject *args)
{
    PyObject *handle, *client, *quiet, *shape;
    unsigned long long buffer, size;
    unsigned int itemsize, timeout_ms;
    int format;
    if (!PyArg_ParseTuple(args, "OO!O!KO!KICI:arm", &handle, switch_type, &client, switch_type,
                          &quiet, &buffer, &PyTuple_Type, &shape, &size, &itemsize, &format,
                          &timeout_ms))
        return NULL;
    Py_ssize_t dimensions = PyTuple_Size(shape);
    if (dimensions < 0)
        return NULL;
    /* NOLINT: cffi gives the pointer as a number */
    self->buffer = (struct smb_buffer *)(uintptr_t)buffer;
    self->size = size;
    self->itemsize = itemsize;
    self->timeout_ms = timeout_ms;
    self->format = (char)format;
    self->forks = forks;
    self->dimensions = dimensions;
    set_field((PyObject **)&self->client, client);
    set_field((PyObject **)&self->quiet, quiet);
    set_field(&self->shape, shape);
    set_field(&self->handle, handle);
    Py_RETURN_NONE;
}

static PyObject *target_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"go_on", NULL};
    PyObject *callable;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O:DirectTarget", names, &callable))
        return NULL;
    DirectTarget *self = (DirectTarget *)PyType_GenericAlloc(type, 0);
    if (self)
        self->go_on = Py_NewRef(callable);
    return (PyObject *)self;
}

static PyMethodDef target_methods[] = {
    {"arm", (PyCFunction)target_arm, METH_VARARGS,
     "arm(handle, client, quiet, buffer, shape, size, itemsize, format, timeout_ms): let calls go\n"
     "directly to the engine's `buffer`, which `handle` keeps alive, while both switches are on."},
    {"disarm", (PyCFunction)target_disarm, METH_NOARGS,
     "Let all calls go to the Python methods again."},
    {NULL},
};

static PyType_Slot target_slots[] = {
    {Py_tp_doc,
     "DirectTarget(go_on): the engine's buffer to which the direct calls of one object go.\n"
     "go_on(started, request, outcome) completes a call that failed. `started` is in seconds\n"
     "of the monotonic clock; the others are addresses of the engine's structs."},
    {Py_tp_new, target_new},
    {Py_tp_dealloc, target_dealloc},
    {Py_tp_traverse, target_traverse},
    {Py_tp_clear, target_clear},
    {Py_tp_methods, target_methods},
    {0, NULL},
};

static PyType_Spec target_spec = {
    .name = "smb._direct.DirectTarget",
    .basicsize = sizeof(DirectTarget),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = target_slots,
};

/* ---- the base of classes with direct methods ------------------------------------------------- */

typedef struct {
    PyObject_HEAD PyObject *target; /* NULL or any object: a DirectTarget is looked for */
} Direct;

static int direct_traverse(Direct *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->target);
    return 0;
}

static int direct_clear(Direct *self)
{
    Py_CLEAR(self->target);
    return 0;
}

static void direct_dealloc(Direct *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    direct_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMemberDef direct_members[] = {
    {"_target", T_OBJECT_EX, offsetof(Direct, target), 0, "The DirectTarget of this object."},
    {NULL},
};

static PyType_Slot direct_slots[] = {
    {Py_tp_doc, "The base of classes with direct methods."},
    {Py_tp_dealloc, direct_dealloc},
    {Py_tp_traverse, direct_traverse},
    {Py_tp_clear, direct_clear},
    {Py_tp_members, direct_members},
    {0, NULL},
};

static PyType_Spec direct_spec = {
    .name = "smb._direct.Direct",
    .basicsize = sizeof(Direct),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = direct_slots,
};

/* ---- the methods ----------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD PyObject *function; /* the Python method */
    vectorcall call;
    int opcode;
} Method;

/* A call's arguments, parsed. References are borrowed. */
struct given {
    PyObject *array; /* the array to read from, or `out` */
    PyObject *offset, *count, *scale, *wire;
    PyObject *value, *expected; /* arguments of fetch_add and compare_swap */
};

static bool is_atomic(int opcode)
{
    return opcode == SMB_FETCH_ADD || opcode == SMB_COMPARE_SWAP;
}

/* False: an argument that only the Python method handles. */
static bool sort_arguments(int opcode, PyObject *const *args, Py_ssize_t positional,
                           PyObject *names, struct given *given)
{
    PyObject **orders[][3] = {
        [SMB_READ] = {&given->offset, &given->count},
        [SMB_WRITE] = {&given->array, &given->offset},
        [SMB_ACCUMULATE] = {&given->array, &given->offset},
        [SMB_FETCH_ADD] = {&given->offset, &given->value},
        [SMB_COMPARE_SWAP] = {&given->offset, &given->expected, &given->value},
    };
    for (Py_ssize_t i = 0; i < positional; i++) {
        if (i == 3 || !orders[opcode][i])
            return false;
        *orders[opcode][i] = args[i];
    }
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < named; i++) {
        /* interned like ours; if it is not, the Python method takes the call */
        PyObject *name = PyTuple_GetItem(names, i);
        PyObject **slot = name == name_offset && !is_atomic(opcode)        ? &given->offset
                          : name == name_count && opcode == SMB_READ       ? &given->count
                          : name == name_out && opcode == SMB_READ         ? &given->array
                          : name == name_scale && opcode == SMB_ACCUMULATE ? &given->scale
                          : name == name_wire && !is_atomic(opcode)        ? &given->wire
                                                                           : NULL;
        if (!slot || *slot)
            return false;
        *slot = args[positional + i];
    }
    return true;
}

/* The wire of a buffer that has direct calls is "exact", so "exact" and None say nothing new. */
static bool is_exact(PyObject *wire)
{
    return !wire || wire == Py_None ||
           (PyUnicode_Check(wire) && PyUnicode_CompareWithASCIIString(wire, "exact") == 0);
}

/* Only Python's own integers: the Python method refuses a float, and handles numpy's, which are
 * rare. */
static bool integer_of(PyObject *value, long long *integer)
{
    if (!PyLong_CheckExact(value))
        return false;
    int overflow;
    *integer = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0;
}

/* An array of two or more dimensions must have the buffer's shape. */
static bool fits_shape(const DirectTarget *target, const Py_buffer *view)
{
    if (view->ndim < 2)
        return true;
    if (target->dimensions != view->ndim)
        return false;
    for (int i = 0; i < view->ndim; i++) {
        long long extent;
        if (!integer_of(PyTuple_GetItem(target->shape, i), &extent) || extent != view->shape[i])
            return false;
    }
    return true;
}

/* Gets the array's memory and fills in the range, if the array is usual and has the required
 * size. */
static bool array_of(const DirectTarget *target, const struct given *given, bool writable,
                     struct smb_request *request, Py_buffer *view)
{
    long long offset = 0, count = -1;
    if (!given->array || Py_TYPE(given->array) != array_type)
        return false;
    if ((given->offset && !integer_of(given->offset, &offset)) ||
        (given->count && !integer_of(given->count, &count)))
        return false;
    if (offset < 0 || (uint64_t)offset > target->size)
        return false;
    if (PyObject_GetBuffer(given->array, view,
                           BUFFER_C_CONTIGUOUS | BUFFER_FORMAT |
                               (writable ? BUFFER_WRITABLE : 0)) != 0) {
        PyErr_Clear();
        return false;
    }
    uint64_t elements = (uint64_t)view->len / target->itemsize;
    bool usual = view->format && view->format[0] == target->format && view->format[1] == 0 &&
                 (uint32_t)view->itemsize == target->itemsize && elements > 0 &&
                 elements <= target->size - (uint64_t)offset;
    /* A read must fill all that was asked for. A change without an offset must cover the whole
     * buffer. */
    if (usual && writable)
        usual = elements == (given->count ? (uint64_t)count : target->size - (uint64_t)offset) &&
                (elements < target->size || target->dimensions < 2 || fits_shape(target, view));
    else if (usual)
        usual = (given->offset || elements == target->size) && fits_shape(target, view);
    if (!usual) {
        PyBuffer_Release(view);
        return false;
    }
    request->offset = (uint64_t)offset * target->itemsize;
    request->bytes = (uint64_t)view->len;
    return true;
}

/* The number's bits as an element, in the low bytes. False: the Python method takes or refuses the
 * number, or the format has no atomics. */
static bool bits_of(char format, PyObject *number, uint64_t *bits)
{
    *bits = 0;
    if (format == 'f' || format == 'd') {
        if (!PyFloat_CheckExact(number))
            return false;
        double wide = PyFloat_AsDouble(number);
        float narrow = (float)wide;
        memcpy(bits, format == 'f' ? (void *)&narrow : &wide, format == 'f' ? 4 : 8);
        return true;
    }
    long long integer;
    if (!integer_of(number, &integer))
        return false;
    *bits = (uint64_t)integer;
    switch (format) {
    case 'l': return true;
    case 'L': return integer >= 0; /* larger ones are rare */
    case 'i': *bits = (uint32_t)integer; return integer >= INT32_MIN && integer <= INT32_MAX;
    case 'I': return integer >= 0 && integer <= UINT32_MAX;
    default: return false;
    }
}

static PyObject *number_of(char format, uint64_t bits)
{
    float narrow;
    double wide;
    switch (format) {
    case 'f': memcpy(&narrow, &bits, sizeof narrow); return PyFloat_FromDouble((double)narrow);
    case 'd': memcpy(&wide, &bits, sizeof wide); return PyFloat_FromDouble(wide);
    case 'i': return PyLong_FromLong((int32_t)(uint32_t)bits);
    case 'l': return PyLong_FromLongLong((long long)bits);
    default: return PyLong_FromUnsignedLongLong(bits);
    }
}

static PyObject *call_of(int opcode, DirectTarget *target, PyObject *const *args,
                         Py_ssize_t positional, PyObject *names, bool *taken)
{
    struct given given = {0};
    *taken = false;
    if (!target->handle || !target->client->open || !target->quiet->open ||
        target->forks != forks || !sort_arguments(opcode, args, positional, names, &given) ||
        !is_exact(given.wire))
        return NULL;
    struct smb_request request = {.opcode = opcode, .scale = 1.0, .timeout_ms = target->timeout_ms};
    Py_buffer view = {0};
    if (is_atomic(opcode)) {
        long long index;
        if (!given.value || !integer_of(given.offset, &index) ||
            !bits_of(target->format, given.value, &request.argument) ||
            (given.expected && !bits_of(target->format, given.expected, &request.expected)) ||
            index < 0 || (uint64_t)index >= target->size)
            return NULL;
        request.offset = (uint64_t)index * target->itemsize;
        request.bytes = target->itemsize;
    } else {
        if (opcode == SMB_ACCUMULATE) {
            bool integers = target->format == 'l' || target->format == 'i' || target->format == 'B';
            /* dtypes without arithmetic, which the Python method refuses */
            bool storage = strchr("bhHILF?", target->format) != NULL;
            if (storage || (given.scale && (integers || !PyFloat_CheckExact(given.scale))))
                return NULL;
            request.op = SMB_SUM;
            request.scale = given.scale ? PyFloat_AsDouble(given.scale) : 1.0;
        }
        if (!array_of(target, &given, opcode == SMB_READ, &request, &view))
            return NULL;
        if (opcode == SMB_READ)
            request.sink = view.buf;
        else
            request.source = view.buf;
    }
    *taken = true;
    struct smb_outcome outcome;
    uint64_t started_ns = 0;
    PyObject *handle = target->handle;
    struct smb_buffer *buffer = target->buffer;
    Py_INCREF(handle);
    Py_INCREF(target);
    if (request.bytes > HOLD_GIL_BYTES || !engine_transfer_at_once(buffer, &request, &outcome)) {
        Py_BEGIN_ALLOW_THREADS;
        started_ns = smb_now_ns();
        engine_transfer(buffer, &request, &outcome);
        Py_END_ALLOW_THREADS;
    }
    PyObject *result = NULL;
    /* A call too short to be interrupted: what a handler raises after it has no outcome of the
     * call. */
    if (!interrupt)
        run_handlers();
    if (outcome.status != SMB_OK || interrupt)
        result = PyObject_CallFunction(target->go_on, "dKK", (double)started_ns / 1e9,
                                       (unsigned long long)(uintptr_t)&request,
                                       (unsigned long long)(uintptr_t)&outcome);
    else if (is_atomic(opcode))
        result = number_of(target->format, outcome.result);
    else
        result = Py_NewRef(Py_None);
    if (result && !is_atomic(opcode)) /* a number from `go_on`, as from the Python method */
        set_field(&result, opcode == SMB_READ ? given.array : Py_None);
    Py_DECREF(handle);
    Py_DECREF(target);
    if (view.obj)
        PyBuffer_Release(&view);
    return result;
}

/* The same call of the Python method, by what every Python's stable ABI has. */
static PyObject *call_python(PyObject *function, PyObject *const *args, Py_ssize_t positional,
                             PyObject *names)
{
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *result = NULL, *keywords = NULL, *tuple = PyTuple_New(positional);
    if (!tuple || (named && !(keywords = PyDict_New())))
        goto done;
    for (Py_ssize_t i = 0; i < positional; i++)
        PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[positional + i]) != 0)
            goto done;
    result = PyObject_Call(function, tuple, keywords);
done:
    Py_XDECREF(tuple);
    Py_XDECREF(keywords);
    return result;
}

static PyObject *method_vectorcall(PyObject *callable, PyObject *const *args, size_t flags,
                                   PyObject *names)
{
    Method *method = (Method *)callable;
    Py_ssize_t count = (Py_ssize_t)(flags & ~ARGUMENTS_OFFSET);
    PyObject *target = NULL;
    if (count > 0 && PyObject_TypeCheck(args[0], direct_type))
        target = ((Direct *)args[0])->target;
    if (target && Py_IS_TYPE(target, target_type)) {
        bool taken;
        PyObject *result = call_of(method->opcode, (DirectTarget *)target, args + 1, count - 1,
                                   names, &taken);
        if (taken)
            return result;
    }
    return call_python(method->function, args, count, names);
}

static PyObject *method_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"opcode", "function", NULL};
    int opcode;
    PyObject *function;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iO:Method", names, &opcode, &function))
        return NULL;
    if (opcode != SMB_READ && opcode != SMB_WRITE && opcode != SMB_ACCUMULATE && !is_atomic(opcode))
        return PyErr_Format(PyExc_ValueError, "Method: opcode %d has no direct call", opcode);
    Method *self = (Method *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->function = Py_NewRef(function);
    self->call = method_vectorcall;
    self->opcode = opcode;
    return (PyObject *)self;
}

static int method_traverse(Method *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->function);
    return 0;
}

static int method_clear(Method *self)
{
    Py_CLEAR(self->function);
    return 0;
}

static void method_dealloc(Method *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    method_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyObject *method_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    if (!object)
        return Py_NewRef(self);
    return PyObject_CallFunctionObjArgs(bound_method, self, object, NULL);
}

/* Python calls this when the class is made. */
static PyObject *method_set_name(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *owner, *name;
    if (!PyArg_ParseTuple(args, "O!O:__set_name__", &PyType_Type, &owner, &name))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)owner, direct_type))
        return PyErr_Format(PyExc_TypeError, "%S of %R: direct methods need the base Direct", name,
                            owner);
    Py_RETURN_NONE;
}

static PyMethodDef method_methods[] = {
    {"__set_name__", method_set_name, METH_VARARGS, NULL},
    {NULL},
};

/* Name, documentation and signature are those of the Python method. */
static PyObject *method_getattro(PyObject *self, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return found;
    PyErr_Clear();
    return PyObject_GetAttr(((Method *)self)->function, name);
}

static PyObject *method_doc(PyObject *self, void *Py_UNUSED(closure))
{
    return PyObject_GetAttrString(((Method *)self)->function, "__doc__");
}

static PyGetSetDef method_attributes[] = {
    {"__doc__", method_doc, NULL, NULL, NULL},
    {NULL},
};

static PyMemberDef method_members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(Method, function), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, NULL},
    {NULL},
};

static PyType_Slot method_slots[] = {
    {Py_tp_new, method_new},
    {Py_tp_dealloc, method_dealloc},
    {Py_tp_traverse, method_traverse},
    {Py_tp_clear, method_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_descr_get, method_get},
    {Py_tp_getattro, method_getattro},
    {Py_tp_methods, method_methods},
    {Py_tp_getset, method_attributes},
    {Py_tp_members, method_members},
    {0, NULL},
};

static PyType_Spec method_spec = {
    .name = "smb._direct.Method",
    .basicsize = sizeof(Method),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             TYPE_HAS_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = method_slots,
};

/* ---- the module ------------------------------------------------------------------------------ */

static PyObject *set_up(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long transfer, at_once;
    PyObject *array;
    if (!PyArg_ParseTuple(args, "KKO!:set_up", &transfer, &at_once, &PyType_Type, &array))
        return NULL;
    engine_transfer = (transfer_function)(uintptr_t)transfer;
    engine_transfer_at_once = (transfer_function)(uintptr_t)at_once;
    set_field((PyObject **)&array_type, array);
    Py_RETURN_NONE;
}

static PyObject *look_address(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromVoidPtr((void *)(uintptr_t)look);
}

static PyObject *take_interrupt(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *taken = interrupt;
    interrupt = NULL;
    return taken ? taken : Py_NewRef(Py_None);
}

static PyObject *forked(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    forks++;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_up", set_up, METH_VARARGS,
     "set_up(transfer, transfer_at_once, ndarray): give this module the addresses of the\n"
     "engine's functions. Call it once, before any target is armed."},
    {"look_address", look_address, METH_NOARGS,
     "Return the address of the function for smb_set_look, which the engine calls while a call\n"
     "waits."},
    {"take_interrupt", take_interrupt, METH_NOARGS,
     "Return and forget the exception that a signal handler raised during this thread's last\n"
     "call of the engine, or None."},
    {"forked", forked, METH_NOARGS,
     "Note that this process is a child of fork, which disarms all targets armed before."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "smb._direct",
    .m_doc = "Direct calls from Python to the engine; csrc/python/direct.c.",
    .m_size = -1,
    .m_methods = functions,
};

/* Makes a type and puts it into the module. Returns a reference that stays, or NULL. */
static PyTypeObject *add_type(PyObject *made, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type && PyModule_AddObjectRef(made, strrchr(spec->name, '.') + 1, type) != 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

PyMODINIT_FUNC PyInit__direct(void)
{
    name_offset = PyUnicode_InternFromString("offset");
    name_count = PyUnicode_InternFromString("count");
    name_out = PyUnicode_InternFromString("out");
    name_scale = PyUnicode_InternFromString("scale");
    name_wire = PyUnicode_InternFromString("wire");
    PyObject *types = PyImport_ImportModule("types");
    bound_method = types ? PyObject_GetAttrString(types, "MethodType") : NULL;
    Py_XDECREF(types);
    if (!name_offset || !name_count || !name_out || !name_scale || !name_wire || !bound_method)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    if (!(switch_type = add_type(made, &switch_spec)) ||
        !(target_type = add_type(made, &target_spec)) ||
        !(direct_type = add_type(made, &direct_spec)) || !add_type(made, &method_spec))
        Py_CLEAR(made);
    return made;
}
