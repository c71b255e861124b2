/* Opens a plan folder: finds, checks and loads its library, then opens the plan.
 *
 * Compile src/atsc_open.c into your application (C11, links with -ldl where libc wants it); it
 * belongs to no particular plan. Before any native code is loaded it checks plan.json (schema,
 * interface, platform, CPU), the size of every file, and the sha256 of every file but the weights;
 * what is loaded are the very bytes that were hashed. The hashes find damage. Against an attacker,
 * pin plan.json itself with `expected_sha256`: loading a plan runs native code.
 */
#ifndef ATSC_OPEN_H
#define ATSC_OPEN_H

#include "atsc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct atsc_open_options {
  size_t struct_size;
  const char* expected_sha256; /* of plan.json, in hex; NULL: any */
  int32_t num_threads;         /* these as in atsc_plan_options, ... */
  int32_t weights_mode;
  int32_t verify;
  int32_t max_sessions;        /* ... but 0: as many as the plan was compiled for */
  const char* isa;
  uint64_t vram_bytes;         /* the rest as in atsc_plan_options again */
  int32_t no_device;
  int32_t device_ordinal;
  int32_t strict;
} atsc_open_options;

typedef struct atsc_opened {
  size_t struct_size;
  const atsc_api* api;
  atsc_plan* plan;
  void* library;  /* for atsc_close */
  int descriptor; /* for atsc_close */
} atsc_opened;

/* `options` may be NULL. Any thread. */
atsc_status atsc_open(const char* directory, const atsc_open_options* options, atsc_opened* opened,
                      atsc_message* message);

/* Closes the plan and unloads its library; refused while sessions exist. */
atsc_status atsc_close(atsc_opened* opened, atsc_message* message);

#ifdef __cplusplus
}
#endif
#endif
