// A round as one graph.
#include <algorithm>

#include "cuda_steps.h"

namespace atsc {
namespace {

constexpr uint64_t kGraphBytes = 4 << 20, kNodeBytes = 4 << 10;  // at most; 0 was measured

// A graph, made node by node: a branch is a chain, and a wait for a point is one more edge.
class CudaGraph final : public CudaRound {
 public:
  CudaGraph(CudaDevice& device, const CommandList& list);
  ~CudaGraph() override;

  bool is_graph() const override { return true; }
  uint64_t device_bytes() const override { return bytes_; }

  bool done() override {
    const CudaContext::Current current(context_);
    return is_idle(gpu_.stream(Branch::kCompute));
  }

 private:
  using Nodes = std::vector<cuda::GraphNode>;

  void start() override {
    const CudaContext::Current current(context_);
    context_.check(context_.driver().cuGraphLaunch(exec_, gpu_.stream(Branch::kCompute)),
                   "starting a round");
  }

  void add_nodes(cuda::Graph graph, const CommandList& list);
  cuda::GraphNode add_node(cuda::Graph graph, Step& step, const Nodes& after);
  void instantiate(cuda::Graph graph);

  cuda::GraphExec exec_ = nullptr;
  uint64_t num_nodes_ = 0;
  uint64_t bytes_ = 0;
};

CudaGraph::CudaGraph(CudaDevice& device, const CommandList& list)
    : CudaRound(device, list, BuildMode::kGraph) {
  const CudaContext::Current current(context_);
  const cuda::Driver& driver = context_.driver();
  cuda::Graph graph = nullptr;
  context_.check(driver.cuGraphCreate(&graph, 0), "making a graph");
  try {
    add_nodes(graph, list);
    instantiate(graph);
  } catch (...) {
    driver.cuGraphDestroy(graph);
    if (exec_ != nullptr) driver.cuGraphExecDestroy(exec_);
    throw;
  }
  driver.cuGraphDestroy(graph);
}

CudaGraph::~CudaGraph() {
  finish();
  const CudaContext::Current current(context_);
  context_.driver().cuGraphExecDestroy(exec_);
  gpu_.refund_executable(bytes_);
}

void CudaGraph::add_nodes(cuda::Graph graph, const CommandList& list) {
  Nodes ends[kNumBranches];  // what the next command of a branch follows
  std::vector<Nodes> points(static_cast<size_t>(list.num_points()));
  for (Step& step : lower(list)) {
    Nodes& end = ends[static_cast<int>(step.branch)];
    if (step.kind == Step::Kind::kRecord) {
      points[static_cast<size_t>(step.point)] = end;
    } else if (step.kind == Step::Kind::kWaitPoint) {
      for (cuda::GraphNode node : points[static_cast<size_t>(step.point)]) {
        if (std::ranges::find(end, node) == end.end()) end.push_back(node);
      }
    } else {
      end = {add_node(graph, step, end)};
      ++num_nodes_;
    }
  }
}

cuda::GraphNode CudaGraph::add_node(cuda::Graph graph, Step& step, const Nodes& after) {
  const cuda::Driver& driver = context_.driver();
  cuda::GraphNode node = nullptr;
  cuda::Result result = cuda::kSuccess;
  if (step.kind == Step::Kind::kKernel) {
    void* params[] = {step.argument()};
    const cuda::KernelNodeParams kernel = {
        step.function, step.grid[0], step.grid[1], step.grid[2],      step.block, 1,
        1,             step.shared_bytes, params,  nullptr, nullptr, nullptr};
    result = driver.cuGraphAddKernelNode(&node, graph, after.data(), after.size(), &kernel);
  } else if (step.kind == Step::Kind::kCopy) {
    cuda::CopyParams copy{};
    cuda::CopyParams::Side& host = step.to_device ? copy.source : copy.target;
    cuda::CopyParams::Side& device = step.to_device ? copy.target : copy.source;
    host.type = cuda::kHostMemory;
    host.host = step.host;
    device.type = cuda::kDeviceMemory;
    device.device = step.device;
    copy.width_bytes = step.bytes;
    copy.height = copy.depth = 1;
    result = driver.cuGraphAddMemcpyNode(&node, graph, after.data(), after.size(), &copy,
                                         context_.handle());
  } else {
    cuda::MemOp op{};
    op.wait = {cuda::kOpWaitValue32, flag_address(step.flag), step.value, cuda::kWaitUntilReached,
               0};
    const cuda::MemOpNodeParams wait = {context_.handle(), 1, &op, 0};
    result = driver.cuGraphAddBatchMemOpNode(&node, graph, after.data(), after.size(), &wait);
  }
  context_.check(result, "adding to a graph");
  return node;
}

void CudaGraph::instantiate(cuda::Graph graph) {
  const cuda::Driver& driver = context_.driver();
  const uint64_t before = gpu_.free_bytes();
  context_.check(driver.cuGraphInstantiate(&exec_, graph, 0), "making a graph ready");
  context_.check(driver.cuGraphUpload(exec_, gpu_.side_stream()), "uploading a graph");
  context_.check(driver.cuStreamSynchronize(gpu_.side_stream()), "uploading a graph");
  const uint64_t after = gpu_.free_bytes();
  // Another program may allocate at the same moment: count no more than a graph can take.
  const uint64_t most = kGraphBytes + kNodeBytes * num_nodes_;
  const uint64_t taken = std::min(before > after ? before - after : 0, most);
  gpu_.charge_executable(taken);
  bytes_ = taken;
}

}  // namespace

std::unique_ptr<Executable> make_cuda_graph(CudaDevice& device, const CommandList& list) {
  return std::make_unique<CudaGraph>(device, list);
}

}  // namespace atsc
