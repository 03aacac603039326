// The reader of packed blobs on truncated, damaged, foreign and oversized bytes.
#include <string>
#include <vector>

#include "blobs.h"
#include "choices.h"
#include "memory.h"
#include "moepack/packed.h"
#include "target.h"

namespace moepack::fuzz {
namespace {

struct Asked {
  const Scheme* scheme;
  std::int64_t rows, cols;
  RowOrder order;
};

Asked ask(Choices& choices) {
  const Scheme& s = scheme(choices);
  const RowOrder order = choices.pick({RowOrder::plain, RowOrder::gate_up});
  const std::int64_t rows = 1 + choices.below(40);
  return {&s, order == RowOrder::gate_up ? 2 * rows : rows, 1 + choices.below(300), order};
}

void damage(Choices& choices, std::vector<std::uint8_t>& blob) {
  std::mt19937 random = choices.stream();
  switch (choices.below(5)) {
    case 0:
      return damage_payload(choices, blob.data(), static_cast<std::int64_t>(blob.size()));
    case 1:
      return blob.resize(static_cast<std::size_t>(choices.below(static_cast<std::int64_t>(blob.size()) + 1)));
    case 2:
      return blob.resize(blob.size() + 1 + static_cast<std::size_t>(choices.below(5000)), 0);
    case 3:
      for (auto& byte : blob) byte = static_cast<std::uint8_t>(random());
      return;
    default:
      if (blob.size() >= sizeof(PackedHeader)) damage_header(choices, blob.data());
  }
}

void read_everything(const Memory& blob, const PackedHeader& header) {
  const auto size = static_cast<std::int64_t>(blob.size());
  const Scheme* found = find_scheme(header.cell, header.group);
  MOEPACK_PROMISE(found != nullptr);
  const auto order = static_cast<RowOrder>(header.row_order);
  MOEPACK_PROMISE(check_header(blob.data(), size, *found, header.rows, header.cols, order).ok());
  const std::size_t rows = header.rows, cols = header.cols;
  Memory codes(rows * cols),
      scales(rows * static_cast<std::size_t>(ceil_div(header.cols, found->group)) * scale_bytes(*found));
  unpack(blob.data(), reinterpret_cast<std::int8_t*>(codes.data()), scales.data());

  // What was read is what is written: again as a blob, it reads the same.
  Memory again(blob.size()), codes_again(codes.size()), scales_again(scales.size());
  pack(*found, order, header.rows, header.cols, reinterpret_cast<const std::int8_t*>(codes.data()), scales.data(),
       header.scale_exponent, again.data());
  MOEPACK_PROMISE(verify(again.data(), size).ok());
  unpack(again.data(), reinterpret_cast<std::int8_t*>(codes_again.data()), scales_again.data());
  MOEPACK_PROMISE(std::memcmp(codes.data(), codes_again.data(), codes.size()) == 0);
  MOEPACK_PROMISE(std::memcmp(scales.data(), scales_again.data(), scales.size()) == 0);
}

void test(Choices& choices) {
  const Asked asked = ask(choices);
  std::mt19937 random = choices.stream();
  std::vector<std::uint8_t> bytes = valid_blob(*asked.scheme, asked.rows, asked.cols, asked.order, random);
  const std::int64_t damages = choices.below(4);
  for (std::int64_t i = 0; i < damages; ++i) damage(choices, bytes);
  Memory blob(bytes.size(), 16, static_cast<std::size_t>(choices.below(16)));
  std::copy(bytes.begin(), bytes.end(), blob.data());

  const auto size = static_cast<std::int64_t>(blob.size());
  const Status matches = check_header(blob.data(), size, *asked.scheme, asked.rows, asked.cols, asked.order);
  const Status intact = verify(blob.data(), size);
  PackedHeader header{};
  const Status read = read_header(blob.data(), size, header);
  MOEPACK_PROMISE(damages > 0 || (read.ok() && matches.ok() && intact.ok()));
  for (const Status* status : {&matches, &intact, &read})
    MOEPACK_PROMISE(status->ok() == (status->message()[0] == '\0'));
  if (read.ok()) {
    ++reached.accepted;
    return read_everything(blob, header);
  }
  ++reached.refused;
  MOEPACK_PROMISE(!matches.ok() && !intact.ok());
}

}  // namespace
}  // namespace moepack::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moepack::fuzz::Choices choices(data, size);
  moepack::fuzz::test(choices);
  return 0;
}
