/* A CUDA runtime without a GPU: it has streams, events, captures and errors, and does no maths.
 *
 * torch's own CUDA build loads it as libcudart.so.13. A stream is the time at which its last work ends. An event is reached at
 * that time. Copies move bytes at once and take time by their size; kernels only take time. Time is the host's monotonic clock,
 * or a clock that a test advances. Declarations are our own, after the public documentation of the CUDA Runtime API (version 13);
 * no header of NVIDIA's is used. Tests control it by the sim_* functions at the end, through ctypes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INITIALIZATION_ERROR = 3, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_READY = 600,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908,
};
static const struct { int error; const char *name, *text; } ERRORS[] = {
    {0, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INITIALIZATION_ERROR, "cudaErrorInitializationError", "initialization error"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {ILLEGAL_STATE, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched", "capture was not initiated in this stream"},
    {CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {CAPTURE_WRONG_THREAD, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
};

typedef struct { unsigned x, y, z; } Dim3;
enum Mode { GLOBAL, THREAD_LOCAL, RELAXED };
enum { NONE, ACTIVE, INVALIDATED };
typedef struct Capture {
    struct Capture *next;
    struct Stream *origin;
    pthread_t thread;
    enum Mode mode;
    int status;
    unsigned long long id;
    int64_t work_ns;
} Capture;
typedef struct Stream {
    struct Stream *next;
    int64_t end_ns;
    int non_blocking;
    Capture *capture;
} Stream;
typedef struct { int alive, timed, recorded; int64_t at_ns; Capture *capture; } Event;
typedef struct { int64_t work_ns; } Graph;
typedef struct Block { struct Block *next; char *begin; size_t size; int type; } Block; /* type: 1 host, 2 device */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream legacy;
static Stream *streams = &legacy;
static Capture *captures; /* those not yet ended */
static Block *blocks;
static _Thread_local int last_error;
static _Thread_local enum Mode thread_mode = GLOBAL;
static _Thread_local struct { Dim3 grid, block; size_t shared; void *stream; } configuration;
static int context, sticky, is_manual, events_alive;
static pid_t owner; /* of the context */
static int64_t manual_ns, ahead_ns, fails_at_ns, kernel_ns = 10000;
static int fails_with;
static double copy_bytes_per_ns = 12.0;
static size_t used_bytes;
static const size_t TOTAL_BYTES = 8UL << 30;
static unsigned long long capture_ids;
static uint64_t synchronising;

#define CALLS 512
static struct { const char *name; uint64_t count; } calls[CALLS];
static int n_calls;
#define INJECTED 16
static struct { char name[64]; long nth; int error, sticky; } injected[INJECTED]; /* nth: 0 is spent, -1 is every call */

static int64_t now(void) {
    if (is_manual) return manual_ns;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec + ahead_ns;
}

static int call_id(const char *name) {
    for (int i = 0; i < n_calls; i++)
        if (!strcmp(calls[i].name, name)) return i;
    calls[n_calls].name = name;
    return n_calls++;
}

/* Without this a call makes a context, which an asynchronous error makes unusable. */
#define NO_CONTEXT 1
/* Not allowed while a capture is under way, as far as its mode and this thread's say so: cudaThreadExchangeStreamCaptureMode. */
#define UNSAFE 2
#define SYNCHRONISES 4

/* Count the call. Return its error if it must fail; the lock is held in any case, until `leave`. */
static int enter(int *id, const char *name, int flags) {
    pthread_mutex_lock(&lock);
    if (*id < 0) *id = call_id(name);
    calls[*id].count++;
    if (flags & SYNCHRONISES) synchronising++;
    if (context && owner != getpid()) return INITIALIZATION_ERROR; /* a forked child of the process that has set CUDA up */
    if (!(flags & NO_CONTEXT)) {
        context = 1, owner = getpid();
        if (fails_with && now() >= fails_at_ns) sticky = fails_with, fails_with = 0;
        if (sticky) return sticky;
    }
    for (int i = 0; i < INJECTED; i++) {
        if (!injected[i].nth || strcmp(injected[i].name, name)) continue;
        if (injected[i].nth > 0 && --injected[i].nth) continue;
        if (injected[i].sticky) sticky = injected[i].error;
        return injected[i].error;
    }
    if (flags & UNSAFE) {
        for (Capture *c = captures; c; c = c->next) {
            int own = pthread_equal(c->thread, pthread_self());
            int forbidden = own ? c->mode != RELAXED && thread_mode != RELAXED
                                : c->mode == GLOBAL && thread_mode == GLOBAL;
            if (forbidden) {
                c->status = INVALIDATED;
                return CAPTURE_UNSUPPORTED;
            }
        }
    }
    return 0;
}

static int leave(int error) {
    if (error) last_error = error;
    pthread_mutex_unlock(&lock);
    return error;
}

#define ENTER(flags)                                  \
    static int id_ = -1;                              \
    int error_ = enter(&id_, __func__, flags);        \
    if (error_) return leave(error_)

static Stream *stream_of(void *handle) { return (uintptr_t)handle <= 2 ? &legacy : handle; }

/* When the device comes to what is queued now. */
static int64_t reached_ns(Stream *s) { int64_t at = now(); return s->end_ns > at ? s->end_ns : at; }

/* Queue work on a stream, or add it to the graph that the stream is captured into. */
static int queue(Stream *s, int64_t work_ns) {
    if (s == &legacy)
        for (Stream *other = streams; other; other = other->next)
            if (other->capture && !other->non_blocking) {
                other->capture->status = INVALIDATED;
                return CAPTURE_IMPLICIT;
            }
    if (s->capture) {
        if (s->capture->status == INVALIDATED) return CAPTURE_INVALIDATED;
        s->capture->work_ns += work_ns;
    } else if (work_ns) {
        s->end_ns = reached_ns(s) + work_ns;
    }
    return 0;
}

/* Wait until the device's clock has reached a time; the lock is released meanwhile. */
static int wait_until(int64_t at_ns) {
    if (is_manual) {
        if (at_ns > manual_ns) manual_ns = at_ns;
    } else {
        /* CUDA's own wait spins, so that the host goes on within microseconds; a sleeping thread wakes 0.1 to 1 ms late. */
        int64_t sleep_ns = at_ns - ahead_ns - 500000;
        struct timespec until = {sleep_ns / 1000000000, sleep_ns % 1000000000};
        pthread_mutex_unlock(&lock);
        if (now() < at_ns - 500000)
            while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) {}
        while (now() < at_ns) sched_yield();
        pthread_mutex_lock(&lock);
    }
    if (fails_with && now() >= fails_at_ns) sticky = fails_with, fails_with = 0;
    return sticky;
}

static int64_t device_end(void) {
    int64_t end = 0;
    for (Stream *s = streams; s; s = s->next)
        if (s->end_ns > end) end = s->end_ns;
    return end;
}

/* What a capture forbids of its own streams and events: it invalidates the capture. */
static int forbidden(Capture *c, int error) {
    if (c) c->status = INVALIDATED;
    return error;
}

static Block *block_at(const void *p) {
    for (Block *b = blocks; b; b = b->next)
        if ((char *)p >= b->begin && (char *)p < b->begin + b->size) return b;
    return NULL;
}

static int allocate(void **p, size_t size, int type) {
    if (type == 2 && used_bytes + size > TOTAL_BYTES) return OUT_OF_MEMORY;
    Block *b = malloc(sizeof *b);
    *b = (Block){blocks, aligned_alloc(512, (size + 511) / 512 * 512 + 512), size, type};
    blocks = b;
    if (type == 2) used_bytes += size;
    *p = b->begin;
    return 0;
}

static int release(void *p) {
    for (Block **b = &blocks; *b; b = &(*b)->next)
        if ((*b)->begin == p) {
            Block *gone = *b;
            *b = gone->next;
            if (gone->type == 2) used_bytes -= gone->size;
            free(gone->begin);
            free(gone);
            return 0;
        }
    return p ? INVALID_VALUE : 0;
}

static int copy(void *to, const void *from, size_t size, Stream *s, int must_wait) {
    int error = queue(s, size / copy_bytes_per_ns);
    if (error) return error;
    memmove(to, from, size);
    Block *b = block_at(to);
    if (!must_wait && b) return 0; /* to pageable memory a copy is synchronous */
    if (!must_wait) synchronising++;
    return s->capture ? forbidden(s->capture, CAPTURE_UNSUPPORTED) : wait_until(s->end_ns);
}

/* The device -------------------------------------------------------------------------------------------------------- */

int cudaGetDeviceCount(int *count) { ENTER(NO_CONTEXT); *count = 1; return leave(0); }
int cudaGetDevice(int *device) { ENTER(NO_CONTEXT); *device = 0; return leave(0); }
int cudaSetDevice(int device) { ENTER(0); return leave(device == 0 ? 0 : 101); }
int cudaDriverGetVersion(int *version) { ENTER(NO_CONTEXT); *version = 13000; return leave(0); }
int cudaRuntimeGetVersion(int *version) { ENTER(NO_CONTEXT); *version = 13000; return leave(0); }
int cudaMemGetInfo(size_t *available, size_t *total) {
    ENTER(0);
    *available = TOTAL_BYTES - used_bytes, *total = TOTAL_BYTES;
    return leave(0);
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { ENTER(0); *least = 0, *greatest = -5; return leave(0); }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { (void)a, (void)b; ENTER(0); *can = 0; return leave(0); }

/* The structure of CUDA 13, as far as torch reads it: offsets in bytes. */
int cudaGetDeviceProperties(char *p, int device) {
    ENTER(NO_CONTEXT);
    if (device) return leave(101);
    strcpy(p, "simulated");
    memset(p + 256, 7, 16); /* uuid */
    *(size_t *)(p + 288) = TOTAL_BYTES;
    *(size_t *)(p + 296) = 48 << 10;
    *(int *)(p + 304) = 65536, *(int *)(p + 308) = 32; /* registers, warp */
    *(int *)(p + 320) = 1024;                           /* threads in a block */
    for (int i = 0; i < 3; i++) *(int *)(p + 324 + 4 * i) = i < 2 ? 1024 : 64, *(int *)(p + 336 + 4 * i) = i ? 65535 : 0x7fffffff;
    *(int *)(p + 360) = 8, *(int *)(p + 364) = 0; /* compute capability */
    *(int *)(p + 384) = 108;                      /* multiprocessors */
    *(int *)(p + 568) = 1;                        /* PCI bus */
    *(int *)(p + 592) = 5120, *(int *)(p + 596) = 40 << 20; /* memory bus, L2 cache */
    *(int *)(p + 604) = 2048, *(int *)(p + 632) = 65536;    /* threads and registers of a multiprocessor */
    return leave(0);
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    ENTER(NO_CONTEXT);
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;
    case 4: *value = 64; break;
    case 5: *value = 0x7fffffff; break;
    case 6: case 7: *value = 65535; break;
    case 8: *value = 48 << 10; break;
    case 10: *value = 32; break;
    case 16: *value = 108; break;
    case 39: *value = 2048; break;
    case 75: *value = 8; break;
    default: *value = 0;
    }
    return leave(0);
}
int cudaDeviceGetPCIBusId(char *id, int size, int device) {
    (void)device;
    ENTER(NO_CONTEXT);
    snprintf(id, size, "0000:01:00.0");
    return leave(0);
}
int cudaDeviceSynchronize(void) {
    ENTER(SYNCHRONISES | UNSAFE);
    return leave(wait_until(device_end()));
}

static int error_index(int error) {
    int n = sizeof ERRORS / sizeof *ERRORS;
    for (int i = 0; i < n; i++)
        if (ERRORS[i].error == error) return i;
    return -1;
}
const char *cudaGetErrorName(int error) { int i = error_index(error); return i < 0 ? "cudaErrorUnknown" : ERRORS[i].name; }
const char *cudaGetErrorString(int error) { int i = error_index(error); return i < 0 ? "unknown error" : ERRORS[i].text; }
int cudaGetLastError(void) {
    static int id = -1;
    int injected_error = enter(&id, __func__, NO_CONTEXT), error = injected_error ? injected_error : sticky ? sticky : last_error;
    last_error = 0; /* a sticky error comes back with the next call */
    pthread_mutex_unlock(&lock);
    return error;
}
int cudaPeekAtLastError(void) {
    static int id = -1;
    enter(&id, __func__, NO_CONTEXT);
    pthread_mutex_unlock(&lock);
    return sticky ? sticky : last_error;
}

/* Memory ------------------------------------------------------------------------------------------------------------ */

int cudaMalloc(void **p, size_t size) { ENTER(UNSAFE); return leave(allocate(p, size, 2)); }
int cudaHostAlloc(void **p, size_t size, unsigned flags) { (void)flags; ENTER(UNSAFE); return leave(allocate(p, size, 1)); }
int cudaFree(void *p) {
    ENTER(p ? SYNCHRONISES | UNSAFE : 0);
    return leave(p ? wait_until(device_end()) || release(p) : 0);
}
int cudaFreeHost(void *p) {
    ENTER(SYNCHRONISES | UNSAFE);
    return leave(wait_until(device_end()) || release(p));
}
int cudaPointerGetAttributes(void *attributes, const void *p) {
    ENTER(0);
    Block *b = block_at(p);
    struct { int type, device; const void *on_device, *on_host; } answer = {b ? b->type : 0, b ? 0 : -1, b ? p : NULL, p};
    memcpy(attributes, &answer, sizeof answer);
    return leave(0);
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    (void)kind;
    ENTER(0);
    return leave(copy(to, from, size, stream_of(stream), 0));
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    (void)kind;
    ENTER(SYNCHRONISES | UNSAFE);
    return leave(copy(to, from, size, &legacy, 1));
}
int cudaMemsetAsync(void *p, int value, size_t size, void *stream) {
    ENTER(0);
    int error = queue(stream_of(stream), kernel_ns);
    if (!error) memset(p, value, size);
    return leave(error);
}

/* Kernels: they take `kernel_ns`, and compute nothing ----------------------------------------------------------------- */

void **__cudaRegisterFatBinary(void *binary) { (void)binary; static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **handle) { (void)handle; return 1; }
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared, *stream = configuration.stream;
    return 0;
}
int __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }
int cudaLaunchKernel(const void *function, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared;
    ENTER(0);
    return leave(queue(stream_of(stream), kernel_ns));
}
int __cudaLaunchKernel(void *kernel, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
int cudaFuncGetAttributes(void *attributes, const void *function) {
    (void)function;
    ENTER(0);
    struct { size_t shared, constant, local; int threads, registers, ptx, binary; } answer = {0, 0, 0, 1024, 32, 80, 80};
    memcpy(attributes, &answer, sizeof answer);
    return leave(0);
}
int cudaFuncSetAttribute(const void *function, int attribute, int value) { (void)function, (void)attribute, (void)value; ENTER(0); return leave(0); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n) { ENTER(0); *n = 2; return leave(0); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { ENTER(0); *n = 2; return leave(0); }

/* Streams ----------------------------------------------------------------------------------------------------------- */

int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)priority;
    ENTER(0);
    Stream *s = calloc(1, sizeof *s);
    s->non_blocking = flags & 1;
    s->next = streams, streams = s;
    *stream = s;
    return leave(0);
}
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
int cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
int cudaStreamDestroy(void *stream) { (void)stream; ENTER(0); return leave(0); }
int cudaStreamGetPriority(void *stream, int *priority) { (void)stream; ENTER(0); *priority = 0; return leave(0); }
int cudaStreamSynchronize(void *stream) {
    ENTER(SYNCHRONISES | UNSAFE);
    Stream *s = stream_of(stream);
    return leave(s->capture ? forbidden(s->capture, CAPTURE_UNSUPPORTED) : wait_until(s->end_ns));
}
int cudaStreamQuery(void *stream) {
    ENTER(UNSAFE);
    Stream *s = stream_of(stream);
    return leave(s->capture ? forbidden(s->capture, CAPTURE_UNSUPPORTED) : now() >= s->end_ns ? 0 : NOT_READY);
}

/* Events ------------------------------------------------------------------------------------------------------------ */

int cudaEventCreateWithFlags(Event **event, unsigned flags) {
    ENTER(0);
    *event = calloc(1, sizeof **event);
    **event = (Event){.alive = 1, .timed = !(flags & 2)};
    events_alive++;
    return leave(0);
}
int cudaEventCreate(Event **event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(Event *event) {
    ENTER(0);
    if (!event->alive) return leave(INVALID_HANDLE);
    event->alive = 0, events_alive--; /* its memory stays: a later use is an error, and no crash */
    return leave(0);
}
int cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) {
    (void)flags;
    ENTER(0);
    Stream *s = stream_of(stream);
    if (!event->alive) return leave(INVALID_HANDLE);
    int error = queue(s, 0);
    if (!error) event->recorded = 1, event->at_ns = reached_ns(s), event->capture = s->capture;
    return leave(error);
}
int cudaEventRecord(Event *event, void *stream) { return cudaEventRecordWithFlags(event, stream, 0); }
int cudaEventQuery(Event *event) {
    ENTER(UNSAFE);
    if (!event->alive) return leave(INVALID_HANDLE);
    if (event->capture) return leave(forbidden(event->capture, CAPTURED_EVENT));
    return leave(!event->recorded || now() >= event->at_ns ? 0 : NOT_READY);
}
int cudaEventSynchronize(Event *event) {
    ENTER(SYNCHRONISES | UNSAFE);
    if (!event->alive) return leave(INVALID_HANDLE);
    if (event->capture) return leave(forbidden(event->capture, CAPTURED_EVENT));
    return leave(event->recorded ? wait_until(event->at_ns) : 0);
}
int cudaEventElapsedTime(float *ms, Event *first, Event *second) {
    ENTER(UNSAFE);
    if (!first->alive || !second->alive || !first->timed || !second->timed || !first->recorded || !second->recorded)
        return leave(INVALID_HANDLE);
    Capture *captured = first->capture ? first->capture : second->capture;
    if (captured) return leave(forbidden(captured, CAPTURED_EVENT));
    if (now() < first->at_ns || now() < second->at_ns) return leave(NOT_READY);
    *ms = (second->at_ns - first->at_ns) / 1e6;
    return leave(0);
}
int cudaStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    (void)flags;
    ENTER(0);
    Stream *s = stream_of(stream);
    if (s->capture && event->recorded && event->capture != s->capture) return leave(forbidden(s->capture, CAPTURE_ISOLATION));
    if (event->capture && !s->capture) s->capture = event->capture; /* the stream joins the capture */
    else if (event->recorded && event->at_ns > s->end_ns) s->end_ns = event->at_ns;
    return leave(0);
}

/* Captures and graphs ------------------------------------------------------------------------------------------------- */

int cudaThreadExchangeStreamCaptureMode(enum Mode *mode) {
    ENTER(NO_CONTEXT);
    enum Mode before = thread_mode;
    thread_mode = *mode, *mode = before;
    return leave(0);
}
int cudaStreamBeginCapture(void *stream, enum Mode mode) {
    ENTER(0);
    Stream *s = stream_of(stream);
    if (s == &legacy) return leave(CAPTURE_UNSUPPORTED);
    if (s->capture) return leave(ILLEGAL_STATE);
    Capture *c = malloc(sizeof *c);
    *c = (Capture){captures, s, pthread_self(), mode, ACTIVE, ++capture_ids, 0};
    captures = s->capture = c;
    return leave(0);
}
int cudaStreamEndCapture(void *stream, Graph **graph) {
    ENTER(0);
    Capture *c = stream_of(stream)->capture;
    *graph = NULL;
    if (!c) return leave(ILLEGAL_STATE);
    if (c->origin != stream) return leave(CAPTURE_UNMATCHED);
    if (c->mode != RELAXED && !pthread_equal(c->thread, pthread_self())) return leave(CAPTURE_WRONG_THREAD);
    for (Capture **p = &captures; *p; p = &(*p)->next)
        if (*p == c) { *p = c->next; break; }
    for (Stream *s = streams; s; s = s->next)
        if (s->capture == c) s->capture = NULL;
    if (c->status == INVALIDATED) return leave(CAPTURE_INVALIDATED);
    *graph = malloc(sizeof **graph);
    (*graph)->work_ns = c->work_ns;
    return leave(0); /* the capture's memory stays: events recorded in it are captured ones for good */
}
static int capture_status(void *stream, int *status, unsigned long long *id) {
    Stream *s = stream_of(stream);
    if (s == &legacy)
        for (Capture *c = captures; c; c = c->next)
            if (!c->origin->non_blocking) return CAPTURE_IMPLICIT;
    *status = s->capture ? s->capture->status : NONE;
    if (s->capture && id) *id = s->capture->id;
    return 0;
}
int cudaStreamIsCapturing(void *stream, int *status) { ENTER(0); return leave(capture_status(stream, status, NULL)); }
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, void **nodes, void **edges, size_t *n) {
    ENTER(0);
    if (graph) *graph = stream_of(stream)->capture;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (n) *n = 0;
    return leave(capture_status(stream, status, id));
}
int cudaGraphGetNodes(Graph *graph, void **nodes, size_t *n) {
    ENTER(0);
    if (nodes) *nodes = graph;
    *n = 1;
    return leave(0);
}
int cudaGraphInstantiateWithFlags(Graph **runnable, Graph *graph, unsigned long long flags) {
    (void)flags;
    ENTER(UNSAFE);
    *runnable = malloc(sizeof **runnable);
    **runnable = *graph;
    return leave(0);
}
int cudaGraphLaunch(Graph *runnable, void *stream) { ENTER(0); return leave(queue(stream_of(stream), runnable->work_ns)); }
int cudaGraphDestroy(Graph *graph) { ENTER(0); free(graph); return leave(0); }
int cudaGraphExecDestroy(Graph *runnable) { ENTER(0); free(runnable); return leave(0); }
int cudaUserObjectCreate(void **object) { ENTER(0); *object = &context; return leave(0); }
int cudaGraphRetainUserObject(void) { ENTER(0); return leave(0); }

/* The driver, which torch asks for a few things ------------------------------------------------------------------------- */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = context; return 0; }
int cuCtxGetCurrent(void **current) { *current = context ? &context : NULL; return 0; }
int cuGetErrorString(int error, const char **text) { *text = cudaGetErrorString(error); return 0; }
static int not_supported(void) { return NOT_SUPPORTED; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
    (void)version, (void)flags;
    ENTER(NO_CONTEXT);
    void *found = dlsym(RTLD_DEFAULT, name);
    *function = found ? found : strncmp(name, "cuLog", 5) ? (void *)not_supported : NULL;
    if (status) *status = *function ? 0 : 1;
    return leave(0);
}

/* What the build adds for each function of the runtime that torch imports and that is not above. */
int sim_missing(int *id, const char *name) {
    int error = enter(id, name, 0);
    return leave(error ? error : NOT_SUPPORTED);
}

/* For tests ----------------------------------------------------------------------------------------------------------- */

#define LOCKED(...) pthread_mutex_lock(&lock); __VA_ARGS__; pthread_mutex_unlock(&lock)

int64_t sim_now(void) { return now(); }
/* Work of so many ns on a stream (0: the default stream). Returns a CUDA error. */
int sim_launch(void *stream, int64_t work_ns) { ENTER(0); return leave(queue(stream_of(stream), work_ns)); }
/* The same, and it ends with an error that every later call gives back. */
int sim_launch_failing(void *stream, int64_t work_ns, int error) {
    ENTER(0);
    int refused = queue(stream_of(stream), work_ns);
    if (!refused) fails_at_ns = stream_of(stream)->end_ns, fails_with = error;
    return leave(refused);
}
/* When the last work of a stream ends. */
int64_t sim_end_ns(void *stream) { return stream_of(stream)->end_ns; }
/* From now on time stands still but for `sim_advance`, or (0) runs on as the host's does. */
void sim_manual_clock(int manual) {
    LOCKED(manual_ns = now(); is_manual = manual; if (!manual) ahead_ns += manual_ns - now()); /* it never goes back */
}
void sim_advance(int64_t ns) { LOCKED(manual_ns += ns); }
void sim_kernel_ns(int64_t ns) { LOCKED(kernel_ns = ns); }
void sim_copy_bytes_per_ns(double rate) { LOCKED(copy_bytes_per_ns = rate); }
/* The nth call of that name from now on fails (0: every call), and if it is sticky, so does all that comes after it. */
int sim_fail(const char *name, long nth, int error, int is_sticky) {
    int done = 0;
    LOCKED(for (int i = 0; i < INJECTED && !done; i++) if (!injected[i].nth) {
        snprintf(injected[i].name, sizeof injected[i].name, "%s", name);
        injected[i].nth = nth ? nth : -1, injected[i].error = error, injected[i].sticky = is_sticky, done = 1;
    });
    return done;
}
uint64_t sim_calls(const char *name) {
    uint64_t count = 0;
    LOCKED(for (int i = 0; i < n_calls; i++) if (!strcmp(calls[i].name, name)) count = calls[i].count);
    return count;
}
/* The name of the i-th function that was ever called; NULL past the last. */
const char *sim_call_name(int i) { return i < n_calls ? calls[i].name : NULL; }
uint64_t sim_synchronising_calls(void) { return synchronising; }
int sim_events_alive(void) { return events_alive; }
int sim_has_context(void) { return context; }
int sim_captures(void) { int n = 0; LOCKED(for (Capture *c = captures; c; c = c->next) n++); return n; }
/* Errors, injected ones too, and this thread's last error are forgotten, and all counters are 0. */
void sim_reset(void) {
    LOCKED(memset(injected, 0, sizeof injected); sticky = fails_with = last_error = 0; synchronising = 0;
           for (int i = 0; i < n_calls; i++) calls[i].count = 0);
}
