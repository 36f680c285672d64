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
  // Values from here on keep fp16's 11 significant bits; a largest value from here on is as exact as TF32's, with all that are
  // added to it.
  static constexpr float kFp16Max = 65504.f, kSmallestNormal = 0x1p-14f, kSmallestSafeMaximum = 0x1p-11f;
  static constexpr int kStraysAllowed = 1;  // of a converter in a slot

  // The two input rows of the n-th slot. They may lie outside the image, and so may columns and channels: TMA fills zeros.
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
  CUTLASS_DEVICE static int first_column(Params const& params, int strip) {
    return strip * Tile::kStrip - params.padding_w - (Tile::kShifted ? params.shift : 0);
  }
  CUTLASS_DEVICE static void load_all(Params const& params, SharedStorage& storage, int strip) {
    int const column = first_column(params, strip);
    uint32_t n = 0;
    for (Work work = storage.work; work.valid();) {
      Segment const segment = work.advance(params);
      int row = 2 * segment.step - params.padding_h;
#pragma unroll 1
      for (int left = segment.count + Tile::kHalo; left > 0; --left, ++n, row += 2) load(params, storage, n, segment.image, row, column);
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
  CUTLASS_DEVICE static int lane_index() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // volatile: addresses are computed anew instead of kept, and spilled
    return lane;
  }

  CUTLASS_DEVICE static int converter_index() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return int(thread / 32) - 1;
  }

  // Where a lane's two pixels lie in a raw tile, and in a slot. lane = (8 channels, pixel pair). K position 8 * c + j of a pixel
  // holds input channel c + kChunks * j, which makes the reads conflict-free; the packed weights have the same order.
  struct Place {
    int chunk, pixel;
    CUTLASS_DEVICE explicit Place(int turn) {
      int const lane = lane_index();
      chunk = lane / kPairs, pixel = (turn * kPairs + lane % kPairs) * 2;
    }
    CUTLASS_DEVICE uint32_t source() const { return (chunk * Tile::kBoxPixels + pixel) * sizeof(Element); }
    static constexpr int kChannelStep = kChunks * Tile::kBoxPixels * int(sizeof(Element));
  };
  static constexpr int kTurns = Tile::kBoxPixels / (2 * kPairs);
  static_assert(!Tile::kConverts || Tile::kBoxPixels % (2 * kPairs) == 0);

  // Address of the even pixel's chunk in a slot; the odd pixel's is the next pixel's, which is `odd_pixel` of it. 0: not needed.
  CUTLASS_DEVICE static uint32_t target(uint32_t slot, Place const& place) {
    int const line = place.pixel >= Tile::kBoxColumns, column = place.pixel - (line ? Tile::kBoxColumns : 0);  // column is even
    if (Tile::kBoxColumns > Tile::kRingColumns && column >= Tile::kRingColumns) return 0;
    int const swizzled = Tile::kChannels == 64 ? place.chunk ^ (column & 7) : place.chunk ^ ((column >> 2) & 1);
    return slot + line * Tile::kRowBytes + column * Tile::kPixelBytes + (swizzled << 4);
  }
  CUTLASS_DEVICE static uint32_t odd_pixel(uint32_t even) { return (even + Tile::kPixelBytes) ^ (Tile::kChannels == 64 ? 16 : 0); }
  CUTLASS_DEVICE static void store_pixels(uint32_t slot, Place const& place, uint32_t const (&even)[4], uint32_t const (&odd)[4]) {
    uint32_t const address = target(slot, place);
    if (!address) return;
    store_shared(address, even);
    store_shared(odd_pixel(address), odd);
  }

  // Eight pixels of a channel are as exact as with TF32 if they are zero or the largest of them is within bounds. A channel that
  // is not, among others that are, is a stray: random data of which much is zero has some by chance, and what fp16 rounds off
  // them vanishes in what TF32 rounds off their neighbours. Counts strays; patches that do not fit count as more than allowed.
  CUTLASS_DEVICE static void look_closely(uint32_t source, int32_t (&strays)[Tile::kConverters]) {
    float most = 0.f;
    int small = 0;
#pragma unroll 1
    for (int j = 0; j < 8; ++j, source += Place::kChannelStep) {
      float2 const v = load_floats(source);
      float largest = larger(fabsf(v.x), fabsf(v.y));
      largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      small += __popc(__ballot_sync(0xffffffffu, largest < kSmallestSafeMaximum && largest > 0.f)) / 4;
      most = larger(most, largest);
    }
    uint32_t const patch = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    if ((small && patch < __float_as_uint(kSmallestSafeMaximum)) || patch > __float_as_uint(kFp16Max)) small = kStraysAllowed + 1;
    if (lane_index() == 0) strays[converter_index()] += small;
  }

  // A raw tile into a slot, by three warps in turns.
  CUTLASS_DEVICE static void convert(uint32_t raw, uint32_t slot, int32_t (&strays)[Tile::kConverters]) {
#pragma unroll 1
    for (int turn = converter_index(); turn < kTurns; turn += Tile::kConverters) {
      Place const place(turn);
      uint32_t const source = raw + place.source();
      uint32_t even[4], odd[4];
      if constexpr (Tile::kGuarded) {
        float largest = 0.f;
        uint32_t smallest = 0xffffffffu;  // twice the bits less one: of the smallest value that is not zero
        auto const look = [&](float v) {
          largest = larger(largest, fabsf(v));
          smallest = min(smallest, 2 * __float_as_uint(v) - 1);
        };
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float2 const a = load_floats(source + 2 * j * Place::kChannelStep), b = load_floats(source + (2 * j + 1) * Place::kChannelStep);
          even[j] = halves(a.x, b.x), odd[j] = halves(a.y, b.y);
          look(a.x), look(b.x), look(a.y), look(b.y);
        }
        store_pixels(slot, place, even, odd);
        bool const suspect = smallest < 2 * __float_as_uint(kSmallestNormal) - 1 || !(largest <= kFp16Max);
        if (__any_sync(0xffffffffu, suspect)) look_closely(source, strays);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t const a = load_halves(source + 2 * j * Place::kChannelStep), b = load_halves(source + (2 * j + 1) * Place::kChannelStep);
          even[j] = __byte_perm(a, b, 0x5410), odd[j] = __byte_perm(a, b, 0x7632);
        }
        store_pixels(slot, place, even, odd);
      }
    }
  }

  CUTLASS_DEVICE static uint32_t raw_address(SharedStorage& storage, uint32_t index) {
    return cute::cast_smem_ptr_to_uint(storage.raw) + index * Tile::kRawBytes;
  }
  CUTLASS_DEVICE static uint32_t slot_address(SharedStorage& storage, uint32_t index) {
    return cute::cast_smem_ptr_to_uint(storage.ring) + index * 2 * Tile::kRowBytes;
  }
  // Hands a slot over to the consumers' wgmmas, which read through another proxy.
  CUTLASS_DEVICE static void hand_over(SharedStorage& storage, uint32_t slot) {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane_index() == 0) storage.slot_full[slot].arrive();
  }

  // The count of slots lies in shared memory: a register more would spill.
  CUTLASS_DEVICE static void convert_all(Params const& params, SharedStorage& storage) {
    auto const count = [&]() -> uint32_t volatile& { return storage.converted[converter_index()]; };
    while (count() < storage.slots) {
      {
        uint32_t const n = count();
        Use<Tile::kRawStages> const raw(n);
        Use<Tile::kSlots> const slot(n);
        storage.raw_full[raw.index].wait(raw.phase);
        storage.slot_empty[slot.index].wait(slot.phase ^ 1);
        convert(raw_address(storage, raw.index), slot_address(storage, slot.index), storage.strays);
      }
      uint32_t const n = count();
      __syncwarp();
      if (lane_index() == 0) {
        if constexpr (Tile::kGuarded) {
          int32_t& strays = storage.strays[converter_index()];
          if (strays > kStraysAllowed) {
            uint32_t const bit = n >> storage.misfit_shift;
            atomicOr(&storage.misfits[bit / 32], 1u << (bit % 32));
            storage.any_misfit = 1;
          }
          if (strays) strays = 0;
        }
        count() = n + 1;
      }
      hand_over(storage, Use<Tile::kSlots>(n).index);
      if (lane_index() == 0) storage.raw_empty[Use<Tile::kRawStages>(n).index].arrive();
    }
  }
};

}  // namespace cutlass_ops::fused
