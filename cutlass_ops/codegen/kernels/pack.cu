// Packing kernels of the fused family: filter (K, C, R, S) -> fragments of the RS wgmma's A operand.
//
// fp32 -> fp16: every output channel is scaled by a power of two that brings its largest weight to [2^13, 2^14), so that weights
// keep fp16's 11 bits down to 2^-27 of the largest one (smaller ones lose some, as TF32's do not); `scales` undoes it, exactly. fp16 and bf16 are
// packed as they are. A block packs one output channel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 128, kMaxChannels = 64, kMaxTaps = 9;

struct Params {
  void const* source;
  int64_t k_stride, c_stride, r_stride, s_stride;  // in elements
  uint32_t* fragments;  // [16 output channels][tap][k step][lane 32][register 4], two input channels each
  float* scales;        // [padded K]
  int32_t k, c, taps, s;
  int32_t channels;  // input channels in the kernel's shared memory: 64 or 16
  int32_t chunks;    // K position 8 * chunk + j holds input channel chunk + chunks * j (converted NCHW); 0: its own number
};

template <class Source, class Operand>
__device__ void pack(Params const& params) {
  asm volatile("griddepcontrol.launch_dependents;");
  __shared__ float smem[kMaxChannels * kMaxTaps];
  __shared__ uint32_t largest_bits;
  int const k = blockIdx.x, values = params.channels * params.taps;
  if (threadIdx.x == 0) largest_bits = 0;
  __syncthreads();
  uint32_t mine = 0;
  for (int i = threadIdx.x; i < values; i += kThreads) {
    int const c = i / params.taps, tap = i % params.taps;
    auto const* source = static_cast<Source const*>(params.source) + k * params.k_stride + c * params.c_stride;
    float const w = k < params.k && c < params.c ? float(source[tap / params.s * params.r_stride + tap % params.s * params.s_stride]) : 0.f;
    smem[i] = w;
    if (isfinite(w)) mine = max(mine, __float_as_uint(fabsf(w)));
  }
  mine = __reduce_max_sync(0xffffffffu, mine);
  if (threadIdx.x % 32 == 0) atomicMax(&largest_bits, mine);
  __syncthreads();
  float const largest = __uint_as_float(largest_bits);
  bool const scaled = sizeof(Source) == 4 && largest > 0.f;
  int const exponent = scaled ? min(13 - ilogbf(largest), 149) : 0;  // from -114 on; a scale of 2^-149 is the least there is
  if (threadIdx.x == 0) params.scales[k] = ldexpf(1.f, -exponent);

  // Registers of lane (group, quad) of 16 channels: (group, k), (group + 8, k), (group, k + 8), (group + 8, k + 8) with
  // k = 2 * quad and its neighbour.
  int const row = k % 16, group = row % 8, steps = params.channels / 16, fragments = params.taps * steps;
  uint32_t* tile = params.fragments + int64_t(k / 16) * fragments * 128;
  auto const weight = [&](int position, int tap) {
    int const c = params.chunks ? position / 8 + params.chunks * (position % 8) : position;
    float const w = smem[c * params.taps + tap];
    return Operand(exponent ? ldexpf(w, exponent) : w);
  };
  for (int i = threadIdx.x; i < fragments * 4 * 2; i += kThreads) {
    int const fragment = i / 8, quad = i / 2 % 4, high = i % 2, tap = fragment / steps, step = fragment % steps;
    int const position = step * 16 + 2 * quad + 8 * high;  // and position + 1
    struct alignas(4) {
      Operand first, second;
    } const pair{weight(position, tap), weight(position + 1, tap)};
    tile[(fragment * 32 + group * 4 + quad) * 4 + high * 2 + row / 8] = *reinterpret_cast<uint32_t const*>(&pair);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) pack_f32_f16(const __grid_constant__ Params params) { pack<float, __half>(params); }
extern "C" __global__ void __launch_bounds__(kThreads) pack_f16_f16(const __grid_constant__ Params params) { pack<__half, __half>(params); }
extern "C" __global__ void __launch_bounds__(kThreads) pack_bf16_bf16(const __grid_constant__ Params params) {
  pack<__nv_bfloat16, __nv_bfloat16>(params);
}

// Read back by the builder: size of the parameter, threads of a block.
extern "C" __device__ __constant__ unsigned const pack_layout[] = {sizeof(Params), kThreads};
