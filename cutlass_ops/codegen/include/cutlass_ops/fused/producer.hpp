// What fills the ring of pixel rows: a TMA thread, or warps that gather, and, but for 16-bit channels_last, converter warps.
#pragma once

#include "cutlass_ops/fused/converter.hpp"

namespace cutlass_ops::fused {

template <class Tile, class Params>
struct Producer {
  using SharedStorage = typename Tile::SharedStorage;
  using Element = typename Tile::Element;
  using Convert = Converter<Tile>;

  // The input rows of the n-th slot. They may lie outside the image, and so may columns and channels, which are zeros.
  // By a thread; where Tile::kGathers by each of Warps warps.
  template <int Warps>
  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& storage, uint32_t n, int image, int row, int column) {
    constexpr int kStages = Tile::kConverts ? Tile::kRawStages : Tile::kSlots;
    Use<kStages> const use(n);
    auto& full = Tile::kConverts ? storage.raw_full[use.index] : storage.slot_full[use.index];
    auto& empty = Tile::kConverts ? storage.raw_empty[use.index] : storage.slot_empty[use.index];
    empty.wait(use.phase ^ 1);
    if constexpr (Tile::kGathers) {
      __syncwarp();
      if (params.gathered) {
        if (lane_index() == 0) storage.gathered[gatherer<Warps>()] = {image, row, column};
        __syncwarp();
        gather<Warps>(params, storage, use.index);
      } else if (lane_index() == 0) {
        copy_tile(params, storage, use.index, full, image, row, column);
      }
      __syncwarp();  // no lane may fall behind by a phase
    } else {
      copy_tile(params, storage, use.index, full, image, row, column);
    }
  }
  // By TMA.
  CUTLASS_DEVICE static void copy_tile(Params const& params, SharedStorage& storage, uint32_t stage, typename Tile::Full& full, int image, int row,
                                       int column) {
    auto const copy = [&](void* target, int c0, int c1, int c2) {
      cute::SM90_TMA_LOAD_4D::copy(&params.input, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   target, c0, c1, c2, image);
    };
    full.arrive_and_expect_tx(params.box_bytes);
    if constexpr (!Tile::kChannelsLast) {
      copy(storage.raw[stage], column, row, 0);
    } else if constexpr (Tile::kConverts) {
      copy(storage.raw[stage], 0, column, row);
      copy(storage.raw[stage] + Tile::kRawBytes / 2, 0, column, row + 1);
    } else {
      copy(storage.ring[stage][0], 0, column, row);
      copy(storage.ring[stage][1], 0, column, row + 1);
    }
  }
  template <int Warps>
  CUTLASS_DEVICE static int gatherer() {
    return Warps == 1 ? 0 : Tile::kLoadsApart ? warp_index() / Tile::kTeamWarps : warp_index();
  }
  // What TMA would bring of the channels that exist: a lane copies an element, or two, of each. Registers are few. Two of 16 bits lie at
  // a multiple of 4 bytes; a tile's may not, and are then those from one column before (Planes::convert_singles). What is left of the places
  // after whole turns is shared out to lanes by channels, too: a copy takes its time, some 17 cycles, whatever lanes have part in it.
  template <int Warps>
  CUTLASS_DEVICE static void gather(Params const& params, SharedStorage& storage, uint32_t stage) {
    auto const volatile& tile = storage.gathered[gatherer<Warps>()];
    constexpr int kColumns = Tile::kGatheredColumns, kPlaces = Tile::kRows * kColumns;
    constexpr bool kFew = Tile::kChannels == 16;
    // Warps share the channels, or the places where channels are few: where a place is takes longer than copies of it.
    constexpr auto kSharing = [](bool early) { return kFew && !early ? 1 : Warps; };
    // Places from `first` on, of kStep elements, kSide lanes side by side in a channel; the others take other channels.
    auto const turn = [&](auto step, auto early, auto side, int first) {
      constexpr int kStep = decltype(step)::value, kSide = decltype(side)::value, kStride = kSharing(early) * (32 / kSide);
      constexpr bool kEarly = decltype(early)::value;
      static_assert(!kEarly || (sizeof(Element) == 2 && kStride % 2 == 0));  // so that it is the same for all of the channels
      int const place = first + lane_index() % kSide * kStep;
      if (kPlaces % (kSide * kStep) && place >= kPlaces) return;
      int channel = (kSharing(early) > 1 ? gatherer<Warps>() : 0) + kSharing(early) * (lane_index() / kSide);
      int const row = tile.row + place / kColumns;
      int column = tile.column + place % kColumns;
      auto const* from = static_cast<Element const*>(params.x) + ((int64_t(tile.image) * params.c + channel) * params.h + row) * params.w + column;
      if constexpr (kEarly) {
        int const before = int(reinterpret_cast<uintptr_t>(from) / sizeof(Element) % 2);
        from -= before, column -= before;
      }
      // Early: the row's first column may be a pair's second, and its last one a pair's first.
      bool const inside = uint32_t(row) < uint32_t(params.h) && uint32_t(column + kEarly) < uint32_t(params.w + kEarly);
      [[maybe_unused]] bool const whole = !inside || column + 1 < params.w;
      uint32_t to = raw_address(storage, stage) +
                    (channel * Tile::kBoxPixels + place / kColumns * Tile::kBoxColumns + place % kColumns) * int(sizeof(Element));
      int height = params.h;
      if constexpr (kSide < 32) asm volatile("" : "+r"(height));  // products with it would be kept from the whole turns
#pragma unroll(kSide < 32 || Warps == 1 ? 1 : 2)
      for (; channel < params.c; channel += kStride) {
        if constexpr (kEarly) {
          copy_pair_async(to, from, inside, whole);
        } else {
          copy_async<kStep * sizeof(Element)>(to, from, inside);
        }
        from += int64_t(height) * params.w * kStride, to += kStride * Tile::kBoxPixels * sizeof(Element);
      }
    };
    using Single = cute::Int<1>;
    using Two = cute::Int<2>;
    // Places that whole turns leave, of many channels, in one way for all.
    using Last = cute::conditional_t<sizeof(Element) == 4, Single, Two>;
    constexpr int kRest = kPlaces % 64, kLanes = kRest / Last::value, kSide = kLanes > 16 ? 32 : kLanes > 8 ? 16 : kLanes > 4 ? 8 : 4;
    constexpr bool kApart = Warps > 1 && !kFew && kLanes > 0 && kSide < 32;
    auto const turns = [&](auto step, auto early) {
      constexpr int kTurn = 32 * decltype(step)::value, kEnd = kApart ? kPlaces - kRest : kPlaces, kWarps = Warps / kSharing(early);
#pragma unroll 1
      for (int first = kWarps > 1 ? gatherer<Warps>() * kTurn : 0; first < kEnd; first += kWarps * kTurn) turn(step, early, cute::Int<32>{}, first);
    };
    if constexpr (Warps == 1) {
      turns(Single{}, cute::false_type{});  // redo.hpp's: rare
    } else if constexpr (sizeof(Element) == 4) {
      params.gathered == 1 ? turns(Single{}, cute::false_type{}) : turns(Two{}, cute::false_type{});
    } else {
      params.gathered == 1 ? turns(Two{}, cute::true_type{}) : turns(Two{}, cute::false_type{});
    }
    if constexpr (kApart) turn(Last{}, cute::bool_constant<sizeof(Element) == 2>{}, cute::Int<kSide>{}, kPlaces - kRest);
    if (sizeof(Element) == 2 && params.gathered == 1 && gatherer<Warps>() == 0 && lane_index() == 0) {
      uint32_t const first = (uint32_t(tile.image) * params.c * params.h + tile.row) * params.w + tile.column;
      storage.odd[stage] = (first + uint32_t(reinterpret_cast<uintptr_t>(params.x) / sizeof(Element))) % 2;
    }
    auto& full = storage.raw_full[stage];
    asm volatile("" ::: "memory");  // which the arrival does not say itself
    cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
    for (int i = Warps; i < Tile::kGatherWarps; ++i) full.arrive();  // for those that do not call it
  }
  // Zeros where the source does not exist.
  template <int Bytes>
  CUTLASS_DEVICE static void copy_async(uint32_t to, void const* from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes), "r"(exists ? Bytes : 0) : "memory");
  }
  // Of 16 bits each; not whole: the first exists. A size that is neither all nor nothing costs registers unless it is a constant.
  CUTLASS_DEVICE static void copy_pair_async(uint32_t to, void const* from, bool exists, bool whole) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %3, 0;"
        " @p cp.async.ca.shared.global [%0], [%1], 4, %2; @!p cp.async.ca.shared.global [%0], [%1], 4, 2; }" ::"r"(to),
        "l"(from), "r"(exists ? 4 : 0), "r"(int(whole))
        : "memory");
  }
  // The next slot's load, by as many as `load`. Its state lies in shared memory: registers are few.
  CUTLASS_DEVICE static void load_next(Params const& params, SharedStorage& storage, int warp) {
    auto& next = storage.loads[warp];
    if (lane_index() == 0 && !next.left) {
      Segment segment{};  // or registers keep an undefined one from load to load
      next.work.next(params, storage, segment);
      next.image = segment.image, next.row = Tile::kRows * segment.step - params.padding_h, next.left = segment.count + Tile::kHalo;
    }
    if constexpr (Tile::kGathers) __syncwarp();
    load<Tile::kGatherWarps>(params, storage, next.n, next.image, next.row, next.column);
    if (lane_index() == 0) ++next.n, --next.left, next.row += Tile::kRows;
    if constexpr (Tile::kGathers) __syncwarp();
  }
  // All loads, by warps that do nothing else.
  CUTLASS_DEVICE static void load_all(Params const& params, SharedStorage& storage) {
    uint32_t n = 0;
    typename Tile::Work work = storage.work;
    int const column = storage.loads[0].column;
    [[maybe_unused]] int ticket = Claims::first(params);
    while (true) {
      if constexpr (Tile::kClaims) {
        if (threadIdx.x == 32 * Tile::kConverters) Claims::publish(params, storage, work.step, ticket);
        __syncwarp();
      }
      Segment segment;
      if (!work.next(params, storage, segment)) break;
      int const row = Tile::kRows * segment.step - params.padding_h;
#pragma unroll 1
      for (int i = 0; i < segment.count + Tile::kHalo; ++i, ++n) load<Tile::kGatherWarps>(params, storage, n, segment.image, row + Tile::kRows * i, column);
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
    // Loads go into the stage that the slot before left.
    auto const load = [&] {
      if constexpr (Tile::kGathers) {
        if (!params.gathered && warp_index() != 3) return;
      } else {
        if (warp_index() != 3 || lane_index() != 0) return;
      }
      int const warp = Tile::kGathers ? warp_index() : 0;
#pragma unroll 1
      while (storage.loads[warp].n < min(count() + Tile::kRawStages, storage.slots)) load_next(params, storage, warp);
    };
    auto const more = [&] {
      if constexpr (Tile::kClaims) {
        Segment segment;
        return Claims{count() / (Tile::kHalo + 1)}.next(params, storage, segment);
      } else {
        return count() < storage.slots;
      }
    };
    if (lane_index() == 0) count() = warp_index() / Tile::kTeamWarps;
    __syncwarp();
    while (more()) {
      if constexpr (!Tile::kLoadsApart) load();
      __syncwarp();
      {
        uint32_t const n = count();
        Use<Tile::kRawStages> const raw(n);
        Use<Tile::kSlots> const slot(n);
        storage.raw_full[raw.index].wait(raw.phase);
        storage.slot_empty[slot.index].wait(slot.phase ^ 1);
        asm volatile("" ::: "memory");  // which the barrier does not say itself
        bool const few = params.box_bytes <= Tile::kRawBytes / 2;
        uint32_t const source = raw_address(storage, raw.index), target = slot_address(storage, slot.index);
        if constexpr (Tile::kGathers && sizeof(Element) == 2) {
          if (params.gathered == 1) {
            uint32_t const plane = uint32_t(params.h) * params.w;
            Convert::convert_singles(source, target, few, storage.odd[raw.index], plane, params.w, -1 - storage.loads[0].column);
          } else {
            Convert::convert(source, target, few, storage.strays);
          }
        } else {
          Convert::convert(source, target, few, storage.strays);
        }
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
      give_back(params, storage, n);
    }
  }
  // By a warp that has converted a raw tile. Where tiles are gathered all lanes arrive: racecheck follows a barrier from the lanes that do.
  CUTLASS_DEVICE static void give_back(Params const& params, SharedStorage& storage, uint32_t n) {
    if ((Tile::kGathers && params.gathered) || lane_index() == 0) storage.raw_empty[Use<Tile::kRawStages>(n).index].arrive();
  }
};

}  // namespace cutlass_ops::fused
