// The wgmma atoms of the fused kernel.
#pragma once

#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cutlass/bfloat16.h"
#include "cutlass/half.h"

namespace cutlass_ops::fused {

// RS wgmma atoms: weights in registers, pixels in shared memory, both with K innermost. Columns: of the accumulators.
template <class Operand, int Columns>
struct Atom;
template <>
struct Atom<cutlass::half_t, 128> : cute::SM90::GMMA::MMA_64x128x16_F32F16F16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K> {};
template <>
struct Atom<cutlass::half_t, 64> : cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K> {};
template <>
struct Atom<cutlass::half_t, 32> : cute::SM90::GMMA::MMA_64x32x16_F32F16F16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K> {};
template <>
struct Atom<cutlass::bfloat16_t, 128> : cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K> {};
template <>
struct Atom<cutlass::bfloat16_t, 64> : cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K> {};

// The accumulators of one part, or of two side by side.
template <class Atom, int N, size_t... I>
CUTLASS_DEVICE void mma(float (&d)[N], uint32_t const (&a)[4], uint64_t b, cute::GMMA::ScaleOut scale, std::index_sequence<I...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[I]..., scale);
}
template <class Atom, int N, size_t... I>
CUTLASS_DEVICE void mma(float (&d)[N], float (&e)[N], uint32_t const (&a)[4], uint64_t b, cute::GMMA::ScaleOut scale,
                        std::index_sequence<I...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[I]..., e[I]..., scale);
}

}  // namespace cutlass_ops::fused
