/* The script of the stand-in for NVML: read, kept up to date, asked.
 *
 * One statement a line, "#" begins a comment, and of two statements about the same thing the later one holds. GPU is a
 * number from 0, the same for ever, or "*" for all:
 *
 *   driver VERSION                     what nvmlSystemGetDriverVersion says
 *   init CODE                          what nvmlInit returns
 *   gpu GPU UUID PCI                   one board
 *   mig GPU GI CI UUID                 one MIG device on it
 *   order GPU ...                      which boards NVML lists, by its own index; "!CODE:GPU" is listed but broken
 *   set GPU KEY VALUE                  a reading: NUMBER, NUMBER+RATE/s (counted from the script's change), err:CODE
 *   call GPU FUNCTION RULE [MS]        what a function does: ok, err CODE, delay MS, hang, crash
 *   process GPU PID BYTES [GI CI]      a compute process; PID 0 removes those named before
 *   event SEQ GPU TYPE DATA [GI CI]    one event; SEQ grows through the script
 */

#pragma once

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 64
#define MAX_ROWS 2048 /* of each kind of statement; more are ignored */
#define NAME 64
#define ANY (-1)
#define NO_GPU (-2)
#define WHOLE_GPU 0xFFFFFFFFu

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, TIMEOUT = 10, VERSION_MISMATCH = 25
};

typedef struct { int id; int mig; } Device; /* mig: row of the MIG device, or -1 */
typedef struct { char uuid[96], pci[96]; } Board;
typedef struct { int gpu; char key[NAME]; double base, rate; int code; } Setting;
typedef struct { int gpu; char function[NAME], rule[16]; int number; } Rule;
typedef struct { int gpu; unsigned pid; unsigned long long bytes; unsigned gi, ci; } Process;
typedef struct { int gpu; unsigned gi, ci; char uuid[96]; } Mig;
typedef struct { unsigned long long seq, type, data; int gpu; unsigned gi, ci; } Event;

typedef struct {
    char driver[80];
    int init, boards, listed, settings, rules, processes, events, migs;
    int order[MAX_GPUS], broken[MAX_GPUS];
    Board board[MAX_GPUS];
    Setting setting[MAX_ROWS];
    Rule rule[MAX_ROWS];
    Process process[MAX_ROWS];
    Event event[MAX_ROWS];
    Mig mig[MAX_ROWS];
} Script;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Script script;
static Device device[MAX_GPUS], mig_device[MAX_ROWS];
static struct timespec changed;
static ino_t inode;
static off_t bytes;
static int users, driver_fd = -1;

static void note(const char *format, int gpu, unsigned long long value) {
    const char *path = getenv("FAKE_NVML_LOG");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (fd < 0) return;
    dprintf(fd, format, gpu, value);
    close(fd);
}

static int gpu_of(const char *word) { return strcmp(word, "*") ? atoi(word) : ANY; }

static int add_setting(Script *to, const char *gpu, const char *key, const char *value) {
    if (to->settings == MAX_ROWS) return 0;
    Setting *s = &to->setting[to->settings++];
    *s = (Setting){.gpu = gpu_of(gpu)};
    snprintf(s->key, NAME, "%s", key);
    if (sscanf(value, "err:%d", &s->code) != 1) sscanf(value, "%lf+%lf/s", &s->base, &s->rate);
    return 1;
}

static void parse_order(Script *to, char *rest) {
    to->listed = 0;
    for (char *word = strtok(rest, " \n"); word && to->listed < MAX_GPUS; word = strtok(NULL, " \n")) {
        int code = 0, gpu = 0;
        if (sscanf(word, "!%d:%d", &code, &gpu) != 2) gpu = atoi(word);
        to->order[to->listed] = gpu;
        to->broken[to->listed++] = code;
    }
}

static void parse_line(Script *to, char *line) {
    char a[NAME], b[NAME], c[96];
    unsigned u, v;
    int n = 0;
    line[strcspn(line, "#\n")] = 0;
    if (sscanf(line, "driver %79s", to->driver) == 1) return;
    if (sscanf(line, "init %d", &to->init) == 1) return;
    if (sscanf(line, "gpu %63s %63s %95s", a, b, c) == 3 && atoi(a) >= 0 && atoi(a) < MAX_GPUS) {
        int id = atoi(a);
        snprintf(to->board[id].uuid, 96, "%s", b);
        snprintf(to->board[id].pci, 96, "%s", c);
        if (id >= to->boards) to->boards = id + 1;
    } else if (sscanf(line, "mig %63s %u %u %95s", a, &u, &v, c) == 4 && to->migs < MAX_ROWS) {
        Mig *m = &to->mig[to->migs++];
        *m = (Mig){.gpu = atoi(a), .gi = u, .ci = v};
        snprintf(m->uuid, 96, "%s", c);
    } else if (strncmp(line, "order ", 6) == 0) {
        parse_order(to, line + 6);
    } else if (sscanf(line, "set %63s %63s %95s", a, b, c) == 3) {
        add_setting(to, a, b, c);
    } else if (sscanf(line, "call %63s %63s %95s %d", a, b, c, &n) >= 3 && to->rules < MAX_ROWS) {
        Rule *r = &to->rule[to->rules++];
        *r = (Rule){.gpu = gpu_of(a), .number = n};
        snprintf(r->function, NAME, "%s", b);
        snprintf(r->rule, sizeof r->rule, "%.15s", c);
    } else if (strncmp(line, "process ", 8) == 0 && to->processes < MAX_ROWS) {
        Process p = {.gi = WHOLE_GPU, .ci = WHOLE_GPU};
        if (sscanf(line, "process %d %u %llu %u %u", &p.gpu, &p.pid, &p.bytes, &p.gi, &p.ci) >= 2) {
            if (p.pid) to->process[to->processes++] = p;
            else for (int i = 0; i < to->processes; i++) if (to->process[i].gpu == p.gpu) to->process[i].gpu = ANY;
        }
    } else if (strncmp(line, "event ", 6) == 0 && to->events < MAX_ROWS) {
        Event e = {.gi = WHOLE_GPU, .ci = WHOLE_GPU};
        char type[32] = "";
        if (sscanf(line, "event %llu %d %31s %llu %u %u", &e.seq, &e.gpu, type, &e.data, &e.gi, &e.ci) >= 4) {
            e.type = strtoull(type, NULL, 0);
            to->event[to->events++] = e;
        }
    }
}

/* Called with the lock held. */
static void refresh(void) {
    const char *path = getenv("FAKE_NVML_SCRIPT");
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (now.st_ino == inode && now.st_size == bytes && now.st_mtim.tv_sec == changed.tv_sec &&
        now.st_mtim.tv_nsec == changed.tv_nsec)
        return;
    FILE *file = fopen(path, "re");
    if (!file) return;
    script.init = script.boards = script.listed = script.settings = script.rules = 0;
    script.processes = script.events = script.migs = 0;
    char line[512];
    while (fgets(line, sizeof line, file)) parse_line(&script, line);
    fclose(file);
    if (!script.listed)
        for (int i = 0; i < script.boards; i++) script.order[script.listed++] = i;
    inode = now.st_ino, bytes = now.st_size, changed = now.st_mtim;
}

static const Rule *rule_for(const char *function, int gpu) {
    for (int i = script.rules - 1; i >= 0; i--) {
        const Rule *r = &script.rule[i];
        if ((r->gpu == ANY || r->gpu == gpu) && (!strcmp(r->function, "*") || !strcmp(r->function, function))) return r;
    }
    return NULL;
}

/* The script's rule for the function; returns when a hang is over. */
static int follow_rule(const char *function, int gpu) {
    struct timespec nap = {0, 5 * 1000 * 1000};
    for (;;) {
        pthread_mutex_lock(&lock);
        refresh();
        const Rule *found = rule_for(function, gpu);
        Rule rule = found ? *found : (Rule){.rule = "ok"};
        pthread_mutex_unlock(&lock);
        if (!strcmp(rule.rule, "err")) return rule.number;
        if (!strcmp(rule.rule, "crash")) raise(SIGSEGV);
        if (!strcmp(rule.rule, "delay")) {
            struct timespec wait = {rule.number / 1000, rule.number % 1000 * 1000000L};
            nanosleep(&wait, NULL);
        }
        if (strcmp(rule.rule, "hang")) return SUCCESS;
        nanosleep(&nap, NULL);
    }
}

/* What every function but init and shutdown does first. */
static int enter(const char *function, int gpu) {
    int code = follow_rule(function, gpu);
    return code ? code : users ? SUCCESS : UNINITIALIZED;
}

static int look_up(const char *key, int gpu, unsigned long long *value) {
    int code = NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    for (int i = script.settings - 1; i >= 0; i--) {
        const Setting *s = &script.setting[i];
        if ((s->gpu != ANY && s->gpu != gpu) || strcmp(s->key, key)) continue;
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        double since = (now.tv_sec - changed.tv_sec) + (now.tv_nsec - changed.tv_nsec) / 1e9;
        *value = (unsigned long long)(s->base + s->rate * (since > 0 ? since : 0));
        code = s->code;
        break;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int read_number(const char *function, const char *key, Device *dev, unsigned *out) {
    int code = enter(function, dev->id);
    unsigned long long value = 0;
    if (!code) code = look_up(key, dev->id, &value);
    if (!code) *out = (unsigned)value;
    return code;
}
