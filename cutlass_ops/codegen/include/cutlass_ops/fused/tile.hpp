// Shapes of the fused kernel: what a CTA computes, how its shared memory is laid out, and its parameters.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass_ops/fused/pool.hpp"
#include "cutlass_ops/fused/work.hpp"

namespace cutlass_ops::fused {

// Element: of x and the result, float, half_t or bfloat16_t. ChannelsLast: their layout. Channels: input channels in shared
// memory, 64 or 16; smaller problems are padded there. Shifted: NCHW only, for a start that is no multiple of 16 bytes: TMA
// reads from 16-byte aligned addresses only (anything else is an illegal instruction), so that the tile starts up to 15 bytes
// early and is wider; the kernel without costs less. Wide: NCHW without a pool, for results wider than
// 64 columns; rows reach the end of a 128-byte line, those of the CTA's first one too (lines.hpp).
template <class Element_, bool ChannelsLast_, int Channels_, int R_, int S_, bool Shifted_, bool Wide_, class Pool_>
struct Tile {
  using Element = Element_;
  using Pool = Pool_;
  using Operand = cute::conditional_t<cute::is_same_v<Element, float>, cutlass::half_t, Element>;
  static constexpr bool kChannelsLast = ChannelsLast_, kShifted = Shifted_;
  // Converters bring NCHW and fp32 into the ring; TMA alone brings 16-bit channels_last.
  static constexpr bool kConverts = !kChannelsLast || sizeof(Element) == 4;
  // Rows that TMA cannot read, of no whole 16 bytes, are gathered by the warps that convert or load.
  static constexpr bool kGathers = !kChannelsLast;
  // A step is one row of 128 columns instead of two of 64, for 64 input channels without a pool (NCHW): rows are written whole.
  static constexpr bool kWide = Wide_;
  static constexpr int kRows = kWide ? 1 : 2;  // of the convolution a step, and of the input a slot
  // fp32 values that fp16 cannot hold are computed again (redo.hpp).
  static constexpr bool kGuarded = cute::is_same_v<Element, float>;
  static constexpr int R = R_, S = S_, kChannels = Channels_, kTaps = R * S, kKSteps = kChannels / 16, kFragments = kTaps * kKSteps;
  static_assert((R == 3 || R == 1) && (S == 3 || S == 1), "a step shares whole ring slots with the next");
  static_assert(kChannels == 64 || kChannels == 16, "a pixel is a row of the 128-byte or of the 32-byte swizzle");
  static_assert(!(kChannelsLast && kShifted) && !(kWide && (kChannelsLast || Pool::kWindow || kChannels != 64)));

  // Two consumer warpgroups of 64 output channels x 64 columns: side by side in channels where the weights of 64 input channels
  // fill the registers, in columns where there are few input channels (rows of the result are then written whole).
  static constexpr int kChannelGroups = kChannels == 64 ? 2 : 1, kColumnGroups = 2 / kChannelGroups;
  static constexpr int kOutputChannels = 64 * kChannelGroups, kStrip = kWide ? 128 : 64 * kColumnGroups;
  // Few input channels leave registers for warps that only store (storer.hpp).
  static constexpr int kStoreWarps = !Pool::kWindow && !kChannelsLast && kChannels == 16 ? 4 : 0;
  // Steps are claimed, so many times by a CTA at most; 0: each team has a slice of the batch (work.hpp).
  static constexpr int kClaims = kStoreWarps && sizeof(Element) == 4 ? 2048 : 0;
  using Work = cute::conditional_t<(kClaims > 0), Claims, Slice>;
  // The warpgroups take turns at the tensor cores, so that one runs chain and stores while the other multiplies. Left to themselves they
  // fall into step within five steps, since stores are slower beside the other's products, and then the tensor cores wait for both.
  // Where fp32 NCHW is pooled, stores are few and it does not pay; with few products a step neither (docs/performance.md).
  static constexpr bool kTakesTurns = kChannels == 64 && R == 3 && !(Pool::kWindow && sizeof(Element) == 4 && !kChannelsLast);
  // Four warps convert a slot, and a thread of them loads. Where stores are not in the consumers' way, two teams take turns, and a warp
  // of its own loads: what that takes, some 2,000 cycles of a thread, kept all of its team waiting. A slot is three turns of each of three
  // converters, or of the busiest of four.
  static constexpr int kConsumerWarps = 8, kTeams = kStoreWarps ? 2 : 1, kTeamWarps = 4, kProducerWarps = kTeams * kTeamWarps;
  static constexpr bool kLoadsApart = kStoreWarps > 0;  // by the fourth warp of the first team
  static constexpr int kConverters = kLoadsApart ? 3 : 4;
  static constexpr int kGatherWarps = kLoadsApart ? kTeams : kConverters;  // the fourth of each team, or all
  static constexpr int kThreads = 32 * (kProducerWarps + kConsumerWarps + kStoreWarps);
  static constexpr int kHalo = (R - 1) / kRows;  // slots that a step shares with the next

  static constexpr int kAlignment = 16 / int(sizeof(Element));  // columns
  static constexpr int kColumns = kStrip + S - 1 + (kShifted ? kAlignment - 1 : 0);  // that a step needs
  static constexpr int kRingColumns = (kColumns + 7) / 8 * 8;                         // rows of whole swizzle atoms
  // NCHW: two rows of fp32 are no multiple of the 32 banks; 16 channels: whole turns of the converters.
  static constexpr int kFloatColumns = kWide ? 136 : kShifted ? 76 : 68;
  static constexpr int kBoxColumns = kChannelsLast ? kColumns : kChannels == 16 ? 144 : sizeof(Element) == 4 ? kFloatColumns : kRingColumns;
  static constexpr int kBoxPixels = kRows * kBoxColumns;
  // Of rows that TMA cannot read. Of 16 bits what a step needs from an even column, or from the one before it, on. Of fp32 as many as TMA
  // brings: what converters find there says which steps are computed again, and the result is to have the same bits.
  static constexpr int kGatheredColumns = sizeof(Element) == 4 ? kBoxColumns : (kStrip + S + 1) / 2 * 2;
  static_assert(kColumns <= kBoxColumns && (kChannelsLast || (kBoxColumns * sizeof(Element)) % 16 == 0));
  static constexpr int kPixelBytes = kChannels * 2, kRowBytes = kRingColumns * kPixelBytes;
  static_assert(kRowBytes % (8 * kPixelBytes) == 0);
  // A stage a team is on its way, and one is converted. With few input channels reading further ahead gets in the way of the stores; where
  // warpgroups take turns and shared memory is left, it helps (16-bit NCHW, pooled: 0.45 -> 0.40).
  static constexpr bool kReadsAhead = kConverts && kChannels == 64 && !kWide && sizeof(Element) == 2;
  static constexpr int kSlots = kReadsAhead ? 6 : kConverts ? 4 : 8, kRawStages = kReadsAhead ? 3 : kConverts ? 2 * kTeams : 1;
  static constexpr int kRawPixels = kChannelsLast ? kRows * kRingColumns : kBoxPixels;
  static constexpr int kRawBytes = kConverts ? kChannels * kRawPixels * int(sizeof(Element)) : 128;
  // With 64 channels and 232 for the consumers ptxas serialises the wgmmas (C7512).
  static constexpr int kProducerRegisters = kChannels == 64 ? 24 : kStoreWarps ? 64 : 72;
  static constexpr int kConsumerRegisters = kChannels == 64 ? 240 : kStoreWarps ? 144 : 208;
  static constexpr int kMisfitWords = kClaims ? kClaims / 32 : kChannelsLast ? 128 : 256;

  // For the layout table: a step's conv outputs x output channels x input channels, its columns in the result.
  static constexpr int kStages = kSlots, kTile[3] = {kRows * kStrip, kOutputChannels, kChannels};
  static constexpr int kEpilogueTile[2] = {Pool::kWindow ? kStrip / 2 : kStrip, kOutputChannels};

  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Barrier = cutlass::arch::ClusterBarrier;
  // Warps stage 16 channels: x 32 pooled columns, as fp32, or x 2 rows x 64 columns. Pitches are free of bank conflicts for what
  // the accumulators' layout writes. channels_last: 16 channels of a pixel, in whole 16 bytes.
  static constexpr int kPixels = Pool::kWindow ? 32 : 128;  // of a warp's tile
  static constexpr int kStagingRow = 64 + 16 / int(sizeof(Element)), kStagingPitch = 36, kStagingPixel = sizeof(Element) == 4 ? 20 : 24;
  static constexpr int kRowsBytes = 32 * kStagingRow * int(sizeof(Element));
  // NCHW results leave in pairs where their rows begin at such.
  struct alignas(2 * sizeof(Element)) Pair {
    Element first, second;
  };
  // A channel of a wide tile (lines.hpp): a ring of a row and a line, and up to 48 bytes between channels.
  static constexpr int kLine = 128 / int(sizeof(Element)), kLineRing = kStrip + kLine;
  static constexpr int kLinesBytes = 16 * (kLineRing * int(sizeof(Element)) + 48);
  // A tile of the store warps: 8 channels x 2 rows x 128 columns. It also holds what redo.hpp stages.
  static constexpr int kTiles = kStoreWarps ? kConsumerWarps : 1;
  static constexpr int kRunPitch = 264, kRunBytes = 8 * kRunPitch * int(sizeof(Element));
  static constexpr int kStagingBytes = kChannelsLast     ? kPixels * kStagingPixel * int(sizeof(Element))
                                       : Pool::kWindow   ? 16 * kStagingPitch * 4
                                       : kWide           ? kLinesBytes
                                       : kStoreWarps > 0 ? cute::max(kRunBytes, kRowsBytes)
                                                         : kRowsBytes;

  struct SharedStorage {
    alignas(1024) uint8_t ring[kSlots][kRows][kRowBytes];
    alignas(128) uint8_t raw[kRawStages][kRawBytes];
    alignas(16) uint8_t staging[kConsumerWarps][kStagingBytes];
    Full raw_full[kRawStages], slot_full[kSlots];
    Barrier raw_empty[kRawStages], slot_empty[kSlots], turn[2], finished;
    Barrier run_full[kTiles], run_free[kTiles];  // storer.hpp
    uint32_t misfits[kGuarded ? kMisfitWords : 1];  // a bit a slot that the CTA read: a value in it does not fit fp16
    union {
      int32_t strays[kProducerWarps];  // of fp32: small values that a converter let pass in a slot
      int32_t odd[kRawStages];         // of 16 bits, gathered: whether a raw tile's first element lies at no multiple of 4 bytes
    };
    uint32_t converted[kProducerWarps];             // the slot that a converter is at
    struct {
      Work work;
      int column, image, row, left;
      uint32_t n, slot;
    } loads[kGathers ? kGatherWarps : 1];           // where the next load is; of each warp that gathers
    struct {
      int image, row, column;
    } gathered[kGathers ? kGatherWarps : 1];        // where the tile is that a warp gathers
    uint32_t found[2][kConverters];                 // redo.hpp
    struct {
      uint32_t left, tiles, slots, turn;
    } redo[kConverters];                            // redo.hpp
    int2 pass[kSlots];                              // redo.hpp: {exponent, input slot of the step * 2 + whether it is that one's last}
    int32_t any_misfit;
    Work work;        // all of the CTA's
    uint32_t slots;   // that it reads; of claims known at the end
    Barrier claimed[Claims::kBarriers];
    int32_t claims[kClaims + 1];  // -1 ends them
    uint32_t claims_known;
    uint32_t misfit_shift;  // slots of a bit in `misfits`, as a power of two
  };
  static constexpr int SharedStorageSize = sizeof(SharedStorage) + 1024;  // dynamic shared memory is aligned by hand
  // A block may have 227 kB. A packing block beside it (kernels/pack.cu) takes the 1 kB that the system takes of every block.
  static_assert(SharedStorageSize <= 232448 - 1024);
};

// Filled by cutlass_ops/fused.py.
template <class Chain>
struct Params {
  cute::TmaDescriptor input;  // tiled (W, H, C, N), or (C, W, H, N) for channels_last; unused where x is gathered
  typename Chain::Params chain;
  uint4 const* weights;  // kernels/pack.cu's fragments
  float const* scales;   // and what its power-of-two scaling of each output channel is undone with
  void const* x;
  void* output;
  int32_t* counters;  // claims of each member of the teams beyond those that are dealt
  float pool_scale;
  int32_t n, k, out_h, out_w;    // of the result
  int32_t c, h, w;               // of x
  int32_t gathered;              // elements at whose multiples rows begin, 1 or 2, where they are gathered; 0: TMA reads x
  int32_t steps;                 // of an image: kRows rows of the convolution each
  int32_t claim_shift;           // steps of a claim, as a power of two
  int32_t padding_h, padding_w;
  int32_t shift;                 // columns that a tile starts early
  int32_t strips, channel_blocks;
  int32_t box_bytes;             // of a slot's loads
};

// Volatile: what follows from them is computed anew instead of kept, and spilled.
CUTLASS_DEVICE int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
CUTLASS_DEVICE int warp_index() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return int(thread / 32);
}

// Stage and phase of a ring's n-th use.
template <int Stages>
struct Use {
  uint32_t index, phase;
  CUTLASS_DEVICE explicit Use(uint32_t n) : index(n % Stages), phase(n / Stages % 2) {}
};

}  // namespace cutlass_ops::fused
