/* A stand-in for UCX's libuct_cuda: the table of imports as in the releases that ipc_cache.py knows, with klib's kinds of
 * buckets (open addressing, triangular steps), and a destroy that counts. `CAPACITY` buckets, never resized. */

#include <stdint.h>
#include <stdlib.h>

#define CAPACITY 32
#define SIZE_AT 136

struct key {
    uint32_t pid, ns, device;
};

struct table {
    uint32_t buckets, size, occupied, upper_bound;
    uint32_t *flags;
    struct key *keys;
    void **values;
    uint32_t lock;
    uint64_t max_regions, max_size;
};

static uint32_t flags[CAPACITY / 16] = {0xaaaaaaaa, 0xaaaaaaaa};
static struct key keys[CAPACITY];
static void *values[CAPACITY];

struct table uct_cuda_ipc_remote_cache = {CAPACITY, 0, 0, CAPACITY * 3 / 4, flags, keys, values, 0, 0, 0};

static int destroyed, handles_closed;

static uint32_t bits(uint32_t at)
{
    return flags[at / 16] >> (at % 16 * 2) & 3;
}

/* where the key is, or CAPACITY; `room`: the first bucket that it could be put into. All keys collide on purpose: a lookup
 * that stopped at a deleted bucket would lose every key behind it. */
static uint32_t look(struct key key, uint32_t *room)
{
    uint32_t at = 5, step = 0;

    *room = CAPACITY;
    for (; step < CAPACITY; at = (at + ++step) % CAPACITY) {
        if (bits(at) != 0 && *room == CAPACITY) {
            *room = at;
        }
        if (bits(at) & 2) {
            break;
        }
        if (bits(at) == 0 && keys[at].pid == key.pid && keys[at].ns == key.ns && keys[at].device == key.device) {
            return at;
        }
    }
    return CAPACITY;
}

int fake_has(uint32_t pid, uint32_t ns, uint32_t device)
{
    uint32_t room;

    return look((struct key){pid, ns, device}, &room) != CAPACITY;
}

void fake_insert(uint32_t pid, uint32_t ns, uint32_t device, uint64_t size)
{
    struct table *table = &uct_cuda_ipc_remote_cache;
    char *cache = calloc(1, SIZE_AT + 8);
    uint32_t room;

    if (look((struct key){pid, ns, device}, &room) != CAPACITY || cache == NULL) {
        abort();
    }
    *(uint64_t *)(cache + SIZE_AT) = size;
    table->occupied += bits(room) == 2;
    table->size++;
    flags[room / 16] &= ~(3u << (room % 16 * 2));
    keys[room] = (struct key){pid, ns, device};
    values[room] = cache;
}

void uct_cuda_ipc_destroy_cache(void *cache, int close_handles)
{
    destroyed++;
    handles_closed += close_handles;
    free(cache);
}

int fake_destroyed(void)
{
    return destroyed;
}

int fake_handles_closed(void)
{
    return handles_closed;
}

int fake_size(void)
{
    return uct_cuda_ipc_remote_cache.size;
}

void fake_lock(uint32_t state)
{
    uct_cuda_ipc_remote_cache.lock = state;
}
