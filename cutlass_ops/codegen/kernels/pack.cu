// Packing kernels of the fused family: filter (K, C, R, S) -> fragments of the RS wgmma's A operand.
//
// fp32 -> fp16: every output channel is scaled by a power of two that brings its largest weight to [2^13, 2^14), so that weights
// keep fp16's 11 bits down to 2^-27 of the largest one (smaller ones lose some, as TF32's do not); `scales` undoes it, exactly. fp16
// and bf16 are packed as they are.
//
// A block is one warp and packs one output channel. It is so small (32 registers, no shared memory) that a CTA of the fused kernel fits
// beside it and reads pixels meanwhile: with 128 threads and shared memory a call took 2 us more (docs/performance.md).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 32, kMaxChannels = 64, kMaxTaps = 9;
static_assert(kMaxChannels == 2 * kThreads);

struct Params {
  void const* source;
  int64_t k_stride, c_stride, r_stride, s_stride;  // in elements
  uint32_t* fragments;  // [16 output channels][tap][k step][lane 32][register 4], two input channels each
  float* scales;        // [padded K]
  uint32_t* counters;   // of the fused kernel's claims, which begin at zero
  int32_t k, c, taps, s;
  int32_t channels;  // input channels in the kernel's shared memory: 64 or 16
  int32_t members;   // counters
  int32_t chunks;    // K position 8 * chunk + j holds input channel chunk + chunks * j (converted NCHW); 0: its own number
};

template <class Source, class Operand>
__device__ void pack(Params const& params) {
  asm volatile("griddepcontrol.launch_dependents;");
  int const k = blockIdx.x, position = 2 * threadIdx.x;  // of the lane's two input channels
  auto const weights = [&](int position) -> Source const* {
    int const c = params.chunks ? position / 8 + params.chunks * (position % 8) : position;
    if (k >= params.k || c >= params.c || position >= params.channels) return nullptr;
    return static_cast<Source const*>(params.source) + k * params.k_stride + c * params.c_stride;
  };
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < params.members; i += kThreads) params.counters[i] = 0;
  }
  Source const *first = weights(position), *second = weights(position + 1);
  Source values[kMaxTaps][2];
  int64_t offset = 0;
  int column = 0;
#pragma unroll
  for (int tap = 0; tap < kMaxTaps; ++tap) {
    bool const valid = tap < params.taps;
    values[tap][0] = valid && first ? first[offset] : Source(0.f), values[tap][1] = valid && second ? second[offset] : Source(0.f);
    offset += params.s_stride;
    if (++column == params.s) column = 0, offset += params.r_stride - params.s * params.s_stride;
  }

  uint32_t bits = 0;  // of the largest finite magnitude
#pragma unroll
  for (int i = 0; i < 2 * kMaxTaps; ++i) {
    float const w = float(values[i / 2][i % 2]);
    if (isfinite(w)) bits = max(bits, __float_as_uint(fabsf(w)));
  }
  float const largest = __uint_as_float(__reduce_max_sync(0xffffffffu, bits));
  bool const scaled = sizeof(Source) == 4 && largest > 0.f;
  int const exponent = scaled ? min(13 - ilogbf(largest), 149) : 0;  // from -114 on; a scale of 2^-149 is the least there is
  if (threadIdx.x == 0) params.scales[k] = ldexpf(1.f, -exponent);
  if (position >= params.channels) return;

  // In two steps: 2^149 is no float.
  auto const power = [](int e) { return __int_as_float((127 + e) << 23); };
  float const scale = power(exponent / 2), rest = power(exponent - exponent / 2);
  auto const operand = [&](Source w) { return Operand(float(w) * scale * rest); };
  // Registers of lane (group, quad) of 16 channels: (group, k), (group + 8, k), (group, k + 8), (group + 8, k + 8) with
  // k = 2 * quad and its neighbour.
  int const row = k % 16, group = row % 8, quad = threadIdx.x % 4, high = threadIdx.x / 4 % 2, steps = params.channels / 16;
  int64_t const fragment = int64_t(k / 16) * params.taps * steps + threadIdx.x / 8;
  uint32_t* target = params.fragments + (fragment * 32 + group * 4 + quad) * 4 + high * 2 + row / 8;
#pragma unroll
  for (int tap = 0; tap < kMaxTaps; ++tap, target += steps * 128) {
    struct alignas(4) {
      Operand first, second;
    } const pair{operand(values[tap][0]), operand(values[tap][1])};
    if (tap < params.taps) *target = *reinterpret_cast<uint32_t const*>(&pair);
  }
}

}  // namespace

extern "C" __global__ void __maxnreg__(32) pack_f32_f16(const __grid_constant__ Params params) { pack<float, __half>(params); }
extern "C" __global__ void __maxnreg__(32) pack_f16_f16(const __grid_constant__ Params params) { pack<__half, __half>(params); }
extern "C" __global__ void __maxnreg__(32) pack_bf16_bf16(const __grid_constant__ Params params) {
  pack<__nv_bfloat16, __nv_bfloat16>(params);
}

// Read back by the builder: size of the parameter, threads of a block.
extern "C" __device__ __constant__ unsigned const pack_layout[] = {sizeof(Params), kThreads};
