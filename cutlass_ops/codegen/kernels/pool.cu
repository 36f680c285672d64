// Pooling kernel: NHWC fp32 (what the implicit GEMM wrote) -> pooled NCHW or NHWC output in fp32, fp16 or bf16.
// Average and max pooling as PyTorch's avg_pool2d and max_pool2d define them. A 1 x 1 window is the layout change alone,
// which is how an operator without a pool gets its output.
//
// A warp reads 32 channels (128 bytes) of 4 pixels in 16-byte accesses; NCHW rows are gathered in shared memory so that a
// block writes runs of 256 neighbouring pixels: rows of an odd size share sectors, which then merge in L2.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 256, kTileChannels = 32, kTilePixels = 256;
constexpr int kLanesC = kTileChannels / 4, kLanesP = kThreads / kLanesC, kPasses = kTilePixels / kLanesP;
constexpr int kPitch = kTilePixels + 1;  // odd: columns of 4 x 8 channels fall into 32 different banks

struct Params {
  float const* source;  // [n, h, w, ld], 16-byte aligned, ld a multiple of 4
  void* target;
  int32_t n, h, w, channels, ld;
  int32_t out_h, out_w;
  int32_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  int32_t count_include_pad;  // average only
  int32_t divisor_override;   // average only; 0: none
  int32_t channels_last;      // of the target
};

__device__ void store(float* p, float v) { *p = v; }
__device__ void store(__half* p, float v) { *p = __float2half_rn(v); }
__device__ void store(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

struct Average {
  static constexpr float kInit = 0.f;
  __device__ static float combine(float a, float b) { return a + b; }
};
struct Max {
  static constexpr float kInit = -INFINITY;
  __device__ static float combine(float a, float b) {  // NaN wins, as in PyTorch
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
};

template <class Kind>
__device__ void accumulate(float (&sum)[4], float4 v) {
  sum[0] = Kind::combine(sum[0], v.x);
  sum[1] = Kind::combine(sum[1], v.y);
  sum[2] = Kind::combine(sum[2], v.z);
  sum[3] = Kind::combine(sum[3], v.w);
}

// The divisor of PyTorch's avg_pool2d for a window starting at (h0, w0), before clipping to the image.
__device__ float divisor(Params const& params, int h0, int w0) {
  if (params.divisor_override != 0) return float(params.divisor_override);
  int const h1 = min(h0 + params.kernel_h, params.h + params.padding_h), w1 = min(w0 + params.kernel_w, params.w + params.padding_w);
  if (params.count_include_pad) return float((h1 - h0) * (w1 - w0));
  return float((min(h1, params.h) - max(h0, 0)) * (min(w1, params.w) - max(w0, 0)));
}

// Window == 0: any window. Otherwise a Window x Window one without dilation that lies inside the image.
template <class Kind, int Window>
__device__ void pool_pixel(Params const& params, float const* image, int pixel, float (&sum)[4]) {
  int const oh = pixel / params.out_w, ow = pixel - oh * params.out_w;
  int const h0 = oh * params.stride_h - params.padding_h, w0 = ow * params.stride_w - params.padding_w;
  for (int i = 0; i < 4; ++i) sum[i] = Kind::kInit;
  if constexpr (Window > 0) {
    float const* row = image + (int64_t(h0) * params.w + w0) * params.ld;
#pragma unroll
    for (int i = 0; i < Window; ++i)
#pragma unroll
      for (int j = 0; j < Window; ++j)
        accumulate<Kind>(sum, __ldcs(reinterpret_cast<float4 const*>(row + (int64_t(i) * params.w + j) * params.ld)));
  } else {
    bool empty = true;
    for (int i = 0; i < params.kernel_h; ++i) {
      int const h = h0 + i * params.dilation_h;
      if (h < 0 || h >= params.h) continue;
      for (int j = 0; j < params.kernel_w; ++j) {
        int const w = w0 + j * params.dilation_w;
        if (w < 0 || w >= params.w) continue;
        accumulate<Kind>(sum, *reinterpret_cast<float4 const*>(image + (int64_t(h) * params.w + w) * params.ld));
        empty = false;
      }
    }
    if constexpr (Kind::kInit == 0.f) {
      if (empty) return;  // PyTorch: the average over no element is 0
    }
  }
  if constexpr (Kind::kInit == 0.f) {
    float const d = divisor(params, h0, w0);
    if (d != 1.f)
      for (int i = 0; i < 4; ++i) sum[i] = __fdiv_rn(sum[i], d);
  }
}

template <class Kind, int Window, class Target>
__device__ void pool_tiles(Params const& params, float (&tile)[kTileChannels][kPitch]) {
  int const pixels = params.out_h * params.out_w;
  int const tiles_c = (params.channels + kTileChannels - 1) / kTileChannels, tiles_p = (pixels + kTilePixels - 1) / kTilePixels;
  // A tile is 8192 elements, so their number fits 32 bits for any result that fits a GPU; a 64-bit division is slow.
  unsigned const tiles = unsigned(params.n) * tiles_p * tiles_c;
  int const lane_c = (threadIdx.x % kLanesC) * 4, lane_p = threadIdx.x / kLanesC;
  Target* const target = static_cast<Target*>(params.target);

  for (unsigned t = blockIdx.x; t < tiles; t += gridDim.x) {
    unsigned const rest = t / tiles_c;
    int64_t const n = rest / tiles_p;
    int const c0 = (t - rest * tiles_c) * kTileChannels, p0 = (rest - unsigned(n) * tiles_p) * kTilePixels;
    bool const channels_inside = c0 + lane_c < params.ld;  // ld covers whole groups of 4
    float const* image = params.source + n * params.h * params.w * params.ld + c0 + lane_c;

    float sum[kPasses][4] = {};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      int const pixel = p0 + pass * kLanesP + lane_p;
      if (channels_inside && pixel < pixels) pool_pixel<Kind, Window>(params, image, pixel, sum[pass]);
    }

    if (params.channels_last) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        int const pixel = p0 + pass * kLanesP + lane_p;
        if (!channels_inside || pixel >= pixels) continue;
        Target* out = target + (n * pixels + pixel) * params.channels + c0 + lane_c;
        if (sizeof(Target) == 4 && params.channels % 4 == 0) {
          *reinterpret_cast<float4*>(out) = make_float4(sum[pass][0], sum[pass][1], sum[pass][2], sum[pass][3]);
        } else {
          for (int i = 0; i < 4; ++i)
            if (c0 + lane_c + i < params.channels) store(out + i, sum[pass][i]);
        }
      }
      continue;
    }

    __syncthreads();  // the previous tile's rows are written
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      for (int i = 0; i < 4; ++i) tile[lane_c + i][pass * kLanesP + lane_p] = sum[pass][i];
    __syncthreads();
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool const vectors = sizeof(Target) == 4 && pixels % 4 == 0;  // planes of whole 16 bytes
    for (int c = warp; c < kTileChannels && c0 + c < params.channels; c += kThreads / 32) {
      Target* out = target + (n * params.channels + c0 + c) * pixels + p0;
      if (vectors) {
#pragma unroll
        for (int p = lane * 4; p < kTilePixels; p += 128)
          if (p0 + p < pixels) *reinterpret_cast<float4*>(out + p) = make_float4(tile[c][p], tile[c][p + 1], tile[c][p + 2], tile[c][p + 3]);
      } else {
#pragma unroll
        for (int p = lane; p < kTilePixels; p += 32)
          if (p0 + p < pixels) store(out + p, tile[c][p]);
      }
    }
  }
}

template <class Kind, class Target>
__device__ void pool(Params const& params) {
  // Programmatic launch: the next kernel may come up now; our predecessor's results are complete and visible after the wait.
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  __shared__ float tile[kTileChannels][kPitch];
  // Windows inside the image need no bounds: the last one must end before the image does, and none starts before it.
  bool const inside = params.padding_h == 0 && params.padding_w == 0 && params.dilation_h == 1 && params.dilation_w == 1 &&
                      (params.out_h - 1) * params.stride_h + params.kernel_h <= params.h &&
                      (params.out_w - 1) * params.stride_w + params.kernel_w <= params.w;
  if (inside && params.kernel_h == 2 && params.kernel_w == 2) {
    pool_tiles<Kind, 2, Target>(params, tile);
  } else if (inside && params.kernel_h == 1 && params.kernel_w == 1) {
    pool_tiles<Kind, 1, Target>(params, tile);
  } else {
    pool_tiles<Kind, 0, Target>(params, tile);
  }
}

}  // namespace

#define POOL_KERNEL(NAME, KIND, TARGET) \
  extern "C" __global__ void __launch_bounds__(kThreads, 3) NAME(const __grid_constant__ Params params) { pool<KIND, TARGET>(params); }

POOL_KERNEL(pool_avg_f32, Average, float)
POOL_KERNEL(pool_avg_f16, Average, __half)
POOL_KERNEL(pool_avg_bf16, Average, __nv_bfloat16)
POOL_KERNEL(pool_max_f32, Max, float)
POOL_KERNEL(pool_max_f16, Max, __half)
POOL_KERNEL(pool_max_bf16, Max, __nv_bfloat16)

// Read back by the builder: size of the parameter, threads of a block.
extern "C" __device__ __constant__ unsigned const pool_layout[] = {sizeof(Params), kThreads};
