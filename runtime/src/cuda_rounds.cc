#include "cuda_rounds.h"

#include <algorithm>

#include "cuda_steps.h"
#include "failure.h"

namespace atsc {
namespace {

constexpr uint64_t kOneBlockBytes = 64 << 10;  // largest payload that one block sends with its flag
constexpr unsigned kSendThreads = 1024, kTransferThreads = 256;
constexpr uint64_t kMostBlocks = 256;

}  // namespace

CudaRound::CudaRound(CudaDevice& device, const CommandList& list, BuildMode mode)
    : Executable(device, list),
      gpu_(device),
      context_(device.context()),
      mode_(mode) {
  if (device.hand_off() == nullptr) {
    fail(ATSC_PLAN_ERROR, "the plan has no hand-off kernels: compile the model again");
  }
}

std::vector<CudaRound::Step> CudaRound::lower(const CommandList& list) {
  std::vector<Step> steps;
  steps.reserve(list.commands().size());
  const std::span<const Command> commands = list.commands();
  for (size_t index = 0; index < commands.size(); ++index) {
    Command command = commands[index];
    if (mode_ == BuildMode::kSynchronous) command.branch = Branch::kCompute;
    if (command.kind != Command::Kind::kWaitFlag || !command.spins || mode_ != BuildMode::kGraph) {
      lower(command, steps);
      continue;
    }
    // One kernel with the transfer that it is a wait for.
    const bool is_one = index + 1 < commands.size() && commands[index + 1].branch == command.branch &&
                        commands[index + 1].kind == Command::Kind::kTransfer;
    if (is_one) ++index;
    add_hand_offs(commands[index], &command, steps);
  }
  return steps;
}

void CudaRound::lower(const Command& command, std::vector<Step>& steps) {
  Step step{.kind = Step::Kind::kKernel, .branch = command.branch};
  switch (command.kind) {
    case Command::Kind::kLaunch: {
      const auto& kernel = *static_cast<const CudaDevice::Kernel*>(command.kernel.entry);
      step.function = kernel.function;
      LaunchShape shape = command.shape;
      shape.num_sms = gpu_.info().num_sms;
      kernel.table->grid(shape, step.grid);
      if (step.grid[0] == 0 || step.grid[1] == 0 || step.grid[2] == 0) {
        fail(ATSC_INTERNAL_ERROR, "kernel %s has an empty grid for %lld rows", command.kernel.name,
             static_cast<long long>(shape.rows));
      }
      step.block = static_cast<unsigned>(kernel.table->block);
      step.shared_bytes = static_cast<unsigned>(kernel.table->shared_bytes);
      step.args = command.args;
      break;
    }
    case Command::Kind::kCopyToDevice:
    case Command::Kind::kCopyToHost: return add_copy(command, steps);
    case Command::Kind::kTransfer:
    case Command::Kind::kSend:
    case Command::Kind::kStamp:
      if (mode_ == BuildMode::kSynchronous) return add_plain_hand_offs(command, steps);
      return add_hand_offs(command, nullptr, steps);
    case Command::Kind::kWaitFlag:
      step.kind = Step::Kind::kWaitFlag;
      step.flag = command.flag;
      step.value = command.value;
      break;
    case Command::Kind::kRecord:
    case Command::Kind::kWaitPoint:
      step.kind = command.kind == Command::Kind::kRecord ? Step::Kind::kRecord
                                                         : Step::Kind::kWaitPoint;
      step.point = command.point;
      break;
  }
  steps.push_back(step);
}

void CudaRound::add_copy(const Command& command, std::vector<Step>& steps) const {
  const bool to_device = command.kind == Command::Kind::kCopyToDevice;
  for (const CudaDevice::Piece& piece : gpu_.pieces_of(command.host, command.bytes)) {
    Step step{.kind = Step::Kind::kCopy, .branch = command.branch};
    step.to_device = to_device;
    step.host = static_cast<std::byte*>(command.host) + piece.offset;
    step.device = (to_device ? command.target : command.source) + piece.offset;
    step.bytes = piece.bytes;
    steps.push_back(step);
  }
}

// `wait`: what its kernel spins for at first; it may be the command itself.
void CudaRound::add_hand_offs(const Command& command, const Command* wait,
                              std::vector<Step>& steps) const {
  HandOffArgs payload{};
  if (wait != nullptr) {
    payload.awaited = static_cast<unsigned*>(as_operand(flag_address(wait->flag)));
    payload.awaited_value = wait->value;
  }
  payload.target = as_operand(command.target);
  payload.source = as_operand(command.source);
  payload.bytes = command.bytes;
  auto* stamp = static_cast<long long*>(as_operand(stamp_address(command.stamp)));
  const uint64_t wide = (command.bytes + 15) / 16;
  const auto blocks = [&](unsigned threads) {
    const uint64_t enough = (wide + threads - 1) / threads;
    return static_cast<uint32_t>(std::clamp<uint64_t>(enough, 1, kMostBlocks));
  };
  if (command.kind == Command::Kind::kWaitFlag) {
    return add_hand_off(command.branch, payload, 1, 32, steps);
  }
  if (command.kind == Command::Kind::kTransfer) {
    payload.stamp_before = stamp;
    return add_hand_off(command.branch, payload, blocks(kTransferThreads), kTransferThreads, steps);
  }
  const bool one_block = command.bytes <= kOneBlockBytes;
  HandOffArgs tail = one_block ? payload : HandOffArgs{};
  tail.stamp_after = stamp;
  if (command.kind == Command::Kind::kSend) {
    tail.flag = static_cast<unsigned*>(as_operand(flag_address(command.flag)));
    tail.value = command.value;
  }
  if (!one_block) {
    add_hand_off(command.branch, payload, blocks(kTransferThreads), kTransferThreads, steps);
  }
  const unsigned threads = one_block && command.bytes > 0 ? kSendThreads : 32;
  add_hand_off(command.branch, tail, 1, threads, steps);
}

// A copy, and where it is a send, the host waits for it. Stamps still are the hand-off kernel's.
void CudaRound::add_plain_hand_offs(const Command& command, std::vector<Step>& steps) const {
  const auto add_stamp = [&] {
    if (command.stamp == kNoStamp) return;
    HandOffArgs stamp{};
    stamp.stamp_after = static_cast<long long*>(as_operand(stamp_address(command.stamp)));
    add_hand_off(command.branch, stamp, 1, 32, steps);
  };
  const bool sends = command.kind == Command::Kind::kSend;
  if (!sends) add_stamp();
  if (command.bytes > 0) {
    steps.push_back({.kind = Step::Kind::kMove,
                     .branch = command.branch,
                     .device = command.target,
                     .from = command.source,
                     .bytes = command.bytes});
  }
  if (!sends) return;
  add_stamp();
  steps.push_back({.kind = Step::Kind::kSettle,
                   .branch = command.branch,
                   .flag = command.flag,
                   .value = command.value});
}

void CudaRound::add_hand_off(Branch branch, const HandOffArgs& args, uint32_t blocks,
                             unsigned threads, std::vector<Step>& steps) const {
  Step step{.kind = Step::Kind::kKernel, .branch = branch};
  step.function = gpu_.hand_off();
  step.grid[0] = blocks;
  step.block = threads;
  step.args = args;
  steps.push_back(step);
}

bool CudaRound::is_idle(cuda::Stream stream) const {
  const cuda::Result result = context_.driver().cuStreamQuery(stream);
  if (result == cuda::kNotReady) return false;
  context_.check(result, "running a round");
  return true;
}

std::unique_ptr<Executable> make_cuda_round(CudaDevice& device, const CommandList& list,
                                            BuildMode mode) {
  if (mode == BuildMode::kGraph) return make_cuda_graph(device, list);
  return make_cuda_launches(device, list, mode);
}

}  // namespace atsc
