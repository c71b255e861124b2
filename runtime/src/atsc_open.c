/* The plan-independent loader: see atsc_open.h. POSIX with Linux's memory files.
 *
 * Order of things: read plan.json; check what it says of itself and of the machine; open every file
 * that it names, through no link, and compare size and hash; copy the hashed bytes of the library
 * into a file in memory; load that. Every failure is one line. */
#define _GNU_SOURCE
#include "atsc_open.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "isa.h"
#include "json.h"
#include "sha256.h"

#define COMPILE_AGAIN "compile the model again"
#define COPY_AGAIN "copy the plan again, or compile the model again"

enum { SCHEMA = 2, MAX_MANIFEST_BYTES = 256 << 20, NAME_ROOM = 4096, READ_BYTES = 1 << 20 };

typedef struct file_entry {
  char* path;
  uint64_t bytes;
  char sha256[65];
} file_entry;

typedef struct loader {
  const char* directory;
  int folder; /* its descriptor */
  atsc_message* message;
  uint64_t schema, interface, oldest_interface, sessions;
  char plan_id[256], platform[64], isa[64], library[NAME_ROOM], weights[NAME_ROOM];
  file_entry* files;
  size_t num_files;
  unsigned char* content; /* of the library */
} loader;

static atsc_status refuse(loader* l, atsc_status status, const char* format, ...) {
  atsc_message* message = l->message;
  if (message == NULL || message->struct_size <= offsetof(atsc_message, text)) return status;
  const size_t size = message->struct_size < sizeof *message ? message->struct_size : sizeof *message;
  const size_t room = size - offsetof(atsc_message, text);
  const int head = snprintf(message->text, room, "%s: ", l->directory);
  if (head < 0 || (size_t)head >= room) return status;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message->text + head, room - (size_t)head, format, arguments);
  va_end(arguments);
  return status;
}

/* A file of the plan: a regular one, reached through no link. -1 with errno. */
static int open_inside(int folder, const char* path) {
  char part[NAME_ROOM];
  int at = dup(folder);
  for (const char* slash; at >= 0 && (slash = strchr(path, '/')) != NULL; path = slash + 1) {
    memcpy(part, path, (size_t)(slash - path));
    part[slash - path] = '\0';
    const int next = openat(at, part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    close(at);
    at = next;
  }
  if (at < 0) return -1;
  const int file = openat(at, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  close(at);
  return file;
}

/* Whether every part of a relative path is a plain name. */
static int is_inside(const char* path) {
  for (const char* at = path;; ++at) {
    const size_t length = strcspn(at, "/");
    const int dots = (length == 1 && at[0] == '.') || (length == 2 && at[0] == '.' && at[1] == '.');
    if (length == 0 || dots) return 0;
    at += length;
    if (*at == '\0') return strchr(path, '\\') == NULL && strcmp(path, "plan.json") != 0;
  }
}

static int read_fully(int file, unsigned char* target, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = read(file, target, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return 0;
    target += got;
    bytes -= (size_t)got;
  }
  return 1;
}

static void read_text(json* j, char* out, size_t room) {
  if (out[0] != '\0') j->failed = 1; /* a key that comes twice */
  json_string(j, out, room);
  if (out[0] == '\0') j->failed = 1;
}

static void read_file_entry(json* j, file_entry* entry) {
  char key[64];
  int first = 1, has_bytes = 0;
  json_enter(j, '{');
  while (json_key(j, &first, key, sizeof key)) {
    if (strcmp(key, "bytes") == 0) {
      entry->bytes = json_count(j);
      has_bytes = 1;
    } else if (strcmp(key, "sha256") == 0) {
      read_text(j, entry->sha256, sizeof entry->sha256);
    } else {
      j->failed = 1;
    }
  }
  const size_t digits = strspn(entry->sha256, "0123456789abcdef");
  if (!has_bytes || digits != 64) j->failed = 1;
}

static void read_files(json* j, loader* l) {
  char path[NAME_ROOM];
  int first = 1;
  if (l->files != NULL) j->failed = 1;
  json_enter(j, '{');
  while (json_key(j, &first, path, sizeof path)) {
    file_entry* grown = realloc(l->files, (l->num_files + 1) * sizeof *grown);
    if (grown == NULL) {
      j->failed = 1;
      return;
    }
    l->files = grown;
    memset(&grown[l->num_files], 0, sizeof *grown);
    grown[l->num_files].path = strdup(path);
    if (grown[l->num_files].path == NULL) j->failed = 1;
    read_file_entry(j, &grown[l->num_files++]);
  }
}

static void read_options(json* j, loader* l) {
  char key[256];
  int first = 1;
  json_enter(j, '{');
  while (json_key(j, &first, key, sizeof key)) {
    if (strcmp(key, "sessions") == 0) {
      l->sessions = json_count(j);
    } else {
      json_skip(j);
    }
  }
}

/* Whether the plan's library does not serve this loader. Versions begin at 1: 0 is not known yet. */
static int is_of_another_interface(const loader* l) {
  if (l->interface == 0 || l->oldest_interface == 0) return 0;
  return l->interface < ATSC_API_VERSION || l->oldest_interface > ATSC_API_VERSION;
}

static void read_manifest(json* j, loader* l) {
  char key[256];
  int first = 1;
  json_enter(j, '{');
  while (json_key(j, &first, key, sizeof key)) {
    if (strcmp(key, "schema") == 0) {
      l->schema = json_count(j);
    } else if (strcmp(key, "interface") == 0) {
      l->interface = json_count(j);
    } else if (strcmp(key, "oldest_interface") == 0) {
      l->oldest_interface = json_count(j);
    } else if (strcmp(key, "plan_id") == 0) {
      read_text(j, l->plan_id, sizeof l->plan_id);
    } else if (strcmp(key, "platform") == 0) {
      read_text(j, l->platform, sizeof l->platform);
    } else if (strcmp(key, "isa") == 0) {
      read_text(j, l->isa, sizeof l->isa);
    } else if (strcmp(key, "library") == 0) {
      read_text(j, l->library, sizeof l->library);
    } else if (strcmp(key, "weights") == 0) {
      read_text(j, l->weights, sizeof l->weights);
    } else if (strcmp(key, "options") == 0) {
      read_options(j, l);
    } else if (strcmp(key, "files") == 0) {
      read_files(j, l);
    } else {
      json_skip(j);
    }
    /* A plan for another loader may look quite different: no more of it needs to make sense. */
    if ((l->schema != 0 && l->schema != SCHEMA) || is_of_another_interface(l)) return;
  }
  json_space(j);
  if (*j->at != '\0') j->failed = 1;
}

static atsc_status parse_manifest(loader* l, const char* text, size_t bytes) {
  json j = {text, 0, strlen(text) != bytes};
  if (!j.failed) read_manifest(&j, l);
  if (!j.failed && l->schema != SCHEMA) {
    return refuse(l, ATSC_PLAN_ERROR,
                  "plan schema %llu, this loader reads schema %d: %s, or use the atsc that made it",
                  (unsigned long long)l->schema, SCHEMA, COMPILE_AGAIN);
  }
  if (!j.failed && is_of_another_interface(l)) {
    return refuse(l, ATSC_PLAN_ERROR,
                  "this plan was made by another version of atsc (C interface %llu, this loader has "
                  "%u): %s, or use the loader of the atsc that made it",
                  (unsigned long long)l->interface, ATSC_API_VERSION, COMPILE_AGAIN);
  }
  const int has_numbers = l->schema != 0 && l->interface != 0 && l->oldest_interface != 0;
  if (j.failed || !has_numbers || !l->plan_id[0] || !l->platform[0] || !l->isa[0] ||
      !l->library[0] || !l->weights[0]) {
    return refuse(l, ATSC_PLAN_ERROR, "plan.json is damaged near byte %lld: %s",
                  (long long)(j.at - text), COPY_AGAIN);
  }
  return ATSC_OK;
}

static atsc_status load_manifest(loader* l, const char* expected_sha256) {
  struct stat status;
  l->folder = open(l->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (l->folder < 0) {
    return refuse(l, ATSC_PLAN_ERROR, "no plan folder (%s): `atsc compile MODEL -o PLAN` makes one",
                  strerror(errno));
  }
  const int file = open_inside(l->folder, "plan.json");
  if (file < 0 || fstat(file, &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_size > MAX_MANIFEST_BYTES) {
    if (file >= 0) close(file);
    return refuse(l, ATSC_PLAN_ERROR, "no plan (it has no plan.json): `atsc compile MODEL -o PLAN` "
                                      "makes one");
  }
  const size_t bytes = (size_t)status.st_size;
  char* text = calloc(bytes + 1, 1);
  const int got = text != NULL && read_fully(file, (unsigned char*)text, bytes);
  close(file);
  atsc_status result = ATSC_OK;
  if (!got) result = refuse(l, ATSC_IO_ERROR, "plan.json cannot be read: check permissions");
  if (result == ATSC_OK && expected_sha256 != NULL) {
    char hex[65];
    sha256 hash;
    sha256_start(&hash);
    sha256_add(&hash, text, bytes);
    sha256_finish(&hash, hex);
    if (strcasecmp(hex, expected_sha256) != 0) {
      result = refuse(l, ATSC_PLAN_ERROR, "plan.json is not the file that expected_sha256 pins: get "
                                          "the plan again, or pin the hash of the new one");
    }
  }
  if (result == ATSC_OK) result = parse_manifest(l, text, bytes);
  free(text);
  return result;
}

static atsc_status check_machine(loader* l) {
#if defined(__linux__) && defined(__x86_64__)
  const char* here = "linux-x86_64";
#else
#error "atsc_open.c: this platform is not supported yet"
#endif
  if (strcmp(l->platform, here) != 0) {
    return refuse(l, ATSC_PLAN_ERROR, "compiled for %s, this machine is %s: compile the model on "
                                      "such a machine", l->platform, here);
  }
  const int has = atsc_cpu_has_psabi_level(l->isa);
  if (has > 0) return ATSC_OK;
  return refuse(l, ATSC_PLAN_ERROR, has < 0 ? "needs a CPU of level %s, which this loader does not "
                                              "know: update it, or compile the model again"
                                            : "needs a CPU of level %s, which this one is not: run "
                                              "the plan on a newer CPU", l->isa);
}

/* Compares size and hash of one file. The library's content is kept, the weights are not hashed. */
static atsc_status check_file(loader* l, const file_entry* entry) {
  struct stat status;
  if (!is_inside(entry->path)) {
    return refuse(l, ATSC_PLAN_ERROR, "plan.json names %s, which is no path inside the plan: %s",
                  entry->path, COPY_AGAIN);
  }
  const int file = open_inside(l->folder, entry->path);
  if (file < 0) {
    const char* why = errno == ENOENT                      ? "is missing"
                      : errno == ELOOP || errno == ENOTDIR ? "is reached through a link"
                                                           : strerror(errno);
    return refuse(l, ATSC_PLAN_ERROR, "%s %s: %s", entry->path, why, COPY_AGAIN);
  }
  if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode) ||
      (uint64_t)status.st_size != entry->bytes) {
    close(file);
    return refuse(l, ATSC_PLAN_ERROR, "%s has %llu bytes instead of %llu: %s", entry->path,
                  (unsigned long long)status.st_size, (unsigned long long)entry->bytes, COPY_AGAIN);
  }
  if (strcmp(entry->path, l->weights) == 0) {
    close(file);
    return ATSC_OK;
  }
  const int keep = strcmp(entry->path, l->library) == 0;
  unsigned char* buffer = malloc(keep ? entry->bytes + 1 : READ_BYTES);
  int fine = buffer != NULL;
  sha256 hash;
  sha256_start(&hash);
  for (uint64_t done = 0; fine && done < entry->bytes;) {
    const uint64_t left = entry->bytes - done;
    const size_t size = left < READ_BYTES ? (size_t)left : READ_BYTES;
    unsigned char* target = keep ? buffer + done : buffer;
    fine = read_fully(file, target, size);
    if (fine) sha256_add(&hash, target, size);
    done += size;
  }
  close(file);
  if (keep) {
    free(l->content);
    l->content = buffer;
  } else {
    free(buffer);
  }
  if (!fine) return refuse(l, ATSC_IO_ERROR, "%s cannot be read", entry->path);
  char hex[65];
  sha256_finish(&hash, hex);
  if (strcmp(hex, entry->sha256) == 0) return ATSC_OK;
  return refuse(l, ATSC_PLAN_ERROR, "%s is not what was compiled (sha256 differs): %s", entry->path,
                COPY_AGAIN);
}

static const file_entry* find_file(const loader* l, const char* path) {
  for (size_t i = 0; i < l->num_files; ++i) {
    if (strcmp(l->files[i].path, path) == 0) return &l->files[i];
  }
  return NULL;
}

static atsc_status check_files(loader* l) {
  const file_entry *library = find_file(l, l->library), *weights = find_file(l, l->weights);
  if (library == NULL || weights == NULL || library == weights) {
    return refuse(l, ATSC_PLAN_ERROR, "plan.json does not list %s and %s as two files: %s",
                  l->library, l->weights, COPY_AGAIN);
  }
  for (size_t i = 0; i < l->num_files; ++i) {
    const atsc_status status = check_file(l, &l->files[i]);
    if (status != ATSC_OK) return status;
  }
  return ATSC_OK;
}

enum { DESCRIPTOR_NAME = 64 };

static void name_descriptor(int file, char name[DESCRIPTOR_NAME]) {
  snprintf(name, DESCRIPTOR_NAME, "/proc/self/fd/%d", file);
}

static int write_fully(int file, const unsigned char* data, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t put = write(file, data, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return 0;
    data += put;
    bytes -= (uint64_t)put;
  }
  return 1;
}

/* The system tells libraries apart by name, and a closed descriptor's number comes again: the file
 * stays open as long as the system keeps a library of that name. */
static void unload_library(void* library, int file) {
  char name[DESCRIPTOR_NAME];
  name_descriptor(file, name);
  dlclose(library);
  void* kept = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  if (kept != NULL) {
    dlclose(kept);
  } else {
    close(file);
  }
}

static atsc_status load_library(loader* l, atsc_opened* opened) {
  const unsigned executable = 0x10; /* MFD_EXEC, Linux 6.3 */
  int file = memfd_create("libplan.so", MFD_CLOEXEC | executable);
  if (file < 0) file = memfd_create("libplan.so", MFD_CLOEXEC);
  opened->descriptor = file;
  if (file < 0 || !write_fully(file, l->content, find_file(l, l->library)->bytes)) {
    return refuse(l, ATSC_DEVICE_ERROR, "no file in memory for %s: %s", l->library, strerror(errno));
  }
  char name[DESCRIPTOR_NAME];
  name_descriptor(file, name);
  opened->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (opened->library == NULL) {
    return refuse(l, ATSC_PLAN_ERROR, "%s cannot be loaded (%s): %s", l->library, dlerror(),
                  COMPILE_AGAIN);
  }
  atsc_get_api_function get_api = NULL;
  *(void**)&get_api = dlsym(opened->library, "atsc_get_api");
  opened->api = get_api != NULL ? get_api(ATSC_API_VERSION) : NULL;
  if (opened->api != NULL) return ATSC_OK;
  return refuse(l, ATSC_PLAN_ERROR, "%s was made by another version of atsc (it has no C interface %u): "
                                    "%s", l->library, ATSC_API_VERSION, COMPILE_AGAIN);
}

static atsc_status open_plan(loader* l, const atsc_open_options* options, atsc_opened* opened) {
  char path[PATH_MAX];
  if (snprintf(path, sizeof path, "%s/%s", l->directory, l->weights) >= (int)sizeof path) {
    return refuse(l, ATSC_INVALID_ARGUMENT, "the path is too long");
  }
  const uint64_t most = 1 << 20;
  const int32_t compiled_for = (int32_t)(l->sessions < most ? l->sessions : most);
  atsc_plan_options plan_options = {
      .struct_size = sizeof plan_options,
      .weights_path = path,
      .num_threads = options->num_threads,
      .weights_mode = options->weights_mode,
      .verify = options->verify,
      .max_sessions = options->max_sessions != 0 ? options->max_sessions : compiled_for,
      .isa = options->isa,
      .vram_bytes = options->vram_bytes,
      .no_device = options->no_device,
      .device_ordinal = options->device_ordinal,
      .strict = options->strict,
  };
  const atsc_api* api = opened->api;
  atsc_status status = api->plan_open(&plan_options, &opened->plan, l->message);
  if (status != ATSC_OK) return status;
  atsc_plan_info info = {.struct_size = sizeof info};
  status = api->plan_get_info(opened->plan, &info, l->message);
  if (status != ATSC_OK) return status;
  if (strcmp(info.plan_id, l->plan_id) == 0) return ATSC_OK;
  return refuse(l, ATSC_PLAN_ERROR, "%s belongs to another plan: %s", l->library, COPY_AGAIN);
}

static void free_loader(loader* l) {
  for (size_t i = 0; i < l->num_files; ++i) free(l->files[i].path);
  free(l->files);
  free(l->content);
  if (l->folder >= 0) close(l->folder);
  free(l);
}

atsc_status atsc_open(const char* directory, const atsc_open_options* options, atsc_opened* opened,
                      atsc_message* message) {
  loader nowhere = {.directory = "atsc_open", .message = message};
  if (directory == NULL || opened == NULL || opened->struct_size < sizeof *opened) {
    return refuse(&nowhere, ATSC_INVALID_ARGUMENT, "a folder and an atsc_opened with its "
                                                   "struct_size are needed");
  }
  atsc_open_options known = {0};
  if (options != NULL) {
    const size_t size = options->struct_size < sizeof known ? options->struct_size : sizeof known;
    memcpy(&known, options, size);
  }
  loader* l = calloc(1, sizeof *l);
  if (l == NULL) return refuse(&nowhere, ATSC_DEVICE_ERROR, "out of memory");
  l->directory = directory;
  l->message = message;
  l->folder = -1;
  const atsc_opened nothing = {.struct_size = opened->struct_size, .descriptor = -1};
  *opened = nothing;
  atsc_status status = load_manifest(l, known.expected_sha256);
  if (status == ATSC_OK) status = check_machine(l);
  if (status == ATSC_OK) status = check_files(l);
  if (status == ATSC_OK) status = load_library(l, opened);
  if (status == ATSC_OK) status = open_plan(l, &known, opened);
  free_loader(l);
  if (status != ATSC_OK) atsc_close(opened, NULL);
  return status;
}

atsc_status atsc_close(atsc_opened* opened, atsc_message* message) {
  if (opened == NULL) return ATSC_OK;
  if (opened->plan != NULL) {
    const atsc_status status = opened->api->plan_close(opened->plan, message);
    if (status != ATSC_OK) return status;
  }
  if (opened->library != NULL) {
    unload_library(opened->library, opened->descriptor);
  } else if (opened->descriptor >= 0) {
    close(opened->descriptor);
  }
  const atsc_opened nothing = {.struct_size = opened->struct_size, .descriptor = -1};
  *opened = nothing;
  return ATSC_OK;
}
