// What fills the ring of pixel rows: a TMA thread and, but for 16-bit channels_last, converter warps.
#pragma once

#include "cutlass_ops/fused/converter.hpp"

namespace cutlass_ops::fused {

template <class Tile, class Params>
struct Producer {
  using SharedStorage = typename Tile::SharedStorage;
  using Element = typename Tile::Element;
  using Convert = Converter<Tile>;

  // The input rows of the n-th slot. They may lie outside the image, and so may columns and channels: TMA fills zeros.
  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& storage, uint32_t n, int image, int row, int column) {
    constexpr int kStages = Tile::kConverts ? Tile::kRawStages : Tile::kSlots;
    Use<kStages> const use(n);
    auto& full = Tile::kConverts ? storage.raw_full[use.index] : storage.slot_full[use.index];
    auto& empty = Tile::kConverts ? storage.raw_empty[use.index] : storage.slot_empty[use.index];
    auto const copy = [&](void* target, int c0, int c1, int c2) {
      cute::SM90_TMA_LOAD_4D::copy(&params.input, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   target, c0, c1, c2, image);
    };
    empty.wait(use.phase ^ 1);
    full.arrive_and_expect_tx(params.box_bytes);
    if constexpr (!Tile::kChannelsLast) {
      copy(storage.raw[use.index], column, row, 0);
    } else if constexpr (Tile::kConverts) {
      copy(storage.raw[use.index], 0, column, row);
      copy(storage.raw[use.index] + Tile::kRawBytes / 2, 0, column, row + 1);
    } else {
      copy(storage.ring[use.index][0], 0, column, row);
      copy(storage.ring[use.index][1], 0, column, row + 1);
    }
  }
  // By one thread: the next slot's load, if there is one. Its state lies in shared memory: registers are few.
  CUTLASS_DEVICE static void load_next(Params const& params, SharedStorage& storage) {
    auto& next = storage.loads;
    if (!next.left) {
      Segment segment;
      if (!next.work.next(params, storage, segment)) return;
      next.image = segment.image, next.row = Tile::kRows * segment.step - params.padding_h, next.left = segment.count + Tile::kHalo;
    }
    load(params, storage, next.n, next.image, next.row, next.column);
    ++next.n, --next.left, next.row += Tile::kRows;
  }
  // By one thread that does nothing else: all loads.
  CUTLASS_DEVICE static void load_all(Params const& params, SharedStorage& storage) {
    uint32_t n = 0;
    typename Tile::Work work = storage.work;
    int const column = storage.loads.column;
    [[maybe_unused]] int ticket = Claims::first(params);
    while (true) {
      if constexpr (Tile::kClaims) Claims::publish(params, storage, work.step, ticket);
      Segment segment;
      if (!work.next(params, storage, segment)) break;
      int const row = Tile::kRows * segment.step - params.padding_h;
#pragma unroll 1
      for (int i = 0; i < segment.count + Tile::kHalo; ++i, ++n) load(params, storage, n, segment.image, row + Tile::kRows * i, column);
    }
  }

  CUTLASS_DEVICE static uint32_t raw_address(SharedStorage& storage, uint32_t index) {
    return cute::cast_smem_ptr_to_uint(storage.raw) + index * Tile::kRawBytes;
  }
  CUTLASS_DEVICE static uint32_t slot_address(SharedStorage& storage, uint32_t index) {
    return cute::cast_smem_ptr_to_uint(storage.ring) + index * Tile::kRows * Tile::kRowBytes;
  }
  // Hands a slot over to the consumers' wgmmas, which read through another proxy.
  CUTLASS_DEVICE static void hand_over(SharedStorage& storage, uint32_t slot) {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane_index() == 0) storage.slot_full[slot].arrive();
  }

  // The count of slots lies in shared memory: a register more would spill.
  CUTLASS_DEVICE static void convert_all(Params const& params, SharedStorage& storage) {
    auto const count = [&]() -> uint32_t volatile& { return storage.converted[warp_index()]; };
    auto const loads = [&] { return !Tile::kLoadsApart && warp_index() == 3 && lane_index() == 0; };
    auto const more = [&] {
      if constexpr (Tile::kClaims) {
        Segment segment;
        return Claims{count() / (Tile::kHalo + 1)}.next(params, storage, segment);
      } else {
        return count() < storage.slots;
      }
    };
    if (loads()) {
      for (int i = 0; i < Tile::kRawStages - 1; ++i) load_next(params, storage);
    }
    if (lane_index() == 0) count() = warp_index() / Tile::kTeamWarps;
    __syncwarp();
    while (more()) {
      if (loads()) load_next(params, storage);  // into the stage that the slot before left
      __syncwarp();
      {
        uint32_t const n = count();
        Use<Tile::kRawStages> const raw(n);
        Use<Tile::kSlots> const slot(n);
        storage.raw_full[raw.index].wait(raw.phase);
        storage.slot_empty[slot.index].wait(slot.phase ^ 1);
        Convert::convert(raw_address(storage, raw.index), slot_address(storage, slot.index), params.box_bytes <= Tile::kRawBytes / 2, storage.strays);
      }
      uint32_t const n = count();
      __syncwarp();
      if (lane_index() == 0) {
        if constexpr (Tile::kGuarded) {
          int32_t& strays = storage.strays[warp_index()];
          if (strays > kStraysAllowed) {
            uint32_t const bit = n >> storage.misfit_shift;
            atomicOr(&storage.misfits[bit / 32], 1u << (bit % 32));
            storage.any_misfit = 1;
          }
          if (strays) strays = 0;
        }
        count() = n + Tile::kTeams;
      }
      hand_over(storage, Use<Tile::kSlots>(n).index);
      if (lane_index() == 0) storage.raw_empty[Use<Tile::kRawStages>(n).index].arrive();
    }
  }
};

}  // namespace cutlass_ops::fused
