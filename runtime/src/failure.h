// The one exception of the runtime. It never leaves the library: api.cc turns it into a status.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "atsc.h"

#ifndef __cpp_exceptions
#error "compile the runtime with -fexceptions: a failed allocation must reach the caller as a status"
#endif

namespace atsc {

class Failure : public std::runtime_error {
 public:
  Failure(atsc_status status, const std::string& message)
      : std::runtime_error(message), status(status) {}

  atsc_status status;
};

[[gnu::format(printf, 2, 3)]] [[noreturn]] inline void fail(atsc_status status, const char* format,
                                                            ...) {
  char text[ATSC_MESSAGE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Failure(status, text);
}

}  // namespace atsc
