// Sorts (token, slot) pairs by expert, so that each expert's weights are read once for all its tokens.
#pragma once

#include <cstdint>

namespace moepack {

// Rows of one expert, at most kRows of them: a unit of work that a hot expert is cut into.
struct Segment {
  static constexpr std::int32_t kRows = 256;
  std::int32_t expert;
  std::int32_t begin;  // first position in the sorted order
  std::int32_t count;
};

struct Grouping {
  std::int32_t* token;     // [pairs] token of each sorted position
  std::int32_t* pair;      // [pairs] token * K + slot of each sorted position
  std::int32_t* position;  // [pairs] sorted position of pair token * K + slot
  std::int32_t* starts;    // [E + 1] first position of each expert
  Segment* segments;       // [max_segments]
  std::int32_t segment_count = 0;

  // All ids are within [0, E).
  void sort(const std::int64_t* topk_ids, std::int64_t tokens, std::int64_t top_k, std::int64_t experts);

  static std::int64_t max_segments(std::int64_t pairs, std::int64_t experts) {
    return (experts < pairs ? experts : pairs) + pairs / Segment::kRows;
  }
};

}  // namespace moepack
