// SPDX-License-Identifier: Apache-2.0
// What a loading warp of the decode kernel knows before its first item: the top of the plan, its worker's line, and the
// group for which it loads.
//
// A group without work has a loading warp that would only leave: it loads for another group, and all that load for one
// walk the same items and take a tile each in turn (docs/performance.md, E14).
#pragma once
#include "cursor.cuh"
#include "decode_merge.cuh"

namespace attnrt {

template <class Config, class Variant>
class DecodeJoin {
 protected:
  using L = DecodeLayout<Config, Variant>;
  using M = DecodeMeta<L, Variant>;
  using Memory = DecodeMemory<Config, Variant>;

  // `group`: whose warp this is. Which group it loads for is known once the plan's header is there.
  __device__ __forceinline__ DecodeJoin(const RunParams& p, const Memory& memory, int group)
      : p_(p),
        memory_(memory),
        lane_(threadIdx.x % 32),
        team_(join(group)),
        own_(memory.own(team_.group)),
        meta_(*reinterpret_cast<M*>(own_ + L::kOffsetMeta)),
        walk_(meta_of(group)),
        item_(walk_.first.item),
        plan_(memory.plan()),
        list_(walk_.list) {}

  __device__ __forceinline__ M& meta_of(int group) const {
    return *reinterpret_cast<M*>(memory_.own(group) + L::kOffsetMeta);
  }
  __device__ __forceinline__ static void await(unsigned long long& barrier, int phase) {
    ptx::mbar_wait(ptx::smem_addr(&barrier), phase);
  }

  // The stage of this barrier is complete when all lanes' copies have landed. The tables are written by now.
  __device__ __forceinline__ void complete(unsigned long long& full) const {
    const unsigned barrier = ptx::smem_addr(&full);
    ptx::cp_async_mbar_arrive_noinc(barrier);
    ptx::mbar_arrive_warp(barrier, lane_);
  }

  const RunParams& p_;
  const Memory memory_;
  int lane_;
  // The item at hand is the worker's first, with all that FirstItem says of it; 32 bits reach all of the pools; whose
  // pages have one size, and 16-byte copies reach them too; tiles of the list may be, the one to come is, four runs;
  // the addresses of the window's runs are known.
  static constexpr unsigned kGiven = 1, kNear = 2, kRuns = 4, kTileRuns = 8, kFound = 16, kPages = 32;
  unsigned flags_;
  const DecodeTeam team_;
  char* own_;  // the group's for which this warp loads, and its tables
  M& meta_;
  M& walk_;  // this warp's own
  const WorkItem& item_;
  const PlanHeader& plan_;  // its top, in shared memory; not more than one part
  KvList& list_;            // in shared memory: few of its fields are needed often

 private:
  // Reads what is there to know of the plan, and tells it to the group. Groups without work have nothing else to wait
  // for; their warps that load begin where those do for which they load besides.
  __device__ __forceinline__ DecodeTeam join(int group) {
    M& mine = meta_of(group);
    read_top(mine, group);
    const PlanHeader& plan = memory_.plan();
    const int workers = plan.firsts ? plan.firsts : plan.num_workers, busy = memory_.busy_of(workers);
    if (lane_ == 0) memory_.share(mine, group, busy);
    __syncwarp();
    // Where every multiprocessor has work, more than two tiles of each at once would only come later.
    const DecodeTeam team = memory_.team_of(group, busy, workers < static_cast<int>(gridDim.x) ? L::kMostGroups : 2);
    if (group >= busy) {
      if (lane_ == 0) memory_.tiles(mine)->span = make_int4(0, 0, kOver, 0);
      complete(mine.full[0]);
      if (team.place < team.size)
        reinterpret_cast<int*>(&mine.first)[lane_] = reinterpret_cast<const int*>(&meta_of(team.group).first)[lane_];
    }
    if (2 * busy <= memory_.groups) ptx::bar_sync(1 + L::kMostGroups, memory_.groups * 32);
    return team;
  }

  // The worker's first item and this group's share of the top of the header, read at once, into shared memory.
  __device__ __forceinline__ void read_top(M& to, int group) {
    const int worker = group * gridDim.x + blockIdx.x;
    const char* header = reinterpret_cast<const char*>(p_.plan);
    const unsigned at = kFirstAt + worker * sizeof(FirstItem);
    int mine = 0;
    if (at + sizeof(FirstItem) <= p_.behind + sizeof(PlanHeader))
      mine = reinterpret_cast<const int*>(header + at)[lane_];
    int i = group * 32 + lane_, word = 0;
    if (i < TopOfPlan::kWords) word = reinterpret_cast<const int*>(header)[i];
    // While these are on their way.
    flags_ = is_near(p_.k, p_.num_qo_heads) && is_near(p_.v, p_.num_qo_heads) ? kNear : 0;
    if (flags_ && p_.k.vectors && p_.v.vectors && p_.k.page.divisor == p_.v.page.divisor) flags_ |= kPages;
#pragma unroll 1
    while (i < TopOfPlan::kWords) {
      memory_.top().words[i] = word;
      if ((i += memory_.groups * 32) < TopOfPlan::kWords) word = reinterpret_cast<const int*>(header)[i];
    }
    reinterpret_cast<int*>(&to.first)[lane_] = mine;
    ptx::bar_sync(1 + L::kMostGroups, memory_.groups * 32);  // of the warps that load
  }

  // Whether 32 bits hold the offset of any of the pool's rows in units of 16 bytes, and that of 16 tokens in bytes.
  __device__ __forceinline__ static bool is_near(const PagedKv& kv, int heads) {
    constexpr long long kMost = 0x7ffffff0;
    const auto far = [](long long x) { return x < 0 ? -x : x; };
    unsigned pages, rest;
    kv.page.split(static_cast<unsigned>(kv.num_slots), pages, rest);
    const long long token = far(kv.stride_token) * kBytes<Config::kv_type>;
    const long long bytes = far(kv.stride_page) * kBytes<Config::kv_type> * pages + token * kv.page.divisor +
                            far(kv.stride_head) * kBytes<Config::kv_type> * heads;
    return token <= kMost / 16 && bytes / 16 <= kMost;
  }
};

}  // namespace attnrt
