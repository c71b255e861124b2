// What a CUDA kernel and the runtime agree on; included by both, so it needs no header.
// A kernel is `extern "C" __global__ void symbol(atsc::DeviceArgs args)`. Everything that changes
// from round to round is read from device memory, so that a captured graph serves every step.
// A launch counts on as many rows as its grid was computed for, never on 0; shared memory beyond
// 48 KiB must be allowed by an attribute of the function.
#pragma once

namespace atsc {

enum DeviceRows : int { kDeviceTokens = 0, kDeviceLogitRows = 1 };

// In device memory, written before each round.
struct RoundParams {
  long long position;   // tokens in the KV cache before this round
  int rows[2];          // by DeviceRows
};

// Operands as in KernelArgs (kernel.h); pointers are device addresses, 64-byte aligned. Values have
// the same layout on both backends, Q8 too.
struct DeviceArgs {
  const void* in[20];
  void* out[2];
  const RoundParams* round;
  const int* logit_rows;
  void* k_cache;        // fp16 [kv_heads][kv_capacity][head_size], token t at t % kv_capacity
  void* v_cache;
  long long kv_capacity;
  void* scratch;        // as the launch plan asks for; zero at first, counters are left at zero
  int rows_of;          // DeviceRows: which count of rows is this node's
};

// Of the kernel `atsc_hand_off` (templates/cuda/handoff). Any pointer but these two may be null.
struct HandOffArgs {
  void* target;                 // device memory or mapped host memory, both; 4-byte aligned
  const void* source;
  unsigned long long bytes;     // a multiple of 4; may be 0
  long long* stamp_before;      // ns of the device's clock, before anything is read
  long long* stamp_after;       // after everything was written: launches of one block only
  unsigned* flag;               // set to `value` after that: launches of one block only
  unsigned value;
  unsigned awaited_value;
  const unsigned* awaited;      // before all else: each block spins until it has reached that value
};

}  // namespace atsc
