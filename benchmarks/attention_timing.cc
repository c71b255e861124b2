// Timed loops for benchmarks/attention.py: an attention kernel over the caches of several layers, a
// plain read of the same bytes, and independent multiply-adds. One thread; seconds a repetition.
#include <immintrin.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <vector>

#include "kernel.h"

namespace {

using atsc::CpuKernel;
using atsc::KernelArgs;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, Free>;

Memory zeroed(size_t num_bytes) {
  const size_t rounded = (num_bytes + 63) / 64 * 64;
  Memory memory(std::aligned_alloc(64, rounded));
  std::memset(memory.get(), 0, rounded);
  return memory;
}

// Of this thread alone: what other programs take does not count.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <typename Body>
double seconds_of(const Body& body) {
  const double start = thread_seconds();
  body();
  return thread_seconds() - start;
}

float read_all(const void* data, size_t num_bytes) {
  const auto* p = static_cast<const float*>(data);
  __m256 sums[4] = {};
  for (size_t i = 0; i + 32 <= num_bytes / 4; i += 32) {
    for (int k = 0; k < 4; ++k) sums[k] = _mm256_add_ps(sums[k], _mm256_loadu_ps(p + i + 8 * k));
  }
  for (int k = 1; k < 4; ++k) sums[0] = _mm256_add_ps(sums[0], sums[k]);
  return _mm256_cvtss_f32(sums[0]);
}

}  // namespace

struct Shape {
  int64_t rows, position, heads, kv_heads, size, layers;
};

struct Timer {
  Shape shape;
  const CpuKernel* kernel;
  KernelArgs args{};
  size_t cache_bytes = 0;
  std::vector<Memory> caches, others;
};

extern "C" {

Timer* new_timer(const CpuKernel* kernel, const Shape* shape) {
  auto* timer = new Timer{*shape, kernel};
  const int64_t total = shape->position + shape->rows;
  const int64_t width = (shape->heads + 2 * shape->kv_heads) * shape->size;
  timer->cache_bytes = 2 * shape->kv_heads * total * shape->size;
  for (int64_t i = 0; i < 2 * shape->layers; ++i) {
    timer->caches.push_back(zeroed(timer->cache_bytes));
  }
  KernelArgs& args = timer->args;
  args.rows = shape->rows;
  args.position = shape->position;
  args.kv_capacity = total;
  args.num_threads = 2;
  auto own = [timer](size_t num_bytes) {
    timer->others.push_back(zeroed(num_bytes));
    return timer->others.back().get();
  };
  args.in[0] = own(shape->rows * width * 4);
  args.in[3] = own(total * shape->size * 2);
  args.in[4] = own(total * shape->size * 2);
  args.out[0] = own(shape->rows * shape->heads * shape->size * 4);
  if (kernel->scratch_bytes) args.scratch = own(kernel->scratch_bytes(shape->rows, total, 2));
  return timer;
}

void delete_timer(Timer* timer) { delete timer; }

double time_kernel(Timer* timer) {
  const int64_t domain = timer->kernel->domain(timer->args);
  return seconds_of([&] {
    for (int64_t layer = 0; layer < timer->shape.layers; ++layer) {
      timer->args.k_cache = timer->caches[2 * layer].get();
      timer->args.v_cache = timer->caches[2 * layer + 1].get();
      timer->kernel->run(timer->args, 0, domain);
    }
  });
}

double time_read(Timer* timer) {
  volatile float sink = 0;
  return seconds_of([&] {
    for (const Memory& cache : timer->caches) sink = read_all(cache.get(), timer->cache_bytes);
  });
}

// Twelve chains of multiply-adds, `count` of eight floats in all.
double time_multiply_adds(int64_t count) {
  __m256 sums[12] = {};
  const __m256 factor = _mm256_set1_ps(0.999f);
  const double seconds = seconds_of([&] {
    for (int64_t i = 0; i < count; i += 12) {
#pragma GCC unroll 12
      for (auto& sum : sums) sum = _mm256_fmadd_ps(sum, factor, factor);
#pragma GCC unroll 12
      for (auto& sum : sums) asm volatile("" : "+x"(sum));
    }
  });
  volatile float sink = _mm256_cvtss_f32(sums[0]);
  (void)sink;
  return seconds;
}

}  // extern "C"
