// From a raw tile to a slot of the ring: pixels rounded to the operands' type, in swizzled rows of all channels. Finds fp32 values that
// fp16 cannot hold.
#pragma once

#include <cuda_fp16.h>

#include "cutlass_ops/fused/tile.hpp"

namespace cutlass_ops::fused {

// Values from 2^-14 on, its smallest normal, keep fp16's 11 significant bits. Of eight neighbours whose largest is kSmallestSafeMaximum or
// more, smaller ones are rounded to 2^-25, a 2^-14th of it, and are left to that.
constexpr float kFp16Max = 65504.f, kSmallestSafeMaximum = 0x1p-11f;
constexpr int kStraysAllowed = 1;  // of a converter in a slot

// Volatile keeps the compiler from hoisting loads beyond what the converters' 24 registers hold.
CUTLASS_DEVICE float load_float(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
CUTLASS_DEVICE float2 load_floats(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
CUTLASS_DEVICE float4 load_four_floats(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}
CUTLASS_DEVICE uint32_t load_halves(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
CUTLASS_DEVICE uint32_t load_half(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
CUTLASS_DEVICE void store_shared(uint32_t address, uint32_t const (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
CUTLASS_DEVICE void store_shared(uint32_t address, uint32_t v, uint32_t w) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v), "r"(w) : "memory");
}
CUTLASS_DEVICE void store_shared(uint32_t address, uint32_t v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }
CUTLASS_DEVICE uint32_t halves(float low, float high) {
  __half2 const pair = __floats2half2_rn(low, high);
  return reinterpret_cast<uint32_t const&>(pair);
}
// NaN wins, so that it counts as a value that does not fit: its bits are above those of every number.
CUTLASS_DEVICE float larger(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// What a lane sees of its values in a turn: whether one may not fit.
template <int Words>
struct Look {
  // The least but for zeros, which become the largest: of the upper halves of two fp32 values at a time, without signs. A
  // sign that is carried into the other half changes a last place.
  uint32_t smallest = 0xffffffffu;
  CUTLASS_DEVICE void at(float v, float w) {
    uint32_t const both = 2 * __byte_perm(__float_as_uint(v), __float_as_uint(w), 0x7632);
    smallest = __viaddmin_u16x2(both, 0xffffffffu, smallest);
  }
  CUTLASS_DEVICE static __half2 largest(uint32_t const (&first)[Words], uint32_t const (&second)[Words]) {
    auto const magnitudes = [](uint32_t v) { return __habs2(reinterpret_cast<__half2 const&>(v)); };
    __half2 most = __hmax2_nan(magnitudes(first[0]), magnitudes(second[0]));
#pragma unroll
    for (int j = 1; j < Words; ++j) most = __hmax2_nan(most, __hmax2_nan(magnitudes(first[j]), magnitudes(second[j])));
    return most;
  }
  CUTLASS_DEVICE bool suspects(uint32_t const (&first)[Words], uint32_t const (&second)[Words]) const {
    constexpr uint32_t kLeast = 2 * (0x38800000u >> 16);  // of 2^-14
    return __vmaxu2(smallest, kLeast * 0x10001u) != smallest || !__hble2(largest(first, second), __float2half2_rn(kFp16Max));
  }
};

// The rule for eight pixels, of which `most` is the largest magnitude of all channels: a channel passes if it is zero or its largest
// is within bounds. One that is not, among others that are, is a stray: random data of which much is zero has some by chance, and what
// fp16 rounds off them vanishes in what TF32 rounds off their neighbours. Pixels that do not fit count as more strays than allowed.
CUTLASS_DEVICE bool is_stray(float largest_of_channel) { return largest_of_channel < kSmallestSafeMaximum && largest_of_channel > 0.f; }
CUTLASS_DEVICE bool is_misfit(float most) { return is_stray(most) || !(most <= kFp16Max); }
CUTLASS_DEVICE void count_strays(int32_t& strays, bool misfit, int small) {
  if (__any_sync(0xffffffffu, misfit)) small = kStraysAllowed + 1;
  if (lane_index() == 0) strays += small;
}

// NCHW: a raw tile has a plane of pixels for each channel, and is transposed.
template <class Tile>
struct Planes {
  using Element = typename Tile::Element;
  // A warp's turn: two pixels of each of kPairs x 8 channels of each of kLaneChunks; kGroups warps share what is left of the channels.
  // So many pairs as a channel's plane, in units of 32 bits, has factors of 2, at least 4: then the reads are free of bank conflicts
  // (32 bits a lane; of 64, which fp32 takes, half a warp's), and the writes are, of 8 lanes each 4 pixels x 2 chunks (64 channels).
  static constexpr int kChunks = Tile::kChannels / 8, kPlane = Tile::kBoxPixels * int(sizeof(Element)) / 4;
  static constexpr int kPairs = cute::max(32 / kChunks, cute::min(16, (kPlane & -kPlane) * 2 / int(sizeof(Element)))), kLaneChunks = 32 / kPairs;
  static constexpr int kGroups = kChunks / kLaneChunks;
  // A lane's way through a raw tile and the slot that it becomes. K position 8 * c + j of a pixel holds input channel c + kChunks * j; the
  // packed weights have the same order. All that is kept is moved from turn to turn: registers are few.
  static constexpr int kChannelStep = kChunks * Tile::kBoxPixels * int(sizeof(Element));
  static constexpr int kRun = 32 / kChunks;  // lanes side by side with one chunk
  CUTLASS_DEVICE static int chunk_of(int warp) { return warp % kGroups * kLaneChunks + lane_index() / kRun % kLaneChunks; }
  CUTLASS_DEVICE static int pair() { return lane_index() % kRun + lane_index() / (kRun * kLaneChunks) * kRun; }
  template <int Warps>
  struct Walk {
    static_assert(Warps % kGroups == 0);
    static constexpr int kStep = Warps / kGroups * 2 * kPairs;
    // Going on to the second row, which begins elsewhere in a swizzle atom.
    static constexpr int kNextRow = Tile::kRowBytes - Tile::kBoxColumns * Tile::kPixelBytes;
    static constexpr uint32_t kFlip = Tile::kChannels == 64 ? Tile::kBoxColumns % 8 * 16 : 0;
    static_assert(kStep % 8 == 0 && (kFlip == 0 || kFlip == 64) && Tile::kBoxPixels % (2 * kPairs) == 0);
    int pixel;
    uint32_t source, target;
    CUTLASS_DEVICE Walk(uint32_t raw, uint32_t slot, int warp) {
      int const chunk = chunk_of(warp);
      pixel = (warp / kGroups * kPairs + pair()) * 2;
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

  // A turn in four parts, of two words each, which redo.hpp converts one by one: two channels of the even pixel, then of the odd one.
  static constexpr int kParts = 4;
  template <class Walk>
  CUTLASS_DEVICE static float4 load(Walk const& walk, int part) {
    uint32_t const source = walk.source + 2 * part * kChannelStep;
    float2 const a = load_floats(source), b = load_floats(source + kChannelStep);
    return make_float4(a.x, b.x, a.y, b.y);
  }
  template <class Walk>
  CUTLASS_DEVICE static void store(Walk const& walk, int part, uint32_t first, uint32_t second) {
    if (!walk.needed()) return;
    store_shared(walk.target + 4 * part, first);
    store_shared(walk.odd_target() + 4 * part, second);
  }

  // Counts strays among the turn's pixels.
  CUTLASS_DEVICE static void look_closely(uint32_t source, int32_t& strays) {
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
        small += __popc(__ballot_sync(0xffffffffu, is_stray(values[j]))) / 4;
        most = larger(most, values[j]);
      }
    }
    // Of all channels of these eight pixels: the other chunks lie in the lanes kPairs apart.
#pragma unroll
    for (int lanes = kPairs; lanes < 32; lanes *= 2) most = larger(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    count_strays(strays, is_misfit(most), small);
  }

  // A raw tile into a slot, by all converters in turns. few: all channels from 8 on are padding.
  CUTLASS_DEVICE static void convert(uint32_t raw, uint32_t slot, [[maybe_unused]] bool few, int32_t (&strays)[Tile::kProducerWarps]) {
#pragma unroll 1
    for (Walk<Tile::kConverters> walk(raw, slot, warp_index() % Tile::kTeamWarps); walk.valid(); walk.advance()) {
      uint32_t even[4], odd[4];
      [[maybe_unused]] Look<4> look;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (Tile::kChannels == 16 && j >= 2 && few) {
          even[j] = odd[j] = 0;
          continue;
        }
        if constexpr (Tile::kGuarded) {
          float2 const a = load_floats(walk.source + 2 * j * kChannelStep), b = load_floats(walk.source + (2 * j + 1) * kChannelStep);
          even[j] = halves(a.x, b.x), odd[j] = halves(a.y, b.y);
          look.at(a.x, b.x), look.at(a.y, b.y);
        } else {
          uint32_t const a = load_halves(walk.source + 2 * j * kChannelStep), b = load_halves(walk.source + (2 * j + 1) * kChannelStep);
          even[j] = __byte_perm(a, b, 0x5410), odd[j] = __byte_perm(a, b, 0x7632);
        }
      }
      if (walk.needed()) store_shared(walk.target, even), store_shared(walk.odd_target(), odd);
      if constexpr (Tile::kGuarded) {
        if (__any_sync(0xffffffffu, look.suspects(even, odd))) look_closely(walk.source, strays[warp_index()]);
      }
    }
  }

  // The same of 16-bit elements that were copied in pairs from one column before where they lie at no multiple of 4 bytes: `odd` says it of
  // the tile's first, and the others are `plane` apart from channel to channel and `width` from row to row. `outside` is the tile's
  // column that is read beside the row's first, if it has one.
  CUTLASS_DEVICE static void convert_singles(uint32_t raw, uint32_t slot, [[maybe_unused]] bool few, uint32_t odd, uint32_t plane, uint32_t width,
                                             int outside) {
    static_assert(Tile::kShifted, "it is an odd column");
    static_assert(Tile::kColumns < Tile::kBoxColumns && kChunks % 2 == 0);
#pragma unroll 1
    for (Walk<Tile::kConverters> walk(raw, slot, warp_index() % Tile::kTeamWarps); walk.valid(); walk.advance()) {
      bool const second_row = walk.pixel >= Tile::kBoxColumns;
      int const column = walk.pixel - (second_row ? Tile::kBoxColumns : 0);
      uint32_t const early = (odd + chunk_of(warp_index()) * plane + (second_row ? width : 0)) & 1;
      // The last column of all is read by no tap, and what lies behind it is not the tile's.
      uint32_t const even = walk.source + 2 * early, next = even + (early && column == Tile::kBoxColumns - 2 ? 0 : 2);
      uint32_t evens[4], odds[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (Tile::kChannels == 16 && j >= 2 && few) {
          evens[j] = odds[j] = 0;
          continue;
        }
        evens[j] = __byte_perm(load_half(even + 2 * j * kChannelStep), load_half(even + (2 * j + 1) * kChannelStep), 0x5410);
        odds[j] = __byte_perm(load_half(next + 2 * j * kChannelStep), load_half(next + (2 * j + 1) * kChannelStep), 0x5410);
        if (column + 1 == outside) odds[j] = 0;
      }
      if (walk.needed()) store_shared(walk.target, evens), store_shared(walk.odd_target(), odds);
    }
  }
};

// channels_last of fp32: a raw tile has the channels of a pixel side by side, like the slot. Both have kRingColumns pixels a row.
template <class Tile>
struct Pixels {
  static_assert(Tile::kGuarded && Tile::kRows == 2);
  // A lane's load is four channels of a pixel. A warp's turn is of eight pixels, or of twice eight where a load has as many.
  static constexpr int kLanes = Tile::kChannels / 4, kPixelsOfLoad = 32 / kLanes, kLoads = Tile::kChannels == 64 ? 4 : 2;
  static constexpr int kLoadsOfEight = 8 / kPixelsOfLoad, kTurn = kLoads * kPixelsOfLoad, kPixels = Tile::kRows * Tile::kRingColumns;
  static constexpr uint32_t kRawPixel = Tile::kChannels * 4, kLoadStep = kPixelsOfLoad * kRawPixel;
  static_assert(kPixels % kTurn == 0);
  template <int Warps>
  struct Walk {
    static constexpr int kStep = Warps * kTurn;
    int pixel;  // the turn's first
    uint32_t source, place;
    CUTLASS_DEVICE Walk(uint32_t raw, uint32_t slot, int warp) {
      int const lane = lane_index(), part = lane % kLanes, own = lane / kLanes;
      pixel = warp * kTurn;
      source = raw + (pixel + own) * kRawPixel + part * 16;
      int const swizzled = part / 2 ^ (Tile::kChannels == 64 ? own : own >> 2);
      place = slot + (pixel + own) * Tile::kPixelBytes + (swizzled << 4) + part % 2 * 8;
    }
    CUTLASS_DEVICE bool valid() const { return pixel < kPixels; }  // the same for all lanes
    CUTLASS_DEVICE void advance() { pixel += kStep, source += kStep * kRawPixel, place += kStep * Tile::kPixelBytes; }
    // The load-th pixel's. Two pixels on, the chunk has another place in its 128 bytes; eight on, in its 32, the same.
    CUTLASS_DEVICE uint32_t target(int load) const {
      return Tile::kChannels == 64 ? place ^ (load << 8 | load << 5) : place + load * kPixelsOfLoad * Tile::kPixelBytes;
    }
  };

  static constexpr int kParts = kLoads;
  template <class Walk>
  CUTLASS_DEVICE static float4 load(Walk const& walk, int part) {
    return load_four_floats(walk.source + part * kLoadStep);
  }
  template <class Walk>
  CUTLASS_DEVICE static void store(Walk const& walk, int part, uint32_t first, uint32_t second) {
    store_shared(walk.target(part), first, second);
  }

  // Counts strays among the turn's pixels.
  CUTLASS_DEVICE static void look_closely(uint32_t source, int32_t& strays) {
    bool misfit = false;
    int small = 0;
#pragma unroll 1
    for (int eight = 0; eight < kLoads / kLoadsOfEight; ++eight, source += kLoadsOfEight * kLoadStep) {
      float most = 0.f;
#pragma unroll 1
      for (int channel = 0; channel < 4; ++channel) {
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < kLoadsOfEight; ++i) largest = larger(largest, fabsf(load_float(source + i * kLoadStep + 4 * channel)));
#pragma unroll
        for (int lanes = kLanes; lanes < 32; lanes *= 2) largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        small += __popc(__ballot_sync(0xffffffffu, is_stray(largest))) / kPixelsOfLoad;
        most = larger(most, largest);
      }
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) most = larger(most, __shfl_xor_sync(0xffffffffu, most, lanes));
      misfit |= is_misfit(most);
    }
    count_strays(strays, misfit, small);
  }

  // A raw tile into a slot, by all converters in turns. TMA has written all channels, so that few are no special case.
  CUTLASS_DEVICE static void convert(uint32_t raw, uint32_t slot, bool, int32_t (&strays)[Tile::kProducerWarps]) {
#pragma unroll 1
    for (Walk<Tile::kConverters> walk(raw, slot, warp_index() % Tile::kTeamWarps); walk.valid(); walk.advance()) {
      uint32_t first[kLoads], second[kLoads];
      Look<kLoads> look;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        float4 const v = load(walk, i);
        first[i] = halves(v.x, v.y), second[i] = halves(v.z, v.w);
        look.at(v.x, v.y), look.at(v.z, v.w);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) store(walk, i, first[i], second[i]);
      if (__any_sync(0xffffffffu, look.suspects(first, second))) look_closely(walk.source, strays[warp_index()]);
    }
  }
};

template <class Tile>
using Converter = cute::conditional_t<Tile::kChannelsLast, Pixels<Tile>, Planes<Tile>>;

}  // namespace cutlass_ops::fused
