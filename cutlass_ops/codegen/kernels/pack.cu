// Packing kernel of the fused family: filter (K, C <= 64, 3, 3) fp32 -> fp16 fragments of the RS wgmma's A operand.
//
// Every output channel is scaled by a power of two that brings its largest weight to [2^13, 2^14), so that weights of any
// magnitude keep fp16's 11 bits relative to the largest one down to 2^-28; `scales` undoes it, exactly. A block packs one
// output channel. It also clears the flag that the fused kernel raises, before that kernel can.
#include <cuda_fp16.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 128, kChannels = 64, kTaps = 9, kFragments = kTaps * 4;

struct Params {
  float const* source;
  int64_t k_stride, c_stride, r_stride, s_stride;  // in elements
  uint32_t* fragments;  // [block of 128][warp 8][tap * 4 + k step][lane 32][register 4], two channels each
  float* scales;        // [padded K]
  int32_t* flag;
  int32_t k, c;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) pack_f32_f16(const __grid_constant__ Params params) {
  asm volatile("griddepcontrol.launch_dependents;");
  __shared__ float smem[kChannels * kTaps];
  __shared__ uint32_t largest_bits;
  int const k = blockIdx.x;
  if (threadIdx.x == 0) largest_bits = 0;
  if (k == 0 && threadIdx.x == 0) *params.flag = 0;
  __syncthreads();
  uint32_t mine = 0;
  for (int i = threadIdx.x; i < kChannels * kTaps; i += kThreads) {
    int const c = i / kTaps, tap = i % kTaps;
    float const w = k < params.k && c < params.c
                        ? params.source[k * params.k_stride + c * params.c_stride + (tap / 3) * params.r_stride + (tap % 3) * params.s_stride]
                        : 0.f;
    smem[i] = w;
    if (isfinite(w)) mine = max(mine, __float_as_uint(fabsf(w)));
  }
  mine = __reduce_max_sync(0xffffffffu, mine);
  if (threadIdx.x % 32 == 0) atomicMax(&largest_bits, mine);
  __syncthreads();
  float const largest = __uint_as_float(largest_bits);
  int const exponent = largest > 0.f ? 13 - ilogbf(largest) : 0;  // -114 .. 162
  if (threadIdx.x == 0) params.scales[k] = ldexpf(1.f, -exponent);

  // Registers of lane (group, quad) of a warp's 16 channels: (group, k), (group + 8, k), (group, k + 8), (group + 8, k + 8) with
  // k = 2 * quad and its neighbour. K position 8 * chunk + j holds input channel chunk + 8 * j (fused_conv_pool.hpp).
  int const warp = (k % 128) / 16, row = k % 16, group = row % 8;
  uint32_t* block = params.fragments + int64_t(k / 128) * 8 * kFragments * 128;
  for (int i = threadIdx.x; i < kFragments * 4 * 2; i += kThreads) {
    int const fragment = i / 8, quad = (i / 2) % 4, high = i % 2, tap = fragment / 4, step = fragment % 4;
    int const position = step * 16 + 2 * quad + 8 * high;  // and position + 1
    __half2 pair;
    pair.x = __float2half_rn(ldexpf(smem[(position / 8 + 8 * (position % 8)) * kTaps + tap], exponent));
    pair.y = __float2half_rn(ldexpf(smem[(position / 8 + 8 * (position % 8 + 1)) * kTaps + tap], exponent));
    int const slot = ((warp * kFragments + fragment) * 32 + group * 4 + quad) * 4 + high * 2 + row / 8;
    block[slot] = *reinterpret_cast<uint32_t*>(&pair);
  }
}

// Read back by the builder: size of the parameter, threads of a block.
extern "C" __device__ __constant__ unsigned const pack_layout[] = {sizeof(Params), kThreads};
