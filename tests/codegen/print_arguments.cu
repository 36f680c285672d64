// Host program of test_params_golden.py, below the types of a generated kernel: what does CUTLASS itself tell the driver?
#include <cstdio>
#include <cstdlib>
#include <cstring>

// CUTLASS calls the driver directly here (CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL): print its arguments, mark the descriptor.
template <class T>
static void list(char const* name, T const* values, int count) {
  printf(", \"%s\": [", name);
  for (int i = 0; i < count; ++i) printf(i ? ", %lld" : "%lld", (long long)values[i]);
  printf("]");
}

static int encoded = 0;

static void head(char const* call, CUtensorMap* map, int type, unsigned rank, void* address) {
  memset(map, 0xA0 + ++encoded, sizeof(*map));
  printf("{\"call\": \"%s\", \"type\": %d, \"rank\": %u, \"address\": %llu", call, type, rank, (unsigned long long)address);
}

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                           cuuint64_t const* extents, cuuint64_t const* strides, cuuint32_t const* box,
                                           cuuint32_t const* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  head("tiled", map, type, rank, address);
  list("extents", extents, rank), list("strides", strides, rank - 1), list("box", box, rank), list("steps", steps, rank);
  printf(", \"interleave\": %d, \"swizzle\": %d, \"fill\": %d}\n", interleave, swizzle, fill);
  return CUDA_SUCCESS;
}

extern "C" CUresult cuTensorMapEncodeIm2col(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                            cuuint64_t const* extents, cuuint64_t const* strides, int const* lower, int const* upper,
                                            cuuint32_t channels, cuuint32_t pixels, cuuint32_t const* steps,
                                            CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                            CUtensorMapFloatOOBfill fill) {
  head("im2col", map, type, rank, address);
  list("extents", extents, rank), list("strides", strides, rank - 1), list("lower", lower, rank - 2), list("upper", upper, rank - 2);
  list("steps", steps, rank);
  printf(", \"channels\": %u, \"pixels\": %u", channels, pixels);
  printf(", \"interleave\": %d, \"swizzle\": %d, \"fill\": %d}\n", interleave, swizzle, fill);
  return CUDA_SUCCESS;
}

// Offset in the kernel's parameter of the one place where CUTLASS wrote these bytes.
template <class T>
static void find(char const* name, Epilogue::Params const& params, T const& value) {
  auto const* bytes = reinterpret_cast<unsigned char const*>(&params);
  int found = -1, count = 0;
  for (int i = 0; i + sizeof(T) <= sizeof(params); i += alignof(T) < 4 ? 4 : alignof(T))
    if (!memcmp(bytes + i, &value, sizeof(T))) found = i, ++count;
  printf("{\"field\": \"%s\", \"count\": %d, \"offset\": %d}\n", name, count, found + int(__builtin_offsetof(Kernel::Params, epilogue)));
}

int main(int argc, char** argv) {
  int v[13];
  for (int i = 0; i < 13; ++i) v[i] = atoi(argv[i + 1]);
  auto [n, h, w, c, k, r, s, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w] = v;
  cutlass::conv::ConvProblemShape<cutlass::conv::Operator::kFprop, 2> shape(
      cutlass::conv::Mode::kCrossCorrelation, {n, h, w, c}, {int64_t(h) * w * c, int64_t(w) * c, c, 1}, {k, r, s, c},
      {int64_t(r) * s * c, int64_t(s) * c, c, 1}, {padding_h, padding_w}, {padding_h, padding_w}, {stride_h, stride_w},
      {dilation_h, dilation_w}, 1);
  auto const* a = reinterpret_cast<cutlass::half_t const*>(0x100000000);
  auto const* b = reinterpret_cast<cutlass::half_t const*>(0x200000000);
  auto* d = reinterpret_cast<float*>(0x300000000);
  auto const* bias = reinterpret_cast<float const*>(0x1122334455667788);
  Mainloop::to_underlying_arguments(shape, {a, b}, nullptr);

  int const m = shape.shape_C[0] * shape.shape_C[1] * shape.shape_C[2];
  int64_t const ld = (k + 3) / 4 * 4;
  Epilogue::Arguments arguments{};
  arguments.thread = {{{{{}, {bias}, {}}, {{1234.5f}}, {}}, {}}, {{987.25f}}, {}};
  arguments.ptr_D = d;
  arguments.dD = {ld, {}, {}};
  auto params = Epilogue::to_underlying_arguments(cute::make_shape(m, k, c * r * s, 1), arguments, nullptr);
  find("bias", params, bias);
  find("subtract1", params, 1234.5f);
  find("subtract2", params, 987.25f);
  CUtensorMap output;
  memset(&output, 0xA0 + encoded, sizeof(output));
  find("output", params, output);
  printf("{\"field\": \"size\", \"count\": 1, \"offset\": %d}\n", int(sizeof(Kernel::Params)));
}
