// Who runs which node of a round, and where host and device meet.
//
// The host runs its nodes in segments, the device its nodes in runs (both are the splits of DESIGN
// section 1, cut where one side has to wait for the other); each side goes through its own in order.
// A value that the other side reads crosses once, into the same place of the other arena:
//
//     host -> device   the device pulls it right before its first reader there, so that a run that
//                      needs it late begins early; the host announces the end of each segment
//     device -> host   the device pushes it when the run that made it ends; the host waits for the
//                      run before the segment with the first reader
//
// Sides that wait only for what they read may be far apart in the order of execution, while a place
// in an arena is reused in that order. So a segment also waits for the run that pulled what it is
// going to overwrite, and a run, before it pushes, for the segment that still uses the place.
//
// Pure functions of the plan's tables: no device, no memory.
// Source: ATSInfer 4.2.2; the waits for reused places are ours.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tables.h"

namespace atsc {

enum class Runner : uint8_t { kNobody, kHost, kDevice };

// Segments and runs count from 1 where they are waited for, so that 0 means nothing.
struct HostSegment {
  int await_run = 0;
  std::vector<int> nodes;
};

struct DeviceStep {
  int node;
  int wait_segment = 0;      // before the pulls
  std::vector<int> pulls{};  // values, from the host's arena
};

struct DeviceRun {
  std::vector<DeviceStep> steps;
  int wait_segment = 0;       // before the pushes
  std::vector<int> pushes{};  // values, to the host's arena
  bool is_awaited = false;
};

struct Splits {
  std::vector<HostSegment> segments;
  std::vector<DeviceRun> runs;
  std::vector<bool> crosses;  // a value: made by the host and read by the device
};

// `runners` has an entry a node.
Splits make_splits(const Plan& plan, std::span<const Runner> runners);

// Bytes of a value in a round in which its maker has so many rows; a multiple of 4.
uint64_t value_bytes(const Plan& plan, int value, RowsOf rows_of, int64_t rows);

}  // namespace atsc
