/* NVML's ABI without a GPU, for the real pynvml to load: what it answers stands in a script.
 *
 * The script's path is in GPUWATCH_FAKE_NVML. It is read again at every call, so that a test changes the GPUs by
 * rewriting it (atomically, by rename). One `key=value` a line; the node's come first, and `device=UUID` begins a
 * GPU. Absent keys are 0. `fake.py` writes it and says what each key means:
 *
 *   driver=550.54.15   cuda=12.4   error.FUNCTION=CODE   hang.FUNCTION=SECONDS   load=N
 *   device=GPU-...   name=   pci=   minor=   lost=1   error.FUNCTION=CODE   hang.FUNCTION=SECONDS
 *   memory_total=   memory_used=   memory_reserved=   utilization=   memory_utilization=   power_mw=   energy_mj=
 *   temperature=   event_reasons=   process=PID BYTES|- [MIG DEVICE]   mps=PID BYTES   sm=PID PERCENT   clock_sm=   clock_memory=   pcie_generation=   pcie_lanes=
 *   pcie_replays=   ecc_corrected=   ecc_uncorrected=   nvlinks=   nvlink_errors=   nvlink_tx_kib=   nvlink_rx_kib=
 *   xid=CODE (one a line, in order)   gpm=METRIC VALUE (any: the GPU has GPM)   mig=ID USED TOTAL PROFILE UUID ACTIVITY
 *
 * Struct layouts: nvml.h. A GPU that leaves the script, or has lost=1, is lost to those who hold its handle. Another
 * `load` than at the last init is a driver that was reloaded. No script is a driver that is not loaded.
 */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25,
};

enum { DEVICES = 16, PROCESSES = 32, FAULTS = 32, TEXT = 96, XIDS = 16, METRICS = 16, INSTANCES = 8 };

typedef struct { char function[TEXT]; int code; double hang_s; } Fault;
typedef struct { Fault list[FAULTS]; int count; } Faults;

typedef struct {
    char uuid[TEXT], name[TEXT], pci[TEXT];
    int lost;
    unsigned minor, utilization, memory_utilization, power_mw, temperature;
    unsigned long long memory_total, memory_used, memory_reserved, energy_mj, event_reasons;
    unsigned clock_sm, clock_memory, pcie_generation, pcie_lanes, pcie_replays, nvlinks;
    unsigned long long ecc[2], nvlink_errors, nvlink_kib[2];
    unsigned xids[XIDS], xid_count;
    struct { unsigned id; double value; } gpm[METRICS];
    unsigned gpm_count;
    struct { unsigned id; unsigned long long used, total; double activity; char profile[24], uuid[TEXT]; } instances[INSTANCES];
    unsigned instance_count;
    struct { unsigned pid; unsigned long long bytes; int instance; } processes[PROCESSES], clients[PROCESSES];
    struct { unsigned pid, percent; } sm[PROCESSES];
    unsigned process_count, client_count, sm_count;
    Faults faults;
} Device;

typedef struct {
    char driver[TEXT];
    int load, cuda;
    Faults faults;
    Device devices[DEVICES];
    int count;
} Node;

typedef struct { char uuid[TEXT]; int generation; int instance; } Handle; /* instance: of MIG, -1 for the GPU itself */

typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned version, sensor; int celsius; } Temperature;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned pid; unsigned long long time_us; unsigned sm, memory, encoder, decoder; } ProcessUtilization;
typedef struct {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} Pci;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int references, generation, loaded;
static Handle handles[1024];
static int handle_count;

static void copy(char *to, const char *from, size_t size) { snprintf(to, size, "%s", from); }

static Fault *fault(Faults *faults, const char *function) {
    for (int i = 0; i < faults->count; i++)
        if (strcmp(faults->list[i].function, function) == 0) return &faults->list[i];
    if (faults->count == FAULTS) return &faults->list[FAULTS - 1];
    Fault *added = &faults->list[faults->count++];
    copy(added->function, function, TEXT);
    return added;
}

static void set(Node *node, const char *key, const char *value) {
    Device *d = node->count ? &node->devices[node->count - 1] : NULL;
    Faults *faults = d ? &d->faults : &node->faults;
    unsigned long long number = strtoull(value, NULL, 0);
    if (strcmp(key, "device") == 0) {
        if (node->count < DEVICES) copy(node->devices[node->count++].uuid, value, TEXT);
    } else if (strncmp(key, "error.", 6) == 0) {
        fault(faults, key + 6)->code = (int)number;
    } else if (strncmp(key, "hang.", 5) == 0) {
        fault(faults, key + 5)->hang_s = strtod(value, NULL);
    } else if (!d) {
        if (strcmp(key, "driver") == 0) copy(node->driver, value, TEXT);
        if (strcmp(key, "load") == 0) node->load = (int)number;
        if (strcmp(key, "cuda") == 0) {
            int major = 0, minor = 0;
            sscanf(value, "%d.%d", &major, &minor);
            node->cuda = 1000 * major + 10 * minor;
        }
    }
    else if (strcmp(key, "name") == 0) copy(d->name, value, TEXT);
    else if (strcmp(key, "pci") == 0) copy(d->pci, value, TEXT);
    else if (strcmp(key, "minor") == 0) d->minor = (unsigned)number;
    else if (strcmp(key, "lost") == 0) d->lost = (int)number;
    else if (strcmp(key, "memory_total") == 0) d->memory_total = number;
    else if (strcmp(key, "memory_used") == 0) d->memory_used = number;
    else if (strcmp(key, "memory_reserved") == 0) d->memory_reserved = number;
    else if (strcmp(key, "utilization") == 0) d->utilization = (unsigned)number;
    else if (strcmp(key, "memory_utilization") == 0) d->memory_utilization = (unsigned)number;
    else if (strcmp(key, "power_mw") == 0) d->power_mw = (unsigned)number;
    else if (strcmp(key, "energy_mj") == 0) d->energy_mj = number;
    else if (strcmp(key, "temperature") == 0) d->temperature = (unsigned)number;
    else if (strcmp(key, "event_reasons") == 0) d->event_reasons = number;
    else if (strcmp(key, "clock_sm") == 0) d->clock_sm = (unsigned)number;
    else if (strcmp(key, "clock_memory") == 0) d->clock_memory = (unsigned)number;
    else if (strcmp(key, "pcie_generation") == 0) d->pcie_generation = (unsigned)number;
    else if (strcmp(key, "pcie_lanes") == 0) d->pcie_lanes = (unsigned)number;
    else if (strcmp(key, "pcie_replays") == 0) d->pcie_replays = (unsigned)number;
    else if (strcmp(key, "ecc_corrected") == 0) d->ecc[0] = number;
    else if (strcmp(key, "ecc_uncorrected") == 0) d->ecc[1] = number;
    else if (strcmp(key, "nvlinks") == 0) d->nvlinks = (unsigned)number;
    else if (strcmp(key, "nvlink_errors") == 0) d->nvlink_errors = number;
    else if (strcmp(key, "nvlink_tx_kib") == 0) d->nvlink_kib[0] = number;
    else if (strcmp(key, "nvlink_rx_kib") == 0) d->nvlink_kib[1] = number;
    else if (strcmp(key, "xid") == 0 && d->xid_count < XIDS) d->xids[d->xid_count++] = (unsigned)number;
    else if (strcmp(key, "gpm") == 0 && d->gpm_count < METRICS) {
        char *rest;
        d->gpm[d->gpm_count].id = (unsigned)strtoul(value, &rest, 10);
        d->gpm[d->gpm_count++].value = strtod(rest, NULL);
    } else if (strcmp(key, "mig") == 0 && d->instance_count < INSTANCES) {
        unsigned i = d->instance_count++;
        sscanf(value, "%u %llu %llu %23s %95s %lf", &d->instances[i].id, &d->instances[i].used, &d->instances[i].total,
               d->instances[i].profile, d->instances[i].uuid, &d->instances[i].activity);
    }
    else if (strcmp(key, "process") == 0 && d->process_count < PROCESSES) {
        char *rest;
        unsigned i = d->process_count++;
        d->processes[i].pid = (unsigned)strtoul(value, &rest, 10);
        d->processes[i].bytes = strncmp(rest, " -", 2) == 0 ? ~0ULL : strtoull(rest, NULL, 10);
        d->processes[i].instance = -1;
        sscanf(rest, "%*s %d", &d->processes[i].instance);
    } else if (strcmp(key, "mps") == 0 && d->client_count < PROCESSES) {
        unsigned i = d->client_count++;
        sscanf(value, "%u %llu", &d->clients[i].pid, &d->clients[i].bytes);
    } else if (strcmp(key, "sm") == 0 && d->sm_count < PROCESSES) {
        unsigned i = d->sm_count++;
        sscanf(value, "%u %u", &d->sm[i].pid, &d->sm[i].percent);
    }
}

static int parse_script(const char *path, Node *node) {
    FILE *file = fopen(path, "r");
    char line[512];
    memset(node, 0, sizeof *node);
    if (!file) return DRIVER_NOT_LOADED;
    while (fgets(line, sizeof line, file)) {
        char *value = strchr(line, '=');
        line[strcspn(line, "\n")] = 0;
        if (!value || line[0] == '#') continue;
        *value++ = 0;
        set(node, line, value);
    }
    fclose(file);
    return OK;
}

/* The script as it is now; it is parsed again only when it was rewritten. */
static int read_script(Node *node) {
    static Node kept;
    static struct stat seen;
    static int code = DRIVER_NOT_LOADED;
    const char *path = getenv("GPUWATCH_FAKE_NVML");
    struct stat now;
    memset(&now, 0, sizeof now);
    if (!path || stat(path, &now) != 0) {
        memset(node, 0, sizeof *node);
        return DRIVER_NOT_LOADED;
    }
    pthread_mutex_lock(&lock);
    if (now.st_ino != seen.st_ino || now.st_size != seen.st_size || now.st_mtim.tv_sec != seen.st_mtim.tv_sec ||
        now.st_mtim.tv_nsec != seen.st_mtim.tv_nsec) {
        code = parse_script(path, &kept);
        seen = now;
    }
    *node = kept;
    int result = code;
    pthread_mutex_unlock(&lock);
    return result;
}

static const Handle *opened(const void *handle) {
    const Handle *h = handle;
    return h >= handles && h < handles + handle_count && h->generation == generation ? h : NULL;
}

/* Read the script and find the GPU of a handle in it (without a handle: only the script). Sleeps through the hang that
 * is set for this function, until its time is over or the script no longer has it. Gives the code to return. */
static int enter(const char *function, Node *node, const void *handle, Device **device) {
    struct timespec pause = {0, 5 * 1000 * 1000};
    for (double slept_s = 0;; slept_s += 0.005) {
        int code = read_script(node);
        Faults *general = &node->faults, *own = NULL;
        if (device) *device = NULL;
        pthread_mutex_lock(&lock);
        const Handle *h = handle ? opened(handle) : NULL;
        int initialised = references > 0 && loaded == node->load;
        pthread_mutex_unlock(&lock);
        for (int i = 0; h && i < node->count; i++)
            if (strcmp(node->devices[i].uuid, h->uuid) == 0) {
                own = &node->devices[i].faults;
                if (!node->devices[i].lost && device) *device = &node->devices[i];
            }
        double hang_s = fault(general, function)->hang_s;
        if (own && fault(own, function)->hang_s > hang_s) hang_s = fault(own, function)->hang_s;
        if (slept_s < hang_s) {
            nanosleep(&pause, NULL);
            continue;
        }
        if (code) return code;
        if (fault(general, function)->code) return fault(general, function)->code;
        if (strncmp(function, "nvmlInit", 8) == 0) return OK;
        if (!initialised) return UNINITIALIZED;
        if (!device) return OK;
        if (!h) return INVALID_ARGUMENT;
        if (!*device) return GPU_IS_LOST;
        return fault(own, function)->code;
    }
}

#define NODE(function) Node n; int code = enter(function, &n, NULL, NULL); if (code) return code
#define DEVICE(function) \
    Node n; Device *d; int code = enter(function, &n, handle, &d); if (code) return code

int nvmlInitWithFlags(unsigned flags) {
    NODE("nvmlInitWithFlags");
    if (n.count == 0 && !(flags & 1)) return NOT_FOUND;
    pthread_mutex_lock(&lock);
    if (references++ == 0) generation++;
    loaded = n.load;
    pthread_mutex_unlock(&lock);
    return OK;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    int code = references ? OK : UNINITIALIZED;
    if (references) references--;
    pthread_mutex_unlock(&lock);
    return code;
}

const char *nvmlErrorString(int code) { return code == OK ? "Success" : "Scripted Error"; }

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    NODE("nvmlSystemGetDriverVersion");
    copy(version, n.driver, size);
    return OK;
}

int nvmlSystemGetNVMLVersion(char *version, unsigned size) {
    NODE("nvmlSystemGetNVMLVersion");
    snprintf(version, size, "12.%s", n.driver);
    return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    NODE("nvmlSystemGetCudaDriverVersion_v2");
    *version = n.cuda;
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    NODE("nvmlDeviceGetCount_v2");
    *count = (unsigned)n.count;
    return OK;
}

static int open_instance(const Device *device, int instance, void **handle) {
    if (device->lost) return GPU_IS_LOST;
    pthread_mutex_lock(&lock);
    Handle *h = NULL;
    for (int i = 0; i < handle_count && !h; i++)
        if (handles[i].generation == generation && handles[i].instance == instance &&
            strcmp(handles[i].uuid, device->uuid) == 0)
            h = &handles[i];
    if (!h && handle_count < (int)(sizeof handles / sizeof *handles)) {
        h = &handles[handle_count++];
        copy(h->uuid, device->uuid, TEXT);
        h->generation = generation;
        h->instance = instance;
    }
    pthread_mutex_unlock(&lock);
    *handle = h;
    return h ? OK : INVALID_ARGUMENT;
}

static int open_device(const Device *device, void **handle) { return open_instance(device, -1, handle); }

static int instance_of(const void *handle) { return ((const Handle *)handle)->instance; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    NODE("nvmlDeviceGetHandleByIndex_v2");
    if (index >= (unsigned)n.count) return INVALID_ARGUMENT;
    code = fault(&n.devices[index].faults, "nvmlDeviceGetHandleByIndex_v2")->code;
    return code ? code : open_device(&n.devices[index], handle);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    NODE("nvmlDeviceGetHandleByUUID");
    for (int i = 0; i < n.count; i++)
        if (strcmp(n.devices[i].uuid, uuid) == 0) return open_device(&n.devices[i], handle);
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    DEVICE("nvmlDeviceGetIndex");
    *index = (unsigned)(d - n.devices);
    return OK;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    DEVICE("nvmlDeviceGetUUID");
    copy(uuid, instance_of(handle) < 0 ? d->uuid : d->instances[instance_of(handle)].uuid, size);
    return OK;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    DEVICE("nvmlDeviceGetName");
    if (instance_of(handle) < 0) copy(name, d->name, size);
    else snprintf(name, size, "%s MIG %s", d->name, d->instances[instance_of(handle)].profile);
    return OK;
}

int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) {
    DEVICE("nvmlDeviceGetMinorNumber");
    *minor = d->minor;
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) {
    DEVICE("nvmlDeviceGetPciInfo_v3");
    memset(pci, 0, sizeof *pci);
    copy(pci->id, d->pci, sizeof pci->id);
    sscanf(d->pci, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "%04x:%02x:%02x.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    return OK;
}

/* recorded: N/A on an A100, an H100 and an H200 with MIG on, at work too */
int nvmlDeviceGetUtilizationRates(void *handle, Utilization *utilization) {
    DEVICE("nvmlDeviceGetUtilizationRates");
    if (d->instance_count) return NOT_SUPPORTED;
    utilization->gpu = d->utilization;
    utilization->memory = d->memory_utilization;
    return OK;
}

/* the first version counts what the driver has reserved as used, the second keeps it apart */
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    DEVICE("nvmlDeviceGetMemoryInfo");
    if (instance_of(handle) >= 0) {
        memory->total = d->instances[instance_of(handle)].total;
        memory->used = d->instances[instance_of(handle)].used;
        memory->free = memory->total - memory->used;
        return OK;
    }
    memory->total = d->memory_total;
    memory->used = d->memory_used + d->memory_reserved;
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
    DEVICE("nvmlDeviceGetMemoryInfo_v2");
    if (memory->version != (sizeof(MemoryV2) | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    memory->total = d->memory_total;
    memory->reserved = d->memory_reserved;
    memory->used = d->memory_used;
    if (instance_of(handle) >= 0) {
        memory->total = d->instances[instance_of(handle)].total;
        memory->reserved = 0;
        memory->used = d->instances[instance_of(handle)].used;
    }
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    DEVICE("nvmlDeviceGetPowerUsage");
    *milliwatts = d->power_mw;
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    DEVICE("nvmlDeviceGetTotalEnergyConsumption");
    *millijoules = d->energy_mj;
    return OK;
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius) {
    DEVICE("nvmlDeviceGetTemperature");
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = d->temperature;
    return OK;
}

int nvmlDeviceGetTemperatureV(void *handle, Temperature *temperature) {
    DEVICE("nvmlDeviceGetTemperatureV");
    if (temperature->version != (sizeof(Temperature) | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    temperature->celsius = (int)d->temperature;
    return OK;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    DEVICE("nvmlDeviceGetCurrentClocksEventReasons");
    *reasons = d->event_reasons;
    return OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    DEVICE("nvmlDeviceGetCurrentClocksThrottleReasons");
    *reasons = d->event_reasons;
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    DEVICE("nvmlDeviceGetMigMode");
    *current = *pending = d->instance_count > 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    DEVICE("nvmlDeviceGetMaxMigDeviceCount");
    *count = d->instance_count ? 7 : 0;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    DEVICE("nvmlDeviceGetMigDeviceHandleByIndex");
    if (index >= d->instance_count) return NOT_FOUND;
    return open_instance(d, (int)index, instance);
}

int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id) {
    DEVICE("nvmlDeviceGetGpuInstanceId");
    if (instance_of(handle) < 0) return INVALID_ARGUMENT;
    *id = d->instances[instance_of(handle)].id;
    return OK;
}

/* of MIG devices only; a whole GPU instance has as many compute slices as GPU slices */
typedef struct { unsigned multiprocessors, engines[5], gpu_slices, compute_slices; unsigned long long memory_mb; } Attributes;

int nvmlDeviceGetAttributes_v2(void *handle, Attributes *attributes) {
    DEVICE("nvmlDeviceGetAttributes_v2");
    if (instance_of(handle) < 0) return INVALID_ARGUMENT;
    const char *profile = d->instances[instance_of(handle)].profile, *of_gpu = strstr(profile, "c.");
    memset(attributes, 0, sizeof *attributes);
    attributes->compute_slices = (unsigned)strtoul(profile, NULL, 10);
    attributes->gpu_slices = (unsigned)strtoul(of_gpu ? of_gpu + 2 : profile, NULL, 10);
    attributes->memory_mb = d->instances[instance_of(handle)].total >> 20;
    return OK;
}

int nvmlDeviceGetClockInfo(void *handle, unsigned type, unsigned *mhz) {
    DEVICE("nvmlDeviceGetClockInfo");
    if (type > 3) return INVALID_ARGUMENT;
    *mhz = type == 2 ? d->clock_memory : d->clock_sm;
    return OK;
}

int nvmlDeviceGetCurrPcieLinkGeneration(void *handle, unsigned *generation_now) {
    DEVICE("nvmlDeviceGetCurrPcieLinkGeneration");
    *generation_now = d->pcie_generation;
    return OK;
}

int nvmlDeviceGetCurrPcieLinkWidth(void *handle, unsigned *lanes) {
    DEVICE("nvmlDeviceGetCurrPcieLinkWidth");
    *lanes = d->pcie_lanes;
    return OK;
}

int nvmlDeviceGetPcieReplayCounter(void *handle, unsigned *replays) {
    DEVICE("nvmlDeviceGetPcieReplayCounter");
    *replays = d->pcie_replays;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(void *handle, unsigned type, unsigned counter, unsigned long long *count) {
    DEVICE("nvmlDeviceGetTotalEccErrors");
    if (type > 1 || counter > 1) return INVALID_ARGUMENT;
    *count = d->ecc[type];
    return OK;
}

/* recorded: "Nvlink queries are not supported for Devices in MIG mode"; a GeForce has a link that is down */
int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) {
    DEVICE("nvmlDeviceGetNvLinkState");
    if (d->instance_count) return NOT_SUPPORTED;
    if (link > 0 && link >= d->nvlinks) return INVALID_ARGUMENT;
    *active = d->nvlinks > 0;
    return OK;
}

/* the GPU's errors are those of its first link, one counter's */
int nvmlDeviceGetNvLinkErrorCounter(void *handle, unsigned link, unsigned counter, unsigned long long *count) {
    DEVICE("nvmlDeviceGetNvLinkErrorCounter");
    if (link >= d->nvlinks || counter > 4) return INVALID_ARGUMENT;
    *count = link == 0 && counter == 0 ? d->nvlink_errors : 0;
    return OK;
}

typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency_us;
    unsigned type;
    int result;
    union { double d; unsigned long long ull; } value;
} FieldValue;

int nvmlDeviceGetFieldValues(void *handle, int count, FieldValue *values) {
    DEVICE("nvmlDeviceGetFieldValues");
    for (int i = 0; i < count; i++) {
        int known = d->nvlinks && !d->instance_count && (values[i].field == 138 || values[i].field == 139) && values[i].scope == ~0u;
        values[i].result = known ? OK : NOT_SUPPORTED;
        values[i].type = 3;
        values[i].value.ull = known ? d->nvlink_kib[values[i].field - 138] : 0;
    }
    return OK;
}

/* Events: each set remembers how many of a GPU's XIDs it has reported; those from before the registration are not reported. */
typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
typedef struct { char uuid[TEXT]; void *handle; unsigned reported; } Registration;
typedef struct { Registration list[DEVICES]; int count; } EventSet;

int nvmlEventSetCreate(EventSet **set) {
    NODE("nvmlEventSetCreate");
    *set = calloc(1, sizeof **set);
    return OK;
}

int nvmlEventSetFree(EventSet *set) {
    free(set);
    return OK;
}

int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, EventSet *set) {
    DEVICE("nvmlDeviceRegisterEvents");
    if (!(types & 8) || set->count == DEVICES) return INVALID_ARGUMENT;
    Registration *added = &set->list[set->count++];
    copy(added->uuid, d->uuid, TEXT);
    added->handle = handle;
    added->reported = d->xid_count;
    return OK;
}

int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned timeout_ms) {
    NODE("nvmlEventSetWait_v2");
    (void)timeout_ms;
    for (int r = 0; r < set->count; r++)
        for (int i = 0; i < n.count; i++) {
            Registration *one = &set->list[r];
            if (strcmp(one->uuid, n.devices[i].uuid) != 0 || one->reported >= n.devices[i].xid_count) continue;
            *event = (Event){one->handle, 8, n.devices[i].xids[one->reported++], ~0u, ~0u};
            return OK;
        }
    return TIMEOUT;
}

/* GPM: a sample is what the script says at that moment; a metric is the later sample's value */
typedef struct { unsigned count; struct { unsigned id; double value; } values[METRICS]; int filled; } GpmSample;
typedef struct { unsigned version, supported; } GpmSupport;
typedef struct { char *short_name, *long_name, *unit; } GpmInfo;
typedef struct { unsigned id; int result; double value; GpmInfo info; } GpmMetric;
typedef struct { unsigned version, count; GpmSample *first, *second; GpmMetric metrics[]; } GpmMetrics;

int nvmlGpmQueryDeviceSupport(void *handle, GpmSupport *support) {
    DEVICE("nvmlGpmQueryDeviceSupport");
    if (support->version != 1) return ARGUMENT_VERSION_MISMATCH;
    support->supported = d->gpm_count > 0;
    return OK;
}

int nvmlGpmSampleAlloc(GpmSample **sample) {
    *sample = calloc(1, sizeof **sample);
    return OK;
}

int nvmlGpmSampleFree(GpmSample *sample) {
    free(sample);
    return OK;
}

int nvmlGpmSampleGet(void *handle, GpmSample *sample) {
    DEVICE("nvmlGpmSampleGet");
    if (!d->gpm_count) return NOT_SUPPORTED;
    sample->count = d->gpm_count;
    for (unsigned i = 0; i < d->gpm_count; i++) {
        sample->values[i].id = d->gpm[i].id;
        sample->values[i].value = d->gpm[i].value;
    }
    sample->filled = 1;
    return OK;
}

/* an instance's values are its activity times those of the GPU */
int nvmlGpmMigSampleGet(void *handle, unsigned instance, GpmSample *sample) {
    DEVICE("nvmlGpmMigSampleGet");
    for (unsigned i = 0; i < d->instance_count; i++) {
        if (d->instances[i].id != instance) continue;
        code = nvmlGpmSampleGet(handle, sample);
        for (unsigned j = 0; j < sample->count; j++) sample->values[j].value *= d->instances[i].activity;
        return code;
    }
    return NOT_FOUND;
}

int nvmlGpmMetricsGet(GpmMetrics *asked) {
    NODE("nvmlGpmMetricsGet");
    if (asked->version != 1) return ARGUMENT_VERSION_MISMATCH;
    if (!asked->first->filled || !asked->second->filled) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < asked->count; i++) {
        asked->metrics[i].result = NOT_SUPPORTED;
        for (unsigned j = 0; j < asked->second->count; j++)
            if (asked->second->values[j].id == asked->metrics[i].id) {
                asked->metrics[i].value = asked->second->values[j].value;
                asked->metrics[i].result = OK;
            }
    }
    return OK;
}

/* of a split GPU all instances' processes; of a MIG device its own */
static int list(const Device *d, int instance, unsigned *count, Process *processes) {
    unsigned room = *count, found = 0;
    for (unsigned i = 0; i < d->process_count; i++) {
        if (instance >= 0 && d->processes[i].instance != instance) continue;
        unsigned id = d->processes[i].instance < 0 ? ~0u : d->instances[d->processes[i].instance].id;
        if (found < room) processes[found] = (Process){d->processes[i].pid, d->processes[i].bytes, id, ~0u};
        found++;
    }
    *count = found;
    return room < found ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    DEVICE("nvmlDeviceGetComputeRunningProcesses_v3");
    return list(d, instance_of(handle), count, processes);
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, Process *processes) {
    DEVICE("nvmlDeviceGetComputeRunningProcesses_v2");
    return list(d, instance_of(handle), count, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    DEVICE("nvmlDeviceGetGraphicsRunningProcesses_v3");
    (void)processes;
    *count = 0;
    return OK;
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    DEVICE("nvmlDeviceGetMPSComputeRunningProcesses_v3");
    unsigned room = *count;
    if (instance_of(handle) >= 0) d->client_count = 0;
    *count = d->client_count;
    if (room < d->client_count) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < d->client_count; i++)
        processes[i] = (Process){d->clients[i].pid, d->clients[i].bytes, ~0u, ~0u};
    return OK;
}

/* one sample of each process that had work, of 0.1 s ago; "not found" where none is later than `since_us` */
int nvmlDeviceGetProcessUtilization(void *handle, ProcessUtilization *samples, unsigned *count, unsigned long long since_us) {
    DEVICE("nvmlDeviceGetProcessUtilization");
    if (d->instance_count) return NOT_SUPPORTED;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long sampled_us = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000 - 100000;
    unsigned room = *count, found = 0;
    for (unsigned i = 0; i < d->sm_count; i++) found += d->sm[i].percent > 0;
    if (!found || sampled_us <= since_us) return NOT_FOUND;
    *count = found;
    if (!samples || room < found) return INSUFFICIENT_SIZE;
    for (unsigned i = 0, at = 0; i < d->sm_count; i++)
        if (d->sm[i].percent) samples[at++] = (ProcessUtilization){d->sm[i].pid, sampled_us, d->sm[i].percent, 0, 0, 0};
    return OK;
}
