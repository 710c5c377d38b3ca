// The driver's part: streams are threads with a queue, events are places in a queue.
#include "standin.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct task { work_fn run; void *argument; struct task *next; };
struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    struct task *first, **last;
    uint64_t given, done;
    int closing;
};
struct event { struct stream *stream; uint64_t at; };

static struct stream usual;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local int contexts;

static void *serve(void *argument) {
    struct stream *s = argument;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->closing) pthread_cond_wait(&s->change, &s->lock);
        if (!s->first) break;
        struct task *t = s->first;
        if (!(s->first = t->next)) s->last = &s->first;
        pthread_mutex_unlock(&s->lock);
        t->run(t->argument);
        free(t);
        pthread_mutex_lock(&s->lock);
        s->done++;
        pthread_cond_broadcast(&s->change);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void start(struct stream *s) {
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->change, NULL);
    s->last = &s->first;
    pthread_create(&s->thread, NULL, serve, s);
}
static void start_usual(void) { start(&usual); }

static struct stream *of(struct stream *s) {
    if (s) return s;
    pthread_once(&once, start_usual);
    return &usual;
}

// As CUDA's: who gives more work than a stream has room for waits.
enum { ROOM = 1024 };

void stream_push(struct stream *stream, work_fn run, void *argument) {
    struct stream *s = of(stream);
    struct task *t = malloc(sizeof *t);
    *t = (struct task){run, argument, NULL};
    pthread_mutex_lock(&s->lock);
    while (s->given - s->done >= ROOM) pthread_cond_wait(&s->change, &s->lock);
    *s->last = t;
    s->last = &t->next;
    s->given++;
    pthread_cond_broadcast(&s->change);
    pthread_mutex_unlock(&s->lock);
}

static void await(struct stream *s, uint64_t at) {
    pthread_mutex_lock(&s->lock);
    while (s->done < at) pthread_cond_wait(&s->change, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

int cuInit(unsigned flags) { return flags ? 1 : getenv("STANDIN_NO_GPU") ? 100 : 0; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR";
    return 0;
}
int cuDeviceGetCount(int *count) { *count = RANKS; return 0; }
int cuDeviceGet(int *device, int number) { *device = number + 1000; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)device; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxPushCurrent_v2(void *context) { (void)context; contexts++; return 0; }
int cuCtxPopCurrent_v2(void **context) { (void)context; return contexts-- > 0 ? 0 : 201; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return *mode < 0 || *mode > 2; }
// What needs a current context says so.
#define NEEDS_CONTEXT if (contexts < 1) return 201

int cuStreamCreateWithPriority(struct stream **out, unsigned flags, int priority) {
    (void)flags; (void)priority;
    NEEDS_CONTEXT;
    start(*out = calloc(1, sizeof **out));
    return 0;
}
int cuStreamDestroy_v2(struct stream *s) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&s->lock);
    s->closing = 1;
    pthread_cond_broadcast(&s->change);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    return 0; // events may still point to it: never freed
}
int cuStreamQuery(struct stream *stream) {
    NEEDS_CONTEXT;
    struct stream *s = of(stream);
    pthread_mutex_lock(&s->lock);
    int ready = s->done == s->given;
    pthread_mutex_unlock(&s->lock);
    return ready ? 0 : 600;
}
int cuStreamSynchronize(struct stream *stream) {
    NEEDS_CONTEXT;
    struct stream *s = of(stream);
    await(s, s->given);
    return 0;
}
int cuEventCreate(struct event **out, unsigned flags) { (void)flags; NEEDS_CONTEXT; *out = calloc(1, sizeof **out); return 0; }
int cuEventDestroy_v2(struct event *event) { NEEDS_CONTEXT; free(event); return 0; }
int cuEventRecord(struct event *event, struct stream *stream) {
    NEEDS_CONTEXT;
    struct stream *s = of(stream);
    pthread_mutex_lock(&s->lock);
    *event = (struct event){s, s->given};
    pthread_mutex_unlock(&s->lock);
    return 0;
}
static void await_event(void *argument) {
    struct event *e = argument;
    await(e->stream, e->at);
    free(e);
}
int cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
    (void)flags;
    NEEDS_CONTEXT;
    struct event *copy = malloc(sizeof *copy);
    *copy = *event;
    if (copy->stream) stream_push(stream, await_event, copy);
    return 0;
}
int cuEventQuery(struct event *event) {
    NEEDS_CONTEXT;
    if (!event->stream) return 0;
    pthread_mutex_lock(&event->stream->lock);
    int ready = event->stream->done >= event->at;
    pthread_mutex_unlock(&event->stream->lock);
    return ready ? 0 : 600;
}
int cuEventSynchronize(struct event *event) { NEEDS_CONTEXT; if (event->stream) await(event->stream, event->at); return 0; }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) { NEEDS_CONTEXT; *address = (uint64_t)malloc(bytes); return 0; }
int cuMemFree_v2(uint64_t address) { NEEDS_CONTEXT; free((void *)address); return 0; }

struct copy { void *to; const void *from; size_t bytes; };
static void do_copy(void *argument) {
    struct copy *c = argument;
    memcpy(c->to, c->from, c->bytes);
    free(c);
}
static int copy(void *to, const void *from, size_t bytes, struct stream *s) {
    struct copy *c = malloc(sizeof *c);
    *c = (struct copy){to, from, bytes};
    stream_push(s, do_copy, c);
    return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, struct stream *s) { NEEDS_CONTEXT; return copy((void *)to, from, n, s); }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, struct stream *s) { NEEDS_CONTEXT; return copy(to, (void *)from, n, s); }
