// Applies an epilogue visitor tree to values that a thread holds in registers, outside CUTLASS's collective epilogue.
//
// The tree is the one that CUTLASS's Python API traced for the implicit GEMM: same node types, same functors, same Params.
// Only where the values come from differs: a fused kernel's thread owns whole output channels, so a per-channel vector is
// one register a channel, loaded once.
#pragma once

#include "cutlass/array.h"
#include "cutlass/epilogue/fusion/sm90_visitor_compute_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"

namespace cutlass_ops {

namespace fusion = cutlass::epilogue::fusion;

// Operand I of a visitor's Params: named fields up to four operands, a cute::tuple beyond.
template <int I, class Params>
CUTLASS_DEVICE decltype(auto) operand(Params const& params) {
  if constexpr (cute::is_tuple<Params>::value) {
    return cute::get<I>(params);
  } else if constexpr (I == 0) {
    return (params.op_0);
  } else if constexpr (I == 1) {
    return (params.op_1);
  } else if constexpr (I == 2) {
    return (params.op_2);
  } else {
    return (params.op_3);
  }
}

// Apply<Visitor>::State is what a thread keeps for one output channel; load() fills it, eval() computes. The accumulators are
// scaled per channel (kernels/pack.cu): `scale` undoes it.
template <class Visitor>
struct Apply;

template <>
struct Apply<fusion::Sm90AccFetch> {
  struct State {
    float scale;
  };
  template <class Params>
  CUTLASS_DEVICE static State load(Params const&, int, int, float scale) {
    return {scale};
  }
  template <class Values>
  CUTLASS_DEVICE static Values eval(State const& state, Values const& accumulators) {
    Values result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Values::kElements; ++i) result[i] = accumulators[i] * state.scale;
    return result;
  }
};

// A value that is the same for all pixels of a channel.
struct Broadcast {
  struct State {
    float value;
  };
  template <class Values>
  CUTLASS_DEVICE static Values eval(State const& state, Values const&) {
    Values result;
    result.fill(state.value);
    return result;
  }
};

template <int Stages, class Tile, class Element, class Compute, class Stride, int Alignment, bool Nullable>
struct Apply<fusion::Sm90RowBroadcast<Stages, Tile, Element, Compute, Stride, Alignment, Nullable>> : Broadcast {
  template <class Params>
  CUTLASS_DEVICE static State load(Params const& params, int channel, int channels, float) {
    return {params.ptr_row != nullptr && channel < channels ? Compute(__ldg(params.ptr_row + channel)) : Compute(params.null_default)};
  }
};

template <class Element, class Stride, int Count, template <class> class Reduction>
struct Apply<fusion::Sm90ScalarBroadcast<Element, Stride, Count, Reduction>> : Broadcast {
  template <class Params>
  CUTLASS_DEVICE static State load(Params const& params, int, int, float) {
    return {params.scalars[0]};
  }
};

template <template <class> class Function, class Output, class Compute, cutlass::FloatRoundStyle Round, class Enable>
struct Apply<fusion::Sm90Compute<Function, Output, Compute, Round, Enable>> {
  struct State {};
  template <class Params>
  CUTLASS_DEVICE static State load(Params const&, int, int, float) {
    return {};
  }
  template <class Values, class... Inputs>
  CUTLASS_DEVICE static Values eval(State const&, Values const&, Inputs const&... inputs) {
    return Function<Values>{}(inputs...);
  }
};

// In two instructions instead of five. Saturated, NaN is zero, and times NaN it is NaN.
template <class Output, class Compute, cutlass::FloatRoundStyle Round, class Enable>
struct Apply<fusion::Sm90Compute<cutlass::epilogue::thread::HardSwish, Output, Compute, Round, Enable>> {
  struct State {};
  template <class Params>
  CUTLASS_DEVICE static State load(Params const&, int, int, float) {
    return {};
  }
  template <class Values>
  CUTLASS_DEVICE static Values eval(State const&, Values const&, Values const& x) {
    Values y;
#pragma unroll
    for (int i = 0; i < Values::kElements; ++i) y[i] = x[i] * __saturatef(__fmaf_rn(x[i], 1.f / 6, 0.5f));
    return y;
  }
};

template <class Visitor>
constexpr bool is_broadcast = cute::is_base_of<Broadcast, Apply<Visitor>>::value;

// The sign that a sum gives its second operand; 0 for any other node.
template <class Node>
constexpr int sum_sign = 0;
template <class Output, class Compute, cutlass::FloatRoundStyle Round, class Enable>
constexpr int sum_sign<fusion::Sm90Compute<cutlass::plus, Output, Compute, Round, Enable>> = 1;
template <class Output, class Compute, cutlass::FloatRoundStyle Round, class Enable>
constexpr int sum_sign<fusion::Sm90Compute<cutlass::minus, Output, Compute, Round, Enable>> = -1;

// A sum or difference of something and a broadcast.
template <class Visitor>
struct Offset : cute::false_type {};
template <class Node, class Left, class Right>
struct Offset<fusion::Sm90TreeVisitor<Node, Left, Right>> : cute::bool_constant<sum_sign<Node> != 0 && is_broadcast<Right>> {
  using Inner = Left;
  static constexpr float kSign = sum_sign<Node>;
};

// The accumulator with offsets alone: one multiply-add, whose offset is summed up when it is loaded (a different rounding of
// the sum of constants, of the order of an fp32 ulp).
template <class Visitor>
struct Affine : cute::false_type {};
template <>
struct Affine<fusion::Sm90AccFetch> : cute::true_type {
  template <class Params>
  CUTLASS_DEVICE static float load(Params const&, int, int) {
    return 0.f;
  }
};
template <class Node, class Left, class Right>
struct Affine<fusion::Sm90TreeVisitor<Node, Left, Right>>
    : cute::bool_constant<Offset<fusion::Sm90TreeVisitor<Node, Left, Right>>::value && Affine<Left>::value> {
  template <class Params>
  CUTLASS_DEVICE static float load(Params const& params, int channel, int channels) {
    float const right = Apply<Right>::load(operand<1>(params), channel, channels, 1.f).value;
    return Affine<Left>::load(operand<0>(params), channel, channels) + float(sum_sign<Node>) * right;
  }
};

// States of a visitor's operands, and how to load them.
template <class... Ops>
struct Operands {
  using State = cute::tuple<typename Apply<Ops>::State...>;
  template <class Params, int... I>
  CUTLASS_DEVICE static State load(Params const& params, int channel, int channels, float scale, cute::seq<I...>) {
    return {Apply<Ops>::load(operand<I>(params), channel, channels, scale)...};
  }
  template <class Params>
  CUTLASS_DEVICE static State load(Params const& params, int channel, int channels, float scale) {
    return load(params, channel, channels, scale, cute::make_seq<sizeof...(Ops)>{});
  }
};

// A tree: the children's values are the node's inputs (the node comes last among the operands).
template <class Node, class... Children>
struct Tree : Operands<Children..., Node> {
  using State = typename Operands<Children..., Node>::State;
  template <class Values, int... I>
  CUTLASS_DEVICE static Values eval(State const& state, Values const& accumulators, cute::seq<I...>) {
    return Apply<Node>::eval(cute::get<sizeof...(Children)>(state), accumulators,
                             Apply<Children>::eval(cute::get<I>(state), accumulators)...);
  }
  template <class Values>
  CUTLASS_DEVICE static Values eval(State const& state, Values const& accumulators) {
    return eval(state, accumulators, cute::make_seq<sizeof...(Children)>{});
  }
};

template <class Visitor>
struct MultiplyAdd {
  struct State {
    float scale, offset;
  };
  template <class Params>
  CUTLASS_DEVICE static State load(Params const& params, int channel, int channels, float scale) {
    return {scale, Affine<Visitor>::load(params, channel, channels)};
  }
  template <class Values>
  CUTLASS_DEVICE static Values eval(State const& state, Values const& accumulators) {
    Values result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Values::kElements; ++i) result[i] = fmaf(accumulators[i], state.scale, state.offset);
    return result;
  }
};

template <class Node, class... Children>
struct Apply<fusion::Sm90TreeVisitor<Node, Children...>>
    : cute::conditional_t<Affine<fusion::Sm90TreeVisitor<Node, Children...>>::value,
                          MultiplyAdd<fusion::Sm90TreeVisitor<Node, Children...>>, Tree<Node, Children...>> {};

// A graph: operands in topological order, each with the indices of its inputs; the last one is the result.
template <class Element, class Edges, class... Ops>
struct Apply<fusion::Sm90TopologicalVisitor<Element, Edges, Ops...>> : Operands<Ops...> {
  using State = typename Operands<Ops...>::State;
  template <int Node, class Values, int... I>
  CUTLASS_DEVICE static void visit(State const& state, Values const& accumulators, Values (&values)[sizeof...(Ops)], cute::seq<I...>) {
    using Op = cute::tuple_element_t<Node, cute::tuple<Ops...>>;
    values[Node] = Apply<Op>::eval(cute::get<Node>(state), accumulators, values[I]...);
  }
  template <class Values, int... Node>
  CUTLASS_DEVICE static Values eval(State const& state, Values const& accumulators, cute::seq<Node...>) {
    Values values[sizeof...(Ops)];
    (visit<Node>(state, accumulators, values, cute::tuple_element_t<Node, Edges>{}), ...);
    return values[sizeof...(Ops) - 1];
  }
  template <class Values>
  CUTLASS_DEVICE static Values eval(State const& state, Values const& accumulators) {
    return eval(state, accumulators, cute::make_seq<sizeof...(Ops)>{});
  }
};

// Chain, then pool, of one window. An offset at the chain's root commutes with a mean (Pool::kMean), and is then added once
// a window instead of once a pixel.
template <class Visitor, class Pool, class State, class Values>
CUTLASS_DEVICE float apply_and_pool(State const& state, Values const& window, float pool_scale) {
  if constexpr (Pool::kMean && Offset<Visitor>::value && !Affine<Visitor>::value) {
    using Inner = typename Offset<Visitor>::Inner;
    float const inner = apply_and_pool<Inner, Pool>(cute::get<0>(state), window, pool_scale);
    return inner + Offset<Visitor>::kSign * cute::get<1>(state).value;
  } else {
    return Pool::pool(Apply<Visitor>::eval(state, window), pool_scale);
  }
}

}  // namespace cutlass_ops
