#include "moepack/packed.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "made.h"
#include "plain.h"

namespace moepack {
namespace {

using Bytes = std::vector<std::uint8_t>;
using made::contains;

const RowOrder kOrders[] = {RowOrder::plain, RowOrder::gate_up};

// Rows and columns around the edges of panels, groups and activation groups.
std::vector<std::pair<std::int64_t, std::int64_t>> shapes(RowOrder order) {
  if (order == RowOrder::gate_up) return {{2, 1}, {2, 32}, {30, 33}, {32, 31}, {34, 100}, {66, 129}};
  return {{1, 1}, {1, 32}, {15, 31}, {16, 33}, {17, 127}, {33, 129}, {48, 256}};
}

void put(Bytes& bytes, std::size_t at, const Bytes& content) {
  std::copy(content.begin(), content.end(), bytes.begin() + static_cast<std::ptrdiff_t>(at));
}

std::string refusal(const Bytes& blob) {
  PackedHeader header;
  return read_header(blob.data(), static_cast<std::int64_t>(blob.size()), header).message();
}

TEST(Packed, Sizes) {
  const std::pair<const char*, int> expected[] = {{"int4-g32", 288}, {"int4-g64", 544},  {"int4-g128", 1056},
                                                  {"int8-g32", 544}, {"int8-g64", 1056}, {"int8-g128", 2080},
                                                  {"mxfp4", 272},    {"fp8-b128", 2112}};
  for (const auto& [name, bytes] : expected) EXPECT_EQ(group_bytes(*find_scheme(name)), bytes) << name;
  const Scheme& scheme = *find_scheme("int4-g32");
  EXPECT_EQ(packed_bytes(scheme, 17, 33, RowOrder::plain), 64 + 2 * 2 * 288);
  EXPECT_EQ(packed_bytes(scheme, 34, 33, RowOrder::gate_up), 64 + 4 * 2 * 288);
  EXPECT_EQ(packed_bytes(scheme, 2, 1, RowOrder::gate_up), 64 + 2 * 288);
  EXPECT_EQ(packed_bytes(scheme, 1 << 30, 1 << 20, RowOrder::plain), 64 + (std::int64_t{1} << 46) * 9);
}

// Written by hand from packed-format.md; the checksum is zlib's.
TEST(Packed, GoldenInt4) {
  Bytes golden(64 + 288, 0x88);
  put(golden, 0, {'M', 'O', 'E', 'P', 1, 0, 1, 0, 2, 0, 0, 0, 6, 0, 0, 0, 32, 0, 0, 0, 0xfb, 0xff, 0xff, 0xff});
  put(golden, 24, {0x63, 0xd5, 0x2f, 0x18, 0, 0});
  std::fill(golden.begin() + 30, golden.begin() + 64, std::uint8_t{0});
  put(golden, 64, {0x79, 0xd0, 0x8f, 0x88, 0xa7, 0x68, 0x8b, 0x83});
  std::fill(golden.end() - 32, golden.end(), std::uint8_t{0});
  put(golden, 64 + 256, {0x00, 0x3c, 0x00, 0xb8});

  const made::Matrix m{find_scheme("int4-g32"), 2, 6, -5, {1, -8, 7, 0, -1, 5, -1, 0, 3, -5, 2, -2}, {0x3c00, 0xb800}};
  EXPECT_EQ(m.pack(RowOrder::plain), golden);
}

TEST(Packed, GoldenInt8GateUp) {
  Bytes golden(64 + 2 * 544, 0);
  put(golden, 0, {'M', 'O', 'E', 'P', 1, 0, 2, 0, 2, 0, 0, 0, 5, 0, 0, 0, 32, 0, 0, 0, 3, 0, 0, 0});
  put(golden, 24, {0x4f, 0x31, 0x9b, 0xe7, 1, 0});
  put(golden, 64, {127, 0x81, 1, 0});   // gate, k = 0..3
  put(golden, 64 + 64, {0xfe});         // k = 4
  put(golden, 64 + 512, {0x55, 0x35});  // its scale
  put(golden, 64 + 544, {5, 6, 7, 8});  // up
  put(golden, 64 + 544 + 64, {9});
  put(golden, 64 + 544 + 512, {0x01, 0x00});

  const made::Matrix m{find_scheme("int8-g32"), 2, 5, 3, {127, -127, 1, 0, -2, 5, 6, 7, 8, 9}, {0x3555, 0x0001}};
  EXPECT_EQ(m.pack(RowOrder::gate_up), golden);
}

TEST(Packed, GoldenMxfp4) {
  Bytes golden(64 + 272, 0);
  put(golden, 0, {'M', 'O', 'E', 'P', 1, 0, 3, 0, 2, 0, 0, 0, 6, 0, 0, 0, 32});
  put(golden, 64, {0xc1, 0x7f, 0x08, 0x02, 0x39, 0x00, 0x04, 0x05});
  put(golden, 64 + 256, {127, 120});
  const std::uint32_t crc = made::crc32(golden, 64);
  std::memcpy(golden.data() + 24, &crc, 4);

  const made::Matrix m{find_scheme("mxfp4"), 2, 6, 0, {1, 15, 8, 2, 12, 7, 9, 0, 4, 5, 3, 0}, {}, {127, 120}, {}};
  EXPECT_EQ(m.pack(RowOrder::plain), golden);
}

TEST(Packed, GoldenFp8) {
  Bytes golden(64 + 2112, 0);
  put(golden, 0, {'M', 'O', 'E', 'P', 1, 0, 4, 0, 2, 0, 0, 0, 3, 0, 0, 0, 128});
  for (int k = 0; k < 3; ++k)
    put(golden, static_cast<std::size_t>(64 + 16 * k), {static_cast<std::uint8_t>(0x38 + k), 0xfe});
  put(golden, 64 + 2048, {0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0});
  const std::uint32_t crc = made::crc32(golden, 64);
  std::memcpy(golden.data() + 24, &crc, 4);

  const made::Matrix m{find_scheme("fp8-b128"), 2, 3, 0, {0x38, 0x39, 0x3a, -2, -2, -2}, {}, {}, {1.0f, -2.0f}};
  EXPECT_EQ(m.pack(RowOrder::plain), golden);
}

TEST(Packed, AnIndependentDecoderReadsWhatPackWrote) {
  for (const Scheme* scheme : made::all_schemes())
    for (const RowOrder order : kOrders)
      for (const auto& [rows, cols] : shapes(order)) {
        SCOPED_TRACE(testing::Message() << scheme->name << " " << rows << "x" << cols << " "
                                        << static_cast<int>(order));
        const made::Matrix m = made::matrix(*scheme, rows, cols, 5);
        const Bytes blob = m.pack(order);
        const plain::Decoded decoded = plain::decode(blob.data());
        ASSERT_EQ(decoded.codes, m.codes);
        ASSERT_EQ(decoded.scale_bytes, m.scale_bytes());
        ASSERT_EQ(decoded.exponent, m.exponent);
      }
}

TEST(Packed, PaddingIsZero) {
  for (const Scheme* scheme : made::all_schemes())
    for (const RowOrder order : kOrders)
      for (const auto& [rows, cols] : shapes(order)) {
        const Bytes blob = made::matrix(*scheme, rows, cols, 6).pack(order);
        const plain::Addresses at(blob.data());
        const std::int64_t part = order == RowOrder::gate_up ? rows / 2 : rows;
        for (std::int64_t panel = 0; panel < panel_count(rows, order); ++panel)
          for (std::int64_t c = 0; c < 16; ++c) {
            const bool row_exists = (order == RowOrder::gate_up ? panel / 2 : panel) * 16 + c < part;
            for (std::int64_t g = row_exists ? at.groups : 0; g < at.groups; ++g)
              for (std::int64_t byte = 0; byte < at.scale_size; ++byte)
                ASSERT_EQ(at.scale(blob.data(), panel, c, g)[byte], 0);
            for (std::int64_t k = row_exists ? cols : 0; k < at.groups * at.group; ++k)
              ASSERT_EQ(at.code(blob.data(), panel, c, k), 0) << scheme->name << panel << " " << c << " " << k;
          }
      }
}

TEST(Packed, UnpackIsTheInverse) {
  for (const Scheme* scheme : made::all_schemes())
    for (const RowOrder order : kOrders)
      for (const auto& [rows, cols] : shapes(order)) {
        const made::Matrix m = made::matrix(*scheme, rows, cols, 8);
        const Bytes blob = m.pack(order);
        std::vector<std::int8_t> codes(m.codes.size(), 99);
        Bytes scales(m.scale_bytes().size(), 99);
        unpack(blob.data(), codes.data(), scales.data());
        ASSERT_EQ(codes, m.codes) << scheme->name << " " << rows << "x" << cols;
        ASSERT_EQ(scales, m.scale_bytes());
      }
}

TEST(Packed, WhatPackWroteIsAccepted) {
  for (const Scheme* scheme : made::all_schemes())
    for (const RowOrder order : kOrders)
      for (const auto& [rows, cols] : shapes(order)) {
        const Bytes blob = made::matrix(*scheme, rows, cols, 9).pack(order);
        const std::int64_t bytes = static_cast<std::int64_t>(blob.size());
        EXPECT_EQ(bytes % 16, 0);
        EXPECT_TRUE(check_header(blob.data(), bytes, *scheme, rows, cols, order).ok());
        EXPECT_TRUE(verify(blob.data(), bytes).ok());
      }
}

TEST(Packed, ExponentsAtTheEndsAreAccepted) {
  for (const Scheme* scheme : made::all_schemes()) {
    made::Matrix m = made::matrix(*scheme, 3, 5, 1);
    const ExponentRange range = exponent_range(scheme->cell);
    for (const int exponent : {range.min - 1, range.min, range.max, range.max + 1}) {
      m.exponent = exponent;
      EXPECT_EQ(refusal(m.pack(RowOrder::plain)).empty(), exponent >= range.min && exponent <= range.max);
    }
  }
}

class Refusal : public testing::Test {
 protected:
  // The blob with one byte of its header changed.
  std::string with(std::size_t at, std::uint8_t byte) const {
    Bytes changed = blob_;
    changed[at] = byte;
    return refusal(changed);
  }

  const Bytes blob_ = made::matrix(*find_scheme("int4-g32"), 34, 33, 1).pack(RowOrder::gate_up);
};

TEST_F(Refusal, BadMagic) {
  for (std::size_t at = 0; at < 4; ++at) EXPECT_TRUE(contains(with(at, 'X'), "not a moepack blob"));
}

TEST_F(Refusal, ANewerVersionByName) {
  EXPECT_TRUE(contains(with(4, 2), "version 2; this moepack reads version 1: update moepack"));
  EXPECT_TRUE(contains(with(5, 1), "version 257"));
  EXPECT_TRUE(contains(with(4, 0), "version 0"));
}

TEST_F(Refusal, UnknownSchemes) {
  for (const std::uint8_t cell : {0, 3, 4, 5, 255})
    EXPECT_TRUE(contains(with(6, cell), cell == 3 ? "makes" : "no known scheme; supported: int4-g32"));
  for (const std::uint8_t group : {0, 31, 33, 96}) EXPECT_TRUE(contains(with(16, group), "no known scheme"));
}

TEST_F(Refusal, UnknownRowOrders) {
  EXPECT_TRUE(contains(with(28, 2), "row order 2; supported: 0 (plain), 1 (gate_up)"));
  EXPECT_TRUE(contains(with(29, 1), "row order 257"));
}

TEST_F(Refusal, ReservedBytes) {
  for (std::size_t at = 30; at < 64; ++at)
    EXPECT_TRUE(contains(with(at, 1), "header's last 34 bytes are not zero")) << at;
}

TEST_F(Refusal, ExponentsOutOfRange) {
  Bytes blob = blob_;
  for (const std::int32_t exponent : {-127, 128, INT32_MIN, INT32_MAX}) {
    std::memcpy(blob.data() + 20, &exponent, 4);
    EXPECT_TRUE(contains(refusal(blob), "scale exponent " + std::to_string(exponent) + " is outside -126..127"));
  }
}

TEST_F(Refusal, RowsThatCannotBe) {
  EXPECT_TRUE(contains(with(8, 33), "even number of rows, not 33"));
  EXPECT_TRUE(contains(with(8, 0), "outside 1..2^31-1"));
  EXPECT_TRUE(contains(with(12, 0), "outside 1..2^31-1"));
  EXPECT_TRUE(contains(with(11, 0x80), "outside 1..2^31-1"));
  EXPECT_TRUE(contains(with(15, 0xff), "outside 1..2^31-1"));
}

TEST_F(Refusal, LengthsThatContradictTheHeader) {
  EXPECT_TRUE(contains(with(8, 66), "the blob has 2368 bytes; its header (66 x 33, int4, group 32) makes 3520"));
  EXPECT_TRUE(contains(with(12, 65), "makes 3520"));
  EXPECT_TRUE(contains(with(11, 0x7f), "makes"));
  Bytes longer = blob_;
  longer.push_back(0);
  EXPECT_TRUE(contains(refusal(longer), "the blob has 2369 bytes"));
}

TEST_F(Refusal, WhatTheCallDoesNotExpect) {
  const std::int64_t bytes = static_cast<std::int64_t>(blob_.size());
  const auto check = [&](const char* scheme, std::int64_t rows, std::int64_t cols, RowOrder order) {
    return std::string(check_header(blob_.data(), bytes, *find_scheme(scheme), rows, cols, order).message());
  };
  EXPECT_EQ(check("int4-g32", 34, 33, RowOrder::gate_up), "");
  const std::string both =
      "the blob holds 34 x 33, int4, group 32, row order 1; the call needs 34 x 33, int8, group 64, row order 1";
  EXPECT_EQ(check("int8-g64", 34, 33, RowOrder::gate_up), both);
  EXPECT_TRUE(contains(check("int4-g64", 34, 33, RowOrder::gate_up), "the call needs"));
  EXPECT_TRUE(contains(check("int4-g32", 36, 33, RowOrder::gate_up), "the call needs 36 x 33"));
  EXPECT_TRUE(contains(check("int4-g32", 34, 34, RowOrder::gate_up), "the call needs 34 x 34"));
  EXPECT_TRUE(contains(check("int4-g32", 34, 33, RowOrder::plain), "row order 0"));
  EXPECT_TRUE(contains(check("int4-g32", -34, 33, RowOrder::gate_up), "the call needs"));
  EXPECT_TRUE(contains(check("int4-g32", 34 + (std::int64_t{1} << 32), 33, RowOrder::gate_up), "the call needs"));
}

// Each in memory of exactly its length, so that ASan sees a byte too many being read.
TEST_F(Refusal, TruncationAnywhere) {
  for (std::size_t bytes = 0; bytes < blob_.size(); bytes += bytes < 80 ? 1 : 37) {
    const std::unique_ptr<std::uint8_t[]> part(new std::uint8_t[bytes]);
    std::copy_n(blob_.begin(), bytes, part.get());
    PackedHeader header;
    const Status status = read_header(part.get(), static_cast<std::int64_t>(bytes), header);
    EXPECT_TRUE(contains(status.message(), bytes < 64 ? "too few for a packed matrix" : "the blob has")) << bytes;
    EXPECT_FALSE(verify(part.get(), static_cast<std::int64_t>(bytes)).ok());
    EXPECT_FALSE(
        check_header(part.get(), static_cast<std::int64_t>(bytes), *find_scheme("int4-g32"), 34, 33, RowOrder::gate_up)
            .ok());
  }
}

TEST_F(Refusal, NegativeLength) {
  PackedHeader header;
  EXPECT_FALSE(read_header(blob_.data(), -1, header).ok());
}

// What read_header lets through can be unpacked within buffers of the header's size.
void expect_safe(const Bytes& blob) {
  PackedHeader header;
  const std::int64_t bytes = static_cast<std::int64_t>(blob.size());
  (void)verify(blob.data(), bytes);
  if (!read_header(blob.data(), bytes, header).ok()) return;
  const std::int64_t groups = ceil_div(header.cols, header.group);
  std::vector<std::int8_t> codes(static_cast<std::size_t>(header.rows) * header.cols);
  std::vector<float> scales(header.rows * static_cast<std::size_t>(groups));  // the largest type
  unpack(blob.data(), codes.data(), scales.data());
}

TEST_F(Refusal, EveryBitOfTheHeaderFlipped) {
  for (std::size_t bit = 0; bit < 64 * 8; ++bit) {
    Bytes damaged = blob_;
    damaged[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    expect_safe(damaged);
  }
}

TEST_F(Refusal, SeveralBitsFlippedAnywhereAndRandomHeaders) {
  made::Random random(11);
  for (int round = 0; round < 3000; ++round) {
    Bytes damaged = blob_;
    for (std::int64_t flips = 1 + random.below(8); flips > 0; --flips)
      damaged[static_cast<std::size_t>(random.below(round % 2 ? 64 : static_cast<std::int64_t>(damaged.size())))] ^=
          static_cast<std::uint8_t>(1 << random.below(8));
    expect_safe(damaged);
  }
  for (int round = 0; round < 3000; ++round) {
    Bytes damaged = blob_;
    for (std::size_t at = 8; at < 30; ++at)
      if (random.below(4) == 0) damaged[at] = static_cast<std::uint8_t>(random.bits());
    expect_safe(damaged);
  }
}

TEST_F(Refusal, VerifyFindsDamageOfThePayload) {
  made::Random random(12);
  for (int round = 0; round < 500; ++round) {
    Bytes damaged = blob_;
    const std::int64_t at = 64 + random.below(static_cast<std::int64_t>(damaged.size()) - 64);
    damaged[static_cast<std::size_t>(at)] ^= static_cast<std::uint8_t>(1 << random.below(8));
    EXPECT_EQ(refusal(damaged), "") << "the header alone is fine";
    EXPECT_TRUE(contains(verify(damaged.data(), static_cast<std::int64_t>(damaged.size())).message(), "checksum"));
  }
}

TEST(Packed, CodesThatABlobMayHold) {
  for (const Scheme* scheme = schemes_begin(); scheme != schemes_end(); ++scheme)
    for (int code = -128; code < 128; ++code)
      for (const std::size_t at : {0, 100, 128}) {
        std::vector<std::int8_t> codes(129, 1);
        codes[at] = static_cast<std::int8_t>(code);
        EXPECT_EQ(are_codes(*scheme, codes.data(), 129), is_code(*scheme, codes[at])) << scheme->name << " " << code;
      }
  EXPECT_TRUE(are_codes(*find_scheme("mxfp4"), nullptr, 0));
}

}  // namespace
}  // namespace moepack
