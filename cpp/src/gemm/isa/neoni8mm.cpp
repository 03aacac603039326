// NEON with matrix products (Armv8.6 i8mm): smmla multiplies 2 rows by 2 columns over 8 k at once.
#include "gemm/instantiate.h"
#include "gemm/isa/dot_neon.h"

namespace moepack::gemm {
namespace {

struct NeonI8mm : DotNeon {
  static constexpr int tile_rows = 4;

  template <int M>
  static void int4_block(const std::uint8_t* cells, const std::int8_t* const* a, Int* sum) {
    nibble_block<M>(cells, a, sum, nibbles);
  }
  template <int M>
  static void mxfp4_block(const std::uint8_t* cells, const std::int8_t* const* a, Int* sum) {
    nibble_block<M>(cells, a, sum, mxfp4);
  }

  // Rows go through smmla in pairs; a last odd one takes sdot.
  template <int M, class Load>
  static void nibble_block(const std::uint8_t* cells, const std::int8_t* const* a, Int* sum, Load load) {
    Pair pairs[M / 2] = {};
    for (int c = 0; c < 4; ++c, cells += 64) {
      const Nibbles w = load(cells);
      for (int p = 0; p < M / 2; ++p) pairs[p].mac(w.k0, w.k4, a[2 * p] + 8 * c, a[2 * p + 1] + 8 * c);
      if constexpr (M % 2) mac(sum[M - 1], w, a[M - 1] + 8 * c);
    }
    for (int p = 0; p < M / 2; ++p) pairs[p].add_to(sum[2 * p], sum[2 * p + 1]);
  }

  template <int M>
  static void int8_block(const std::uint8_t* cells, const std::int8_t* const* a, Int* sum) {
    Pair pairs[M / 2] = {};
    for (int c = 0; c < 4; ++c, cells += 128) {
      const Bytes k0 = bytes(cells), k4 = bytes(cells + 64);
      for (int p = 0; p < M / 2; ++p) pairs[p].mac(k0.columns, k4.columns, a[2 * p] + 8 * c, a[2 * p + 1] + 8 * c);
      if constexpr (M % 2) {
        mac(sum[M - 1], k0, a[M - 1] + 8 * c);
        mac(sum[M - 1], k4, a[M - 1] + 8 * c + 4);
      }
    }
    for (int p = 0; p < M / 2; ++p) pairs[p].add_to(sum[2 * p], sum[2 * p + 1]);
  }

 private:
  // Sums of two rows: register j holds columns 2j and 2j+1 of the first row, then of the second.
  struct Pair {
    int32x4_t sums[8];

    // k0 and k4: k = 0..3 and 4..7 of 4 columns a register. Zipped, a register has all 8 k of two columns.
    void mac(const int8x16_t* k0, const int8x16_t* k4, const std::int8_t* first, const std::int8_t* second) {
      const int8x16_t rows = vcombine_s8(vld1_s8(first), vld1_s8(second));
      for (int i = 0; i < 4; ++i) {
        const int32x4_t low = vreinterpretq_s32_s8(k0[i]), high = vreinterpretq_s32_s8(k4[i]);
        sums[2 * i] = vmmlaq_s32(sums[2 * i], rows, vreinterpretq_s8_s32(vzip1q_s32(low, high)));
        sums[2 * i + 1] = vmmlaq_s32(sums[2 * i + 1], rows, vreinterpretq_s8_s32(vzip2q_s32(low, high)));
      }
    }

    void add_to(Int& first, Int& second) const {
      for (int i = 0; i < 4; ++i) {
        const int32x4_t a = sums[2 * i], b = sums[2 * i + 1];
        first.v[i] = vaddq_s32(first.v[i], vcombine_s32(vget_low_s32(a), vget_low_s32(b)));
        second.v[i] = vaddq_s32(second.v[i], vcombine_s32(vget_high_s32(a), vget_high_s32(b)));
      }
    }
  };
};

}  // namespace

extern const Kernel neoni8mm_kernel;
const Kernel neoni8mm_kernel = instantiate<NeonI8mm>("neoni8mm");

}  // namespace moepack::gemm
