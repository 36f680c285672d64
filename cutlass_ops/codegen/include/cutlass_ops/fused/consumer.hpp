// What empties the ring: wgmmas with the weights in registers, then chain, pool and store.
#pragma once

#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass_ops/fused/atom.hpp"
#include "cutlass_ops/fused/lines.hpp"
#include "cutlass_ops/fused/storer.hpp"
#include "cutlass_ops/visitor_apply.hpp"

namespace cutlass_ops::fused {

template <class Tile, class Chain, class Params>
struct Consumer {
  using SharedStorage = typename Tile::SharedStorage;
  using Element = typename Tile::Element;
  using Pool = typename Tile::Pool;
  using Pair = typename Tile::Pair;
  using State = typename Apply<Chain>::State;
  using Weights = uint32_t[Tile::kFragments][4];

  // Issues the products of a step with its input slots from First to Last. The accumulators' parts are two rows of the convolution, of
  // N * 2 columns each, or columns from 0 and from 64 on of one row, where 32 + 32 a thread are one atom's. The first product of a
  // part overwrites it.
  template <int First, int Last, int N>
  CUTLASS_DEVICE static void multiply(float (&upper)[N], float (&lower)[N], Weights const& weights, uint32_t const (&slots)[Last - First + 1]) {
    constexpr int kSwizzle = Tile::kPixelBytes == 128 ? 1 : 3;  // of 128 or of 32 bytes
    constexpr bool kOneAtom = Tile::kWide && N == 32;
    constexpr auto kAll = std::make_index_sequence<N>{};
    bool begun[2] = {};
    cute::warpgroup_arrive();
#pragma unroll
    for (int line = First * Tile::kRows; line < (Last + 1) * Tile::kRows; ++line) {
      if (First < Last && line == (First + 1) * Tile::kRows) cute::warpgroup_commit_batch();
#pragma unroll
      for (int p = 0; p < (kOneAtom ? 1 : 2); ++p) {
        int const r = Tile::kWide ? line : line - p;
        if (r < 0 || r >= Tile::R) continue;
#pragma unroll
        for (int s = 0; s < Tile::S; ++s)
#pragma unroll
          for (int k = 0; k < Tile::kKSteps; ++k) {
            int const pixel = line % Tile::kRows * Tile::kRingColumns + s + (Tile::kWide ? 64 * p : 0);
            cute::GmmaDescriptor b;
            b.reg32_[0] = slots[line / Tile::kRows - First] + (pixel * Tile::kPixelBytes + k * 32) / 16;
            b.reg32_[1] = uint32_t(kSwizzle) << 30 | (8 * Tile::kPixelBytes >> 4);  // bytes between groups of 8 pixels; base offset 0
            auto const scale = begun[p] ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero;
            begun[p] = true;
            auto const& a = weights[(r * Tile::S + s) * Tile::kKSteps + k];
            if constexpr (kOneAtom) {
              mma<Atom<typename Tile::Operand, 4 * N>>(upper, lower, a, b, scale, kAll);
            } else {
              mma<Atom<typename Tile::Operand, 2 * N>>(p ? lower : upper, a, b, scale, kAll);
            }
          }
      }
    }
    cute::warpgroup_commit_batch();
  }
  template <int N>
  CUTLASS_DEVICE static void wait_for_products(float (&upper)[N], float (&lower)[N]) {
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int j = 0; j < N; ++j) {
      cute::warpgroup_fence_operand(upper[j]);
      cute::warpgroup_fence_operand(lower[j]);
    }
  }

  // A warp: 16 channels from channel0 on, of which a thread has two, and 64 columns of the convolution (128 of a wide tile).
  struct Place {
    int warp, lane, group, quad;
    int channel0, column;  // the warp's first ones, in the result
    CUTLASS_DEVICE Place(int strip, int block) {
      warp = threadIdx.x / 32 - Tile::kProducerWarps, lane = threadIdx.x % 32, group = lane >> 2, quad = lane & 3;
      int const column_group = Tile::kColumnGroups == 2 ? warp / 4 : 0, channels = Tile::kColumnGroups == 2 ? warp % 4 : warp;
      channel0 = block * Tile::kOutputChannels + channels * 16;
      column = (strip * Tile::kStrip + column_group * 64) / (Pool::kWindow ? 2 : 1);
    }
  };
  CUTLASS_DEVICE static State load_chain(Params const& params, int channel, float scale) {
    return Apply<Chain>::load(params.chain, channel, params.k, scale);
  }

  // Loop-invariant values of a warp's stores. Loading them again in every step costs 3 %: constant loads wait in front of stores.
  struct Store {
    int columns, channels, pitch, plane;
    CUTLASS_DEVICE static void keep(int& value) { asm volatile("" : "+r"(value)); }
    CUTLASS_DEVICE Store(Params const& params, Place const& place) {
      columns = params.out_w - place.column, channels = min(16, params.k - place.channel0);
      pitch = params.out_w, plane = params.out_h * params.out_w;
      if (Tile::kChannelsLast) pitch = params.k;
      if (Pool::kWindow && !Tile::kChannelsLast) keep(columns), keep(channels), keep(pitch), keep(plane);
    }
    CUTLASS_DEVICE Element* start(Params const& params, Place const& place, Segment const& segment) const {
      int const row = segment.step * (Pool::kWindow ? 1 : Tile::kRows);
      auto* output = static_cast<Element*>(params.output);
      if constexpr (Tile::kChannelsLast) {
        return output + ((int64_t(segment.image) * params.out_h + row) * params.out_w + place.column) * params.k + place.channel0;
      } else {
        return output + int64_t(segment.image * params.k + place.channel0) * plane + uint32_t(row * pitch + place.column);
      }
    }
  };

  // Chain and pool of 32 columns from half * 32 on, into the warp's staging tile.
  template <int N>
  CUTLASS_DEVICE static void stage(Params const& params, Place const& place, uint8_t* staging, State const (&chain)[2], float const (&upper)[N],
                                   float const (&lower)[N], int offset, int half) {
    // Accumulator 4 * b + 2 * i + j of a row is channel group + 8 * i, conv column 8 * b + 2 * quad + j.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const channel = place.group + 8 * i;
      if constexpr (Pool::kWindow) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          int const j = offset + 4 * b + 2 * i, pixel = half * 16 + b * 4 + place.quad;
          cutlass::Array<float, 4> window;
          window[0] = upper[j], window[1] = upper[j + 1], window[2] = lower[j], window[3] = lower[j + 1];
          float const value = apply_and_pool<Chain, Pool>(chain[i], window, params.pool_scale);
          if constexpr (Tile::kChannelsLast) {
            reinterpret_cast<Element*>(staging)[pixel * Tile::kStagingPixel + channel] = Element(value);
          } else {
            reinterpret_cast<float*>(staging)[channel * Tile::kStagingPitch + pixel] = value;
          }
        }
      } else {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            int const j = offset + 4 * b + 2 * i, pixel = half * 32 + b * 8 + 2 * place.quad;
            cutlass::Array<float, 2> accumulators;
            accumulators[0] = row ? lower[j] : upper[j], accumulators[1] = row ? lower[j + 1] : upper[j + 1];
            auto const values = Apply<Chain>::eval(chain[i], accumulators);
            Pair const pair{Element(values[0]), Element(values[1])};
            if constexpr (Tile::kChannelsLast) {
              auto* target = reinterpret_cast<Element*>(staging) + (row * 64 + pixel) * Tile::kStagingPixel + channel;
              target[0] = pair.first, target[Tile::kStagingPixel] = pair.second;
            } else {
              *reinterpret_cast<Pair*>(reinterpret_cast<Element*>(staging) + (2 * channel + row) * Tile::kStagingRow + pixel) = pair;
            }
          }
        }
      }
    }
  }

  // The compiler makes two stores of it where addresses are chosen.
  CUTLASS_DEVICE static void store_shared(uint32_t address, Pair const& pair) {
    if constexpr (sizeof(Pair) == 8) {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(float(pair.first)), "f"(float(pair.second)) : "memory");
    } else {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(reinterpret_cast<uint32_t const&>(pair)) : "memory");
    }
  }

  // Chain of a row's accumulators, into the warp's tile: of columns from `first` on, and of those 64 further; of 8 channels from
  // 8 * Begin to 8 * End.
  template <int Begin, int End, int N>
  CUTLASS_DEVICE static void stage_lines(Lines<Tile> const& lines, State const (&chain)[2], float const (&upper)[N], float const (&lower)[N],
                                         uint8_t* staging, int first) {
    int const lane = lane_index(), group = lane >> 2, quad = lane & 3;
#pragma unroll
    for (int i = Begin; i < End; ++i) {
      int const channel = group + 8 * i, phase = lines.phase(channel), start = lines.wrapped(lines.line(phase) + phase) + first + 2 * quad;
      uint32_t const target = cute::cast_smem_ptr_to_uint(staging) + (channel * lines.pitch() + start) * int(sizeof(Element));
#pragma unroll
      for (int p = 0; p < 2; ++p)
#pragma unroll
        for (int b = 0; b < N / 4; ++b) {
          int const j = 4 * b + 2 * i;
          cutlass::Array<float, 2> accumulators;
          accumulators[0] = p ? lower[j] : upper[j], accumulators[1] = p ? lower[j + 1] : upper[j + 1];
          auto const values = Apply<Chain>::eval(chain[i], accumulators);
          constexpr int kSize = int(sizeof(Element));
          int const column = 64 * p + 8 * b;
          uint32_t const ring = start + column >= Tile::kLineRing ? target - Tile::kLineRing * kSize : target;
          store_shared(ring + column * kSize, Pair{Element(values[0]), Element(values[1])});
        }
    }
  }

  // A row of a wide tile. Of fp32, half of the channels are on their way while the chain of the others is computed (31: 0.548 -> 0.530 ms);
  // between loads of a half and what is staged there next lies the other half's barrier. In 16 bits it is slower.
  CUTLASS_DEVICE static void store_lines(Lines<Tile> const& lines, State const (&chain)[2], float const (&upper)[32], float const (&lower)[32],
                                         uint8_t* staging) {
    if constexpr (sizeof(Element) == 4) {
      stage_lines<0, 1>(lines, chain, upper, lower, staging, 0);
      __syncwarp();
      lines.template store<0, 8>(staging);
      stage_lines<1, 2>(lines, chain, upper, lower, staging, 0);
      __syncwarp();
      lines.template store<8, 8>(staging);
    } else {
      stage_lines<0, 2>(lines, chain, upper, lower, staging, 0);
      __syncwarp();
      lines.template store<0, 16>(staging);
      __syncwarp();
    }
  }

  // Chain of a step's accumulators, into the tiles that the store warps empty.
  CUTLASS_DEVICE static void stage_runs(SharedStorage& storage, Place const& place, State const (&chain)[2], float const (&upper)[32],
                                        float const (&lower)[32], uint32_t phase) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const tile = 4 * i + place.warp % 4;
      auto* target = reinterpret_cast<Element*>(storage.staging[tile]) + place.group * Tile::kRunPitch + place.warp / 4 * 64 + 2 * place.quad;
      Storer<Tile, Params>::wait(storage.run_free[tile], phase ^ 1);
#pragma unroll
      for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int b = 0; b < 8; ++b) {
          int const j = 4 * b + 2 * i;
          cutlass::Array<float, 2> accumulators;
          accumulators[0] = row ? lower[j] : upper[j], accumulators[1] = row ? lower[j + 1] : upper[j + 1];
          auto const values = Apply<Chain>::eval(chain[i], accumulators);
          *reinterpret_cast<Pair*>(target + row * (Tile::kRunPitch / 2) + 8 * b) = {Element(values[0]), Element(values[1])};
        }
      Storer<Tile, Params>::arrive(storage.run_full[tile]);
    }
  }

  // The warp's staging tile -> device memory, of channels_last: 16 channels of the pixels of 32 columns from Half * 32 on. rows: that are
  // left of the image (without a pool). Unroll: of a lane's 16-byte pieces. All eight of fp32's in straight code spill.
  template <int Half, int Unroll = 4>
  CUTLASS_DEVICE static void store_pixels(Params const& params, Store const& to, Place const& place, uint8_t const* staging, Element* output,
                                          int rows) {
    constexpr int kPiece = 16 / int(sizeof(Element)), kLanes = 16 / kPiece, kTurn = 32 / kLanes;  // channels of a lane; lanes of a pixel; pixels
    constexpr int kColumns = Pool::kWindow ? 16 : 32, kRow = 2 * kColumns, kTurns = Tile::kPixels / 2 / kTurn;
    auto const* tile = reinterpret_cast<Element const*>(staging);
    bool const whole = to.channels == 16 && to.pitch % kPiece == 0;
    // Of fp32, eight lanes take pixels four apart, whose 16 channels lie in different banks.
    int const own = kLanes == 2 ? place.lane / 2 : place.lane / 8 + place.lane / 4 % 2 * 4, channel = place.lane % kLanes * kPiece;
#pragma unroll Unroll
    for (int i = 0; i < kTurns; ++i) {
      int const row = i * kTurn / kColumns, column = Half * kColumns + i * kTurn % kColumns + own;
      if (column >= to.columns || (!Pool::kWindow && row >= rows)) continue;
      Element* target = output + (int64_t(row) * params.out_w + column) * to.pitch + channel;
      Element const* source = tile + (row * kRow + column) * Tile::kStagingPixel + channel;
      if (whole) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4 const*>(source);
      } else {
#pragma unroll 4  // straight code computes its comparisons ahead, for all steps, and spills
        for (int c = 0; c < min(kPiece, to.channels - channel); ++c) target[c] = source[c];
      }
    }
  }

  // All of the tile.
  template <int Unroll = 4>
  CUTLASS_DEVICE static void store(Params const& params, Store const& to, Place const& place, uint8_t const* staging, Element* output,
                                   int rows) {
    if constexpr (Tile::kChannelsLast) {
      store_pixels<0, Unroll>(params, to, place, staging, output, rows);
      store_pixels<1, Unroll>(params, to, place, staging, output, rows);
    } else if constexpr (Pool::kWindow) {
      auto const* tile = reinterpret_cast<float const*>(staging) + place.lane;
      output += place.lane;
      int const channels = place.lane < to.columns ? to.channels : 0;
      if (channels == 16) {
#pragma unroll
        for (int c = 0; c < 16; ++c) output[int64_t(c) * to.plane] = Element(tile[c * Tile::kStagingPitch]);
      } else {
#pragma unroll 1
        for (int c = 0; c < channels; ++c) output[int64_t(c) * to.plane] = Element(tile[c * Tile::kStagingPitch]);
      }
    } else {
      store_rows(to, place, reinterpret_cast<Element const*>(staging), output, rows);
    }
  }

  // Both rows of 16 channels, two columns a lane. Straight code: with a condition at every piece it took a third of the kernel's
  // time. Bulk copies of such short rows take 65 cycles each, and 16-byte stores leave ends that cost more than they gain
  // (docs/performance.md). One column a lane where rows begin at single elements.
  CUTLASS_DEVICE static void store_rows(Store const& to, Place const& place, Element const* tile, Element* output, int rows) {
    if (to.channels == 16 && rows > 1 && to.pitch % 2 == 0) {
      if (2 * place.lane >= to.columns) return;
      tile += 2 * place.lane, output += 2 * place.lane;
      auto const row = [&](Element* at, int i) { *reinterpret_cast<Pair*>(at) = *reinterpret_cast<Pair const*>(tile + i * Tile::kStagingRow); };
#pragma unroll
      for (int channel = 0; channel < 16; ++channel, output += int64_t(to.plane)) {
        row(output, 2 * channel), row(output + to.pitch, 2 * channel + 1);
        if (channel % 4 == 3) asm volatile("" ::: "memory");  // more loads ahead take registers that the products need
      }
    } else if (to.pitch % 2 == 0) {
#pragma unroll 1
      for (int i = 0; i < 2 * to.channels; ++i, tile += Tile::kStagingRow) {
        auto* row = reinterpret_cast<Pair*>(output + int64_t(i / 2) * to.plane + i % 2 * to.pitch);
        if (2 * place.lane < (i % 2 < rows ? to.columns : 0)) row[place.lane] = reinterpret_cast<Pair const*>(tile)[place.lane];
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < 2 * to.channels; ++i, tile += Tile::kStagingRow) {
        Element* row = output + int64_t(i / 2) * to.plane + i % 2 * to.pitch;
#pragma unroll
        for (int column = place.lane, end = i % 2 < rows ? to.columns : 0; column < 64; column += 32)
          if (column < end) row[column] = tile[column];
      }
    }
  }

  // Rows from a step on, of the image's result (without a pool).
  CUTLASS_DEVICE static int rows_of(Params const& params, int step) { return params.out_h - Tile::kRows * step; }

  CUTLASS_DEVICE static void load_weights(Params const& params, Place const& place, Weights& weights) {
    uint4 const* fragments = params.weights + place.channel0 / 16 * Tile::kFragments * 32 + place.lane;
#pragma unroll
    for (int i = 0; i < Tile::kFragments; ++i) {
      uint4 const v = fragments[i * 32];
      weights[i][0] = v.x, weights[i][1] = v.y, weights[i][2] = v.z, weights[i][3] = v.w;
    }
  }

  // The same for all lanes, and the compiler knows it: descriptors are then made of uniform registers.
  CUTLASS_DEVICE static int column_group() { return (cutlass::canonical_warp_idx_sync() - Tile::kProducerWarps) / 4; }

  // Of the consumers; computed anew where it is used, since registers are few.
  CUTLASS_DEVICE static int warpgroup() { return (warp_index() - Tile::kProducerWarps) / 4; }

  // Descriptors address shared memory in units of 16 bytes; bit 16 is the (unused) leading byte offset of 1.
  CUTLASS_DEVICE static uint32_t ring_base(Params const& params, SharedStorage& storage, Place const& place) {
    uint32_t const pixel = (Tile::kShifted ? params.shift : 0) + (Tile::kColumnGroups == 2 ? column_group() * 64 : 0);
    return ((cute::cast_smem_ptr_to_uint(storage.ring) >> 4) + pixel * (Tile::kPixelBytes / 16)) | (1u << 16);
  }
  static constexpr uint32_t kSlotUnits = Tile::kRows * Tile::kRowBytes / 16;

  CUTLASS_DEVICE static void consume(Params const& params, SharedStorage& storage, Place const& place, Weights const& weights) {
    State const chain[2] = {load_chain(params, place.channel0 + place.group, params.scales[place.channel0 + place.group]),
                            load_chain(params, place.channel0 + place.group + 8, params.scales[place.channel0 + place.group + 8])};
    auto* staging = storage.staging[place.warp];
    uint32_t const ring = ring_base(params, storage, place);
    Store const to(params, place);
    float upper[32], lower[32];
    uint32_t n = 0;
    [[maybe_unused]] uint32_t phase = 0;
    // Whole addresses are cheaper than the registers of a pointer that is kept, but for pooled NCHW.
    constexpr bool kKeepsPointer = Pool::kWindow && !Tile::kChannelsLast;
    typename Tile::Work work = storage.work;
    for (Segment segment; work.next(params, storage, segment);) {
      Element* output = to.start(params, place, segment);
#pragma unroll
      for (int i = 0; i < Tile::kHalo; ++i) storage.slot_full[Use<Tile::kSlots>(n + i).index].wait(Use<Tile::kSlots>(n + i).phase);
#pragma unroll 1
      for (int left = segment.count; left > 0; --left, ++n) {
        Use<Tile::kSlots> const newest(n + Tile::kHalo);
        storage.slot_full[newest.index].wait(newest.phase);
        uint32_t slots[Tile::kHalo + 1];
#pragma unroll
        for (int i = 0; i <= Tile::kHalo; ++i) slots[i] = ring + Use<Tile::kSlots>(n + i).index * kSlotUnits;
        if (Tile::kTakesTurns) storage.turn[warpgroup()].wait(phase ^ (warpgroup() == 0));
        multiply<0, Tile::kHalo>(upper, lower, weights, slots);
        if (Tile::kTakesTurns) {
          if (place.lane == 0) storage.turn[warpgroup() ^ 1].arrive();
          phase ^= 1;
        }
        // The products with the oldest slot came first.
        cute::warpgroup_wait<(Tile::kHalo > 0 ? 1 : 0)>();
        __syncwarp();
        if (place.lane == 0) storage.slot_empty[Use<Tile::kSlots>(n).index].arrive();
        wait_for_products(upper, lower);
        if constexpr (Tile::kStoreWarps) {
          stage_runs(storage, place, chain, upper, lower, phase);
          phase ^= 1;
        } else if constexpr (Tile::kWide) {
          int const step = segment.step + segment.count - left;
          uint8_t* tile = storage.staging[warp_index() - Tile::kProducerWarps];
          Lines<Tile> const lines(params, place, {segment.image, step, 1}, left == segment.count, left == 1);
          store_lines(lines, chain, upper, lower, tile);
        } else {
          stage(params, place, staging, chain, upper, lower, 0, 0);
          int const step = segment.step + segment.count - left, rows = rows_of(params, step);
          if (!kKeepsPointer) output = to.start(params, place, {segment.image, step, 1});
          if constexpr (Tile::kChannelsLast && !Pool::kWindow) {
            // Half of the pixels are on their way while the chain of the others is computed: 57 in 0.158 -> 0.149 ms; with a pool it takes 10 % more.
            // Between loads of a half and what is staged there next lies the other half's barrier.
            __syncwarp();
            store_pixels<0>(params, to, place, staging, output, rows);
            stage(params, place, staging, chain, upper, lower, 16, 1);
            __syncwarp();
            store_pixels<1>(params, to, place, staging, output, rows);
          } else {
            stage(params, place, staging, chain, upper, lower, 16, 1);
            __syncwarp();
            store(params, to, place, staging, output, rows);
            __syncwarp();
          }
        }
        if (kKeepsPointer) output += to.pitch;
      }
#pragma unroll
      for (int i = 0; i < Tile::kHalo; ++i, ++n) {
        if (place.lane == 0) storage.slot_empty[Use<Tile::kSlots>(n).index].arrive();
      }
    }
    if (Tile::kClaims && place.warp == 0 && place.lane == 0) storage.slots = n;
  }
};

}  // namespace cutlass_ops::fused
