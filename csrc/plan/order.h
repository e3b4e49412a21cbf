// The order of work, shared by the engine and the simulator. A step walks the units forward,
// 0..n-1, then backward, n-1..0; then the next forward begins. What is needed soonest goes first.
#pragma once

#include <cstdint>
#include <utility>

namespace autohete {

enum class Direction : std::uint8_t { kForward, kBackward, kForwardOnly };  // the last: no backward follows

// How many units the traversal visits until it next uses `unit`, standing at `position` (which it
// uses now; -1: the forward has not begun). Always >= 1; 2n at most.
constexpr int next_use_distance(Direction direction, int position, int unit, int num_units) {
  switch (direction) {
    case Direction::kForward:
      return unit > position ? unit - position : (num_units - 1 - position) + (num_units - unit);
    case Direction::kForwardOnly:
      return unit > position ? unit - position : num_units - position + unit;
    case Direction::kBackward:
      return unit < position ? position - unit : position + 1 + unit;
  }
  return 1;
}

// The unit the traversal visits after `position`.
constexpr std::pair<Direction, int> next_position(Direction direction, int position, int num_units) {
  switch (direction) {
    case Direction::kForward:
      if (position + 1 < num_units) return {Direction::kForward, position + 1};
      return {Direction::kBackward, num_units - 1};
    case Direction::kForwardOnly:
      return {Direction::kForwardOnly, position + 1 < num_units ? position + 1 : 0};
    case Direction::kBackward:
      if (position > 0) return {Direction::kBackward, position - 1};
      return {Direction::kForward, 0};
  }
  return {direction, position};
}

}  // namespace autohete
