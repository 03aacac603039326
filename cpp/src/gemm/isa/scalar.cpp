// The reference: every operation of an instruction set in plain C++, 16 or 8 lanes at a time. All others are compared
// with it.
#include "gemm/instantiate.h"

namespace moepack::gemm {
namespace {

// What every vector does, of 16 lanes or of 8.
template <int N>
struct Lanes {
  struct Float {
    float v[N];
  };
  struct Int {
    std::int32_t v[N];
  };

  template <class F>
  static Float lanes(F f) {
    Float result;
    for (int l = 0; l < N; ++l) result.v[l] = f(l);
    return result;
  }
  template <class F>
  static Int int_lanes(F f) {
    Int result;
    for (int l = 0; l < N; ++l) result.v[l] = f(l);
    return result;
  }

  static Float broadcast(float x) {
    return lanes([=](int) { return x; });
  }
  static Float load(const float* p) {
    return lanes([=](int l) { return p[l]; });
  }
  static Float load_single(const std::uint8_t* p) {
    Float result;
    __builtin_memcpy(&result, p, sizeof result);
    return result;
  }
  static void store(float* p, const Float& a) {
    for (int l = 0; l < N; ++l) p[l] = a.v[l];
  }
  static Float add(const Float& a, const Float& b) {
    return lanes([&](int l) { return a.v[l] + b.v[l]; });
  }
  static Float mul(const Float& a, const Float& b) {
    return lanes([&](int l) { return a.v[l] * b.v[l]; });
  }
  static Float fma(const Float& a, const Float& b, const Float& c) {
    return lanes([&](int l) { return __builtin_fmaf(a.v[l], b.v[l], c.v[l]); });
  }
  static Float to_float(const Int& a) {
    return lanes([&](int l) { return static_cast<float>(a.v[l]); });
  }
  static Int broadcast_int(std::int32_t x) {
    return int_lanes([=](int) { return x; });
  }
  static Int start_int8(std::int32_t) { return broadcast_int(0); }
};

struct Scalar : Lanes<kLanes> {
  static constexpr int tile_rows = 1;
  static constexpr int float_rows = 1;

  using Partial = Int;
  struct Nibbles {
    const std::uint8_t* cell;
  };
  struct Mxfp4 {
    const std::uint8_t* cell;
  };
  struct Bytes {
    const std::uint8_t* cell;
  };

  static Float load_half(const std::uint8_t* p) {
    return lanes([=](int l) { return half(static_cast<std::uint32_t>(p[2 * l] | p[2 * l + 1] << 8)); });
  }
  static Float load_e8m0(const std::uint8_t* p) {
    return lanes([=](int l) { return from_bits(static_cast<std::uint32_t>(p[l]) << 23); });
  }
  static Float load_fp8(const std::uint8_t* p) {
    return lanes([=](int l) { return half(static_cast<std::uint32_t>((p[l] & 0x80) << 8 | (p[l] & 0x7f) << 7)); });
  }

  static Float sub(const Float& a, const Float& b) {
    return lanes([&](int l) { return a.v[l] - b.v[l]; });
  }
  static Float div(const Float& a, const Float& b) {
    return lanes([&](int l) { return a.v[l] / b.v[l]; });
  }
  static Float min(const Float& a, const Float& b) {
    return lanes([&](int l) { return a.v[l] < b.v[l] ? a.v[l] : b.v[l]; });
  }
  static Float max(const Float& a, const Float& b) {
    return lanes([&](int l) { return a.v[l] > b.v[l] ? a.v[l] : b.v[l]; });
  }
  static Float select_less(const Float& a, const Float& b, const Float& then, const Float& otherwise) {
    return lanes([&](int l) { return a.v[l] < b.v[l] ? then.v[l] : otherwise.v[l]; });
  }
  static Float negate(const Float& a) {
    return lanes([&](int l) { return -a.v[l]; });
  }
  static Float rint(const Float& a) {
    return lanes([&](int l) { return __builtin_rintf(a.v[l]); });
  }
  // 2^n for whole n in [-126, 127]; anything for NaN.
  static Float pow2(const Float& n) {
    return lanes([&](int l) {
      const std::uint32_t bits =
          n.v[l] == n.v[l] ? static_cast<std::uint32_t>(static_cast<int>(n.v[l]) + 127) << 23 : 0;
      return from_bits(bits);
    });
  }

  static Int absolute_bits(const Float& a) {
    return int_lanes([&](int l) {
      std::int32_t bits;
      __builtin_memcpy(&bits, &a.v[l], sizeof bits);
      return bits & 0x7fffffff;
    });
  }
  static Int max_int(const Int& a, const Int& b) {
    return int_lanes([&](int l) { return a.v[l] > b.v[l] ? a.v[l] : b.v[l]; });
  }
  static std::int32_t reduce_max(const Int& a) {
    std::int32_t result = a.v[0];
    for (int l = 1; l < kLanes; ++l) result = a.v[l] > result ? a.v[l] : result;
    return result;
  }
  static void store_codes(std::int8_t* p, const Float& a) {
    for (int l = 0; l < kLanes; ++l) p[l] = static_cast<std::int8_t>(a.v[l]);
  }

  static void prefetch(const std::uint8_t*) {}

  // A sum of 32 k begins and ends in a Partial; where that is an Int, it goes on from the sum so far.
  static Partial begin(const Int& sum) { return sum; }
  static Int end(const Partial& partial, const Int&) { return partial; }

  static Nibbles nibbles(const std::uint8_t* cell) { return {cell}; }
  static Mxfp4 mxfp4(const std::uint8_t* cell) { return {cell}; }
  static Bytes bytes(const std::uint8_t* cell) { return {cell}; }
  static void mac(Partial& sum, const Nibbles& w, const std::int8_t* a) {
    for (int c = 0; c < kLanes; ++c)
      for (int j = 0; j < 4; ++j) {
        const int byte = w.cell[4 * c + j];
        sum.v[c] += (byte & 15) * a[j] + (byte >> 4) * a[4 + j];
      }
  }
  static void mac(Partial& sum, const Mxfp4& w, const std::int8_t* a) {
    constexpr int twice_plus_12[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    for (int c = 0; c < kLanes; ++c)
      for (int j = 0; j < 4; ++j) {
        const int byte = w.cell[4 * c + j];
        sum.v[c] += twice_plus_12[byte & 15] * a[j] + twice_plus_12[byte >> 4] * a[4 + j];
      }
  }
  static void mac(Int& sum, const Bytes& w, const std::int8_t* a) {
    for (int c = 0; c < kLanes; ++c)
      for (int j = 0; j < 4; ++j) sum.v[c] += static_cast<std::int8_t>(w.cell[4 * c + j]) * a[j];
  }

  struct Half : Lanes<kHalfLanes> {
    struct NibblePieces {
      static constexpr int k = 8;
      static Nibbles load(const std::uint8_t* piece) { return {piece}; }

      struct Sums : Int {
        void mac(const Nibbles& w, const std::int8_t* a) {
          constexpr int rows[] = {0, 1, 4, 5};
          for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 8; ++j) {
              const int byte = w.cell[8 * i + j];
              v[rows[i]] += (byte & 15) * a[j];
              v[rows[i] + 2] += (byte >> 4) * a[j];
            }
        }
        Int fold(const Int& sum) const { return sums(*this, sum); }
      };
    };

    struct BytePieces {
      static constexpr int k = 8;
      static Bytes load(const std::uint8_t* piece) { return {piece}; }

      struct Sums : Int {
        void mac(const Bytes& w, const std::int8_t* a) {
          for (int row = 0; row < 8; ++row)
            for (int j = 0; j < 8; ++j) v[row] += static_cast<std::int8_t>(w.cell[8 * row + j]) * a[j];
        }
        Int fold(const Int& sum) const { return sums(*this, sum); }
      };
    };

   private:
    static Int sums(const Int& a, const Int& b) {
      return int_lanes([&](int l) { return a.v[l] + b.v[l]; });
    }
  };

 private:
  static float from_bits(std::uint32_t bits) {
    float result;
    __builtin_memcpy(&result, &bits, sizeof result);
    return result;
  }
  static float half(std::uint32_t h) {
    const std::uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent > 0) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
};

}  // namespace

extern const Kernel scalar_kernel;
const Kernel scalar_kernel = instantiate<Scalar>("scalar");

}  // namespace moepack::gemm
