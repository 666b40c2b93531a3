// SPDX-License-Identifier: Apache-2.0
// Loaders of the Hopper prefill family: they bring Q and the K and V tiles of a worker's list into shared memory, in
// the order in which consumers want them (K of tile t + 1 before V of tile t), and say which keys a tile holds.
// Consumers see barriers and the key table only, never how the bytes came.
#pragma once
#include "hopper_boxes.cuh"
#include "hopper_gather.cuh"

namespace attnrt {

template <class Config, class Variant, Loading kHow>
struct HopperWays {
  using type = HopperBoxes<Config, Variant>;
};
template <class Config, class Variant>
struct HopperWays<Config, Variant, Loading::gather> {
  using type = HopperGather<Config, Variant>;
};

template <class Config, class Variant, Loading kHow>
class HopperLoader : public HopperWays<Config, Variant, kHow>::type {
  using L = HopperLayout<Config, Variant>;
  using Base = typename HopperWays<Config, Variant, kHow>::type;

 public:
  // Registers per thread. A CTA has 504 for 128 threads of the loader and 256 consumers, so that neither side spills;
  // 512 for 128 and 384, where consumers below 160 make ptxas serialise their products (C7512), so that the loader
  // spills.
  // With a stage that rewrites, 512 for two times 128 and 256; one that turns q alone needs few.
  static constexpr bool kTurnsQ = L::kTurns && !L::kRewritesK && !L::kRewritesV;
  static constexpr int kRegs = L::kGroups == 3 ? 32 : kTurnsQ ? 64 : L::kDimVo > 128 || L::kTurns ? 56 : 72;
  static constexpr int kRewriterRegs = kTurnsQ ? 48 : L::kTurns ? 72 : L::kHooks || L::kNarrow ? 56 : 40;
  static constexpr int kConsumerRegs = L::kGroups == 3 ? (512 - kRegs) / 3
                                       : L::kRewrites  ? (512 - kRegs - kRewriterRegs) / 2
                                                       : (504 - kRegs) / 2;

  using Base::Base;
};

}  // namespace attnrt
