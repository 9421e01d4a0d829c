/* A stand-in for libnvidia-ml.so.1 that answers from a script, for machines without a GPU.
 *
 * FAKE_NVML_SCRIPT names the script; script.h says what stands in it. It is read again whenever it changes, so a fault can
 * be played while a monitor runs. FAKE_NVML_LOG, if set, names a file that gets one line for each init, shutdown and event
 * registration.
 */

#include <poll.h>
#include <sys/inotify.h>

#include "script.h"

#define API __attribute__((visibility("default")))

typedef struct {
    unsigned long long mask[MAX_GPUS], seen[MAX_GPUS];
    int inotify;
} EventSet;

/* --- the library itself ----------------------------------------------------------------------------------------- */

API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = follow_rule("nvmlInit", NO_GPU);
    pthread_mutex_lock(&lock);
    if (!code) code = script.init;
    if (!code && !users++) {
        driver_fd = open("/dev/null", O_RDONLY | O_CLOEXEC); /* the real one holds device files open */
        for (int i = 0; i < MAX_GPUS; i++) device[i] = (Device){i, -1};
    }
    pthread_mutex_unlock(&lock);
    note("init %d %llu\n", code, 0);
    return code;
}

API int nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    int code = users ? SUCCESS : UNINITIALIZED;
    if (users > 0 && !--users) close(driver_fd);
    pthread_mutex_unlock(&lock);
    note("shutdown %d %llu\n", code, 0);
    return code;
}

API const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "fake error %d", code);
    return text;
}

API int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    int code = enter("nvmlSystemGetDriverVersion", NO_GPU);
    if (!code) snprintf(version, length, "%s", script.driver);
    return code;
}

/* --- boards ----------------------------------------------------------------------------------------------------- */

API int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = enter("nvmlDeviceGetCount", NO_GPU);
    if (!code) *count = script.listed;
    return code;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    pthread_mutex_lock(&lock);
    refresh();
    int known = index < (unsigned)script.listed, id = known ? script.order[index] : 0;
    int broken = known ? script.broken[index] : 0;
    pthread_mutex_unlock(&lock);
    if (!known) return INVALID_ARGUMENT;
    int code = broken ? broken : enter("nvmlDeviceGetHandleByIndex", id);
    if (!code) *out = &device[id];
    return code;
}

API int nvmlDeviceGetUUID(Device *dev, char *uuid, unsigned length) {
    int code = enter("nvmlDeviceGetUUID", dev->id);
    if (!code) snprintf(uuid, length, "%s", dev->mig < 0 ? script.board[dev->id].uuid : script.mig[dev->mig].uuid);
    return code;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;

API int nvmlDeviceGetPciInfo_v3(Device *dev, PciInfo *info) {
    int code = enter("nvmlDeviceGetPciInfo", dev->id);
    if (code) return code;
    memset(info, 0, sizeof *info);
    sscanf(script.board[dev->id].pci, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    snprintf(info->bus_id, 32, "%08X:%02X:%02X.0", info->domain, info->bus, info->device);
    snprintf(info->legacy, 16, "%04X:%02X:%02X.0", info->domain & 0xffff, info->bus & 0xff, info->device & 0xff);
    return SUCCESS;
}

API int nvmlDeviceGetArchitecture(Device *dev, unsigned *arch) {
    return read_number("nvmlDeviceGetArchitecture", "architecture", dev, arch);
}

API int nvmlDeviceGetMigMode(Device *dev, unsigned *current, unsigned *pending) {
    int code = read_number("nvmlDeviceGetMigMode", "mig", dev, current);
    if (!code) *pending = *current;
    return code;
}

API int nvmlDeviceGetMaxMigDeviceCount(Device *dev, unsigned *count) {
    int code = enter("nvmlDeviceGetMaxMigDeviceCount", dev->id);
    if (!code) *count = 7;
    return code;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(Device *dev, unsigned index, Device **out) {
    int code = enter("nvmlDeviceGetMigDeviceHandleByIndex", dev->id);
    for (int i = 0; !code && i < script.migs; i++)
        if (script.mig[i].gpu == dev->id && index-- == 0) {
            mig_device[i] = (Device){dev->id, i};
            *out = &mig_device[i];
            return SUCCESS;
        }
    return code ? code : NOT_FOUND;
}

/* --- readings --------------------------------------------------------------------------------------------------- */

typedef union { double d; unsigned u; unsigned long long ull; } Value;
typedef struct { unsigned field, scope; int64_t at, latency; unsigned type; int code; Value value; } FieldValue;

API int nvmlDeviceGetFieldValues(Device *dev, int count, FieldValue *values) {
    int code = enter("nvmlDeviceGetFieldValues", dev->id);
    for (int i = 0; !code && i < count; i++) {
        char key[NAME];
        unsigned long long value = 0;
        snprintf(key, NAME, "field.%u.%u", values[i].field, values[i].scope);
        values[i].code = look_up(key, dev->id, &value);
        if (values[i].code) {
            snprintf(key, NAME, "field.%u", values[i].field);
            values[i].code = look_up(key, dev->id, &value);
        }
        values[i].type = 3;
        values[i].value.ull = values[i].code ? 0 : value;
    }
    return code;
}

API int nvmlDeviceGetMemoryErrorCounter(Device *dev, unsigned kind, unsigned life, unsigned place,
                                        unsigned long long *count) {
    char key[NAME];
    int code = enter("nvmlDeviceGetMemoryErrorCounter", dev->id);
    snprintf(key, NAME, "ecc.%s.%s.%s", kind ? "uncorrected" : "corrected", life ? "aggregate" : "volatile",
             place == 2 ? "dram" : place == 7 ? "sram" : "other");
    return code ? code : look_up(key, dev->id, count);
}

typedef struct { unsigned version; unsigned long long counts[11]; unsigned exceeded; } SramStatus;

API int nvmlDeviceGetSramEccErrorStatus(Device *dev, SramStatus *status) {
    if (status->version != 0x1000068) return VERSION_MISMATCH;
    return read_number("nvmlDeviceGetSramEccErrorStatus", "sram.threshold", dev, &status->exceeded);
}

API int nvmlDeviceGetRemappedRows(Device *dev, unsigned *corr, unsigned *unc, unsigned *pending, unsigned *failed) {
    int code = read_number("nvmlDeviceGetRemappedRows", "remap.correctable", dev, corr);
    if (!code) code = read_number("nvmlDeviceGetRemappedRows", "remap.uncorrectable", dev, unc);
    if (!code) code = read_number("nvmlDeviceGetRemappedRows", "remap.pending", dev, pending);
    return code ? code : read_number("nvmlDeviceGetRemappedRows", "remap.failed", dev, failed);
}

API int nvmlDeviceGetCurrentClocksEventReasons(Device *dev, unsigned long long *reasons) {
    int code = enter("nvmlDeviceGetCurrentClocksEventReasons", dev->id);
    return code ? code : look_up("clocks", dev->id, reasons);
}

API int nvmlDeviceGetTemperature(Device *dev, unsigned sensor, unsigned *degrees) {
    (void)sensor;
    return read_number("nvmlDeviceGetTemperature", "temperature", dev, degrees);
}

API int nvmlDeviceGetTemperatureThreshold(Device *dev, unsigned threshold, unsigned *degrees) {
    (void)threshold;
    return read_number("nvmlDeviceGetTemperatureThreshold", "slowdown", dev, degrees);
}

API int nvmlDeviceGetMemoryInfo(Device *dev, unsigned long long *memory) {
    int code = enter("nvmlDeviceGetMemoryInfo", dev->id);
    if (!code) code = look_up("memory.total", dev->id, &memory[0]);
    if (!code) code = look_up("memory.used", dev->id, &memory[2]);
    if (!code) memory[1] = memory[0] - memory[2];
    return code;
}

API int nvmlDeviceGetUtilizationRates(Device *dev, unsigned *rates) {
    int code = read_number("nvmlDeviceGetUtilizationRates", "utilization", dev, &rates[0]);
    if (!code) rates[1] = 0;
    return code;
}

API int nvmlDeviceGetCurrPcieLinkWidth(Device *dev, unsigned *out) {
    return read_number("nvmlDeviceGetCurrPcieLinkWidth", "pcie.width", dev, out);
}

API int nvmlDeviceGetMaxPcieLinkWidth(Device *dev, unsigned *out) {
    return read_number("nvmlDeviceGetMaxPcieLinkWidth", "pcie.width.max", dev, out);
}

API int nvmlDeviceGetCurrPcieLinkGeneration(Device *dev, unsigned *out) {
    return read_number("nvmlDeviceGetCurrPcieLinkGeneration", "pcie.generation", dev, out);
}

API int nvmlDeviceGetMaxPcieLinkGeneration(Device *dev, unsigned *out) {
    return read_number("nvmlDeviceGetMaxPcieLinkGeneration", "pcie.generation.max", dev, out);
}

API int nvmlDeviceGetNvLinkState(Device *dev, unsigned link, unsigned *active) {
    char key[NAME];
    unsigned long long count = 0, value = 0;
    int code = enter("nvmlDeviceGetNvLinkState", dev->id);
    if (!code) code = look_up("nvlink.count", dev->id, &count);
    if (code) return code;
    if (link >= count) return INVALID_ARGUMENT;
    snprintf(key, NAME, "nvlink.%u", link);
    if (look_up(key, dev->id, &value) && (code = look_up("nvlink", dev->id, &value))) return code;
    *active = (unsigned)value;
    return SUCCESS;
}

typedef struct {
    unsigned version; unsigned char cluster[16]; unsigned status, clique; unsigned char state; unsigned health;
    unsigned char summary;
} Fabric;

API int nvmlDeviceGetGpuFabricInfoV(Device *dev, Fabric *fabric) {
    unsigned long long value = 0;
    int code = enter("nvmlDeviceGetGpuFabricInfoV", dev->id);
    if (code) return code;
    if (fabric->version != 0x3000028) return VERSION_MISMATCH;
    if ((code = look_up("fabric.state", dev->id, &value))) return code;
    fabric->state = (unsigned char)value;
    value = 0, look_up("fabric.status", dev->id, &value), fabric->status = (unsigned)value;
    value = 0, look_up("fabric.health", dev->id, &value), fabric->health = (unsigned)value;
    value = 0, look_up("fabric.summary", dev->id, &value), fabric->summary = (unsigned char)value;
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long bytes; unsigned gi, ci; } ProcessInfo;

API int nvmlDeviceGetComputeRunningProcesses_v3(Device *dev, unsigned *count, ProcessInfo *list) {
    int code = enter("nvmlDeviceGetComputeRunningProcesses", dev->id);
    unsigned room = *count, found = 0;
    if (code) return code;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < script.processes; i++) {
        const Process *p = &script.process[i];
        if (p->gpu != dev->id) continue;
        if (list && found < room) list[found] = (ProcessInfo){p->pid, p->bytes, p->gi, p->ci};
        found++;
    }
    pthread_mutex_unlock(&lock);
    *count = found;
    return found > (list ? room : 0) ? INSUFFICIENT_SIZE : SUCCESS;
}

/* --- events ----------------------------------------------------------------------------------------------------- */

typedef struct { Device *device; unsigned long long type, data; unsigned gi, ci; } EventData;

API int nvmlEventSetCreate(EventSet **out) {
    int code = enter("nvmlEventSetCreate", NO_GPU);
    if (code) return code;
    EventSet *set = calloc(1, sizeof *set);
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", getenv("FAKE_NVML_SCRIPT") ? getenv("FAKE_NVML_SCRIPT") : "/");
    *(strrchr(folder, '/') ? strrchr(folder, '/') + 1 : folder) = 0;
    set->inotify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    inotify_add_watch(set->inotify, *folder ? folder : ".", IN_MOVED_TO | IN_CLOSE_WRITE);
    *out = set;
    return SUCCESS;
}

API int nvmlEventSetFree(EventSet *set) {
    close(set->inotify);
    free(set);
    return SUCCESS;
}

API int nvmlDeviceGetSupportedEventTypes(Device *dev, unsigned long long *types) {
    int code = enter("nvmlDeviceGetSupportedEventTypes", dev->id);
    return code ? code : look_up("events", dev->id, types);
}

API int nvmlDeviceRegisterEvents(Device *dev, unsigned long long types, EventSet *set) {
    int code = enter("nvmlDeviceRegisterEvents", dev->id);
    if (code) return code;
    if (dev->mig >= 0) return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    set->mask[dev->id] |= types;
    for (int i = 0; i < script.events; i++) /* what happened before the registration is lost */
        if (script.event[i].gpu == dev->id && script.event[i].seq > set->seen[dev->id])
            set->seen[dev->id] = script.event[i].seq;
    pthread_mutex_unlock(&lock);
    note("register %d 0x%llx\n", dev->id, types);
    return SUCCESS;
}

static int next_event(EventSet *set, EventData *out) {
    int found = 0;
    pthread_mutex_lock(&lock);
    refresh();
    for (int i = 0; i < script.events && !found; i++) {
        const Event *e = &script.event[i];
        if (e->gpu < 0 || e->gpu >= MAX_GPUS || e->seq <= set->seen[e->gpu]) continue;
        set->seen[e->gpu] = e->seq;
        if (!(set->mask[e->gpu] & e->type)) continue;
        *out = (EventData){&device[e->gpu], e->type, e->data, e->gi, e->ci};
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

API int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms) {
    long long end = now_ms() + timeout_ms;
    char drained[4096];
    for (;;) {
        int code = enter("nvmlEventSetWait", NO_GPU);
        if (code) return code;
        if (next_event(set, out)) return SUCCESS;
        long long left = end - now_ms();
        if (left <= 0) return TIMEOUT;
        struct pollfd watched = {set->inotify, POLLIN, 0};
        poll(&watched, 1, (int)left);
        while (read(set->inotify, drained, sizeof drained) > 0) {}
    }
}
