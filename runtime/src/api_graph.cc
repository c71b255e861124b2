#include "api_graph.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "api_calls.h"
#include "api_handles.h"

namespace atsc {
namespace {

// An element of an array of structs whose size the caller's first one says.
template <class T>
T* element(T* array, int32_t index) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(array) + array->struct_size * index);
}

std::vector<atsc_tensor> read_tensors(const atsc_tensor* tensors, int32_t count, const char* name) {
  std::vector<atsc_tensor> found;
  for (int32_t index = 0; index < count; ++index) {
    found.push_back(read_struct(element(&present(tensors, name), index), name));
  }
  return found;
}

const GraphTables& graph_of(const atsc_plan* plan) {
  present(plan, "plan");
  if (kPlan.graph == nullptr) {
    fail(ATSC_INVALID_ARGUMENT, "%s is a language model: run it in a session", kPlan.model_name);
  }
  return *kPlan.graph;
}

}  // namespace

atsc_status plan_get_graph(const atsc_plan* plan, atsc_graph_info* info, atsc_message* message) {
  return guard(message, [&] {
    const GraphTables& graph = graph_of(plan);
    read_struct(info, "info");
    atsc_graph_info found{};
    found.num_inputs = graph.num_inputs;
    found.num_outputs = graph.num_outputs;
    found.input_names = plan->graph_names.data();
    found.output_names = plan->graph_names.data() + graph.num_inputs;
    write_struct(info, found, "info");
  });
}

atsc_status plan_run(atsc_plan* plan, const atsc_tensor* inputs, int32_t num_inputs,
                     atsc_tensor* outputs, int32_t num_outputs, atsc_message* message) {
  return guard(message, [&] {
    graph_of(plan);
    const auto given = read_tensors(inputs, num_inputs, "inputs");
    auto wanted = read_tensors(outputs, num_outputs, "outputs");
    const std::lock_guard lock(plan->rounds);
    plan->graph->run(given, wanted);
    for (int32_t index = 0; index < num_outputs; ++index) {
      write_struct(element(outputs, index), wanted[index], "outputs");
    }
  });
}

}  // namespace atsc
