// Steps with values that fp16 cannot hold are computed once more, before the CTA ends, as exactly as with TF32 operands.
//
// The inputs of a step are taken slot by slot, and each slot's are split by magnitude into windows of 28 binades, from the largest
// value down. A pass per window scales its values by a power of two to fp16's normal range, zeroes all others, and multiplies what of
// the step reads this slot; the passes' results are scaled back and added in fp32. So every value keeps 11 significant bits, as in TF32,
// whatever else the step holds. Nearly always one window holds everything. Infinities and NaN belong to the first pass.
//
// Passes run over 32 columns at a time: 16 accumulators and 16 partial sums a row take the registers of the 32 accumulators.
#pragma once

#include "cutlass_ops/fused/consumer.hpp"
#include "cutlass_ops/fused/producer.hpp"

namespace cutlass_ops::fused {

template <class Tile, class Chain, class Params>
struct Redo {
  using SharedStorage = typename Tile::SharedStorage;
  using Produce = Producer<Tile, Params>;
  using Convert = typename Produce::Convert;
  using Consume = Consumer<Tile, Chain, Params>;
  static constexpr int kBinades = 28, kTop = 14;  // the largest value is scaled to [2^14, 2^15)
  static constexpr int kConverters = Tile::kTeamWarps - 1;  // here the first of the producer warps loads, and nothing else
  static constexpr bool kLacks = Tile::kConverters > kConverters;  // an arrival at the barriers of converters
  static constexpr int kInputs = Tile::kHalo + 1;  // slots of a step
  static constexpr uint32_t kInfinity = 0x7f800000u;
  static constexpr uint32_t kLastPass = (kInputs - 1) * 2 + 1;  // of a step: in `pass` the input slot stands before whether it is its last

  CUTLASS_DEVICE static bool marked(SharedStorage const& storage, uint32_t slot) {
    uint32_t const bit = slot >> storage.misfit_shift;
    return storage.misfits[bit / 32] >> (bit % 32) & 1;
  }
  CUTLASS_DEVICE static bool reads_marked(SharedStorage const& storage, uint32_t slot) {
    bool any = false;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) any |= marked(storage, slot + k);
    return any;
  }
  // Calls visit(segment, step, how many came before) for every marked step.
  template <class Visit>
  CUTLASS_DEVICE static void for_each(Params const& params, SharedStorage const& storage, Visit&& visit) {
    uint32_t slot = 0, count = 0;
    typename Tile::Work work = storage.work;
    for (Segment segment; work.template next<false>(params, storage, segment);) {
#pragma unroll 1
      for (int i = 0; i < segment.count; ++i, ++slot)
        if (reads_marked(storage, slot)) visit(segment, i, count++);
      slot += Tile::kHalo;
    }
  }

  // Raw tiles of the marked steps; they follow the others in the ring. Both halves of a step read them all. By a thread, or a warp where
  // Tile::kGathers. What its first lane knows lies in shared memory: registers are few.
  CUTLASS_DEVICE static void load_all(Params const& params, SharedStorage& storage) {
    auto& at = storage.loads[0];  // `row` counts steps here, and `left` is of the segment
    if (lane_index() == 0) at.work = storage.work, at.left = 0, at.n = storage.slots, at.slot = -Tile::kHalo;
    while (true) {
      if (lane_index() == 0) find_step(params, storage);
      if constexpr (Tile::kGathers) __syncwarp();
      if (!at.left) return;
      uint32_t const input = (at.n - storage.slots) % kInputs;
      Produce::template load<1>(params, storage, at.n, at.image, Tile::kRows * (at.row + int(input)) - params.padding_h, at.column);
      if (kLacks) Produce::give_back(params, storage, at.n);  // as a converter, which this warp is not here
      if constexpr (Tile::kGathers) __syncwarp();
      if (lane_index() == 0) ++at.n;
    }
  }
  // Goes on to the next marked step where all tiles of one are loaded; at the end nothing is left.
  CUTLASS_DEVICE static void find_step(Params const& params, SharedStorage& storage) {
    auto& at = storage.loads[0];
    if ((at.n - storage.slots) % (2 * kInputs)) return;
    if (at.left) --at.left, ++at.row, ++at.slot;
    while (!at.left || !reads_marked(storage, at.slot)) {
      if (at.left) {
        --at.left, ++at.row, ++at.slot;
        continue;
      }
      Segment segment;
      if (!at.work.template next<false>(params, storage, segment)) return;
      at.image = segment.image, at.row = segment.step, at.left = segment.count, at.slot += Tile::kHalo;
    }
  }

  CUTLASS_DEVICE static float power_of_two(int exponent) { return __uint_as_float(uint32_t(max(exponent, -126) + 127) << 23); }

  // Where a converter is: how many raw tiles are left, uses of both rings and of `found`. In shared memory: registers are few.
  CUTLASS_DEVICE static auto& own(SharedStorage& storage) { return storage.redo[converter_index()]; }
  CUTLASS_DEVICE static int converter_index() { return warp_index() - 1; }

  // The largest of what the converters found.
  CUTLASS_DEVICE static uint32_t largest_of_all(SharedStorage& storage, uint32_t mine) {
    mine = __reduce_max_sync(0xffffffffu, mine);
    uint32_t const turn = own(storage).turn;
    auto& found = storage.found[turn % 2];
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      found[converter_index()] = mine;
      own(storage).turn = turn + 1;
    }
    asm volatile("" ::: "memory");  // which the barrier does not say itself
    cutlass::arch::NamedBarrier::sync(kConverters * 32, 1);
    asm volatile("" ::: "memory");
    uint32_t all = 0;
    for (int i = 0; i < kConverters; ++i) all = max(all, found[i]);
    return all;
  }

  // Values in [low, limit) of a raw tile into a slot, scaled by 2^exponent. Returns the largest magnitude below `low`.
  // Scaling is done in two multiplications, since 2^exponent alone may be out of range; both are exact.
  CUTLASS_DEVICE static uint32_t convert(uint32_t raw, uint32_t slot, uint32_t low, uint32_t limit, int exponent, bool write) {
    uint32_t rest = 0;
    float const first = power_of_two(exponent / 2), second = power_of_two(exponent - exponent / 2);
#pragma unroll 1
    for (typename Convert::template Walk<kConverters> walk(raw, slot, converter_index()); walk.valid(); walk.advance()) {
      auto const scaled = [&](float v) {
        uint32_t const magnitude = __float_as_uint(v) & 0x7fffffffu;
        if (magnitude < low) rest = max(rest, magnitude);
        bool const special = magnitude >= kInfinity && limit == kInfinity;
        return special ? v : magnitude >= low && magnitude < limit ? v * first * second : 0.f;
      };
#pragma unroll 1
      for (int part = 0; part < Convert::kParts; ++part) {
        float4 const v = Convert::load(walk, part);
        uint32_t const first = halves(scaled(v.x), scaled(v.y)), second = halves(scaled(v.z), scaled(v.w));
        if (write) Convert::store(walk, part, first, second);
      }
    }
    return rest;
  }

  // Raw tiles come in the order that consumers need them in, so that their number is all that a converter must know.
  CUTLASS_DEVICE static void convert_all(Params const& params, SharedStorage& storage) {
    uint32_t marked = 0;
    for_each(params, storage, [&](Segment const&, int, uint32_t) { ++marked; });
    if (lane_index() == 0) own(storage) = {marked * 2 * kInputs, storage.slots, storage.slots, 0};
    __syncwarp();
    while (own(storage).left) {
      Use<Tile::kRawStages> const raw(own(storage).tiles);
      storage.raw_full[raw.index].wait(raw.phase);
      convert_tile(storage);
      Produce::give_back(params, storage, own(storage).tiles);
      __syncwarp();
      if (lane_index() == 0) ++own(storage).tiles, --own(storage).left;
      __syncwarp();
    }
  }

  // The passes of a raw tile, from the largest values to the smallest.
  CUTLASS_DEVICE static void convert_tile(SharedStorage& storage) {
    uint32_t rest = 0, limit = kInfinity;
    rest = convert(raw_address(storage, own(storage).tiles), 0, kInfinity, kInfinity, 0, false);
    uint32_t largest = largest_of_all(storage, rest);
    bool last;
    do {
      // Subnormal numbers have the exponent of the smallest normal one.
      int const exponent = max(int(largest >> 23), 1) - 127;
      uint32_t const low = exponent > kBinades - 126 ? uint32_t(exponent - kBinades + 128) << 23 : 0;
      {
        Use<Tile::kSlots> const slot(own(storage).slots);
        storage.slot_empty[slot.index].wait(slot.phase ^ 1);
        uint32_t const raw = raw_address(storage, own(storage).tiles);
        rest = convert(raw, Produce::slot_address(storage, slot.index), low, limit, kTop - exponent, true);
      }
      largest = largest_of_all(storage, rest);
      limit = low, last = largest == 0;
      uint32_t const slot = Use<Tile::kSlots>(own(storage).slots).index;
      if (threadIdx.x == 32) storage.pass[slot] = make_int2(exponent - kTop, int((own(storage).tiles - storage.slots) % kInputs * 2 + last));
      Produce::hand_over(storage, slot);
      if (kLacks && threadIdx.x == 32) storage.slot_full[slot].arrive();  // for the warp that loads
      __syncwarp();
      if (lane_index() == 0) ++own(storage).slots;
      __syncwarp();
    } while (!last);
  }
  CUTLASS_DEVICE static uint32_t raw_address(SharedStorage& storage, uint32_t n) {
    return Produce::raw_address(storage, Use<Tile::kRawStages>(n).index);
  }

  CUTLASS_DEVICE static void consume(Params const& params, SharedStorage& storage, typename Consume::Place place,
                                     typename Consume::Weights const& weights) {
    // What follows from them is computed anew: kept from the loop before, it would spill.
    for (int* value : {&place.warp, &place.lane, &place.group, &place.quad, &place.channel0, &place.column}) Consume::Store::keep(*value);
    uint32_t n = storage.slots;
    int const channels[2] = {place.channel0 + place.group, place.channel0 + place.group + 8};
    auto* staging = storage.staging[place.warp];
    uint32_t const ring = Consume::ring_base(params, storage, place);
    for_each(params, storage, [&](Segment const& segment, int i, uint32_t) {
      Segment const step{segment.image, segment.step + i, 1};
      Lines<Tile> const lines(params, place, step, true, true);  // of a wide tile
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        float sums[2][16] = {};
        // The passes of the step's input slots, one after the other.
        bool more;
#pragma unroll 1
        do {
          Use<Tile::kSlots> const slot(n++);
          storage.slot_full[slot.index].wait(slot.phase);
          asm volatile("" ::: "memory");  // which the barrier does not say itself
          int2 const pass = storage.pass[slot.index];
          more = pass.y != int(kLastPass);
          float upper[16], lower[16];
          auto const multiply = [&](auto chosen) {
            constexpr int kInput = decltype(chosen)::value;
            if constexpr (kInput < kInputs)
              Consume::template multiply<kInput, kInput>(upper, lower, weights,
                                                         {ring + half * 32 * (Tile::kPixelBytes / 16) + slot.index * Consume::kSlotUnits});
            Consume::wait_for_products(upper, lower);
          };
          if (pass.y >> 1 == 0) {
            multiply(cute::Int<0>{});
          } else if (pass.y >> 1 == 1) {
            multiply(cute::Int<1>{});
          } else {
            multiply(cute::Int<2>{});
          }
          __syncwarp();
          if (place.lane == 0) storage.slot_empty[slot.index].arrive();
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            // Volatile, and the channel anew: what is kept from step to step would spill.
            float const scale = *static_cast<float const volatile*>(params.scales + place.channel0 + lane_index() / 4 + 8 * c);
            int const exponent = min(max(pass.x + ilogbf(scale), -252), 254);
            float const first = power_of_two(exponent / 2), second = power_of_two(exponent - exponent / 2);
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
              for (int j = 4 * b + 2 * c; j < 4 * b + 2 * c + 2; ++j) {
                sums[0][j] += upper[j] * first * second;
                sums[1][j] += lower[j] * first * second;
              }
          }
        } while (more);
        typename Consume::State const chain[2] = {Consume::load_chain(params, channels[0], 1.f), Consume::load_chain(params, channels[1], 1.f)};
        if constexpr (Tile::kWide) {
          Consume::template stage_lines<0, 2>(lines, chain, sums[0], sums[1], staging, half * 32);
        } else {
          Consume::stage(params, place, staging, chain, sums[0], sums[1], 0, half);
        }
      }
      __syncwarp();
      if constexpr (Tile::kWide) {
        lines.template store<0, 16>(staging);
      } else {
        typename Consume::Store const to(params, place);
        Consume::template store<1>(params, to, place, staging, to.start(params, place, step), Consume::rows_of(params, step.step));
      }
      __syncwarp();
    });
  }
};

}  // namespace cutlass_ops::fused
