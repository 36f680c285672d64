// Warps of their own that store what is not pooled, for the kernels of few input channels (NCHW).
//
// There the consumers have little to multiply, and storing took them longer than all else: 57 in 0.220 ms, of which 0.09 for stores.
// Consumers leave 8 channels x 2 rows x 128 columns in a tile; a store warp takes them from there in runs of whole
// rows. Two rows of an image that is no wider are one run: pieces of rows from several warps share 128-byte lines, which L2 takes
// at half the rate (docs/performance.md).
#pragma once

#include "cutlass_ops/fused/tile.hpp"

namespace cutlass_ops::fused {

template <class Tile, class Params>
struct Storer {
  using SharedStorage = typename Tile::SharedStorage;
  using Element = typename Tile::Element;
  static constexpr int kPitch = Tile::kRunPitch, kRow = kPitch / 2;

  // CUTLASS's own wait and arrive let the compiler move loads and stores of the tile to their other side. All lanes arrive, so
  // that racecheck can follow.
  CUTLASS_DEVICE static void wait(typename Tile::Barrier& barrier, uint32_t phase) {
    barrier.wait(phase);
    asm volatile("" ::: "memory");
  }

  CUTLASS_DEVICE static void arrive(typename Tile::Barrier& barrier) {
    asm volatile("" ::: "memory");
    barrier.arrive();
  }

  // By four warps, each for 16 channels: 8 from one tile, 8 from another.
  CUTLASS_DEVICE static void store_all(Params const& params, SharedStorage& storage, int strip, int block) {
    int const channels = threadIdx.x / 32 % 4, channel0 = block * Tile::kOutputChannels + 16 * channels;
    int const column = strip * Tile::kStrip, width = min(Tile::kStrip, params.out_w - column);
    int64_t const plane = int64_t(params.out_h) * params.out_w;
    bool const one_run = width == params.out_w;
    uint32_t phase = 0;
    typename Tile::Work work = storage.work;
    for (Segment segment; work.next(params, storage, segment);) {
#pragma unroll 1
      for (int step = segment.step; step < segment.step + segment.count; ++step, phase ^= 1) {
        int const rows = min(2, params.out_h - 2 * step);
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          auto const* tile = reinterpret_cast<Element const*>(storage.staging[4 * i + channels]);
          int const channel = channel0 + 8 * i, count = min(8, params.k - channel);
          auto* output = static_cast<Element*>(params.output) + (int64_t(segment.image) * params.k + channel) * plane +
                         int64_t(2 * step) * params.out_w + column;
          wait(storage.run_full[4 * i + channels], phase);
          if (params.out_w % 2) {
            store_singles(tile, output, params, plane, count, width, rows);
          } else if (one_run) {
            store<Tile::kStrip>(tile, output, plane, count, width, rows * width);
          } else {
#pragma unroll 1
            for (int row = 0; row < rows; ++row, output += params.out_w, tile += kRow)
              store<Tile::kStrip / 2>(tile, output, plane, count, width, width);
          }
          arrive(storage.run_free[4 * i + channels]);
        }
      }
    }
  }

  // Rows that begin at single elements, one a lane.
  CUTLASS_DEVICE static void store_singles(Element const* tile, Element* output, Params const& params, int64_t plane, int count, int width,
                                           int rows) {
#pragma unroll 1
    for (int row = 0; row < rows; ++row, output += params.out_w, tile += kRow)
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < width; i += 32)
#pragma unroll
        for (int c = 0; c < 8; ++c)
          if (c < count) output[c * plane + i] = tile[c * kPitch + i];
  }

  // A run of `size` elements of each channel, two a lane; Pairs: that a run has at most. In the tile a row ends after `width`
  // elements, and the next begins at kRow.
  template <int Pairs>
  CUTLASS_DEVICE static void store(Element const* tile, Element* output, int64_t plane, int count, int width, int size) {
    using Pair = typename Tile::Pair;
    constexpr int kTurns = Pairs / 32;
    int const lane = 2 * (threadIdx.x % 32);
    Element const* sources[kTurns];
    bool valid[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      int const at = lane + 64 * i;
      valid[i] = at < size, sources[i] = tile + at + (at >= width ? kRow - width : 0);
    }
    output += lane;
    auto const channel = [&](int c) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i)
        if (valid[i]) *reinterpret_cast<Pair*>(output + 64 * i) = *reinterpret_cast<Pair const*>(sources[i] + c * kPitch);
      output += plane;
    };
    if (count == 8) {
#pragma unroll
      for (int c = 0; c < 8; ++c) channel(c);
    } else {
#pragma unroll 1
      for (int c = 0; c < count; ++c) channel(c);
    }
  }
};

}  // namespace cutlass_ops::fused
