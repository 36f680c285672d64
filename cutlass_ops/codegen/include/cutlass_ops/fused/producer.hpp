// What fills the ring of pixel rows: a TMA thread and, for NCHW, converter warps.
#pragma once

#include <cuda_fp16.h>

#include "cutlass_ops/fused/tile.hpp"

namespace cutlass_ops::fused {

template <class Tile, class Params>
struct Producer {
  using SharedStorage = typename Tile::SharedStorage;
  using Element = typename Tile::Element;
  static constexpr int kChunks = Tile::kChannels / 8, kPairs = 32 / kChunks;  // a warp's turn: 2 * kPairs pixels x all channels
  // Values from kSmallestNormal on keep fp16's 11 significant bits. Of eight neighbours whose largest is kSmallestSafeMaximum or
  // more, smaller ones are rounded to 2^-25, a 2^-14th of it, and are left to that.
  static constexpr float kFp16Max = 65504.f, kSmallestNormal = 0x1p-14f, kSmallestSafeMaximum = 0x1p-11f;
  static constexpr int kStraysAllowed = 1;  // of a converter in a slot

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
    if constexpr (Tile::kConverts) {
      copy(storage.raw[use.index], column, row, 0);
    } else {
      copy(storage.ring[use.index][0], 0, column, row);
      copy(storage.ring[use.index][1], 0, column, row + 1);
    }
  }
  // By one thread: the load of the team's next slot, if there is one. Its state lies in shared memory: registers are few.
  CUTLASS_DEVICE static void load_next(Params const& params, SharedStorage& storage, int team) {
    auto& next = storage.loads[team];
    for (bool mine = false; !mine; ++next.n, --next.left, next.row += Tile::kRows) {
      if (!next.left) {
        if (!next.work.valid()) return;
        Segment const segment = next.work.advance(params);
        next.image = segment.image, next.row = Tile::kRows * segment.step - params.padding_h, next.left = segment.count + Tile::kHalo;
      }
      mine = int(next.n % Tile::kTeams) == team;
      if (mine) load(params, storage, next.n, next.image, next.row, next.column);
    }
  }

  // Volatile keeps the compiler from hoisting loads beyond what the converters' 24 registers hold.
  CUTLASS_DEVICE static float2 load_floats(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
  }
  CUTLASS_DEVICE static uint32_t load_halves(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
  }
  CUTLASS_DEVICE static void store_shared(uint32_t address, uint32_t const (&v)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
  }
  CUTLASS_DEVICE static void store_shared(uint32_t address, uint32_t v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }
  CUTLASS_DEVICE static uint32_t halves(float low, float high) {
    __half2 const pair = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
  }
  // NaN wins, so that it counts as a value that does not fit: its bits are above those of every number.
  CUTLASS_DEVICE static float larger(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
  CUTLASS_DEVICE static __half2 largest(uint32_t const (&even)[4], uint32_t const (&odd)[4]) {
    auto const magnitudes = [](uint32_t v) { return __habs2(reinterpret_cast<__half2 const&>(v)); };
    __half2 most = __hmax2_nan(magnitudes(even[0]), magnitudes(odd[0]));
#pragma unroll
    for (int j = 1; j < 4; ++j) most = __hmax2_nan(most, __hmax2_nan(magnitudes(even[j]), magnitudes(odd[j])));
    return most;
  }
  // A lane's way through a raw tile and the slot that it becomes: two pixels x 8 channels a turn. K position 8 * c + j of a pixel
  // holds input channel c + kChunks * j, which makes the reads conflict-free; the packed weights have the same order. All that
  // is kept is moved from turn to turn: registers are few.
  static constexpr int kChannelStep = kChunks * Tile::kBoxPixels * int(sizeof(Element));
  template <int Warps>
  struct Walk {
    static constexpr int kStep = Warps * 2 * kPairs;
    // Going on to the second row, which begins elsewhere in a swizzle atom.
    static constexpr int kNextRow = Tile::kRowBytes - Tile::kBoxColumns * Tile::kPixelBytes;
    static constexpr uint32_t kFlip = Tile::kChannels == 64 ? Tile::kBoxColumns % 8 * 16 : 0;
    static_assert(kStep % 8 == 0 && (kFlip == 0 || kFlip == 64) && Tile::kBoxPixels % (2 * kPairs) == 0);
    int pixel;
    uint32_t source, target;
    CUTLASS_DEVICE Walk(uint32_t raw, uint32_t slot, int warp) {
      int const lane = lane_index(), chunk = lane / kPairs;
      pixel = (warp * kPairs + lane % kPairs) * 2;
      source = raw + (chunk * Tile::kBoxPixels + pixel) * sizeof(Element);
      int const swizzled = Tile::kChannels == 64 ? chunk ^ (pixel & 7) : chunk ^ (pixel >> 2 & 1);  // pixel is even
      target = slot + pixel * Tile::kPixelBytes + (swizzled << 4);
      if (pixel >= Tile::kBoxColumns) target = (target + kNextRow) ^ kFlip;
    }
    CUTLASS_DEVICE bool valid() const { return pixel < Tile::kBoxPixels; }  // the same for all lanes
    CUTLASS_DEVICE void advance() {
      bool const first_row = pixel < Tile::kBoxColumns;
      pixel += kStep, source += kStep * sizeof(Element), target += kStep * Tile::kPixelBytes;
      if (first_row && pixel >= Tile::kBoxColumns) target = (target + kNextRow) ^ kFlip;
    }
    // Columns beyond are read by no tap.
    CUTLASS_DEVICE bool needed() const {
      return Tile::kBoxColumns <= Tile::kRingColumns || pixel % Tile::kBoxColumns < Tile::kRingColumns;
    }
    CUTLASS_DEVICE uint32_t odd_target() const { return (target + Tile::kPixelBytes) ^ (Tile::kChannels == 64 ? 16 : 0); }
  };

  // Eight pixels of a channel pass if they are zero or the largest of them is within bounds. A channel that
  // is not, among others that are, is a stray: random data of which much is zero has some by chance, and what fp16 rounds off
  // them vanishes in what TF32 rounds off their neighbours. Counts strays; patches that do not fit count as more than allowed.
  CUTLASS_DEVICE static void look_closely(uint32_t source, int32_t (&strays)[Tile::kProducerWarps]) {
    float most = 0.f;
    int small = 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half, source += 4 * kChannelStep) {
      float values[4];  // four at a time hide each other's latency
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 const v = load_floats(source + j * kChannelStep);
        values[j] = larger(fabsf(v.x), fabsf(v.y));
      }
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = larger(values[j], __shfl_xor_sync(0xffffffffu, values[j], lanes));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        small += __popc(__ballot_sync(0xffffffffu, values[j] < kSmallestSafeMaximum && values[j] > 0.f)) / 4;
        most = larger(most, values[j]);
      }
    }
    // Of all channels of these eight pixels: the other chunks lie in the lanes kPairs apart.
#pragma unroll
    for (int lanes = kPairs; lanes < 32; lanes *= 2) most = larger(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    bool const misfit = (most > 0.f && most < kSmallestSafeMaximum) || !(most <= kFp16Max);
    if (__any_sync(0xffffffffu, misfit)) small = kStraysAllowed + 1;
    if (lane_index() == 0) strays[warp_index()] += small;
  }

  // A raw tile into a slot, by all converters in turns. few: all channels from 8 on are padding.
  CUTLASS_DEVICE static void convert(uint32_t raw, uint32_t slot, [[maybe_unused]] bool few, int32_t (&strays)[Tile::kProducerWarps]) {
#pragma unroll 1
    for (Walk<Tile::kConverters> walk(raw, slot, warp_index() % Tile::kConverters); walk.valid(); walk.advance()) {
      uint32_t even[4], odd[4];
      [[maybe_unused]] bool suspect = false;
      if constexpr (Tile::kGuarded) {
        // The least but for zeros, which become the largest: of the upper halves of two fp32 values at a time, without signs. A
        // sign that is carried into the other half changes a last place.
        uint32_t smallest = 0xffffffffu;
        auto const look = [&](float v, float w) {
          uint32_t const both = 2 * __byte_perm(__float_as_uint(v), __float_as_uint(w), 0x7632);
          smallest = __viaddmin_u16x2(both, 0xffffffffu, smallest);
        };
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (Tile::kChannels == 16 && j >= 2 && few) {
            even[j] = odd[j] = 0;
            continue;
          }
          float2 const a = load_floats(walk.source + 2 * j * kChannelStep), b = load_floats(walk.source + (2 * j + 1) * kChannelStep);
          even[j] = halves(a.x, b.x), odd[j] = halves(a.y, b.y);
          look(a.x, b.x), look(a.y, b.y);
        }
        constexpr uint32_t kLeast = 2 * (0x38800000u >> 16);  // of 2^-14
        suspect = __vcmpltu2(smallest, kLeast * 0x10001u) || !__hble2(largest(even, odd), __float2half2_rn(kFp16Max));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (Tile::kChannels == 16 && j >= 2 && few) {
            even[j] = odd[j] = 0;
            continue;
          }
          uint32_t const a = load_halves(walk.source + 2 * j * kChannelStep), b = load_halves(walk.source + (2 * j + 1) * kChannelStep);
          even[j] = __byte_perm(a, b, 0x5410), odd[j] = __byte_perm(a, b, 0x7632);
        }
      }
      if (walk.needed()) store_shared(walk.target, even), store_shared(walk.odd_target(), odd);
      if constexpr (Tile::kGuarded) {
        if (__any_sync(0xffffffffu, suspect)) look_closely(walk.source, strays);
      }
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
    auto const team = [&] { return warp_index() / Tile::kConverters; };
    auto const loads = [&] { return warp_index() % Tile::kConverters == 3 && lane_index() == 0; };
    if (loads()) {
      for (int i = 0; i < Tile::kRawStages / Tile::kTeams - 1; ++i) load_next(params, storage, team());
    }
    if (lane_index() == 0) count() = team();
    __syncwarp();
    while (count() < storage.slots) {
      if (loads()) load_next(params, storage, team());  // into the stage that the team's slot before left
      __syncwarp();
      {
        uint32_t const n = count();
        Use<Tile::kRawStages> const raw(n);
        Use<Tile::kSlots> const slot(n);
        storage.raw_full[raw.index].wait(raw.phase);
        storage.slot_empty[slot.index].wait(slot.phase ^ 1);
        convert(raw_address(storage, raw.index), slot_address(storage, slot.index), params.box_bytes <= Tile::kRawBytes / 2, storage.strays);
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
