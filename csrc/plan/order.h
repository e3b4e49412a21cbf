// The order of work, shared by the engine's scheduler and the simulator.
//
// A step walks the units forward (0 .. n-1) and then backward (n-1 .. 0); the next step starts
// over. So the walk is a circle of 2n visits, and what is needed soonest is what comes first on it:
//   - parameter prefetch: the unit with the nearest next visit;
//   - gradients leaving the device and CPU updates: the smallest unit index, because the next
//     forward asks for unit 0 first (earliest deadline first).
// Ties cannot happen between different units. Header-only, no state, any thread.
#pragma once

#include <cstdint>
#include <utility>

namespace autohete {

// kForwardOnly: evaluation and generation; the next forward follows, no backward.
enum class Direction : std::uint8_t { kForward, kBackward, kForwardOnly };

// Index of a visit on the circle: 0 .. n-1 forward, n .. 2n-1 backward (unit n-1 first).
constexpr int visit_index(Direction direction, int unit, int num_units) {
  return direction == Direction::kForward ? unit : 2 * num_units - 1 - unit;
}
constexpr int unit_of_visit(int visit, int num_units) {
  return visit < num_units ? visit : 2 * num_units - 1 - visit;
}

// Visits from the walk's place (the unit `position` is running in `direction`; -1: the forward has
// not begun) to the next visit of `unit`, strictly ahead: 1 .. 2n. The running unit itself is next
// used on the way back.
constexpr int next_use_distance(Direction direction, int position, int unit, int num_units) {
  if (direction == Direction::kForwardOnly)
    return unit > position ? unit - position : num_units - position + unit;
  const int circle = 2 * num_units;
  const int here = visit_index(direction, position, num_units);
  const int forward = (unit - here + circle) % circle;
  const int backward = (circle - 1 - unit - here + circle) % circle;
  const int nearest_forward = forward == 0 ? circle : forward;
  const int nearest_backward = backward == 0 ? circle : backward;
  return nearest_forward < nearest_backward ? nearest_forward : nearest_backward;
}

// The unit the walk visits after `position`, and in which direction.
constexpr std::pair<Direction, int> next_position(Direction direction, int position,
                                                  int num_units) {
  if (direction == Direction::kForwardOnly)
    return {direction, position + 1 < num_units ? position + 1 : 0};
  const int next = (visit_index(direction, position, num_units) + 1) % (2 * num_units);
  return {next < num_units ? Direction::kForward : Direction::kBackward,
          unit_of_visit(next, num_units)};
}

// Priorities: smaller runs first. Each queue holds one kind of work only, so kinds need no rank.
constexpr std::uint64_t gradient_priority(int unit) { return static_cast<std::uint64_t>(unit); }
constexpr std::uint64_t update_priority(int unit) { return static_cast<std::uint64_t>(unit); }
constexpr std::uint64_t prefetch_priority(Direction direction, int position, int unit,
                                          int num_units) {
  return static_cast<std::uint64_t>(next_use_distance(direction, position, unit, num_units));
}

// What to evict from the window: the resident unit whose next use is furthest away (Belady).
constexpr bool evict_before(Direction direction, int position, int a, int b, int num_units) {
  return next_use_distance(direction, position, a, num_units) >
         next_use_distance(direction, position, b, num_units);
}

}  // namespace autohete
