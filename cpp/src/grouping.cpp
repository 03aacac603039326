#include "grouping.h"

#include <algorithm>

namespace moepack {

void Grouping::sort(const std::int64_t* topk_ids, std::int64_t tokens, std::int64_t top_k, std::int64_t experts) {
  std::fill_n(starts, experts + 1, 0);
  for (std::int64_t p = 0; p < tokens * top_k; ++p) ++starts[topk_ids[p] + 1];
  for (std::int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];

  segment_count = 0;
  for (std::int64_t e = 0; e < experts; ++e)
    for (std::int32_t begin = starts[e]; begin < starts[e + 1]; begin += Segment::kRows)
      segments[segment_count++] = {static_cast<std::int32_t>(e), begin,
                                   std::min(Segment::kRows, starts[e + 1] - begin)};

  for (std::int64_t p = 0; p < tokens * top_k; ++p) {
    const std::int32_t at = starts[topk_ids[p]]++;
    token[at] = static_cast<std::int32_t>(p / top_k);
    pair[at] = static_cast<std::int32_t>(p);
    position[p] = at;
  }
  for (std::int64_t e = experts; e > 0; --e) starts[e] = starts[e - 1];
  starts[0] = 0;
}

}  // namespace moepack
