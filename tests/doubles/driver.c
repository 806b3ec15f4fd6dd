/* A DOUBLE of NVIDIA's driver: host memory, every call done at once. For tests without a GPU.
 *
 * Work on the stream that is being captured is recorded and not done; launching does it, with the addresses of then.
 * What breaks a capture of the real driver (waiting, allocating, freeing) breaks it here. Memory that was given back is
 * never given out again, so that an address that went stale stays so.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef uint64_t ptr;
typedef struct {
  size_t srcXInBytes, srcY; int srcMemoryType; const void *srcHost; ptr srcDevice; void *srcArray; size_t srcPitch;
  size_t dstXInBytes, dstY; int dstMemoryType; void *dstHost; ptr dstDevice; void *dstArray; size_t dstPitch;
  size_t WidthInBytes, Height;
} copy2d;
typedef struct op { /* one piece of work; an engine's is a function of its double */
  enum { SET, COPY, COPY_ROWS, CALL } kind;
  void *to; const void *from; size_t n; unsigned char value; copy2d rows; int (*call)(int); int number;
  struct op *next;
} op;
typedef struct { op *first, **last; size_t n; } graph; /* a captured one, and an executable one */
typedef struct block { ptr address; size_t n; int live; struct block *next; } block;
enum { ILLEGAL_HANDLE = 400, ILLEGAL_STATE = 401, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
static void *const STREAM = (void *)2;
static int ready;
static block *blocks;
static graph *captured; /* while the stream is being captured */
static int broken;      /* whether that capture is lost */
static long live, graphs, launches;

/* What tests ask. */
long double_live(void) { return live; }
int double_ready(void) { return ready; }
int double_capturing(void) { return captured != NULL; }
long double_graphs(void) { return graphs; }
long double_launches(void) { return launches; }
int double_holds(ptr address, size_t n) { /* all of it, in one block that was not given back */
  for (block *b = blocks; b; b = b->next)
    if (b->live && address >= b->address && address + n <= b->address + b->n) return 1;
  return 0;
}

static int perform(const op *o) {
  const copy2d *c = &o->rows;
  switch (o->kind) {
    case SET: memset(o->to, o->value, o->n); return 0;
    case COPY: memcpy(o->to, o->from, o->n); return 0;
    case CALL: return o->call(o->number);
    case COPY_ROWS:
      for (size_t row = 0; row < c->Height; row++)
        memcpy((char *)c->dstDevice + row * c->dstPitch, (char *)c->srcDevice + row * c->srcPitch, c->WidthInBytes);
  }
  return 0;
}
static void append(graph *to, const op *o) {
  op *kept = malloc(sizeof *kept);
  *kept = *o;
  kept->next = NULL;
  *to->last = kept;
  to->last = &kept->next;
  to->n++;
}
static int on_stream(void *stream, op o) {
  if (stream != STREAM) return ILLEGAL_HANDLE;
  if (!captured) return perform(&o);
  if (broken) return CAPTURE_INVALIDATED;
  append(captured, &o);
  return 0;
}
static int breaks_capture(void) {
  if (!captured) return 0;
  broken = 1;
  return CAPTURE_UNSUPPORTED;
}
static graph *new_graph(void) {
  graph *made = calloc(1, sizeof *made);
  made->last = &made->first;
  graphs++;
  return made;
}
static int drop_graph(graph *given) {
  for (op *o = given->first, *next; o; o = next) { next = o->next; free(o); }
  free(given);
  graphs--;
  return 0;
}
/* How the double of an engine puts a pass on the stream. */
int double_put(void *stream, int (*call)(int), int number) {
  return on_stream(stream, (op){.kind = CALL, .call = call, .number = number});
}

int cuInit(unsigned flags) { ready = 1; return FAILS; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return index ? 101 : 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "double", length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 6 : 0;
  return 0;
}
int cuDeviceTotalMem_v2(size_t *n, int device) { *n = 1ull << 33; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) { return context == (void *)1 ? 0 : 201; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = STREAM; return 0; }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuCtxSynchronize(void) { return breaks_capture(); }
int cuStreamSynchronize(void *stream) { return stream == STREAM ? breaks_capture() : ILLEGAL_HANDLE; }
int cuMemAlloc_v2(ptr *address, size_t n) {
  int fault = breaks_capture();
  if (fault) return fault;
  if (n > (1ull << 32)) return 2;
  block *made = malloc(sizeof *made);
  char *memory = malloc(n + 64);
  memset(memory, 0xA5, n + 64); /* what nobody wrote is no number */
  *made = (block){.address = (ptr)memory, .n = n, .live = 1, .next = blocks};
  blocks = made;
  *address = made->address;
  live++;
  return 0;
}
int cuMemFree_v2(ptr address) {
  int fault = breaks_capture();
  if (fault) return fault;
  for (block *b = blocks; b; b = b->next)
    if (b->live && b->address == address) {
      memset((void *)address, 0xA5, b->n);
      b->live = 0;
      live--;
      return 0;
    }
  return 1;
}
int cuMemsetD8Async(ptr to, unsigned char value, size_t n, void *stream) {
  return on_stream(stream, (op){.kind = SET, .to = (void *)to, .value = value, .n = n});
}
int cuMemcpyHtoDAsync_v2(ptr to, const void *from, size_t n, void *stream) {
  return on_stream(stream, (op){.kind = COPY, .to = (void *)to, .from = from, .n = n});
}
int cuMemcpyDtoHAsync_v2(void *to, ptr from, size_t n, void *stream) {
  return on_stream(stream, (op){.kind = COPY, .to = to, .from = (void *)from, .n = n});
}
int cuMemcpyDtoDAsync_v2(ptr to, ptr from, size_t n, void *stream) {
  return on_stream(stream, (op){.kind = COPY, .to = (void *)to, .from = (void *)from, .n = n});
}
int cuMemcpy2DAsync_v2(const copy2d *c, void *stream) {
  return on_stream(stream, (op){.kind = COPY_ROWS, .rows = *c});
}
int cuStreamBeginCapture(void *stream, int mode) {
  if (stream != STREAM) return ILLEGAL_HANDLE;
  if (captured) return ILLEGAL_STATE;
  captured = new_graph();
  return 0;
}
int cuStreamEndCapture(void *stream, graph **found) {
  *found = NULL;
  if (stream != STREAM || !captured) return ILLEGAL_STATE;
  graph *made = captured;
  int lost = broken;
  captured = NULL;
  broken = 0;
  if (lost) {
    drop_graph(made);
    return CAPTURE_INVALIDATED;
  }
  *found = made;
  return 0;
}
int cuGraphGetNodes(graph *given, void **nodes, size_t *n) { *n = given->n; return 0; }
/* Which name is asked for differs between releases of cuda-bindings. */
int cuGraphInstantiate(graph **made, graph *given, unsigned long long flags) {
  *made = new_graph();
  for (op *o = given->first; o; o = o->next) append(*made, o);
  return 0;
}
int cuGraphInstantiateWithFlags(graph **made, graph *given, unsigned long long flags) {
  return cuGraphInstantiate(made, given, flags);
}
int cuGraphLaunch(graph *given, void *stream) {
  if (stream != STREAM) return ILLEGAL_HANDLE;
  if (captured) return breaks_capture();
  launches++;
  for (op *o = given->first; o; o = o->next) {
    int fault = perform(o);
    if (fault) return fault;
  }
  return 0;
}
int cuGraphExecDestroy(graph *given) { return drop_graph(given); }
int cuGraphDestroy(graph *given) { return drop_graph(given); }
int cuGetErrorName(int status, const char **name) { *name = "DOUBLE"; return 0; }
int cuGetErrorString(int status, const char **text) { *text = "double"; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status) {
  char longer[128];
  void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  snprintf(longer, sizeof longer, "%s_v2", name);
  *found = dlsym(RTLD_DEFAULT, longer);
  if (!*found && self) *found = dlsym(self, longer);
  if (!*found && self) *found = dlsym(self, name);
  if (status) *(int *)status = *found ? 0 : 1;
  return 0;
}
int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
