// What follows the chain: a 2 x 2 pool, or none.
#pragma once

#include "cutlass/array.h"
#include "cutlass/functional.h"
#include "cutlass_ops/visitor_apply.hpp"

namespace cutlass_ops {

struct AveragePool {
  static constexpr bool kWindow = true, kMean = true;  // pool_scale is one over the window's size
  CUTLASS_DEVICE static float pool(cutlass::Array<float, 4> const& v, float scale) { return ((v[0] + v[1]) + (v[2] + v[3])) * scale; }
};
struct MaxPool {  // NaN wins, as in PyTorch
  static constexpr bool kWindow = true, kMean = false;
  CUTLASS_DEVICE static float pool(cutlass::Array<float, 4> const& v, float) {
    cutlass::maximum_with_nan_propagation<float> larger;
    return larger(larger(v[0], v[1]), larger(v[2], v[3]));
  }
};
struct NoPool {
  static constexpr bool kWindow = false, kMean = false;
};

}  // namespace cutlass_ops
