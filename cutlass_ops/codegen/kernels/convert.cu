// Conversion kernel: any (batch, channel, pixel) strided tensor -> dense NHWC operand of the implicit GEMM, channels
// zero-padded to a multiple of 8 (16 bytes of fp16: what TMA needs).
//
// One launch serves both operands: the activation (batch N, pixels H * W) and the filter (batch K, pixels R * S).
// Tiles are transposed in shared memory, so both sides move 16 bytes a lane in runs of 256 bytes at 64 channels (64-byte
// runs on either side cost up to a third of the bandwidth: docs/performance.md).
//
// fp32 -> fp16 notices on the device what fp16 cannot hold as exactly as TF32 does, and raises `flag`:
//   - not |v| <= 65504: overflow, infinity, NaN;
//   - a warp's patch (8 channels x 64 pixels at 64 channels) whose largest magnitude is below 2^-11 but not zero: fp16 is
//     subnormal below 2^-14 and its error there is 2^-25 whatever the value. With a largest magnitude of 2^-11 and more
//     the RMS error of uniform values exceeds TF32's by 1 % at most (the top binade's 2^-23 dominates).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 256, kLogTile = 12, kLoads = (1 << kLogTile) / 4 / kThreads;
constexpr int kSharedFloats = (1 << kLogTile) / 8 * 9;  // 8 channels: 512 pixels at a pitch of 9; 64 channels need less
constexpr float kFp16Max = 65504.f, kSmallestSafeMaximum = 0x1p-11f;

struct Job {
  void const* source;
  void* target;
  int64_t batch_stride, channel_stride, pixel_stride;  // of the source, in elements
  int32_t batch, channels, pixels;
  int32_t padded_channels;  // of the target, a multiple of 8
};

struct Params {
  Job jobs[2];           // activation, filter; a job with batch = 0 has no work
  int32_t const* guard;  // if not null, the kernel works only where *guard == guard_value
  int32_t* flag;         // if not null, set to 1 where a value does not fit
  int32_t guard_value;
  int32_t reserved;
};

struct Tf32 {
  float value;
};

// A tile is 4096 elements: up to 64 channels x as many pixels as then remain, so that few channels leave no lane idle.
struct Tiling {
  int log_channels, log_pixels, tiles_p, tiles_c;
  __device__ Tiling(Job const& job) {
    log_channels = min(6, 32 - __clz(job.padded_channels - 1));
    log_pixels = kLogTile - log_channels;
    tiles_p = (job.pixels + (1 << log_pixels) - 1) >> log_pixels;
    tiles_c = (job.padded_channels + (1 << log_channels) - 1) >> log_channels;
  }
  // Their number fits 32 bits for any tensor that fits a GPU; a 64-bit division is slow.
  __device__ unsigned tiles(Job const& job) const { return unsigned(job.batch) * tiles_p * tiles_c; }
};

__device__ float to_float(float v) { return v; }
__device__ float to_float(__half v) { return __half2float(v); }
__device__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class Source>
__device__ void load4(Source const* p, float (&v)[4]) {
  if constexpr (sizeof(Source) == 4) {
    float4 const q = __ldcs(reinterpret_cast<float4 const*>(p));  // read once: evict first
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
  } else {
    uint2 const q = __ldcs(reinterpret_cast<uint2 const*>(p));
    Source const* h = reinterpret_cast<Source const*>(&q);
    for (int i = 0; i < 4; ++i) v[i] = to_float(h[i]);
  }
}

__device__ void store_channels(__half* p, float const (&v)[8]) {
  uint4 q;
  __half2* h = reinterpret_cast<__half2*>(&q);
  for (int i = 0; i < 4; ++i) h[i] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
  *reinterpret_cast<uint4*>(p) = q;
}

__device__ void store_channels(__nv_bfloat16* p, float const (&v)[8]) {
  uint4 q;
  __nv_bfloat162* h = reinterpret_cast<__nv_bfloat162*>(&q);
  for (int i = 0; i < 4; ++i) h[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
  *reinterpret_cast<uint4*>(p) = q;
}

// The tensor core truncates raw fp32 to TF32 (error twice as large): round to nearest here.
__device__ void store_channels(Tf32* p, float const (&v)[4]) {
  uint32_t q[4];
  for (int i = 0; i < 4; ++i) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(q[i]) : "f"(v[i]));
    if (v[i] != v[i]) q[i] = 0x7fffffffu;  // the conversion cuts a NaN's payload, and without payload it is an infinity
  }
  *reinterpret_cast<uint4*>(p) = make_uint4(q[0], q[1], q[2], q[3]);
}

// Four neighbours along the source's dense dimension, zero outside the tensor: pixels p..p+3 of channel c, or channels
// c..c+3 of pixel p.
template <class Source>
__device__ void load_neighbours(Job const& job, Source const* source, int c, int p, bool along_pixels, bool vectors, float (&v)[4]) {
  Source const* first = source + c * job.channel_stride + p * job.pixel_stride;
  bool const inside = c < job.channels && p < job.pixels;
  if (inside && vectors && (along_pixels ? p + 4 <= job.pixels : c + 4 <= job.channels)) {
    load4(first, v);
    return;
  }
  int64_t const step = along_pixels ? job.pixel_stride : job.channel_stride;
  int const count = along_pixels ? job.pixels - p : job.channels - c;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = inside && i < count ? to_float(first[i * step]) : 0.f;
}

template <class Source, class Target, bool CheckRange>
__device__ bool convert_tile(Job const& job, Tiling const& tiling, unsigned tile, float* smem) {
  constexpr int kChunk = 16 / sizeof(Target), kLogChunk = kChunk == 8 ? 3 : 2;
  unsigned const rest = tile / tiling.tiles_c, tile_c = tile - rest * tiling.tiles_c;
  unsigned const n = rest / tiling.tiles_p, tile_p = rest - n * tiling.tiles_p;
  int const c0 = tile_c << tiling.log_channels, p0 = tile_p << tiling.log_pixels;
  int const pitch = (1 << tiling.log_channels) + 1;  // odd: at most two lanes a bank at 64 channels
  Source const* source = static_cast<Source const*>(job.source) + n * job.batch_stride;
  bool const along_pixels = job.channel_stride != 1 || job.pixel_stride == 1;
  // Four elements are one aligned vector where base and the other strides are multiples of four elements.
  bool const vectors = reinterpret_cast<uintptr_t>(source) % (4 * sizeof(Source)) == 0 &&
                       (along_pixels ? job.pixel_stride == 1 && job.channel_stride % 4 == 0 : job.pixel_stride % 4 == 0);

  float v[kLoads][4];
  int const log_inner = (along_pixels ? tiling.log_pixels : tiling.log_channels) - 2;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int const index = i * kThreads + threadIdx.x, inner = (index & ((1 << log_inner) - 1)) * 4, outer = index >> log_inner;
    load_neighbours(job, source, c0 + (along_pixels ? outer : inner), p0 + (along_pixels ? inner : outer), along_pixels, vectors, v[i]);
  }
  __syncthreads();  // the previous tile is read
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int const index = i * kThreads + threadIdx.x, inner = (index & ((1 << log_inner) - 1)) * 4, outer = index >> log_inner;
#pragma unroll
    for (int j = 0; j < 4; ++j) smem[along_pixels ? (inner + j) * pitch + outer : outer * pitch + inner + j] = v[i][j];
  }
  __syncthreads();

  Target* target = static_cast<Target*>(job.target) + (int64_t(n) * job.pixels + p0) * job.padded_channels + c0;
  int const log_chunks = tiling.log_channels - kLogChunk;
#pragma unroll
  for (int i = 0; i < (1 << kLogTile) / kChunk / kThreads; ++i) {
    int const index = i * kThreads + threadIdx.x, c = (index & ((1 << log_chunks) - 1)) << kLogChunk, p = index >> log_chunks;
    if (c0 + c < job.padded_channels && p0 + p < job.pixels) {
      float row[kChunk];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) row[j] = smem[p * pitch + c + j];
      store_channels(target + int64_t(p) * job.padded_channels + c, row);
    }
  }

  if constexpr (CheckRange) {
    float largest = 0.f;
    bool fits = true;
    for (auto const& row : v)
      for (float const value : row) {
        largest = fmaxf(largest, fabsf(value));
        fits &= fabsf(value) <= kFp16Max;
      }
    // Non-negative floats order as their bits do.
    float const patch = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
    return !fits || (patch > 0.f && patch < kSmallestSafeMaximum);
  }
  return false;
}

template <class Source, class Target, bool CheckRange>
__device__ void convert(Params const& params) {
  // Programmatic launch: the next kernel may come up now; our predecessor's results are complete and visible after the wait.
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (params.guard != nullptr && *params.guard != params.guard_value) return;
  __shared__ float smem[kSharedFloats];
  bool misfit = false;
#pragma unroll 1
  for (int j = 0; j < 2; ++j) {
    Job const& job = params.jobs[j];
    if (job.batch == 0) continue;
    Tiling const tiling(job);
    for (unsigned tile = blockIdx.x; tile < tiling.tiles(job); tile += gridDim.x)
      misfit |= convert_tile<Source, Target, CheckRange>(job, tiling, tile, smem);
  }
  if (CheckRange && misfit && params.flag != nullptr) *params.flag = 1;  // every writer writes the same value
}

}  // namespace

#define CONVERT_KERNEL(NAME, SOURCE, TARGET, CHECK) \
  extern "C" __global__ void __launch_bounds__(kThreads, 6) NAME(const __grid_constant__ Params params) { convert<SOURCE, TARGET, CHECK>(params); }

CONVERT_KERNEL(convert_f32_f16, float, __half, true)
CONVERT_KERNEL(convert_f32_tf32, float, Tf32, false)
CONVERT_KERNEL(convert_f16_f16, __half, __half, false)
CONVERT_KERNEL(convert_bf16_bf16, __nv_bfloat16, __nv_bfloat16, false)

// Read back by the builder: size of the parameter, threads of a block.
extern "C" __device__ __constant__ unsigned const convert_layout[] = {sizeof(Params), kThreads};
