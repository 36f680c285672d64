// Convolution, chain and 2 x 2 pool in one kernel: fp32 NCHW in, fp32 NCHW out, nothing else in device memory.
//
// D^T = W x X: M = output channels, N = pixels. Each of two consumer warpgroups keeps the weights of its 64 output channels
// in registers (R * S taps x 64 input channels), the A operand of an RS wgmma. Pixels lie in shared memory as fp16, one
// 128-byte row of 64 channels a pixel, 128B-swizzled, in a ring of input rows: a filter tap is a shifted start address of
// the B descriptor, so every pixel is read from device memory once. The accumulator layout puts each 2 x 2 window of
// conv outputs into one thread.
//
//   warp 0       TMA: raw fp32 tiles, 64 channels x 2 rows x 68 columns (zero outside the image and beyond C)
//   warps 1..3   converters: raw tile -> a ring slot of 2 rows of fp16 pixels; they also find values that fp16 cannot hold
//   warps 4..11  consumers: a step is 2 conv rows x 64 columns x 64 channels a warpgroup, then chain, pool, store
//
// CTAs come in teams of strips x channel blocks that walk the same rows side by side: output rows of an odd width share
// sectors between strips, which then merge in L2 (DRAM bytes at the minimum: docs/performance.md).
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_ops/visitor_apply.hpp"

namespace cutlass_ops {

struct AveragePool {
  static constexpr bool kMean = true;  // pool_scale is one over the window's size
  CUTLASS_DEVICE static float pool(cutlass::Array<float, 4> const& v, float scale) { return ((v[0] + v[1]) + (v[2] + v[3])) * scale; }
};
struct MaxPool {  // NaN wins, as in PyTorch
  static constexpr bool kMean = false;
  CUTLASS_DEVICE static float pool(cutlass::Array<float, 4> const& v, float) {
    cutlass::maximum_with_nan_propagation<float> larger;
    return larger(larger(v[0], v[1]), larger(v[2], v[3]));
  }
};

// Shifted: for a padding_w that is no multiple of 4. TMA reads from 16-byte aligned addresses only (anything else is an
// illegal instruction), so the tile starts up to 3 columns early and is wider; the kernel without costs less.
template <class Chain_, class Pool_, int R, int S, bool Shifted>
struct FusedConvPool {
  using Chain = Chain_;
  using Pool = Pool_;
  static_assert(R == 3 && S == 3, "a step reads two ring slots of two rows, and the weights fill the registers");

  static constexpr int kTaps = R * S, kChannels = 64, kKSteps = kChannels / 16;  // of the input
  // 64 + S - 1 columns needed, from an aligned one on; 2 * 68 or 2 * 76 floats between channels are free of bank conflicts.
  static constexpr int kStrip = 64, kBoxColumns = Shifted ? 76 : 68, kBoxPixels = 2 * kBoxColumns, kRingColumns = 72;
  static constexpr int kOutputChannels = 128;  // of a CTA: 64 a consumer warpgroup
  static constexpr int kConverters = 3, kSlots = 4, kRawStages = 2;  // a third raw stage gained nothing
  static constexpr int kRawBytes = kChannels * kBoxPixels * 4;
  static constexpr int kPixelBytes = kChannels * 2, kRowBytes = kRingColumns * kPixelBytes;  // a multiple of the swizzle's 1024 bytes
  static constexpr int kStagingPitch = 36;  // 16 channels x 32 pixels a warp; this pitch is free of bank conflicts
  static constexpr int kThreads = 384, kConsumerWarps = 8;
  // For the layout table: a step's conv outputs x output channels x input channels, its pooled outputs.
  static constexpr int kStages = kSlots, kTile[3] = {2 * kStrip, kOutputChannels, kChannels}, kEpilogueTile[2] = {kStrip / 2, kOutputChannels};
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // with 232 ptxas serialises the wgmmas (C7512)
  static constexpr float kFp16Max = 65504.f, kSmallestSafeMaximum = 0x1p-11f;  // as in kernels/convert.cu

  using Mma = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K>;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Barrier = cutlass::arch::ClusterBarrier;

  struct SharedStorage {
    alignas(1024) uint8_t ring[kSlots][2][kRowBytes];
    alignas(128) uint8_t raw[kRawStages][kRawBytes];
    alignas(16) float staging[kConsumerWarps][16][kStagingPitch];
    Full raw_full[kRawStages];
    Barrier raw_empty[kRawStages], slot_full[kSlots], slot_empty[kSlots];
    int32_t misfit[kConverters];  // in shared memory, since a register more would spill
  };
  static constexpr int SharedStorageSize = sizeof(SharedStorage) + 1024;  // dynamic shared memory is aligned by hand

  struct Params {
    cute::TmaDescriptor input;  // tiled (W, H, C, N) fp32, box kBoxColumns x 2 x 64 x 1
    typename Chain::Params chain;
    uint4 const* weights;  // kernels/pack.cu's fragments
    float const* scales;   // and what its power-of-two scaling of each output channel is undone with
    float* output;
    int32_t* flag;  // set to 1 where a value does not fit fp16
    float pool_scale;
    int32_t n, k, out_h, out_w;  // of the pooled output
    int32_t padding_h, padding_w;
    int32_t shift;  // columns that a tile starts early: -padding_w modulo 4
    int32_t strips, channel_blocks;
  };

  // The batch's n * out_h pooled rows from `next` to `last`, in segments that stay within an image.
  struct Rows {
    int next, last;
    struct Segment {
      int image, row, count;
    };
    CUTLASS_DEVICE bool valid() const { return next < last; }
    CUTLASS_DEVICE Segment advance(Params const& params) {
      int const image = next / params.out_h, row = next - image * params.out_h, count = min(params.out_h - row, last - next);
      next += count;
      return {image, row, count};
    }
  };

  // Stage and phase of a ring's n-th use. A power of two, so that producers keep one counter for both rings.
  template <int Stages>
  struct Use {
    static_assert((Stages & (Stages - 1)) == 0);
    uint32_t index, phase;
    CUTLASS_DEVICE explicit Use(uint32_t n) : index(n % Stages), phase(n / Stages % 2) {}
  };

  // A segment of count steps reads count + 1 slots, the first of which starts at input row 2 * row - padding.
  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& storage, int first, int last, int strip) {
    uint32_t n = 0;
    for (Rows rows{first, last}; rows.valid();) {
      auto const segment = rows.advance(params);
      for (int i = 0; i <= segment.count; ++i, ++n) {
        Use<kRawStages> const raw(n);
        storage.raw_empty[raw.index].wait(raw.phase ^ 1);
        storage.raw_full[raw.index].arrive_and_expect_tx(kRawBytes);
        cute::SM90_TMA_LOAD_4D::copy(&params.input, reinterpret_cast<uint64_t*>(&storage.raw_full[raw.index]),
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), storage.raw[raw.index],
                                     strip * kStrip - params.padding_w - (Shifted ? params.shift : 0), 2 * (segment.row + i) - params.padding_h, 0, segment.image);
      }
    }
  }

  // Volatile keeps the compiler from hoisting loads beyond what the converters' 24 registers hold.
  CUTLASS_DEVICE static float2 load_shared(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
  }
  CUTLASS_DEVICE static void store_shared(uint32_t address, uint32_t const (&v)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
  }

  // NaN wins, so that it counts as a value that does not fit: its bits are above those of every number.
  CUTLASS_DEVICE static float larger(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }

  // Eight pixels x 64 channels a warp at a time: lane = (16-byte chunk, pixel pair). K position 8 * c + j of a pixel row holds
  // input channel c + 8 * j, which makes the reads conflict-free; the packed weights have the same order.
  // Sets `misfit` (in shared memory) where a patch has a value that fp16 cannot hold.
  CUTLASS_DEVICE static void convert(uint32_t raw, uint32_t slot, int first, int32_t& misfit) {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // volatile: addresses are computed anew instead of kept, and spilled
    int const chunk = lane >> 2;
    int pixel = first * 8 + (lane & 3) * 2;
    uint32_t source = raw + (chunk * kBoxPixels + pixel) * 4;
#pragma unroll 1
    for (; pixel < kBoxPixels; pixel += kConverters * 8, source += kConverters * 32) {
      uint32_t even[4], odd[4];
      float magnitude = 0.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 const a = load_shared(source + 2 * j * (8 * kBoxPixels * 4)), b = load_shared(source + (2 * j + 1) * (8 * kBoxPixels * 4));
        __half2 const low = __floats2half2_rn(a.x, b.x), high = __floats2half2_rn(a.y, b.y);
        even[j] = reinterpret_cast<uint32_t const&>(low);
        odd[j] = reinterpret_cast<uint32_t const&>(high);
        magnitude = larger(larger(magnitude, larger(fabsf(a.x), fabsf(b.x))), larger(fabsf(a.y), fabsf(b.y)));
      }
      int const line = pixel >= kBoxColumns, column = pixel - (line ? kBoxColumns : 0);  // column is even
      uint32_t const target = slot + line * kRowBytes + column * kPixelBytes + ((chunk ^ (column & 7)) << 4);
      if (!Shifted || column < kRingColumns) {
        store_shared(target, even);
        store_shared((target + kPixelBytes) ^ 16, odd);
      }
      // Non-negative floats order as their bits do. Zero less one is the largest word: a patch of zeros fits.
      uint32_t const patch = __reduce_max_sync(0xffffffffu, __float_as_uint(magnitude));
      if (patch - 1 < __float_as_uint(kSmallestSafeMaximum) - 1 || patch > __float_as_uint(kFp16Max)) misfit = 1;
    }
  }

  CUTLASS_DEVICE static void convert_all(Params const& params, SharedStorage& storage, int first, int last, int converter) {
    uint32_t const raw_base = cute::cast_smem_ptr_to_uint(storage.raw), ring_base = cute::cast_smem_ptr_to_uint(storage.ring);
    uint32_t const segments = (last - 1) / params.out_h - first / params.out_h + 1, slots = last - first + segments;
#pragma unroll 1
    for (uint32_t n = 0; n < slots; ++n) {
      Use<kRawStages> const raw(n);
      Use<kSlots> const slot(n);
      storage.raw_full[raw.index].wait(raw.phase);
      storage.slot_empty[slot.index].wait(slot.phase ^ 1);
      convert(raw_base + raw.index * kRawBytes, ring_base + slot.index * 2 * kRowBytes, converter, storage.misfit[converter]);
      cutlass::arch::fence_view_async_shared();  // generic writes -> wgmma reads
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        storage.slot_full[slot.index].arrive();
        storage.raw_empty[raw.index].arrive();
      }
    }
    cutlass::arch::wait_on_dependent_grids();  // the packing kernel clears the flag
    if (threadIdx.x % 32 == 0 && storage.misfit[converter]) *params.flag = 1;
  }

  template <size_t... I>
  CUTLASS_DEVICE static void mma(float (&d)[32], uint32_t const (&a)[4], uint64_t b, cute::GMMA::ScaleOut scale, std::index_sequence<I...>) {
    Mma::fma(a[0], a[1], a[2], a[3], b, d[I]..., scale);
  }

  // All products of a step: conv row p reads ring rows p + r; rows of the older slot come first.
  CUTLASS_DEVICE static void multiply(float (&upper)[32], float (&lower)[32], uint32_t const (&weights)[kTaps * kKSteps][4],
                                      uint32_t older, uint32_t newer) {
    constexpr int kOrder[6][2] = {{0, 0}, {0, 1}, {1, 0}, {0, 2}, {1, 1}, {1, 2}};  // (p, r)
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      int const p = kOrder[i][0], r = kOrder[i][1], line = p + r;
#pragma unroll
      for (int s = 0; s < S; ++s)
#pragma unroll
        for (int k = 0; k < kKSteps; ++k) {
          cute::GmmaDescriptor b;
          b.reg32_[0] = (line < 2 ? older : newer) + ((line & 1) * kRowBytes + s * kPixelBytes + k * 32) / 16;
          b.reg32_[1] = 0x40000000u | (1024 >> 4);  // 128-byte swizzle, 1024 bytes between groups of 8 pixels, base offset 0
          auto const scale = r == 0 && s == 0 && k == 0 ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
          mma(p ? lower : upper, weights[(r * S + s) * kKSteps + k], b, scale, std::make_index_sequence<32>{});
        }
    }
  }

  // Keeps a value in a register instead of computing it again.
  CUTLASS_DEVICE static void keep(int& value) { asm volatile("" : "+r"(value)); }

  CUTLASS_DEVICE static void consume(Params const& params, SharedStorage& storage, int first, int last, int strip, int block) {
    int const warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, group = lane >> 2, quad = lane & 3;
    int const channel0 = block * kOutputChannels + warp * 16;  // this thread: channel0 + group and + 8
    cutlass::arch::wait_on_dependent_grids();                  // the packing kernel's weights
    uint32_t weights[kTaps * kKSteps][4];
    uint4 const* fragments = params.weights + (block * kConsumerWarps + warp) * (kTaps * kKSteps) * 32 + lane;
#pragma unroll
    for (int i = 0; i < kTaps * kKSteps; ++i) {
      uint4 const v = fragments[i * 32];
      weights[i][0] = v.x, weights[i][1] = v.y, weights[i][2] = v.z, weights[i][3] = v.w;
    }
    auto const load_chain = [&](int channel) {
      return Apply<Chain>::load(params.chain, channel, params.k, params.scales[channel]);
    };
    typename Apply<Chain>::State const chain[2] = {load_chain(channel0 + group), load_chain(channel0 + group + 8)};
    auto& staging = storage.staging[warp];
    // Descriptors address shared memory in units of 16 bytes; bit 16 is the (unused) leading byte offset of 1.
    uint32_t const ring = ((cute::cast_smem_ptr_to_uint(storage.ring) >> 4) + (Shifted ? params.shift * (kPixelBytes / 16) : 0)) | (1u << 16);
    // Loading these again in every step costs 3 %: constant loads wait in front of the stores.
    int const column = strip * (kStrip / 2) + lane;  // pooled
    int stored_channels = column < params.out_w ? min(16, params.k - channel0) : 0, plane = params.out_h * params.out_w, pitch = params.out_w;
    keep(stored_channels), keep(plane), keep(pitch);

    float upper[32], lower[32];
    uint32_t n = 0;
    for (Rows rows{first, last}; rows.valid();) {
      auto const segment = rows.advance(params);
      float* output = params.output + ((int64_t(segment.image) * params.k + channel0) * params.out_h + segment.row) * params.out_w + column;
      storage.slot_full[Use<kSlots>(n).index].wait(Use<kSlots>(n).phase);
#pragma unroll 1
      for (int left = segment.count; left > 0; --left, output += pitch) {
        Use<kSlots> const older(n), newer(++n);
        storage.slot_full[newer.index].wait(newer.phase);
        cute::warpgroup_arrive();
        multiply(upper, lower, weights, ring + older.index * (2 * kRowBytes / 16), ring + newer.index * (2 * kRowBytes / 16));
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          cute::warpgroup_fence_operand(upper[j]);
          cute::warpgroup_fence_operand(lower[j]);
        }
        __syncwarp();
        if (lane == 0) storage.slot_empty[older.index].arrive();

        // Accumulator 4 * b + 2 * half + j of a row is channel group + 8 * half, conv column 8 * b + 2 * quad + j.
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            int const j = 4 * b + 2 * half;
            cutlass::Array<float, 4> window;
            window[0] = upper[j], window[1] = upper[j + 1], window[2] = lower[j], window[3] = lower[j + 1];
            staging[group + 8 * half][b * 4 + quad] = apply_and_pool<Chain, Pool>(chain[half], window, params.pool_scale);
          }
        __syncwarp();
        if (stored_channels == 16) {
#pragma unroll
          for (int c = 0; c < 16; ++c) output[int64_t(c) * plane] = staging[c][lane];
        } else {
#pragma unroll 1
          for (int c = 0; c < stored_channels; ++c) output[int64_t(c) * plane] = staging[c][lane];
        }
        __syncwarp();
      }
      if (lane == 0) storage.slot_empty[Use<kSlots>(n).index].arrive();
      ++n;
    }
  }

  CUTLASS_DEVICE void operator()(Params const& params, char* smem) const {
    auto& storage = *reinterpret_cast<SharedStorage*>(smem + (-cute::cast_smem_ptr_to_uint(smem) & 1023u));
    int const team = params.strips * params.channel_blocks, teams = gridDim.x / team;
    int const me = blockIdx.x / team, member = blockIdx.x % team, strip = member % params.strips, block = member / params.strips;
    int64_t const total = int64_t(params.n) * params.out_h;
    int const first = int(total * me / teams), last = me < teams ? int(total * (me + 1) / teams) : first;
    int const warp = cutlass::canonical_warp_idx_sync();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kRawStages; ++i) storage.raw_full[i].init(1), storage.raw_empty[i].init(kConverters);
      for (int i = 0; i < kSlots; ++i) storage.slot_full[i].init(kConverters), storage.slot_empty[i].init(kConsumerWarps);
      for (int& misfit : storage.misfit) misfit = 0;
      cutlass::arch::fence_barrier_init();
      cutlass::arch::fence_view_async_shared();
      cute::prefetch_tma_descriptor(&params.input);
    }
    __syncthreads();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (first >= last) return;  // no barrier follows
      if (warp == 0) {
        if (cute::elect_one_sync()) load(params, storage, first, last, strip);
      } else {
        convert_all(params, storage, first, last, warp - 1);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      if (first >= last) return;
      consume(params, storage, first, last, strip, block);
    }
  }
};

}  // namespace cutlass_ops
