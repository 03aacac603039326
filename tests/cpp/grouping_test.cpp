#include "grouping.h"

#include <gtest/gtest.h>

#include <vector>

#include "made.h"

namespace moepack {
namespace {

constexpr std::int32_t kGuard = -77;

struct Sorted {
  Sorted(const std::vector<std::int64_t>& ids, std::int64_t T, std::int64_t K, std::int64_t E)
      : token(T * K),
        pair(T * K),
        position(T * K),
        starts(E + 2, kGuard),
        segments(Grouping::max_segments(T * K, E) + 1) {
    segments.back().expert = kGuard;
    grouping.token = token.data();
    grouping.pair = pair.data();
    grouping.position = position.data();
    grouping.starts = starts.data();
    grouping.segments = segments.data();
    grouping.sort(ids.data(), T, K, E);
    EXPECT_EQ(starts.back(), kGuard);
    EXPECT_EQ(segments.back().expert, kGuard);
    EXPECT_LT(static_cast<std::size_t>(grouping.segment_count), segments.size());
  }

  std::vector<std::int32_t> token, pair, position, starts;
  std::vector<Segment> segments;
  Grouping grouping;
};

// Whatever the ids: pairs are in the order of their experts, stable, and the segments are exactly those runs.
void expect_sorted(const std::vector<std::int64_t>& ids, std::int64_t T, std::int64_t K, std::int64_t E) {
  const Sorted s(ids, T, K, E);
  std::vector<std::int32_t> filled(E, 0);
  for (std::int64_t pair = 0; pair < T * K; ++pair) {
    const std::int64_t e = ids[pair];
    ASSERT_EQ(s.position[pair], s.starts[e] + filled[e]++) << "pair " << pair;
    ASSERT_EQ(s.token[s.position[pair]], pair / K);
    ASSERT_EQ(s.pair[s.position[pair]], pair);
  }
  for (std::int64_t e = 0; e < E; ++e) ASSERT_EQ(s.starts[e + 1] - s.starts[e], filled[e]);

  std::int32_t next = 0;
  for (std::int32_t i = 0; i < s.grouping.segment_count; ++i) {
    const Segment& segment = s.segments[i];
    ASSERT_EQ(segment.begin, next);
    ASSERT_GE(segment.count, 1);
    ASSERT_LE(segment.count, Segment::kRows);
    ASSERT_GE(segment.begin, s.starts[segment.expert]);
    ASSERT_LE(segment.begin + segment.count, s.starts[segment.expert + 1]);
    next += segment.count;
  }
  ASSERT_EQ(next, T * K);
}

TEST(Grouping, ByHand) {
  const Sorted s({2, 0, 0, 2, 1, 2}, 3, 2, 4);
  EXPECT_EQ(s.token, (std::vector<std::int32_t>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(s.position, (std::vector<std::int32_t>{3, 0, 1, 4, 2, 5}));
  EXPECT_EQ(std::vector<std::int32_t>(s.starts.begin(), s.starts.end() - 1),
            (std::vector<std::int32_t>{0, 2, 3, 6, 6}));
  ASSERT_EQ(s.grouping.segment_count, 3);
}

TEST(Grouping, RandomIds) {
  made::Random random(3);
  for (const std::int64_t T : {1, 2, 17, 700})
    for (const std::int64_t K : {1, 2, 8})
      for (const std::int64_t E : {1, 2, 7, 64}) {
        std::vector<std::int64_t> ids(static_cast<std::size_t>(T * K));
        for (std::int64_t& id : ids) id = random.below(E);
        expect_sorted(ids, T, K, E);
      }
}

TEST(Grouping, AHotExpertIsCutIntoSegments) {
  for (const std::int64_t T : {255, 256, 257, 511, 512, 513, 1024}) {
    expect_sorted(std::vector<std::int64_t>(static_cast<std::size_t>(T), 3), T, 1, 8);
    const Sorted s(std::vector<std::int64_t>(static_cast<std::size_t>(T), 3), T, 1, 8);
    EXPECT_EQ(s.grouping.segment_count, (T + Segment::kRows - 1) / Segment::kRows);
  }
}

// The most segments that so many pairs can make: full ones of one expert and single rows of all others.
TEST(Grouping, TheBoundOfSegmentsIsReachedNotExceeded) {
  std::vector<std::int64_t> ids(257, 0);
  for (std::int64_t e = 1; e < 16; ++e) ids.push_back(e);
  expect_sorted(ids, static_cast<std::int64_t>(ids.size()), 1, 16);
  const Sorted s(ids, static_cast<std::int64_t>(ids.size()), 1, 16);
  EXPECT_EQ(s.grouping.segment_count, Grouping::max_segments(static_cast<std::int64_t>(ids.size()), 16));
}

TEST(Grouping, NoPairs) {
  const Sorted s({}, 0, 2, 3);
  EXPECT_EQ(s.grouping.segment_count, 0);
}

}  // namespace
}  // namespace moepack
