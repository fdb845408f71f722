/* The hot path, compiled: what usual_step() in watched_iterator.py does at each usual step, what `timed` in transfers.py does at each usual
 * copy, and what `count_first` in batches.py does with each usual batch. All else is handed to the Python code. Those are the description;
 * a property test compares them with this.
 *
 * Beside a real training step everything runs from cold caches, so that it counts how little is touched: here a tuple and four numbers a step.
 * Optional: an installation without it (no C compiler, another interpreter) runs the Python code.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define INTERFACE 2 /* the same in compiled.py: a module left over from an older installation is not used */

#ifdef Py_GIL_DISABLED
#error "written for one thread at a time: a free-threaded Python runs the Python code"
#endif

/* ---- UsualStep: the slots of a recorder that the hot path touches. Base class of gpuwatch.recorder.Recorder. -------------------------- */

typedef struct {
    PyObject_HEAD
    long long begin_ns, fed_ns, transfer_ns;
    PyObject *clock, *samples, *steady, *thread; /* NULL until they are set */
} UsualStep;

static PyMemberDef usual_members[] = {
    {"begin_ns", T_LONGLONG, offsetof(UsualStep, begin_ns), 0, NULL},
    {"fed_ns", T_LONGLONG, offsetof(UsualStep, fed_ns), 0, NULL},
    {"transfer_ns", T_LONGLONG, offsetof(UsualStep, transfer_ns), 0, NULL},
    {"clock", T_OBJECT_EX, offsetof(UsualStep, clock), 0, NULL},
    {"steady", T_OBJECT_EX, offsetof(UsualStep, steady), 0, NULL},
    {"thread", T_OBJECT_EX, offsetof(UsualStep, thread), 0, NULL},
    {"samples", T_OBJECT_EX, offsetof(UsualStep, samples), 0, NULL},
    {NULL},
};

static int
usual_traverse(UsualStep *self, visitproc visit, void *arg)
{
    Py_VISIT(self->clock);
    Py_VISIT(self->steady);
    Py_VISIT(self->thread);
    Py_VISIT(self->samples);
    return 0;
}

static int
usual_clear(UsualStep *self)
{
    Py_CLEAR(self->clock);
    Py_CLEAR(self->steady);
    Py_CLEAR(self->thread);
    Py_CLEAR(self->samples);
    return 0;
}

static void
usual_dealloc(UsualStep *self)
{
    PyObject_GC_UnTrack(self);
    usual_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject UsualStepType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gpuwatch._hot.UsualStep",
    .tp_doc = "What the hot path touches of a recorder, side by side.",
    .tp_basicsize = sizeof(UsualStep),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = usual_members,
    .tp_traverse = (traverseproc)usual_traverse,
    .tp_clear = (inquiry)usual_clear,
    .tp_dealloc = (destructor)usual_dealloc,
};

/* Whether the calling thread is the recorder's training thread. */
static int
is_training_thread(UsualStep *recorder)
{
    if (recorder->thread == NULL || !PyLong_Check(recorder->thread)) {
        return 0;
    }
    unsigned long ident = PyLong_AsUnsignedLong(recorder->thread);
    if (ident == (unsigned long)-1 && PyErr_Occurred()) { /* NOBODY, a negative number */
        PyErr_Clear();
        return 0;
    }
    return ident == PyThread_get_thread_ident();
}

/* Read the recorder's clock. Returns -1 with an exception set where that failed. */
static int
read_clock(UsualStep *recorder, long long *ns)
{
    PyObject *clock = recorder->clock;
    if (clock == NULL) {
        PyErr_SetString(PyExc_AttributeError, "clock");
        return -1;
    }
    Py_INCREF(clock);
    PyObject *now = PyObject_CallNoArgs(clock);
    Py_DECREF(clock);
    if (now == NULL) {
        return -1;
    }
    *ns = PyLong_AsLongLong(now);
    Py_DECREF(now);
    return *ns == -1 && PyErr_Occurred() ? -1 : 0;
}

/* ---- Steps: an iterator whose every next() ends one step of a Loop and fetches the next one's batch. ---------------------------------- */

typedef struct {
    PyObject_HEAD
    UsualStep *recorder;
    PyObject *loop, *owner, *fetch, *append;
    int turn, turns; /* of so many steps one is the loop's, which may look at it closely */
} Steps;

static PyObject *usual_kind, *name_ask, *name_came, *name_nothing_came, *name_cannot_count, *name_samples;

/* Take the exception that is set. */
static PyObject *
take_exception(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

/* Raise an exception that was taken. */
static void
raise_again(PyObject *exception)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(exception);
#else
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(exception)), exception, PyException_GetTraceback(exception));
#endif
}

/* Append (USUAL, begin, end, fed, transfer, samples) to the recorder's log, as `entry`, which is new and whose reference it takes. */
static int
log_step(Steps *self, PyObject *entry, long long end_ns)
{
    UsualStep *recorder = self->recorder;
    long long times[] = {recorder->begin_ns, end_ns, recorder->fed_ns, recorder->transfer_ns};
    PyTuple_SET_ITEM(entry, 0, Py_NewRef(usual_kind));
    for (int i = 0; i < 4; i++) {
        PyObject *time = PyLong_FromLongLong(times[i]);
        if (time == NULL) {
            Py_DECREF(entry);
            return -1;
        }
        PyTuple_SET_ITEM(entry, i + 1, time);
    }
    PyTuple_SET_ITEM(entry, 5, Py_NewRef(recorder->samples == NULL ? Py_None : recorder->samples));
    PyObject *none = PyObject_CallOneArg(self->append, entry);
    Py_DECREF(entry);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Tell the loop of an error. Returns -1 where that raised, an interrupt meanwhile, which is set as Python does inside an `except`. */
static int
tell(Steps *self, PyObject *method, PyObject *error)
{
    PyObject *told = PyObject_CallMethodOneArg(self->loop, method, error);
    Py_XDECREF(told);
    if (told != NULL) {
        return 0;
    }
    PyObject *newer = take_exception(), *last = newer;
    for (int i = 0; i < 100 && last != error; i++) { /* users can make a ring of contexts */
        PyObject *before = PyException_GetContext(last);
        if (before == NULL) {
            PyException_SetContext(last, Py_NewRef(error));
            break;
        }
        Py_DECREF(before);
        last = before;
    }
    raise_again(newer);
    return -1;
}

/* The fetch has raised: tell the loop, and raise the same again. */
static PyObject *
nothing_came(Steps *self)
{
    PyObject *error = take_exception();
    if (tell(self, name_nothing_came, error) < 0) {
        Py_DECREF(error);
        return NULL;
    }
    raise_again(error);
    return NULL;
}

/* Set the samples of the step whose batch has come, where they are counted. */
static int
count_samples(Steps *self, PyObject *batch)
{
    PyObject *count = PyObject_GetAttr(self->loop, name_samples);
    if (count == NULL || count == Py_None) {
        Py_XDECREF(count);
        return count == NULL ? -1 : 0;
    }
    PyObject *samples = PyObject_CallOneArg(count, batch);
    Py_DECREF(count);
    if (samples != NULL) {
        Py_XSETREF(self->recorder->samples, samples);
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *error = take_exception();
    int told = tell(self, name_cannot_count, error);
    Py_DECREF(error);
    return told;
}

static PyObject *take_one(PyObject *self, PyObject *loop);
static PyMethodDef usual = {"usual", take_one, METH_O, "Take one usual step, whosever turn it is."};

/* Leave the step to the loop. What it may call back is made here: an iterator with a `__call__` of its own would not be the loader's. */
static PyObject *
ask_loop(Steps *self)
{
    PyObject *take_usual = PyCFunction_New(&usual, (PyObject *)self);
    PyObject *batch = take_usual == NULL ? NULL : PyObject_CallMethodOneArg(self->loop, name_ask, take_usual);
    Py_XDECREF(take_usual);
    return batch;
}

/* As `ask` in watched_iterator.py. */
static PyObject *
take_step(Steps *self, int is_due)
{
    UsualStep *recorder = self->recorder;
    long long now, fed;
    if (is_due || recorder->steady != self->owner || !is_training_thread(recorder)) {
        return ask_loop(self);
    }
    PyObject *entry = PyTuple_New(6); /* may collect garbage, whose finalizers do what they like: nothing is read of the recorder before */
    if (entry == NULL) {
        return NULL;
    }
    if (recorder->steady != self->owner) {
        Py_DECREF(entry);
        return ask_loop(self);
    }
    if (read_clock(recorder, &now) < 0) {
        Py_DECREF(entry);
        return NULL;
    }
    if (log_step(self, entry, now) < 0) {
        return NULL;
    }
    recorder->begin_ns = now;
    recorder->fed_ns = 0;
    recorder->transfer_ns = 0;
    PyObject *batch = PyObject_CallNoArgs(self->fetch);
    if (batch == NULL) {
        return nothing_came(self);
    }
    if (read_clock(recorder, &fed) < 0) {
        Py_DECREF(batch);
        return NULL;
    }
    if (recorder->steady != self->owner) { /* something else went on in the fetch, or another thread has taken over meanwhile */
        PyObject *at = PyLong_FromLongLong(fed);
        PyObject *result = at == NULL ? NULL : PyObject_CallMethodObjArgs(self->loop, name_came, batch, at, NULL);
        Py_XDECREF(at);
        Py_DECREF(batch);
        return result;
    }
    recorder->fed_ns = fed;
    if (count_samples(self, batch) < 0) {
        Py_DECREF(batch);
        return NULL;
    }
    return batch;
}

static PyObject *
steps_next(Steps *self)
{
    int is_due = ++self->turn == self->turns;
    if (is_due) {
        self->turn = 0;
    }
    return take_step(self, is_due);
}

static PyObject *
take_one(PyObject *self, PyObject *loop)
{
    return take_step((Steps *)self, 0);
}

static int
steps_traverse(Steps *self, visitproc visit, void *arg)
{
    Py_VISIT(self->recorder);
    Py_VISIT(self->loop);
    Py_VISIT(self->owner);
    Py_VISIT(self->fetch);
    Py_VISIT(self->append);
    return 0;
}

static void
steps_dealloc(Steps *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->recorder);
    Py_XDECREF(self->loop);
    Py_XDECREF(self->owner);
    Py_XDECREF(self->fetch);
    Py_XDECREF(self->append);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *loop;
    int turns;
    if (!PyArg_ParseTuple(args, "Oi:Steps", &loop, &turns)) {
        return NULL;
    }
    Steps *self = (Steps *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->turns = turns;
    self->loop = Py_NewRef(loop);
    PyObject *recorder = PyObject_GetAttrString(loop, "recorder");
    if (recorder != NULL && !PyObject_TypeCheck(recorder, &UsualStepType)) {
        PyErr_Format(PyExc_TypeError, "a loop's recorder must be a UsualStep, not %.100s", Py_TYPE(recorder)->tp_name);
        Py_CLEAR(recorder);
    }
    self->recorder = (UsualStep *)recorder;
    PyObject *log = recorder == NULL ? NULL : PyObject_GetAttrString(recorder, "log");
    self->append = log == NULL ? NULL : PyObject_GetAttrString(log, "append");
    Py_XDECREF(log);
    self->owner = self->append == NULL ? NULL : PyObject_GetAttrString(loop, "owner");
    self->fetch = self->owner == NULL ? NULL : PyObject_GetAttrString(loop, "fetch");
    if (self->fetch == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyTypeObject StepsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gpuwatch._hot.Steps",
    .tp_doc = "Steps(loop, turns): next() takes the loop's usual step, and leaves one in so many turns to the loop.",
    .tp_basicsize = sizeof(Steps),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = steps_new,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)steps_next,
    .tp_traverse = (traverseproc)steps_traverse,
    .tp_dealloc = (destructor)steps_dealloc,
};

/* ---- TimedCopy: what stands in place of Tensor.to and Tensor.cuda, and is bound to a tensor as a function is. ------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    UsualStep *recorder;
    PyObject *original, *otherwise, *is_overridden, *dict;
} TimedCopy;

static PyObject *name_is_cpu;

/* 1 or 0; -1 where it cannot be told, as by a device of somebody's own making. An interrupt stays set. */
static int
is_on_cpu(PyObject *tensor)
{
    PyObject *answer = PyObject_GetAttr(tensor, name_is_cpu);
    if (answer == NULL) {
        if (PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear();
        }
        return -1;
    }
    Py_DECREF(answer);
    return answer == Py_True ? 1 : answer == Py_False ? 0 : -1;
}

/* In a usual step: call the original, and add its time to the step's copies if the result has left the CPU. Else as `otherwise` does. */
static PyObject *
timed_copy(TimedCopy *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    UsualStep *recorder = self->recorder;
    long long begin, end;
    if (PyVectorcall_NARGS(nargsf) < 1 || recorder->steady == NULL || recorder->steady == Py_None || recorder->fed_ns == 0
        || !is_training_thread(recorder)) {
        return PyObject_Vectorcall(self->otherwise, args, nargsf, names);
    }
    PyObject *overridden = PyObject_CallOneArg(self->is_overridden, args[0]);
    if (overridden == NULL) {
        return NULL;
    }
    Py_DECREF(overridden);
    if (overridden != Py_False) {
        return PyObject_Vectorcall(self->otherwise, args, nargsf, names);
    }
    if (read_clock(recorder, &begin) < 0) {
        return NULL;
    }
    PyObject *tensor = Py_NewRef(args[0]);
    PyObject *result = PyObject_Vectorcall(self->original, args, nargsf, names);
    if (result != NULL && result != tensor && is_on_cpu(tensor) == 1 && is_on_cpu(result) == 0) {
        if (read_clock(recorder, &end) < 0) {
            Py_CLEAR(result);
        }
        else {
            recorder->transfer_ns += end - begin;
        }
    }
    Py_DECREF(tensor);
    if (result != NULL && PyErr_Occurred()) {
        Py_CLEAR(result);
    }
    return result;
}

static PyObject *
timed_bind(PyObject *self, PyObject *tensor, PyObject *type)
{
    return tensor == NULL || tensor == Py_None ? Py_NewRef(self) : PyMethod_New(self, tensor);
}

static int
timed_traverse(TimedCopy *self, visitproc visit, void *arg)
{
    Py_VISIT(self->recorder);
    Py_VISIT(self->original);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->is_overridden);
    Py_VISIT(self->dict);
    return 0;
}

/* What else it refers to is needed for as long as it may be called. */
static int
timed_clear(TimedCopy *self)
{
    Py_CLEAR(self->dict);
    return 0;
}

static void
timed_dealloc(TimedCopy *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->recorder);
    Py_XDECREF(self->original);
    Py_XDECREF(self->otherwise);
    Py_XDECREF(self->is_overridden);
    Py_XDECREF(self->dict);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
timed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *recorder, *original, *otherwise, *is_overridden;
    if (!PyArg_ParseTuple(args, "O!OOO:TimedCopy", &UsualStepType, &recorder, &original, &otherwise, &is_overridden)) {
        return NULL;
    }
    TimedCopy *self = (TimedCopy *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->call = (vectorcallfunc)timed_copy;
    self->recorder = (UsualStep *)Py_NewRef(recorder);
    self->original = Py_NewRef(original);
    self->otherwise = Py_NewRef(otherwise);
    self->is_overridden = Py_NewRef(is_overridden);
    return (PyObject *)self;
}

/* Copied deeply and pickled it is the original. */
static PyObject *
timed_reduce(TimedCopy *self, PyObject *none)
{
    PyObject *loaders = PyImport_ImportModule("gpuwatch.watched_loader");
    PyObject *as_it_is = loaders == NULL ? NULL : PyObject_GetAttrString(loaders, "as_it_is");
    Py_XDECREF(loaders);
    return as_it_is == NULL ? NULL : Py_BuildValue("N(O)", as_it_is, self->original);
}

static PyMethodDef timed_methods[] = {
    {"__reduce__", (PyCFunction)timed_reduce, METH_NOARGS, NULL},
    {NULL},
};

static PyGetSetDef timed_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

static PyTypeObject TimedCopyType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gpuwatch._hot.TimedCopy",
    .tp_doc = "TimedCopy(recorder, original, otherwise, is_overridden): times the original's copies in usual steps, else calls otherwise.",
    .tp_basicsize = sizeof(TimedCopy),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = timed_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(TimedCopy, call),
    .tp_descr_get = timed_bind,
    .tp_methods = timed_methods,
    .tp_getset = timed_attributes,
    .tp_dictoffset = offsetof(TimedCopy, dict),
    .tp_getattro = PyObject_GenericGetAttr,
    .tp_setattro = PyObject_GenericSetAttr,
    .tp_traverse = (traverseproc)timed_traverse,
    .tp_clear = (inquiry)timed_clear,
    .tp_dealloc = (destructor)timed_dealloc,
};

/* ---- FirstLength: int(batch[key].shape[0]), the samples of a usual batch. ------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *key, *otherwise;
} FirstLength;

static PyObject *name_shape, *zero;

static PyObject *
first_length(FirstLength *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (PyVectorcall_NARGS(nargsf) != 1 || (names != NULL && PyTuple_GET_SIZE(names) > 0)) {
        PyErr_SetString(PyExc_TypeError, "one batch, and nothing else");
        return NULL;
    }
    PyObject *tensor = PyObject_GetItem(args[0], self->key);
    PyObject *shape = tensor == NULL ? NULL : PyObject_GetAttr(tensor, name_shape);
    Py_XDECREF(tensor);
    PyObject *length = shape == NULL ? NULL : PyObject_GetItem(shape, zero);
    Py_XDECREF(shape);
    PyObject *count = length == NULL ? NULL : PyNumber_Long(length);
    Py_XDECREF(length);
    if (count == NULL
        && (PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_IndexError)
            || PyErr_ExceptionMatches(PyExc_KeyError) || PyErr_ExceptionMatches(PyExc_TypeError))) {
        PyErr_Clear(); /* shaped otherwise, such as a last batch */
        return PyObject_CallOneArg(self->otherwise, args[0]);
    }
    return count;
}

static int
first_traverse(FirstLength *self, visitproc visit, void *arg)
{
    Py_VISIT(self->key);
    Py_VISIT(self->otherwise);
    return 0;
}

static void
first_dealloc(FirstLength *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->key);
    Py_XDECREF(self->otherwise);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
first_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *key, *otherwise;
    if (!PyArg_ParseTuple(args, "OO:FirstLength", &key, &otherwise)) {
        return NULL;
    }
    FirstLength *self = (FirstLength *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->call = (vectorcallfunc)first_length;
        self->key = Py_NewRef(key);
        self->otherwise = Py_NewRef(otherwise);
    }
    return (PyObject *)self;
}

static PyTypeObject FirstLengthType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gpuwatch._hot.FirstLength",
    .tp_doc = "FirstLength(key, otherwise): called with a batch it returns int(batch[key].shape[0]), or otherwise(batch) where it has none.",
    .tp_basicsize = sizeof(FirstLength),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = first_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(FirstLength, call),
    .tp_traverse = (traverseproc)first_traverse,
    .tp_dealloc = (destructor)first_dealloc,
};

/* ---- The module ----------------------------------------------------------------------------------------------------------------------- */

static struct PyModuleDef hot_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "gpuwatch._hot",
    .m_doc = "The hot path, compiled: see gpuwatch/compiled.py.",
    .m_size = -1,
};

static int
make_names(void)
{
    PyObject *entries = PyImport_ImportModule("gpuwatch.entries");
    if (entries == NULL) {
        return -1;
    }
    usual_kind = PyObject_GetAttrString(entries, "USUAL");
    Py_DECREF(entries);
    name_ask = PyUnicode_InternFromString("ask");
    name_came = PyUnicode_InternFromString("came");
    name_nothing_came = PyUnicode_InternFromString("nothing_came");
    name_cannot_count = PyUnicode_InternFromString("cannot_count");
    name_samples = PyUnicode_InternFromString("samples");
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    name_shape = PyUnicode_InternFromString("shape");
    zero = PyLong_FromLong(0);
    return name_is_cpu && name_shape && zero && usual_kind && name_ask && name_came && name_nothing_came && name_cannot_count && name_samples ? 0 : -1;
}

PyMODINIT_FUNC
PyInit__hot(void)
{
    if (make_names() < 0) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&hot_module);
    if (module == NULL || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0
        || PyModule_AddType(module, &UsualStepType) < 0 || PyModule_AddType(module, &StepsType) < 0
        || PyModule_AddType(module, &TimedCopyType) < 0 || PyModule_AddType(module, &FirstLengthType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
