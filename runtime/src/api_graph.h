// The functions of the C interface (atsc.h) that concern plans of general graphs.
#pragma once

#include "atsc.h"

namespace atsc {

atsc_status plan_get_graph(const atsc_plan* plan, atsc_graph_info* info, atsc_message* message);
atsc_status plan_run(atsc_plan* plan, const atsc_tensor* inputs, int32_t num_inputs,
                     atsc_tensor* outputs, int32_t num_outputs, atsc_message* message);

}  // namespace atsc
