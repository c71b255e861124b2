// common/ptx.cuh in plain C++.
#pragma once

#include "emulation.h"

namespace atsc {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;

inline float from_f16(u16 half) { return static_cast<float>(std::bit_cast<_Float16>(half)); }
inline u16 to_f16(float value) { return std::bit_cast<u16>(static_cast<_Float16>(value)); }
inline uint4 load_once(const void* p) { return *static_cast<const uint4*>(p); }
inline u32 high_nibbles(u32 word) { return (word & 0xf0f0f0f0u) ^ 0x80808080u; }

}  // namespace atsc
