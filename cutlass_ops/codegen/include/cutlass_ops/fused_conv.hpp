// The fused kernel: convolution, chain and 2 x 2 pool (or none) in one pass, nothing else in device memory.
//
// D^T = W x X: M = output channels, N = pixels. Each of two consumer warpgroups keeps the weights of its 64 output channels
// in registers (R * S taps x the input channels), the A operand of an RS wgmma. Pixels lie in shared memory as fp16 or bf16, one
// swizzled row of all channels a pixel, in a ring of input rows: a filter tap is a shifted start address of the B descriptor, so
// every pixel is read from device memory once. The accumulator layout puts each 2 x 2 window of conv outputs into one thread.
//
//   producers    TMA by one thread: raw tiles, or the ring's rows themselves for 16-bit channels_last (zero outside the image and
//                beyond C); for raw tiles four warps also convert: raw tile -> a ring slot of 2 rows of pixels, finding values that fp16
//                cannot hold. Where store warps make stores fast enough for it, two teams of three take turns at the slots, and another
//                warp loads. Rows that TMA cannot read are copied by the converters, or by a fourth warp of each of two teams
//   consumers    8 warps: a step is 2 conv rows x 64 columns x 64 channels a warpgroup, then chain, pool, store; 1 x 128 where wide
//                rows are stored (lines.hpp)
//   store warps  4, for few input channels without a pool (NCHW): they store what consumers leave in shared memory
//
// CTAs come in teams of strips x channel blocks that walk the same rows side by side: output rows of an odd width share
// sectors between strips, which then merge in L2 (DRAM bytes at the minimum: docs/performance.md).
#pragma once

#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_ops/fused/redo.hpp"
#include "cutlass_ops/fused/storer.hpp"

namespace cutlass_ops {

template <class Chain_, class Tile_>
struct FusedConv : Tile_ {
  using Tile = Tile_;
  using Chain = Chain_;
  using Params = fused::Params<Chain>;
  using SharedStorage = typename Tile::SharedStorage;
  using Produce = fused::Producer<Tile, Params>;
  using Consume = fused::Consumer<Tile, Chain, Params>;
  using Redo = fused::Redo<Tile, Chain, Params>;

  CUTLASS_DEVICE static void initialize(Params const& params, SharedStorage& storage, int team, int teams, int strip) {
    for (int i = threadIdx.x; i < int(sizeof(storage.misfits) / 4); i += Tile::kThreads) storage.misfits[i] = 0;
    if (Tile::kConverts && (params.box_bytes < Tile::kRawBytes || params.gathered)) {  // channels and columns that no load writes
      for (int i = threadIdx.x; i < int(sizeof(storage.raw) / 16); i += Tile::kThreads)
        reinterpret_cast<uint4*>(storage.raw)[i] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) {
      int const loaders = Tile::kGathers && params.gathered ? 32 * Tile::kGatherWarps : 1;
      int const givers = Tile::kConverters * (loaders > 1 ? 32 : 1);
      for (int i = 0; i < Tile::kRawStages; ++i) storage.raw_full[i].init(loaders), storage.raw_empty[i].init(givers);
      for (int i = 0; i < Tile::kSlots; ++i) {
        storage.slot_full[i].init(Tile::kConverts ? Tile::kConverters : 1), storage.slot_empty[i].init(Tile::kConsumerWarps);
      }
      for (int i = 0; i < Tile::kProducerWarps; ++i) storage.strays[i] = 0;
      if constexpr (Tile::kStoreWarps) {
        for (int i = 0; i < Tile::kTiles; ++i) storage.run_full[i].init(2 * 32), storage.run_free[i].init(32);
      }
      if constexpr (Tile::kClaims) {
        for (auto& claimed : storage.claimed) claimed.init(1);
      }
      storage.turn[0].init(4), storage.turn[1].init(4), storage.finished.init(Tile::kThreads);
      storage.any_misfit = 0;
      cutlass::arch::fence_barrier_init();
      if (loaders == 1) cute::prefetch_tma_descriptor(&params.input);
    }
    if (threadIdx.x == 32) {
      storage.work = Tile::Work::start(params, team, teams);
      int const column = strip * Tile::kStrip - params.padding_w - (Tile::kShifted ? params.shift : 0);
      for (auto& next : storage.loads) next = {storage.work, column, 0, 0, 0, 0, 0};
      if constexpr (Tile::kClaims) {
        static_assert(Tile::kHalo < 2, "a claim's slots share a bit");
        storage.misfit_shift = params.claim_shift + Tile::kHalo, storage.claims_known = 0;
      } else {
        storage.slots = 0, storage.misfit_shift = 0;
        typename Tile::Work work = storage.work;
        for (fused::Segment segment; work.next(params, storage, segment);) storage.slots += segment.count + Tile::kHalo;
        while (storage.slots >> storage.misfit_shift >= Tile::kMisfitWords * 32) ++storage.misfit_shift;
      }
    }
    cutlass::arch::fence_view_async_shared();
    __syncthreads();
  }

  // __syncthreads is no way for warps that wait at different places (compute-sanitizer's synccheck). All lanes arrive: racecheck
  // follows a barrier from the lanes that do.
  CUTLASS_DEVICE static void wait_for_all(SharedStorage& storage) {
    asm volatile("" ::: "memory");  // which the barrier does not say itself
    storage.finished.arrive();
    storage.finished.wait(0);
    asm volatile("" ::: "memory");
  }

  CUTLASS_DEVICE void operator()(Params const& params, char* smem) const {
    auto& storage = *reinterpret_cast<SharedStorage*>(smem + (-cute::cast_smem_ptr_to_uint(smem) & 1023u));
    int const members = params.strips * params.channel_blocks, teams = gridDim.x / members;
    int const team = blockIdx.x / members, member = blockIdx.x % members, strip = member % params.strips, block = member / params.strips;
    initialize(params, storage, team, teams, strip);
    // Until here all warps go together; then a whole CTA without work may leave.
    if (!Tile::kClaims && !storage.slots) return;
    if (cutlass::canonical_warp_idx_sync() < Tile::kProducerWarps) {
      cutlass::arch::warpgroup_reg_dealloc<Tile::kProducerRegisters>();
      if (Tile::kLoadsApart && threadIdx.x / 32 % Tile::kTeamWarps == Tile::kConverters) {
        if (params.gathered || cutlass::canonical_warp_idx_sync() == Tile::kConverters) Produce::load_all(params, storage);
        __syncwarp();
      } else if constexpr (Tile::kConverts) {
        Produce::convert_all(params, storage);
      } else if (threadIdx.x == 0) {
        while (storage.loads[0].n < storage.slots) Produce::load_next(params, storage, 0);
      }
      if constexpr (Tile::kGuarded) {
        wait_for_all(storage);
        if (!storage.any_misfit) return;
        if (threadIdx.x >= 32 * Tile::kTeamWarps) return;  // one team redoes
        if (threadIdx.x < 32) {
          if (Tile::kGathers || threadIdx.x == 0) Redo::load_all(params, storage);
        } else {
          Redo::convert_all(params, storage);
        }
      }
    } else if (Tile::kStoreWarps && cutlass::canonical_warp_idx_sync() >= Tile::kProducerWarps + Tile::kConsumerWarps) {
      cutlass::arch::warpgroup_reg_dealloc<Tile::kProducerRegisters>();
      if constexpr (Tile::kStoreWarps) fused::Storer<Tile, Params>::store_all(params, storage, strip, block);
      if constexpr (Tile::kGuarded) wait_for_all(storage);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Tile::kConsumerRegisters>();
      typename Consume::Place const place(strip, block);
      asm volatile("griddepcontrol.wait;" ::: "memory");  // for the packing kernel's weights, and all that came before it
      typename Consume::Weights weights;
      Consume::load_weights(params, place, weights);
      Consume::consume(params, storage, place, weights);
      if constexpr (Tile::kGuarded) {
        wait_for_all(storage);
        if (!storage.any_misfit) return;
        Redo::consume(params, storage, place, weights);
      }
    }
  }
};

}  // namespace cutlass_ops
