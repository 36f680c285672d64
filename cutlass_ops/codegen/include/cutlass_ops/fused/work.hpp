// Which steps a CTA computes: a slice of the batch, or steps that CTAs claim one after the other while the kernel runs.
#pragma once

#include "cutlass/arch/barrier.h"

namespace cutlass_ops::fused {

// Steps that follow each other in an image. A segment of `count` steps reads count + kHalo slots.
struct Segment {
  int image, step, count;
};

// The slice of a team.
struct Slice {
  int image, step;  // of the next segment
  int left;         // steps

  template <class Params>
  CUTLASS_DEVICE static Slice start(Params const& params, int team, int teams) {
    int64_t const total = int64_t(params.n) * params.steps;
    int const first = int(total * team / teams);
    return {first / params.steps, first % params.steps, int(total * (team + 1) / teams) - first};
  }
  template <bool WhileClaimed = true, class Params, class SharedStorage>
  CUTLASS_DEVICE bool next(Params const& params, SharedStorage&, Segment& segment) {
    if (left <= 0) return false;
    segment = {image, step, min(left, params.steps - step)};
    left -= segment.count, ++image, step = 0;
    return true;
  }
};

// Steps in the order of the batch, 2^claim_shift at a time, for whichever CTA comes first: all of them write to the same few images at any
// time. Steps that are dealt in turn drift apart with their CTAs, by up to 50 us, and DRAM takes writes to many places more slowly
// (a kernel that does nothing but write 57's results, two rows at a time: 0.157 ms dealt, 0.126 ms claimed; docs/performance.md).
// A CTA's first claims are dealt, so that it begins before the packing kernel has reset the counters.
//
// Claims, steps and slots are counted from the CTA's first. What a claim is in the batch is written once, and kept for redo.hpp.
struct Claims {
  static constexpr int kDealt = 3;
  static constexpr uint32_t kBarriers = 16;  // more than the claims by which the first to know one is ahead of the last
  uint32_t step;

  template <class Params>
  CUTLASS_DEVICE static Claims start(Params const&, int, int) {
    return {0};
  }

  // A ticket is a claim's place in the batch, less those that are dealt.
  template <class Params>
  CUTLASS_DEVICE static int first(Params const& params) {
    int const members = params.strips * params.channel_blocks;
    return int(blockIdx.x / members) - kDealt * int(gridDim.x / members);
  }
  // By one thread: the claim that the step belongs to is known from now on. Its ticket is replaced by the next one's, which takes
  // microseconds to come, behind the CTA's stores, and is not looked at before the next call.
  template <class Params, class SharedStorage>
  CUTLASS_DEVICE static void publish(Params const& params, SharedStorage& storage, uint32_t step, int& ticket) {
    constexpr uint32_t kMost = sizeof(storage.claims) / sizeof(storage.claims[0]) - 1;
    uint32_t const claim = step >> params.claim_shift;
    if (claim != storage.claims_known) return;
    int const members = params.strips * params.channel_blocks, teams = gridDim.x / members, own = kDealt * teams + ticket;
    bool const exists = claim < kMost && uint64_t(own) << params.claim_shift < uint64_t(params.n) * params.steps;
    storage.claims[claim] = exists ? own : -1, storage.claims_known = claim + 1;
    asm volatile("" ::: "memory");
    storage.claimed[claim % kBarriers].arrive();
    if (claim + 1 < kDealt) {
      ticket += teams;
    } else if (exists && claim + 1 < kMost) {
      if (claim + 1 == kDealt) asm volatile("griddepcontrol.wait;" ::: "memory");
      // ptxas would gather an addition from the warp's threads, of which one is here, and wait for its result.
      asm volatile("atom.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(ticket) : "l"(params.counters + blockIdx.x % members) : "memory");
    }
  }

  // WhileClaimed: until the last is known, steps wait for their claim.
  template <bool WhileClaimed = true, class Params, class SharedStorage>
  CUTLASS_DEVICE bool next(Params const& params, SharedStorage& storage, Segment& segment) {
    uint32_t const claim = step >> params.claim_shift;
    if constexpr (WhileClaimed) {
      storage.claimed[claim % kBarriers].wait(claim / kBarriers % 2);
      asm volatile("" ::: "memory");
    }
    int const ticket = storage.claims[claim];
    uint64_t const place = (uint64_t(uint32_t(ticket)) << params.claim_shift) + (step & ((1u << params.claim_shift) - 1));
    if (ticket < 0 || place >= uint64_t(params.n) * params.steps) return false;
    segment = {int(uint32_t(place) / params.steps), int(uint32_t(place) % params.steps), 1};
    ++step;
    return true;
  }
};

}  // namespace cutlass_ops::fused
