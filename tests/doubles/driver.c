/* A DOUBLE of NVIDIA's driver: host memory, every call done at once. For tests without a GPU. */
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
static int ready;
static long live;
long double_live(void) { return live; }
int double_ready(void) { return ready; }
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
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)2; return 0; }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuStreamSynchronize(void *stream) { return stream == (void *)2 ? 0 : 400; }
int cuMemAlloc_v2(ptr *address, size_t n) {
  if (n > (1ull << 32)) return 2;
  char *memory = malloc(n + 64);
  memset(memory, 0xA5, n + 64); /* what nobody wrote is no number */
  *address = (ptr)memory;
  live++;
  return 0;
}
int cuMemFree_v2(ptr address) { free((void *)address); live--; return 0; }
int cuMemsetD8Async(ptr to, unsigned char value, size_t n, void *stream) { memset((void *)to, value, n); return 0; }
int cuMemcpyHtoDAsync_v2(ptr to, const void *from, size_t n, void *stream) { memcpy((void *)to, from, n); return 0; }
int cuMemcpyDtoHAsync_v2(void *to, ptr from, size_t n, void *stream) { memcpy(to, (void *)from, n); return 0; }
int cuMemcpy2DAsync_v2(const copy2d *c, void *stream) {
  for (size_t row = 0; row < c->Height; row++)
    memcpy((char *)c->dstDevice + row * c->dstPitch, (char *)c->srcDevice + row * c->srcPitch, c->WidthInBytes);
  return 0;
}
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
