// Persistent, ping-pong conv2d fprop for SM90: the kernel layer around CUTLASS's own collectives.
//
// CUTLASS 4.2 has no persistent schedule for conv (its dispatch policy refuses one), and its one-tile-per-CTA kernel
// leaves the tensor cores idle during every epilogue. Here two consumer warpgroups take turns: one multiplies while the
// other runs its epilogue. Mainloop (wgmma), epilogue (visitor tree, TMA store) and pipelines are CUTLASS's, as the
// CUTLASS Python API emits them; this file adds the tile loop, the TMA producer and parameters that are plain fields.
//
//   D[m, k] = chain(sum_{r, s, c} activation[n, p * stride_h - pad_h + r * dilation_h, q * ..., c] * filter[k, r, s, c])
//   with m = (n * P + p) * Q + q; activation NHWC (im2col TMA), filter KRSC, D row-major.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/pipeline/pipeline.hpp"

namespace cutlass_ops {

using namespace cute;

CUTLASS_HOST_DEVICE constexpr int tiles_of(int extent, int tile) { return (extent + tile - 1) / tile; }

template <class CollectiveMainloop_, class CollectiveEpilogue_>
struct PersistentConvFprop {
  using CollectiveMainloop = CollectiveMainloop_;
  using CollectiveEpilogue = CollectiveEpilogue_;
  using TileShape = typename CollectiveMainloop::TileShape;
  using TiledMma = typename CollectiveMainloop::TiledMma;
  using MainloopPipeline = typename CollectiveMainloop::MainloopPipeline;
  using EpiLoadPipeline = typename CollectiveEpilogue::LoadPipeline;
  using EpiStorePipeline = typename CollectiveEpilogue::StorePipeline;

  static constexpr int TileM = size<0>(TileShape{}), TileN = size<1>(TileShape{}), TileK = size<2>(TileShape{});
  static constexpr int Consumers = 2;
  static constexpr int kThreads = (1 + Consumers) * cutlass::NumThreadsPerWarpGroup;
  // For the layout table.
  static constexpr int kStages = CollectiveMainloop::DispatchPolicy::Stages;
  static constexpr int kTile[3] = {TileM, TileN, TileK};
  static constexpr int kEpilogueTile[2] = {size<0>(typename CollectiveEpilogue::EpilogueTile{}),
                                           size<1>(typename CollectiveEpilogue::EpilogueTile{})};
  static_assert(size(TiledMma{}) == cutlass::NumThreadsPerWarpGroup, "ping-pong: one warpgroup a tile");
  static_assert(size(typename CollectiveMainloop::DispatchPolicy::ClusterShape{}) == 1, "no clusters");

  // A consumer holds TileM * TileN / 128 accumulators; 40 registers suffice for the producer's coordinates.
  static constexpr int AccumulatorRegisters = TileM * TileN / cutlass::NumThreadsPerWarpGroup;
  static constexpr int ProducerRegisters = AccumulatorRegisters >= 208 ? 24 : 40;
  static constexpr int ConsumerRegisters = AccumulatorRegisters >= 208 ? 240 : 232;

  // Order of the consumers: stage 0 the mainloop, stage 1 the epilogue (they share the epilogue's shared memory).
  using Order = cutlass::OrderedSequenceBarrier<2, Consumers>;

  struct SharedStorage {
    struct Pipelines : cute::aligned_struct<16, _1> {
      alignas(16) typename CollectiveMainloop::PipelineStorage mainloop;
      alignas(16) typename CollectiveEpilogue::PipelineStorage epi_load;
      alignas(16) typename Order::SharedStorage order;
    } pipelines;
    struct Tensors : cute::aligned_struct<128, _1> {
      typename CollectiveEpilogue::TensorStorage epilogue;
      typename CollectiveMainloop::TensorStorage mainloop;
    } tensors;
  };
  static constexpr int SharedStorageSize = sizeof(SharedStorage);
  static_assert(SharedStorageSize <= 232448, "more than the 227 KB of shared memory of an SM90 block");

  // Filled by cutlass_ops/two_kernel.py at the offsets that every kernel exports in its layout table.
  struct Params {
    cute::TmaDescriptor activation;  // im2col, NHWC, box TileM pixels x TileK channels
    cute::TmaDescriptor filter;      // tiled (C, R * S, K), box TileK x 1 x TileN
    typename CollectiveEpilogue::Params epilogue;
    int32_t const* guard;  // if not null, the kernel works only where *guard == guard_value
    int32_t guard_value;
    int32_t m, k;  // rows N * P * Q and columns (output channels) of D
    int32_t c, r, s;
    int32_t p, q;
    int32_t stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  };

  // Tiles go round robin over the CTAs, columns first, so that neighbouring CTAs share activation rows in L2.
  struct TileIterator {
    int tile, tiles, tiles_n;
    CUTLASS_DEVICE TileIterator(Params const& params, int first)
        : tile(first), tiles_n(tiles_of(params.k, TileN)) {
      tiles = tiles_of(params.m, TileM) * tiles_n;
    }
    CUTLASS_DEVICE bool valid() const { return tile < tiles; }
    CUTLASS_DEVICE int m() const { return tile / tiles_n; }
    CUTLASS_DEVICE int n() const { return tile % tiles_n; }
    CUTLASS_DEVICE void advance(int count) { tile += count * int(gridDim.x); }
  };

  CUTLASS_DEVICE static void produce(Params const& params, MainloopPipeline& pipeline, SharedStorage& storage) {
    using SmemLayoutA = typename CollectiveMainloop::SmemLayoutA;
    using SmemLayoutB = typename CollectiveMainloop::SmemLayoutB;
    auto state = cutlass::make_producer_start_state<MainloopPipeline>();
    auto* smem_a = storage.tensors.mainloop.smem_A.data();
    auto* smem_b = storage.tensors.mainloop.smem_B.data();
    int const pq = params.p * params.q, filter_pixels = params.r * params.s;

    for (TileIterator it(params, blockIdx.x); it.valid(); it.advance(1)) {
      // First output pixel of the tile; the im2col TMA walks on from there, over row and image ends.
      int const m0 = it.m() * TileM;
      int const n = m0 / pq, pixel = m0 - n * pq, p = pixel / params.q, q = pixel - p * params.q;
      int const h = p * params.stride_h - params.padding_h, w = q * params.stride_w - params.padding_w;
      int const k0 = it.n() * TileN;
      for (int rs = 0; rs < filter_pixels; ++rs) {
        int const r = rs / params.s, s = rs - r * params.s;
        for (int c0 = 0; c0 < params.c; c0 += TileK) {
          pipeline.producer_acquire(state);
          uint64_t* barrier = reinterpret_cast<uint64_t*>(pipeline.producer_get_barrier(state));
          int const stage = state.index();
          SM90_TMA_LOAD_IM2COL_4D::copy(&params.activation, barrier, smem_a + stage * size(take<0, 2>(SmemLayoutA{})), c0, w, h, n,
                                        uint16_t(s * params.dilation_w), uint16_t(r * params.dilation_h));
          SM90_TMA_LOAD_3D::copy(&params.filter, barrier, static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST),
                                 smem_b + stage * size(take<0, 2>(SmemLayoutB{})), c0, rs, k0);
          ++state;
        }
      }
    }
    pipeline.producer_tail(state);
  }

  CUTLASS_DEVICE static void consume(Params const& params, MainloopPipeline& pipeline, EpiLoadPipeline& epi_load_pipeline, Order& order,
                                     SharedStorage& storage, int consumer) {
    int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
    int const k_tiles = params.r * params.s * tiles_of(params.c, TileK);
    constexpr int epi_tiles = CollectiveEpilogue::get_store_pipe_increment(TileShape{});
    auto problem = make_shape(params.m, params.k, k_tiles * TileK, 1);

    CollectiveMainloop mainloop;
    CollectiveEpilogue epilogue(params.epilogue, storage.tensors.epilogue);
    typename EpiStorePipeline::Params store_params;
    store_params.always_wait = true;
    EpiStorePipeline epi_store_pipeline(store_params);
    typename CollectiveMainloop::PipelineState state;
    typename CollectiveEpilogue::LoadPipelineState epi_load_state;
    auto epi_store_state = cutlass::make_producer_start_state<EpiStorePipeline>();

    // The consumers alternate over the CTA's tiles, each skipping the pipeline stages that the other takes.
    TileIterator it(params, blockIdx.x);
    it.advance(consumer);
    state.advance(consumer * k_tiles);
    epi_load_state.advance(consumer * epi_tiles);
    epi_store_state.advance(consumer * epi_tiles);

    for (; it.valid(); it.advance(Consumers)) {
      auto coord = make_coord(it.m(), it.n(), _, 0);
      TiledMma tiled_mma;
      Tensor accumulators = partition_fragment_C(tiled_mma, take<0, 2>(TileShape{}));

      order.wait();
      mainloop.mma(pipeline, state, accumulators, k_tiles, thread, storage.tensors.mainloop, {});
      order.arrive();
      mainloop.mma_tail(pipeline, state, k_tiles);
      state.advance(k_tiles * Consumers);

      order.wait();
      auto [load_next, store_next] = epilogue.store(epi_load_pipeline, epi_load_state, epi_store_pipeline, epi_store_state, problem,
                                                    TileShape{}, coord, accumulators, tiled_mma, thread, storage.tensors.epilogue);
      // TMA stores are visible only to the warp that issued them: drain them before the other consumer reuses the buffers.
      auto [load_done, store_done] = epilogue.store_tail(epi_load_pipeline, load_next, epi_store_pipeline, store_next);
      epi_load_state = load_done;
      epi_store_state = store_done;
      epi_load_state.advance(epi_tiles);
      epi_store_state.advance(epi_tiles);
      order.arrive();
    }
  }

  CUTLASS_DEVICE void operator()(Params const& params, char* smem) const {
    // Programmatic launch: the next kernel may come up now; our predecessor's results are complete and visible after the wait.
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (params.guard != nullptr && *params.guard != params.guard_value) {
      return;
    }
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    int const warpgroup = cutlass::canonical_warp_group_idx();
    bool const producer = warpgroup == 0;

    if (cutlass::canonical_warp_idx_sync() == 0 && cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(&params.activation);
      cute::prefetch_tma_descriptor(&params.filter);
      CollectiveEpilogue::prefetch_tma_descriptors(params.epilogue);
    }

    typename MainloopPipeline::Params pipeline_params;
    pipeline_params.role = producer ? MainloopPipeline::ThreadCategory::Producer : MainloopPipeline::ThreadCategory::Consumer;
    pipeline_params.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
    pipeline_params.num_consumers = cutlass::NumThreadsPerWarpGroup;
    pipeline_params.transaction_bytes = CollectiveMainloop::TmaTransactionBytes;
    MainloopPipeline pipeline(storage.pipelines.mainloop, pipeline_params, Shape<_1, _1, _1>{});

    // The chain has no tensor operand, so nothing is ever loaded through this pipeline; the collective's interface asks for it.
    typename EpiLoadPipeline::Params load_params;
    load_params.role = producer ? EpiLoadPipeline::ThreadCategory::Producer : EpiLoadPipeline::ThreadCategory::Consumer;
    load_params.producer_arv_count = cutlass::NumThreadsPerWarp;
    load_params.consumer_arv_count = cutlass::NumThreadsPerWarpGroup;
    EpiLoadPipeline epi_load_pipeline(storage.pipelines.epi_load, load_params);

    typename Order::Params order_params;
    order_params.group_id = warpgroup - 1;  // the producer takes no part
    order_params.group_size = cutlass::NumThreadsPerWarpGroup;
    Order order(storage.pipelines.order, order_params);
    __syncthreads();

    if (producer) {
      cutlass::arch::warpgroup_reg_dealloc<ProducerRegisters>();
      if (cutlass::canonical_warp_idx_sync() == 0 && cute::elect_one_sync()) {
        produce(params, pipeline, storage);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<ConsumerRegisters>();
      consume(params, pipeline, epi_load_pipeline, order, storage, warpgroup - 1);
    }
  }
};

}  // namespace cutlass_ops
