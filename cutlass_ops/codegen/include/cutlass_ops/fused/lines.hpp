// Whole rows of results without a pool leave in whole 128-byte lines.
//
// Rows that follow each other in a plane are one stream, and a row's end is a line's as good as never. A line that is written in two
// pieces costs L2 twice and DRAM more. So what a row leaves of its last line waits in the warp's tile until the next row completes it: the
// tile of a channel is a ring of a row and a line. Rows of more than one strip stand alone, and leave as far as they go.
#pragma once

#include "cutlass_ops/fused/tile.hpp"

namespace cutlass_ops::fused {

// A row of a warp's 16 channels.
template <class Tile>
struct Lines {
  using Element = typename Tile::Element;
  using Pair = typename Tile::Pair;
  static constexpr int kLine = Tile::kLine, kRing = Tile::kLineRing, kPiece = 16 / int(sizeof(Element));

  Element* output;  // of the first channel
  int plane;        // elements from channel to channel
  int channels, width;
  int at;            // the row's place in the ring of a plane that begins at a line
  bool first, last;  // of a segment: what lies before or after in the line is another CTA's

  template <class Params, class Place>
  CUTLASS_DEVICE Lines(Params const& params, Place const& place, Segment const& step, bool first_, bool last_) {
    plane = params.out_h * params.out_w;
    uint32_t const offset = step.step * params.out_w + place.column;
    output = static_cast<Element*>(params.output) + int64_t(step.image * params.k + place.channel0) * plane + offset;
    channels = min(16, params.k - place.channel0), width = min(Tile::kStrip, params.out_w - place.column);
    at = int(offset % kRing);
    // Rows of an image that is wider than a strip do not follow each other. Rows of whole lines need no neighbours.
    bool const alone = params.out_w > Tile::kStrip, whole = ((phase(0) | plane | width) & (kLine - 1)) == 0;
    first = !whole && (first_ || alone), last = !whole && (last_ || alone);
  }

  CUTLASS_DEVICE static int wrapped(int place) { return place >= kRing ? place - kRing : place; }
  // Elements from channel to channel in the tile: free of bank conflicts for what accumulators hold, 4 groups of lanes x 8 words at a
  // time (of 16 bits: 8 x 4), given that channels are `plane` apart in the stream as well.
  CUTLASS_DEVICE int pitch() const { return kRing + ((8 - plane) & (sizeof(Element) == 4 ? 12 : 8)); }
  // Where a channel's row begins in its line, and the place of that line. Phases below that of `at` are of the line after.
  CUTLASS_DEVICE int phase(int channel) const {
    return int((uint32_t(reinterpret_cast<uintptr_t>(output) / sizeof(Element)) + uint32_t(channel) * plane) & (kLine - 1));
  }
  CUTLASS_DEVICE int line(int phase) const { return wrapped((at & -kLine) + (phase < (at & (kLine - 1)) ? kLine : 0)); }

  CUTLASS_DEVICE uintptr_t bytes_of_plane() const { return uintptr_t(uint32_t(plane)) * sizeof(Element); }

  // In assembly: the compiler loads under the condition of the store, one after the other, behind branches.
  CUTLASS_DEVICE static void load(uint32_t (&v)[4], uint32_t address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address));
  }
  CUTLASS_DEVICE static void store_if(bool condition, uintptr_t address, uint32_t const (&v)[4]) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"(int(condition)), "l"(address),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
  }

  // The lines that the row completes, of Count channels from From on; where a segment begins or ends as far as it goes.
  template <int From, int Count>
  CUTLASS_DEVICE void store(uint8_t const* staging) const {
    int const lane = lane_index();
    constexpr int kSize = int(sizeof(Element));
    if (channels == 16 && !first && !last) {
      uint32_t const piece = lane * 16;  // bytes
      int const least = at & (kLine - 1), begin = at - least + lane * kPiece;
      uint32_t source = cute::cast_smem_ptr_to_uint(staging) + From * pitch() * kSize;
      uint32_t const place = wrapped(begin) * kSize, after = wrapped(begin + kLine) * kSize;
      uintptr_t row = reinterpret_cast<uintptr_t>(output) + From * bytes_of_plane();
      // Loads in flight, and turns unrolled: straight code is slower, and spills for some chains (docs/performance.md).
      constexpr int kAhead = kSize == 4 ? 2 : 4, kUnrolled = kSize == 4 ? 2 : 1;
#pragma unroll kUnrolled
      for (int channel = From; channel < From + Count; channel += kAhead) {
        uint32_t values[kAhead][4];
#pragma unroll
        for (int i = 0; i < kAhead; ++i, source += pitch() * kSize) load(values[i], source + (phase(channel + i) < least ? after : place));
#pragma unroll
        for (int i = 0; i < kAhead; ++i, row += bytes_of_plane())
          store_if(piece < uint32_t((phase(channel + i) + width) & -kLine) * kSize, (row & ~uintptr_t(127)) + piece, values[i]);
      }
    } else if (channels == 16 && first && last) {
      store_alone<From, Count>(staging);
    } else {
#pragma unroll 1
      for (int channel = From; channel < min(channels, From + Count); ++channel) {
        auto const* tile = reinterpret_cast<Element const*>(staging) + channel * pitch();
        int const start = phase(channel), begin = first ? start : 0, end = last ? start + width : (start + width) & -kLine;
        Element* target = output + int64_t(channel) * plane - start;
#pragma unroll 1
        for (int i = 2 * lane; i < end; i += 64)
          if (i >= begin) *reinterpret_cast<Pair*>(target + i) = *reinterpret_cast<Pair const*>(tile + wrapped(line(start) + i));
      }
    }
  }

  // A row without neighbours, two elements a lane: where lines begin differs from channel to channel, and two are what all share.
  template <int From, int Count>
  CUTLASS_DEVICE void store_alone(uint8_t const* staging) const {
    constexpr int kSize = int(sizeof(Element));
    int const lane = lane_index();
    uint32_t source = cute::cast_smem_ptr_to_uint(staging) + From * pitch() * kSize;
    uintptr_t row = reinterpret_cast<uintptr_t>(output + 2 * lane) + From * bytes_of_plane();
#pragma unroll
    for (int channel = From; channel < From + Count; ++channel, source += pitch() * kSize, row += bytes_of_plane()) {
      int const start = phase(channel), place = wrapped(line(start) + start) + 2 * lane;
#pragma unroll
      for (int column = 0; column < Tile::kStrip; column += 64)
        copy_if(column + 2 * lane < width, row + column * kSize, source + wrapped(place + column) * kSize);
    }
  }
  CUTLASS_DEVICE static void copy_if(bool condition, uintptr_t target, uint32_t source) {
    if constexpr (sizeof(Pair) == 8) {
      uint32_t v, w;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v), "=r"(w) : "r"(source));
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v2.b32 [%1], {%2, %3}; }" ::"r"(int(condition)), "l"(target), "r"(v),
                   "r"(w) : "memory");
    } else {
      uint32_t v;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(source));
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.b32 [%1], %2; }" ::"r"(int(condition)), "l"(target), "r"(v) : "memory");
    }
  }
};

}  // namespace cutlass_ops::fused
