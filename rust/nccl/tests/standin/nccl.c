// NCCL's part. Calls return before they are done, and most say "in progress" first: a caller that
// does not ask how a communicator is doing gets nowhere.
#define _GNU_SOURCE
#include "standin.h"
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define SLOT (1u << 16)
#define BOX (1u << 14)
#define VERSION 22907

typedef struct { char text[128]; } id_t128;
struct box { _Atomic uint32_t written, read; uint32_t bytes; char data[BOX]; };
struct shared {
    _Atomic int attached, arrived, round;
    int colors[RANKS], keys[RANKS];
    char slots[RANKS][SLOT];
    struct box boxes[RANKS][RANKS];
    char grown[64];                          // the name of the communicator that it grows to: an id that was not used
    _Atomic int grow_id, growing;            // how many ids there were; ranks that have begun to grow
    size_t window[RANKS];                    // bytes, by rank
};
struct comm {
    struct shared *shared;
    char name[64];
    int rank, size, splits, shrinks, grows;
    _Atomic int revoked, revoking, lacks; // lacks: a network that has seen an error, which NCCL keeps
    _Atomic int aborted, failed, fresh, finalized, splitting;
    _Atomic int working; // calls given to a stream that have not ended
};
struct config { size_t size; unsigned magic, version; int blocking, cga, least, most; const char *net; int share, traffic; };
enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };
struct call {
    enum kind kind;
    struct comm *comm;
    struct stream *stream;
    const char *from;
    char *to;
    size_t count;
    int type, op, root;
};
struct batch { int n; struct call calls[256]; };

static _Thread_local int depth;
static _Thread_local struct batch *gathered;
static struct { double scalar; int used; } ops[1024];
static const int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

int ncclGetVersion(int *version) {
    const char *said = getenv("STANDIN_VERSION");
    *version = said ? atoi(said) : VERSION;
    return OK;
}
const char *ncclGetErrorString(int code) { return code == IN_PROGRESS ? "in progress" : code == INVALID_ARGUMENT ? "invalid argument" : code == INVALID_USAGE ? "invalid usage" : "an error"; }
static char last[256];
const char *ncclGetLastError(void *comm) { (void)comm; return last; }
static int refuse(int code, const char *why) { snprintf(last, sizeof last, "%s", why); return code; }

int ncclGetUniqueId(id_t128 *id) {
    uint64_t number;
    memset(id, 0, sizeof *id);
    if (getrandom(&number, sizeof number, 0) < 0) return 2;
    snprintf(id->text, sizeof id->text, "/nccl-standin-%016lx", (unsigned long)number);
    return OK;
}

static struct comm *attach(const char *name, int rank, int size) {
    int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared))) return NULL;
    struct comm *c = calloc(1, sizeof *c);
    c->shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    snprintf(c->name, sizeof c->name, "%s", name);
    c->rank = rank;
    c->size = size;
    if (atomic_fetch_add(&c->shared->attached, 1) + 1 == size) shm_unlink(name);
    return c;
}

static int config_is_right(const struct config *config) {
    if (!config || config->magic != 0xcafebeef || config->size != 88 || config->version != VERSION) return 0;
    return config->blocking == 0 && (config->least == INT_MIN) == (config->most == INT_MIN) && config->traffic == INT_MIN;
}

int ncclCommInitRankConfig(struct comm **out, int size, id_t128 id, int rank, struct config *config) {
    if (*out || strncmp(id.text, "/nccl-standin-", 14) || size > RANKS) { depth++; return refuse(INVALID_ARGUMENT, "init: a handle that is not null, a wrong id, or too many ranks"); }
    if (!config_is_right(config)) { depth++; return refuse(INVALID_ARGUMENT, "init: the config is not one of 2.29"); }
    if (!(*out = attach(id.text, rank, size))) return 2;
    return IN_PROGRESS;
}

// Milliseconds that each part of a collective takes before it is written, for tests of what comes too early.
static unsigned slow(void) {
    const char *said = getenv("STANDIN_SLOW");
    return said ? (unsigned)atoi(said) : 0;
}

// RANK:MILLISECONDS by which that rank's part of a collective ends after those of the others, for tests of an
// error that comes in between.
static unsigned late(int rank) {
    const char *said = getenv("STANDIN_LATE");
    return said && atoi(said) == rank ? (unsigned)atoi(strchr(said, ':') + 1) : 0;
}

int ncclCommGetAsyncError(struct comm *c, int *out) {
    if (atomic_load(&c->failed)) *out = atomic_load(&c->failed);
    else if (atomic_load(&c->shared->attached) < c->size || atomic_load(&c->splitting) || atomic_load(&c->revoking)) *out = IN_PROGRESS;
    else if (slow() && atomic_load(&c->working)) *out = IN_PROGRESS; // as the first call of a kind, which connects
    else *out = atomic_exchange(&c->fresh, 0) ? IN_PROGRESS : OK; // at least one look is needed
    return OK;
}

static int usable(struct comm *c) {
    return atomic_load(&c->shared->attached) >= c->size && !atomic_load(&c->fresh) && !atomic_load(&c->splitting) && !atomic_load(&c->failed) && !atomic_load(&c->finalized) && !atomic_load(&c->revoked);
}
int ncclCommCount(struct comm *c, int *out) { *out = c->size; return usable(c) ? OK : INVALID_ARGUMENT; }
int ncclCommUserRank(struct comm *c, int *out) { *out = c->rank; return usable(c) ? OK : INVALID_ARGUMENT; }
// Returns when its work has ended, as NCCL does: from then on nobody reads or writes the memory of its calls.
int ncclCommAbort(struct comm *c) {
    atomic_store(&c->aborted, 1);
    shm_unlink(c->name);
    while (atomic_load(&c->working) || atomic_load(&c->splitting) || atomic_load(&c->revoking)) usleep(20);
    return OK; // not freed: its peers may still look at it
}
int ncclCommFinalize(struct comm *c) {
    if (!usable(c)) return refuse(INVALID_USAGE, "finalize: not ready, or finalized before");
    atomic_store(&c->finalized, 1);
    atomic_store(&c->fresh, 1);
    return IN_PROGRESS;
}
int ncclCommDestroy(struct comm *c) {
    if (!atomic_load(&c->finalized) || atomic_load(&c->fresh)) return refuse(INVALID_USAGE, "destroy: not finalized");
    return OK;
}

static int barrier(struct comm *c) {
    struct shared *s = c->shared;
    int round = atomic_load(&s->round);
    if (atomic_fetch_add(&s->arrived, 1) + 1 == c->size) {
        atomic_store(&s->arrived, 0);
        atomic_store(&s->round, round + 1);
    }
    while (atomic_load(&s->round) == round) {
        if (atomic_load(&c->aborted)) return -1;
        usleep(20);
    }
    return 0;
}

static double get(const char *p, int type, size_t i) {
    switch (type) {
    case 0: return ((const int8_t *)p)[i];
    case 1: return ((const uint8_t *)p)[i];
    case 2: return ((const int32_t *)p)[i];
    case 3: return ((const uint32_t *)p)[i];
    case 4: return (double)((const int64_t *)p)[i];
    case 5: return (double)((const uint64_t *)p)[i];
    case 6: return (double)((const _Float16 *)p)[i];
    case 7: return ((const float *)p)[i];
    case 8: return ((const double *)p)[i];
    case 9: { uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16; float f; memcpy(&f, &bits, 4); return f; }
    default: abort();
    }
}
static void put(char *p, int type, size_t i, double v) {
    switch (type) {
    case 0: ((int8_t *)p)[i] = (int8_t)v; break;
    case 1: ((uint8_t *)p)[i] = (uint8_t)v; break;
    case 2: ((int32_t *)p)[i] = (int32_t)v; break;
    case 3: ((uint32_t *)p)[i] = (uint32_t)v; break;
    case 4: ((int64_t *)p)[i] = (int64_t)v; break;
    case 5: ((uint64_t *)p)[i] = (uint64_t)v; break;
    case 6: ((_Float16 *)p)[i] = (_Float16)v; break;
    case 7: ((float *)p)[i] = (float)v; break;
    case 8: ((double *)p)[i] = v; break;
    case 9: { float f = (float)v; uint32_t bits; memcpy(&bits, &f, 4); ((uint16_t *)p)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); break; }
    default: abort();
    }
}
static double combined(const struct call *k, size_t i) {
    const struct shared *s = k->comm->shared;
    double sum = 0;
    for (int r = 0; r < k->comm->size; r++) {
        double v = get(s->slots[r], k->type, i);
        if (r == 0) { sum = v; continue; }
        int narrow = k->type == 6 || k->type == 7 || k->type == 9; // accumulated in float, as NCCL does or better
        sum = k->op == 1 ? sum * v : k->op == 2 ? (v > sum ? v : sum) : k->op == 3 ? (v < sum ? v : sum) : sum + v;
        if (narrow) sum = (float)sum;
    }
    return k->op == 4 ? sum / k->comm->size : sum;
}

// The combined values `i` of everybody, as value `at` of `to`. A double does not hold 64 bits.
static void combine(char *to, size_t at, const struct call *k, size_t i) {
    if (k->type != 4 || (k->op != 2 && k->op != 3)) { put(to, k->type, at, combined(k, i)); return; }
    int64_t best = 0;
    for (int r = 0; r < k->comm->size; r++) {
        int64_t v = ((const int64_t *)k->comm->shared->slots[r])[i];
        if (r == 0 || (k->op == 2 ? v > best : v < best)) best = v;
    }
    ((int64_t *)to)[at] = best;
}

// Copies or combines `count` values of everybody, slot by slot; `from` null gives nothing.
static int exchange(const struct call *k, const char *from, size_t count, size_t skip) {
    struct comm *c = k->comm;
    size_t width = (size_t)SIZES[k->type], step = SLOT / width;
    for (size_t at = 0; at < count || (count == 0 && at == 0); at += step) {
        size_t n = count - at < step ? count - at : step;
        if (from) memcpy(c->shared->slots[c->rank], from + at * width, n * width);
        if (k->op >= 5) for (size_t i = 0; i < n; i++) put(c->shared->slots[c->rank], k->type, i, ops[k->op].scalar * get(c->shared->slots[c->rank], k->type, i));
        if (barrier(c)) return -1;
        usleep(slow() * 1000);
        while (getenv("STANDIN_STUCK") && !atomic_load(&c->aborted)) usleep(200); // as where a link is silent
        if (atomic_load(&c->aborted)) return -1; // its part never comes: the others must not end the call with it
        if (k->kind == ALL_GATHER) for (int r = 0; r < c->size; r++) memcpy(k->to + ((size_t)r * k->count + at) * width, c->shared->slots[r], n * width);
        else if (k->kind == BROADCAST) memcpy(k->to + at * width, c->shared->slots[k->root], n * width);
        else for (size_t i = 0; i < n; i++) {
            size_t place = at + i - skip; // wraps below the part that is wanted
            if ((k->kind != REDUCE || c->rank == k->root) && place < k->count) combine(k->to, place, k, i);
        }
        if (barrier(c)) return -1;
    }
    for (unsigned ms = late(c->rank); ms; ms--) {
        usleep(1000);
        if (atomic_load(&c->aborted)) return -1;
    }
    return 0;
}

static int messages(struct call *calls, int n) {
    size_t moved[256] = {0};
    for (int left = n; left > 0;) {
        left = 0;
        for (int i = 0; i < n; i++) {
            struct call *k = &calls[i];
            size_t bytes = k->count * (size_t)SIZES[k->type];
            if (moved[i] >= bytes) continue;
            left++;
            if (atomic_load(&k->comm->aborted)) return -1;
            // An earlier call with the same peer and direction goes first.
            int behind = 0;
            for (int j = 0; j < i; j++) behind |= calls[j].kind == k->kind && calls[j].root == k->root && calls[j].comm == k->comm && moved[j] < calls[j].count * (size_t)SIZES[calls[j].type];
            if (behind) continue;
            struct box *b = k->kind == SEND ? &k->comm->shared->boxes[k->comm->rank][k->root] : &k->comm->shared->boxes[k->root][k->comm->rank];
            int full = atomic_load(&b->written) != atomic_load(&b->read);
            size_t part = bytes - moved[i] < BOX ? bytes - moved[i] : BOX;
            if (k->kind == SEND && !full) {
                memcpy(b->data, k->from + moved[i], b->bytes = (uint32_t)part);
                atomic_fetch_add(&b->written, 1);
                moved[i] += part;
            } else if (k->kind == RECV && full) {
                if (b->bytes != part) { atomic_store(&k->comm->failed, INVALID_USAGE); return -1; }
                memcpy(k->to + moved[i], b->data, part);
                atomic_fetch_add(&b->read, 1);
                moved[i] += part;
            }
        }
        if (left) usleep(20);
    }
    return 0;
}

static void run(void *argument) {
    struct batch *b = argument;
    struct call p2p[256];
    int n = 0;
    for (int i = 0; i < b->n; i++) {
        struct call *k = &b->calls[i];
        if (k->kind >= SEND) { p2p[n++] = *k; continue; }
        size_t parts = k->kind == REDUCE_SCATTER ? (size_t)k->comm->size : 1;
        if (exchange(k, k->from, k->count * parts, k->kind == REDUCE_SCATTER ? k->count * (size_t)k->comm->rank : 0)) break;
    }
    messages(p2p, n);
    for (int i = 0; i < b->n; i++) atomic_fetch_sub(&b->calls[i].comm->working, 1);
    free(b);
}

static int begin(struct batch *b) {
    for (int i = 0; i < b->n; i++) {
        atomic_store(&b->calls[i].comm->fresh, 1);
        atomic_fetch_add(&b->calls[i].comm->working, 1);
    }
    stream_push(b->calls[0].stream, run, b);
    return IN_PROGRESS;
}

static int submit(struct call call) {
    if (!usable(call.comm)) return refuse(INVALID_ARGUMENT, "a call on a communicator that is not ready");
    if (call.type < 0 || call.type > 9 || call.root < 0 || call.root >= call.comm->size) return refuse(INVALID_ARGUMENT, "a type or a rank that there is not");
    struct batch *b = depth ? gathered : NULL;
    if (!b) { b = calloc(1, sizeof *b); if (depth) gathered = b; }
    if (b->n == 256) return refuse(INVALID_USAGE, "too many calls in a group");
    b->calls[b->n++] = call;
    return depth ? OK : begin(b);
}
int ncclGroupStart(void) { depth++; return OK; }
int ncclGroupEnd(void) {
    if (depth == 0) return refuse(INVALID_USAGE, "group end without a start");
    if (--depth) return OK;
    struct batch *b = gathered;
    gathered = NULL;
    return b ? begin(b) : OK;
}
#define CALL(...) submit((struct call){__VA_ARGS__})
int ncclAllReduce(const void *f, void *t, size_t n, int type, int op, struct comm *c, struct stream *s) { return CALL(ALL_REDUCE, c, s, f, t, n, type, op, 0); }
int ncclReduce(const void *f, void *t, size_t n, int type, int op, int root, struct comm *c, struct stream *s) { return CALL(REDUCE, c, s, f, t, n, type, op, root); }
int ncclBroadcast(const void *f, void *t, size_t n, int type, int root, struct comm *c, struct stream *s) { return CALL(BROADCAST, c, s, f, t, n, type, 0, root); }
int ncclAllGather(const void *f, void *t, size_t n, int type, struct comm *c, struct stream *s) { return CALL(ALL_GATHER, c, s, f, t, n, type, 0, 0); }
int ncclReduceScatter(const void *f, void *t, size_t n, int type, int op, struct comm *c, struct stream *s) { return CALL(REDUCE_SCATTER, c, s, f, t, n, type, op, 0); }
int ncclSend(const void *f, size_t n, int type, int peer, struct comm *c, struct stream *s) { return CALL(SEND, c, s, f, NULL, n, type, 0, peer); }
int ncclRecv(void *t, size_t n, int type, int peer, struct comm *c, struct stream *s) { return CALL(RECV, c, s, NULL, t, n, type, 0, peer); }

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, struct comm *c) {
    if (!usable(c) || residence != 1 || (type != 7 && type != 8)) return refuse(INVALID_ARGUMENT, "a scalar of float or double, read at once");
    for (int i = 5; i < 1024; i++) if (!ops[i].used) {
        ops[i].used = 1;
        ops[i].scalar = type == 7 ? *(float *)scalar : *(double *)scalar;
        *op = i;
        return OK;
    }
    return refuse(INVALID_USAGE, "too many reductions");
}
int ncclRedOpDestroy(int op, struct comm *c) { if (op < 5 || !ops[op].used || !usable(c)) return INVALID_ARGUMENT; return OK; } // kept: work may use it
#ifndef STANDIN_OLD
// Ends what is under way, in a thread; from then on the communicator only makes others. The error of a call is forgotten,
// that of the network is not.
static void *quiesce(void *argument) {
    struct comm *c = argument;
    while (atomic_load(&c->working)) usleep(20);
    usleep(2000); // the caller must not go on too early
    atomic_store(&c->aborted, 0);
    atomic_store(&c->failed, atomic_load(&c->lacks));
    atomic_store(&c->revoking, 0);
    return NULL;
}
int ncclCommRevoke(struct comm *c, int flags) {
    if (flags || atomic_load(&c->finalized) || atomic_load(&c->revoked)) return refuse(INVALID_ARGUMENT, "revoke: flags, finalized, or revoked before");
    const char *who = getenv("STANDIN_NETWORK_ERROR"); // all, or a rank
    atomic_store(&c->lacks, who && (!strcmp(who, "all") || atoi(who) == c->rank) ? 6 : 0);
    atomic_store(&c->revoked, 1);
    atomic_store(&c->revoking, 1);
    atomic_store(&c->aborted, 1);
    pthread_t thread;
    pthread_create(&thread, NULL, quiesce, c);
    pthread_detach(thread);
    return IN_PROGRESS;
}

struct making { struct comm *parent; char name[96]; int rank, size; struct comm **out; };
static void *shrunk(void *argument) {
    struct making *x = argument;
    struct comm *made = attach(x->name, x->rank, x->size);
    usleep(2000); // the caller must not look too early
    *x->out = made;
    while (atomic_load(&made->shared->attached) < x->size && !atomic_load(&x->parent->aborted)) usleep(20);
    atomic_store(&x->parent->splitting, 0);
    free(x);
    return NULL;
}
static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }
int ncclCommShrink(struct comm *c, int *excluded, int count, struct comm **out, struct config *config, int flags) {
    if (!config_is_right(config) || depth || count <= 0 || (flags & ~1)) return refuse(INVALID_ARGUMENT, "shrink: a wrong config, nobody, wrong flags, or in a group");
    qsort(excluded, (size_t)count, sizeof *excluded, ascending);
    unsigned gone = 0;
    for (int i = 0; i < count; i++) {
        if (excluded[i] < 0 || excluded[i] >= c->size || excluded[i] == c->rank) return refuse(INVALID_ARGUMENT, "shrink: without itself, or without a rank that there is not");
        gone |= 1u << excluded[i];
    }
    if (flags) { // blocks until what is under way has ended
        atomic_store(&c->aborted, 1);
        while (atomic_load(&c->working)) usleep(20);
        atomic_store(&c->aborted, 0);
        atomic_store(&c->fresh, 0);
    }
    if (atomic_load(&c->failed)) return refuse(atomic_load(&c->failed), "shrink: the communicator keeps an error");
    if (atomic_load(&c->shared->attached) < c->size || atomic_load(&c->fresh) || atomic_load(&c->splitting) || atomic_load(&c->revoking) || atomic_load(&c->finalized)) return refuse(INVALID_ARGUMENT, "shrink: not ready");
    struct making *x = malloc(sizeof *x);
    *x = (struct making){.parent = c, .out = out};
    snprintf(x->name, sizeof x->name, "%s.s%d.%x", c->name, c->shrinks++, gone);
    for (int r = 0; r < c->size; r++) if (!(gone >> r & 1)) {
        x->rank += r < c->rank;
        x->size++;
    }
    *out = NULL;
    atomic_store(&c->splitting, 1);
    pthread_t thread;
    pthread_create(&thread, NULL, shrunk, x);
    pthread_detach(thread);
    return OK; // as NCCL: success while it is under way
}

// One id at a time: the ranks that are there fetch it from the one that made it.
int ncclCommGetUniqueId(struct comm *c, id_t128 *id) {
    if (!usable(c) || depth) return refuse(INVALID_ARGUMENT, "an id to grow: not ready, or in a group");
    if (atomic_load(&c->shared->grow_id) != c->grows) return refuse(INVALID_USAGE, "an id to grow: there is one that was not used");
    int code = ncclGetUniqueId(id);
    memcpy(c->shared->grown, id->text, sizeof c->shared->grown);
    atomic_fetch_add(&c->shared->grow_id, 1);
    return code;
}
static void *come(void *argument) { // writes the handle once more, late
    struct making *x = argument;
    usleep(2000);
    *x->out = x->parent;
    free(x);
    return NULL;
}
int ncclCommGrow(struct comm *c, int size, const id_t128 *id, int rank, struct comm **out, struct config *config) {
    *out = NULL;
    if (!config_is_right(config) || depth || size <= 0 || size > RANKS) return refuse(INVALID_ARGUMENT, "grow: a wrong config or size, or in a group");
    char name[64];
    if (c) {
        if (!usable(c) || rank != -1 || size <= c->size) return refuse(INVALID_ARGUMENT, "grow: not ready, a rank, or nobody comes");
        c->grows++;
        while (atomic_load(&c->shared->grow_id) < c->grows) { // inside of the call, as NCCL
            if (atomic_load(&c->aborted)) return refuse(INVALID_USAGE, "grow: aborted");
            usleep(20);
        }
        snprintf(name, sizeof name, "%s", c->shared->grown);
        if (id && strncmp(id->text, name, sizeof name)) return refuse(INVALID_ARGUMENT, "grow: another id");
        rank = c->rank;
    } else {
        if (!id || rank < 0 || rank >= size || strncmp(id->text, "/nccl-standin-", 14)) return refuse(INVALID_ARGUMENT, "grow: no id, or a rank that there is not");
        snprintf(name, sizeof name, "%.63s", id->text);
    }
    struct comm *made = *out = attach(name, rank, size);
    if (!made) return 2;
    atomic_store(&made->fresh, 1);
    struct making *x = malloc(sizeof *x);
    *x = (struct making){.parent = made, .out = out};
    pthread_t thread;
    pthread_create(&thread, NULL, come, x);
    pthread_detach(thread);
    return OK; // as NCCL: success while it is under way
}

int ncclMemAlloc(void **p, size_t n) { return posix_memalign(p, 4096, n) ? 1 : OK; }
int ncclMemFree(void *p) { free(p); return OK; }

struct windowing { struct comm *comm; void *at; size_t bytes; void **out; };
static void *windows(void *argument) {
    struct windowing *x = argument;
    struct comm *c = x->comm;
    c->shared->window[c->rank] = x->bytes;
    if (!barrier(c)) {
        int same = 1;
        for (int r = 0; r < c->size; r++) same &= c->shared->window[r] == x->bytes;
        usleep(2000); // the caller must not look too early
        if (same) *x->out = x->at;
        else atomic_store(&c->failed, INVALID_USAGE);
        barrier(c);
    }
    atomic_store(&c->splitting, 0);
    free(x);
    return NULL;
}
int ncclCommWindowRegister(struct comm *c, void *p, size_t n, void **win, int flags) {
    *win = NULL;
    if (!p || !n || (uintptr_t)p % 4096 || (flags & ~3)) return refuse(INVALID_ARGUMENT, "a window of nothing, not aligned, or with wrong flags");
    if (getenv("STANDIN_NO_WINDOWS")) return OK; // as NCCL where ranks cannot map each other's memory
    if (!usable(c)) return refuse(INVALID_ARGUMENT, "a window: not ready");
    struct windowing *x = malloc(sizeof *x);
    *x = (struct windowing){c, p, n, win};
    atomic_store(&c->splitting, 1);
    pthread_t thread;
    pthread_create(&thread, NULL, windows, x);
    pthread_detach(thread);
    return OK;
}
int ncclCommWindowDeregister(struct comm *c, void *win) { (void)win; return usable(c) ? OK : INVALID_ARGUMENT; }
#endif

int ncclCommRegister(struct comm *c, void *p, size_t n, void **handle) { (void)n; *handle = p; return usable(c) ? OK : INVALID_ARGUMENT; }
int ncclCommDeregister(struct comm *c, void *handle) { (void)handle; return usable(c) ? OK : INVALID_ARGUMENT; }

struct splitting { struct comm *parent; int color, key, number; struct comm **out; };
static void *split(void *argument) {
    struct splitting *x = argument;
    struct comm *p = x->parent;
    p->shared->colors[p->rank] = x->color;
    p->shared->keys[p->rank] = x->key;
    if (!barrier(p)) {
        int rank = 0, size = 0;
        for (int r = 0; r < p->size; r++) if (p->shared->colors[r] == x->color) {
            size++;
            rank += p->shared->keys[r] < x->key || (p->shared->keys[r] == x->key && r < p->rank);
        }
        char name[96];
        snprintf(name, sizeof name, "%s.%d.%d", p->name, x->number, x->color);
        struct comm *made = x->color < 0 ? NULL : attach(name, rank, size);
        usleep(2000); // the caller must not look too early
        *x->out = made;
        while (made && atomic_load(&made->shared->attached) < size && !atomic_load(&p->aborted)) usleep(20);
        barrier(p);
    }
    atomic_store(&p->splitting, 0);
    free(x);
    return NULL;
}
int ncclCommSplit(struct comm *c, int color, int key, struct comm **out, struct config *config) {
    if (!usable(c) || !config_is_right(config) || depth) return refuse(INVALID_ARGUMENT, "split: not ready, a wrong config, or in a group");
    struct splitting *x = malloc(sizeof *x);
    *x = (struct splitting){c, color, key, c->splits++, out};
    atomic_store(&c->splitting, 1);
    pthread_t thread;
    pthread_create(&thread, NULL, split, x);
    pthread_detach(thread);
    return OK; // as NCCL: success while it is under way
}
