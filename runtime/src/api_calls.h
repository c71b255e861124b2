// What every function of the C interface does with its arguments and failures.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "atsc.h"
#include "failure.h"

namespace atsc {

inline void tell(atsc_message* message, const char* text) {
  if (message == nullptr || message->struct_size <= offsetof(atsc_message, text)) return;
  const size_t room = std::min(message->struct_size, sizeof *message) - offsetof(atsc_message, text);
  const size_t length = std::min(std::strlen(text), room - 1);
  std::memcpy(message->text, text, length);
  message->text[length] = '\0';
}

// Runs a call; whatever it throws becomes a status and a message.
template <class Call>
atsc_status guard(atsc_message* message, Call&& call) noexcept {
  try {
    call();
    tell(message, "");
    return ATSC_OK;
  } catch (const Failure& failure) {
    tell(message, failure.what());
    return failure.status;
  } catch (const std::bad_alloc&) {
    tell(message, "out of memory: close other programs, or compile with a smaller --ctx");
    return ATSC_DEVICE_ERROR;
  } catch (const std::exception& error) {
    tell(message, error.what());
    return ATSC_INTERNAL_ERROR;
  }
}

template <class T>
T& present(T* handle, const char* name) {
  if (handle == nullptr) fail(ATSC_INVALID_ARGUMENT, "%s is NULL", name);
  return *handle;
}

// A caller's struct, which may be shorter or longer than ours: what it lacks is zero.
template <class T>
T read_struct(const T* from, const char* name) {
  const size_t size = present(from, name).struct_size;
  if (size < sizeof(size_t) || size > 1 << 16) {
    fail(ATSC_INVALID_ARGUMENT, "%s.struct_size is %zu: set it to sizeof the struct", name, size);
  }
  T copy{};
  std::memcpy(&copy, from, std::min(size, sizeof copy));
  return copy;
}

template <class T>
void write_struct(T* to, T value, const char* name) {
  const size_t size = read_struct(to, name).struct_size;
  value.struct_size = size;
  std::memcpy(to, &value, std::min(size, sizeof value));
}

}  // namespace atsc
