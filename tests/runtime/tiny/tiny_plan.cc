// A complete plan by hand: two layers of plain C++ kernels and their tables. It holds every form of
// node that the executor knows: replicated (embed, norm, select_rows), claimed (linear, attention,
// head), aligned (add), kernels for few and for many rows, scratch with a counter, a full cache and a
// ring. tiny_model.py has the same model in numpy. Sums have one order, so that results are equal to
// the bit however a round is cut.
//
// -D: TINY_CRCS (checksums of the units), TINY_PLAN_ID, TINY_FACTOR (scales the logits), TINY_RUNGS
// (-1: no device; else a virtual one with so many of the rungs below, of which 0 are for profiling).
#include <atomic>
#include <cmath>
#include <cstring>

#include "tables.h"

namespace atsc {
namespace {

constexpr int kWidth = 16, kVocab = 32, kHeads = 2, kHeadSize = 8, kSplits = 2;
constexpr int kGateToken = 31;  // the gate node waits while a test holds it

std::atomic<int> gate_held{0}, gate_waiting{0}, heads_run{0};

const float* in_f32(const KernelArgs& a, int slot) { return static_cast<const float*>(a.in[slot]); }
float* out_f32(const KernelArgs& a) { return static_cast<float*>(a.out[0]); }

int64_t per_row(const KernelArgs& a) { return a.rows; }
int64_t per_output(const KernelArgs&) { return kWidth; }
int64_t per_token_of_vocab(const KernelArgs&) { return kVocab; }

void embed(const KernelArgs& a, int64_t begin, int64_t end) {
  const auto* ids = static_cast<const int32_t*>(a.in[0]);
  for (int64_t m = begin; m < end; ++m) {
    std::memcpy(out_f32(a) + m * kWidth, in_f32(a, 1) + ids[m] * kWidth, kWidth * sizeof(float));
  }
}

// y = x / (1 + max |x|)
void norm(const KernelArgs& a, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    const float* x = in_f32(a, 0) + m * kWidth;
    float largest = 0;
    for (int i = 0; i < kWidth; ++i) largest = std::max(largest, std::fabs(x[i]));
    for (int i = 0; i < kWidth; ++i) out_f32(a)[m * kWidth + i] = x[i] / (1 + largest);
  }
}

float dot(const float* x, const float* w) {
  float sum = 0;
  for (int k = 0; k < kWidth; ++k) sum += x[k] * w[k];
  return sum;
}

void linear_few(const KernelArgs& a, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    for (int64_t m = 0; m < a.rows; ++m) {
      out_f32(a)[m * kWidth + n] = dot(in_f32(a, 0) + m * kWidth, in_f32(a, 1) + n * kWidth);
    }
  }
}

void linear_many(const KernelArgs& a, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    for (int64_t n = 0; n < kWidth; ++n) {
      out_f32(a)[m * kWidth + n] = dot(in_f32(a, 0) + m * kWidth, in_f32(a, 1) + n * kWidth);
    }
  }
}

void add_few(const KernelArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t m = 0; m < a.rows; ++m) {
      const int64_t at = m * kWidth + i;
      out_f32(a)[at] = in_f32(a, 0)[at] + in_f32(a, 1)[at];
    }
  }
}

void add_many(const KernelArgs& a, int64_t begin, int64_t end) {
  for (int64_t at = begin * kWidth; at < end * kWidth; ++at) {
    out_f32(a)[at] = in_f32(a, 0)[at] + in_f32(a, 1)[at];
  }
}

// Writes x into the cache as K and V; y = x + softmax(x . K) V over the visible tokens.
// An item is a head and a parity of tokens; the thread that finishes a head's last item joins them.
struct Partial {
  float largest, sum, y[kHeadSize];
};

struct AttentionScratch {
  std::atomic<int> done[kHeads];
  Partial partials[1];  // [kHeads][kSplits][rows]
};

template <int kWindow>
void attend(const KernelArgs& a, int64_t m, int64_t head, int64_t parity, Partial& out) {
  const auto* k = static_cast<const _Float16*>(a.k_cache) + head * a.kv_capacity * kHeadSize;
  const auto* v = static_cast<const _Float16*>(a.v_cache) + head * a.kv_capacity * kHeadSize;
  const float* x = in_f32(a, 0) + m * kWidth + head * kHeadSize;
  const int64_t last = a.position + m;
  const int64_t first = kWindow > 0 ? std::max<int64_t>(0, last - kWindow + 1) : 0;
  out = {-1e30f, 0, {}};
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t t = first; t <= last; ++t) {
      if (t % kSplits != parity) continue;
      const int64_t row = t % a.kv_capacity * kHeadSize;
      float score = 0;
      for (int i = 0; i < kHeadSize; ++i) score += x[i] * static_cast<float>(k[row + i]);
      if (pass == 0) {
        out.largest = std::max(out.largest, score);
        continue;
      }
      const float weight = std::exp(score - out.largest);
      out.sum += weight;
      for (int i = 0; i < kHeadSize; ++i) out.y[i] += weight * static_cast<float>(v[row + i]);
    }
  }
}

template <int kWindow>
void attention(const KernelArgs& a, int64_t begin, int64_t end) {
  auto* scratch = static_cast<AttentionScratch*>(a.scratch);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t head = item / kSplits, parity = item % kSplits;
    for (int64_t m = 0; m < a.rows; ++m) {
      const int64_t t = a.position + m;
      if (t % kSplits != parity) continue;
      const int64_t at = (head * a.kv_capacity + t % a.kv_capacity) * kHeadSize;
      for (int i = 0; i < kHeadSize; ++i) {
        const auto half = static_cast<_Float16>(in_f32(a, 0)[m * kWidth + head * kHeadSize + i]);
        static_cast<_Float16*>(a.k_cache)[at + i] = half;
        static_cast<_Float16*>(a.v_cache)[at + i] = half;
      }
    }
    Partial* partials = scratch->partials + head * kSplits * a.rows;
    for (int64_t m = 0; m < a.rows; ++m) {
      attend<kWindow>(a, m, head, parity, partials[parity * a.rows + m]);
    }
    if (scratch->done[head].fetch_add(1) + 1 < kSplits) continue;
    scratch->done[head] = 0;
    for (int64_t m = 0; m < a.rows; ++m) {
      const Partial &one = partials[m], &two = partials[a.rows + m];
      const float largest = std::max(one.largest, two.largest);
      const float w1 = std::exp(one.largest - largest), w2 = std::exp(two.largest - largest);
      const int64_t at = m * kWidth + head * kHeadSize;
      for (int i = 0; i < kHeadSize; ++i) {
        const float y = (one.y[i] * w1 + two.y[i] * w2) / (one.sum * w1 + two.sum * w2);
        out_f32(a)[at + i] = in_f32(a, 0)[at + i] + y;
      }
    }
  }
}

int64_t per_head_and_parity(const KernelArgs&) { return kHeads * kSplits; }

size_t attention_scratch(int64_t max_rows, int64_t, int32_t) {
  return sizeof(AttentionScratch) + sizeof(Partial) * kHeads * kSplits * max_rows;
}

// Copies x, and waits at the gate token while a test holds the gate.
void gate(const KernelArgs& a, int64_t begin, int64_t end) {
  const auto* ids = static_cast<const int32_t*>(a.in[1]);
  for (int64_t m = begin; m < end; ++m) {
    if (ids[m] == kGateToken) {
      ++gate_waiting;
      while (gate_held != 0) {}
    }
    std::memcpy(out_f32(a) + m * kWidth, in_f32(a, 0) + m * kWidth, kWidth * sizeof(float));
  }
}

// y = norm(x[logit_rows]): has scratch of its own, so that replicas with scratch are tested.
void select_rows(const KernelArgs& a, int64_t begin, int64_t end) {
  auto* copy = static_cast<float*>(a.scratch);
  for (int64_t r = begin; r < end; ++r) {
    std::memcpy(copy, in_f32(a, 0) + a.logit_rows[r] * kWidth, kWidth * sizeof(float));
    std::memcpy(out_f32(a) + r * kWidth, copy, kWidth * sizeof(float));
  }
}

// For many rows: no scratch, since threads share a call's.
void select_rows_many(const KernelArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float* x = in_f32(a, 0) + a.logit_rows[r] * kWidth;
    std::memcpy(out_f32(a) + r * kWidth, x, kWidth * sizeof(float));
  }
}

size_t select_scratch(int64_t, int64_t, int32_t) { return kWidth * sizeof(float); }

void head(const KernelArgs& a, int64_t begin, int64_t end) {
  ++heads_run;
  for (int64_t v = begin; v < end; ++v) {
    for (int64_t r = 0; r < a.rows; ++r) {
      out_f32(a)[r * kVocab + v] =
          TINY_FACTOR * dot(in_f32(a, 0) + r * kWidth, in_f32(a, 1) + v * kWidth);
    }
  }
}

constexpr CpuKernel kEmbed{"embed", embed, per_row, nullptr};
constexpr CpuKernel kNorm{"norm", norm, per_row, nullptr};
constexpr CpuKernel kLinearFew{"linear_few", linear_few, per_output, nullptr};
constexpr CpuKernel kLinearMany{"linear_many", linear_many, per_row, nullptr};
constexpr CpuKernel kAddFew{"add_few", add_few, per_output, nullptr};
constexpr CpuKernel kAddMany{"add_many", add_many, per_row, nullptr};
constexpr CpuKernel kFull{"attention", attention<0>, per_head_and_parity, attention_scratch};
constexpr CpuKernel kWindow{"attention_w4", attention<4>, per_head_and_parity, attention_scratch};
constexpr CpuKernel kGate{"gate", gate, per_row, nullptr};
constexpr CpuKernel kSelect{"select_rows", select_rows, per_row, select_scratch};
constexpr CpuKernel kSelectMany{"select_rows_many", select_rows_many, per_row, nullptr};
constexpr CpuKernel kHead{"head", head, per_token_of_vocab, nullptr};

constexpr int kChunk = 12, kMaxLogitRows = 10, kContext = 96;
constexpr uint64_t kBytes = kChunk * kWidth * sizeof(float);

// The places of dead values are used again, as the compiler's allocator does it: by whole groups.
enum { kX, kN, kH, kY, kA, kN2, kH2, kY2, kA2, kG, kS, kNumValues };
constexpr ValueEntry kValues[] = {
    {0 * kBytes, kBytes, 0},               // x: replicated
    {1 * kBytes, kBytes, kBytes},          // n: replicated
    {2 * kBytes, kBytes, kNotPrivate},     // h
    {3 * kBytes, kBytes, kNotPrivate},     // y
    {0 * kBytes, kBytes, kNotPrivate},     // a: where x was
    {1 * kBytes, kBytes, 0},               // n2
    {2 * kBytes, kBytes, kNotPrivate},     // h2
    {3 * kBytes, kBytes, kNotPrivate},     // y2
    {0 * kBytes, kBytes, kNotPrivate},     // a2
    {1 * kBytes, kBytes, kNotPrivate},     // g
    {2 * kBytes, kBytes, kBytes},          // s: rows of logits
};
constexpr Operand value(int index) { return {OperandKind::kValue, static_cast<uint64_t>(index)}; }
constexpr Operand weight(uint64_t offset) { return {OperandKind::kWeight, offset}; }
constexpr Operand kIds{OperandKind::kTokenIds, 0}, kLogits{OperandKind::kLogits, 0};

#define TINY_KERNELS(few, many) {&few, nullptr, nullptr, nullptr}, {&many, nullptr, nullptr, nullptr}

constexpr NodeEntry kNodes[] = {
    {"embed", "embed", TINY_KERNELS(kEmbed, kEmbed), {kIds, weight(0)}, {value(kX)},
     RowsOf::kTokens, kReplicate, 0, 0, -1},
    {"norm", "norm", TINY_KERNELS(kNorm, kNorm), {value(kX)}, {value(kN)}, RowsOf::kTokens,
     kReplicate, 0, 1, -1},
    {"linear", "linear", TINY_KERNELS(kLinearFew, kLinearMany), {value(kN), weight(4096)},
     {value(kH)}, RowsOf::kTokens, 0, 0, 1, -1},
    {"add", "add", TINY_KERNELS(kAddFew, kAddMany), {value(kH), value(kX)}, {value(kY)},
     RowsOf::kTokens, kAligned, 0, 1, -1},
    {"attention", "attention", TINY_KERNELS(kFull, kFull), {value(kY)}, {value(kA)},
     RowsOf::kTokens, 0, 1, 1, 0},
    {"norm2", "norm", TINY_KERNELS(kNorm, kNorm), {value(kA)}, {value(kN2)}, RowsOf::kTokens,
     kReplicate, 2, 2, -1},
    {"linear2", "linear", TINY_KERNELS(kLinearFew, kLinearMany), {value(kN2), weight(8192)},
     {value(kH2)}, RowsOf::kTokens, 0, 2, 2, -1},
    // For few rows its items are rows, those before it outputs: it must wait for all of them.
    {"add2", "add", TINY_KERNELS(kAddMany, kAddMany), {value(kH2), value(kA)}, {value(kY2)},
     RowsOf::kTokens, kAligned, 2, 2, -1},
    {"attention2", "attention", TINY_KERNELS(kWindow, kWindow), {value(kY2)}, {value(kA2)},
     RowsOf::kTokens, 0, 3, 2, 1},
    {"gate", "gate", TINY_KERNELS(kGate, kGate), {value(kA2), kIds}, {value(kG)}, RowsOf::kTokens,
     0, 4, 3, -1},
    {"select", "select_rows", TINY_KERNELS(kSelect, kSelectMany), {value(kG)}, {value(kS)},
     RowsOf::kLogitRows, kReplicate, 5, 3, -1},
    {"head", "head", TINY_KERNELS(kHead, kHead), {value(kS), weight(12288)}, {kLogits},
     RowsOf::kLogitRows, 0, 5, 3, -1},
};

constexpr uint32_t kCrcs[] = {TINY_CRCS};
constexpr UnitEntry kUnits[] = {
    {"table", 0, 2048, kCrcs[0], UnitKind::kHost},
    {"w1", 4096, 1024, kCrcs[1]},
    {"w2", 8192, 1024, kCrcs[2]},
    {"head", 12288, 2048, kCrcs[3]},
};
constexpr CacheEntry kCaches[] = {{kHeads, kHeadSize, 0, kContext}, {kHeads, kHeadSize, 4, 15}};
constexpr int32_t kEos[] = {30};

constexpr uint8_t kNothing[] = {0, 0, 0, 0}, kHalf[] = {0, 0, 1, 0}, kAll[] = {0, 1, 1, 1};
[[maybe_unused]] constexpr RungEntry kRungs[] = {
    {0, 0, 2048, 2, kNothing},
    {0, 0, 2048, 2, kHalf},
    {0, 0, 0, 2, kAll},
};
constexpr int64_t kStreamFrom = 10;
constexpr DeviceEntry kDevice =
    TINY_RUNGS < 0 ? DeviceEntry{}
                   : DeviceEntry{DeviceKind::kVirtual, 1 << 20, 0, 10000, 1e9, kStreamFrom, 0,
                                 TINY_RUNGS, nullptr, kRungs};

}  // namespace

const Plan kPlan = {kAbiVersion,  "tiny", TINY_PLAN_ID, kVocab,       kContext, kChunk,
                    kMaxLogitRows, 1,     1,            kEos,         4 * kBytes, 2 * kBytes,
                    14336,        kNumValues, 12,       4,            2,        kValues,
                    kNodes,       kUnits,    kCaches,      kDevice};

}  // namespace atsc

// Hooks for tests.
#define TINY_EXPORT extern "C" __attribute__((visibility("default")))
TINY_EXPORT void tiny_hold_gate(int held) { atsc::gate_held = held; }
TINY_EXPORT int tiny_gate_waiting() { return atsc::gate_waiting; }
TINY_EXPORT int tiny_heads_run() { return atsc::heads_run; }
