/* A small JSON reader (RFC 8259) for the C loader: it walks the text once, values are taken in the
 * order in which they come. The first mistake sets `failed`; from then on every call does nothing,
 * so that callers check once, at the end. The text must end with a zero byte. */
#ifndef ATSC_JSON_H
#define ATSC_JSON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { JSON_MAX_DEPTH = 64 };

typedef struct json {
  const char* at;
  int depth;
  int failed;
} json;

static inline void json_space(json* j) {
  while (*j->at == ' ' || *j->at == '\n' || *j->at == '\t' || *j->at == '\r') ++j->at;
}

/* Takes a character if it comes next. */
static inline int json_take(json* j, char wanted) {
  if (j->failed) return 0;
  json_space(j);
  if (*j->at != wanted) return 0;
  ++j->at;
  return 1;
}

static inline void json_expect(json* j, char wanted) {
  if (!json_take(j, wanted)) j->failed = 1;
}

static inline void json_put(json* j, char c, char* out, size_t room, size_t* used) {
  if (out == NULL) return;
  if (*used + 1 < room && c != '\0') {
    out[(*used)++] = c;
  } else {
    j->failed = 1; /* too long for the caller, or a zero byte, which no text of ours has */
  }
}

/* The four hex digits of an escape. */
static inline uint32_t json_hex(json* j) {
  uint32_t value = 0;
  for (int i = 0; i < 4 && !j->failed; ++i) {
    const char c = *j->at;
    if (c >= '0' && c <= '9') {
      value = value * 16 + (uint32_t)(c - '0');
    } else if ((c | 32) >= 'a' && (c | 32) <= 'f') {
      value = value * 16 + (uint32_t)((c | 32) - 'a' + 10);
    } else {
      j->failed = 1;
      return 0;
    }
    ++j->at;
  }
  return value;
}

/* After "\u": one code point, of two escapes if it is beyond 16 bits, as UTF-8. */
static inline void json_unicode(json* j, char* out, size_t room, size_t* used) {
  uint32_t code = json_hex(j);
  if (code >= 0xd800 && code < 0xdc00 && j->at[0] == '\\' && j->at[1] == 'u') {
    j->at += 2;
    const uint32_t low = json_hex(j);
    if (low < 0xdc00 || low > 0xdfff) j->failed = 1;
    code = 0x10000 + ((code & 0x3ff) << 10) + (low & 0x3ff);
  }
  if (code >= 0xd800 && code < 0xe000) j->failed = 1;
  const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  static const unsigned char lead[4] = {0, 0xc0, 0xe0, 0xf0};
  json_put(j, (char)(lead[more] | code >> (6 * more)), out, room, used);
  for (int i = more - 1; i >= 0; --i) {
    json_put(j, (char)(0x80 | (code >> (6 * i) & 0x3f)), out, room, used);
  }
}

/* A string, without escapes, into `out`; NULL drops it. */
static inline void json_string(json* j, char* out, size_t room) {
  static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  size_t used = 0;
  if (out != NULL) out[0] = '\0';
  json_expect(j, '"');
  while (!j->failed && *j->at != '"') {
    const char c = *j->at++;
    if ((unsigned char)c < 0x20) {
      j->failed = 1;
    } else if (c != '\\') {
      json_put(j, c, out, room, &used);
    } else {
      const char kind = *j->at++;
      const char* found = kind != '\0' ? strchr(escapes, kind) : NULL;
      if (kind == 'u') {
        json_unicode(j, out, room, &used);
      } else if (found != NULL) {
        json_put(j, meanings[found - escapes], out, room, &used);
      } else {
        j->failed = 1;
      }
    }
  }
  json_expect(j, '"');
  if (out != NULL) out[used] = '\0';
}

/* A whole number of 0 or more. */
static inline uint64_t json_count(json* j) {
  uint64_t value = 0;
  json_space(j);
  if (*j->at < '0' || *j->at > '9') j->failed = 1;
  while (!j->failed && *j->at >= '0' && *j->at <= '9') {
    if (value > (UINT64_MAX - 9) / 10) j->failed = 1;
    value = value * 10 + (uint64_t)(*j->at++ - '0');
  }
  if (*j->at == '.' || *j->at == 'e' || *j->at == 'E') j->failed = 1;
  return value;
}

static inline void json_enter(json* j, char opening) {
  json_expect(j, opening);
  if (++j->depth > JSON_MAX_DEPTH) j->failed = 1;
}

/* In an object or array: whether another member follows (its comma is taken), else takes its end.
 * `first` is 1 before the first member, and becomes 0. */
static inline int json_more(json* j, char closing, int* first) {
  if (j->failed) return 0;
  if (json_take(j, closing)) {
    --j->depth;
    return 0;
  }
  if (!*first) json_expect(j, ',');
  *first = 0;
  return !j->failed;
}

/* The next key of an object; 0 at its end. */
static inline int json_key(json* j, int* first, char* key, size_t room) {
  if (!json_more(j, '}', first)) return 0;
  json_string(j, key, room);
  json_expect(j, ':');
  return !j->failed;
}

static inline void json_skip(json* j) {
  int first = 1;
  if (j->failed) return;
  json_space(j);
  if (*j->at == '{') {
    json_enter(j, '{');
    while (json_key(j, &first, NULL, 0)) json_skip(j);
  } else if (*j->at == '[') {
    json_enter(j, '[');
    while (json_more(j, ']', &first)) json_skip(j);
  } else if (*j->at == '"') {
    json_string(j, NULL, 0);
  } else {
    const size_t length = strspn(j->at, "+-.0123456789aefElnrstu"); /* numbers and the three words */
    if (length == 0) j->failed = 1;
    j->at += length;
  }
}

#endif
