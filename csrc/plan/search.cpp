#include "csrc/plan/search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <queue>

namespace autohete {
namespace {

constexpr double kSlack = 1e-11;  // of scaled costs: rounding, below what one count costs

struct Box {
  std::vector<int> lower, upper;
  double bound = 0;
  long long number = 0;
};

struct LaterFirst {  // std::priority_queue keeps the largest on top
  bool operator()(const Box& a, const Box& b) const {
    return a.bound != b.bound ? a.bound > b.bound : a.number > b.number;
  }
};

// Smallest and largest value of every variable over a box.
class Intervals {
 public:
  explicit Intervals(const Formulation& formulation)
      : formulation_(formulation),
        low_(formulation.variables.size()),
        high_(formulation.variables.size()) {
    // Memory rows come first; everything up to the host variable is enough to judge feasibility.
    memory_bounds_ = 0;
    for (const Bound& bound : formulation.bounds) {
      if (bound.variable <= formulation.host) ++memory_bounds_;
    }
  }

  // False when no point of the box fits the budgets. Fills the memory variables only.
  bool fits(const Box& box) {
    std::fill(low_.begin(), low_.end(), 0);
    std::fill(high_.begin(), high_.end(), 0);
    for (int i = 0; i < formulation_.num_counts(); ++i) {
      low_[i] = box.lower[i];
      high_[i] = box.upper[i];
    }
    propagate(0, memory_bounds_);
    return within_budgets(formulation_, low_);
  }

  // After fits(): a lower bound of the cost over the box.
  double lowest_cost(const std::vector<double>& cost) {
    propagate(memory_bounds_, formulation_.bounds.size());
    double sum = 0;
    for (std::size_t i = 0; i < cost.size(); ++i) sum += cost[i] * low_[i];
    return sum;
  }

 private:
  void propagate(std::size_t begin, std::size_t end) {
    const int counts = formulation_.num_counts();
    for (std::size_t i = begin; i < end; ++i) {
      const Bound& bound = formulation_.bounds[i];
      if (bound.variable < counts) continue;
      double low = bound.constant, high = bound.constant;
      for (const Term& term : bound.terms) {
        const bool rising = term.coefficient > 0;
        low += term.coefficient * (rising ? low_ : high_)[term.variable];
        high += term.coefficient * (rising ? high_ : low_)[term.variable];
      }
      if (formulation_.variables[bound.variable].integer) {
        low = std::ceil(low - 1e-9);
        high = std::ceil(high - 1e-9);
      }
      low_[bound.variable] = std::max(low_[bound.variable], low);
      high_[bound.variable] = std::max(high_[bound.variable], high);
    }
  }

  const Formulation& formulation_;
  std::vector<double> low_, high_;
  std::size_t memory_bounds_;
};

class Search {
 public:
  Search(const Formulation& formulation, Goal goal, const SearchLimits& limits,
         bool (*interrupted)())
      : formulation_(formulation),
        cost_(objective(formulation, goal)),
        limits_(limits),
        interrupted_(interrupted),
        intervals_(formulation) {
    result_.objective = std::numeric_limits<double>::infinity();
  }

  SearchResult run() {
    push(whole_box());
    while (!queue_.empty() && !out_of_limits()) {
      Box box = queue_.top();
      queue_.pop();
      if (box.bound >= result_.objective - kSlack) break;  // best first: nothing better is left
      explore(std::move(box));
    }
    result_.optimal = queue_.empty() || queue_.top().bound >= result_.objective - kSlack;
    return std::move(result_);
  }

 private:
  Box whole_box() const {
    Box box;
    for (int i = 0; i < formulation_.num_counts(); ++i) {
      box.lower.push_back(0);
      box.upper.push_back(static_cast<int>(formulation_.variables[i].upper));
    }
    return box;
  }

  bool out_of_limits() {
    ++result_.boxes;
    if (result_.boxes > limits_.boxes) return true;
    if (result_.boxes % 256 != 0) return false;
    if (interrupted_ && interrupted_()) return true;
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
    return spent.count() > limits_.seconds;
  }

  // Tightens, bounds and queues a box, or drops it.
  void push(Box box) {
    if (!tighten(box)) return;
    box.bound = intervals_.lowest_cost(cost_);
    if (box.bound >= result_.objective - kSlack) return;
    try_point(box, box.lower);
    try_point(box, box.upper);
    box.number = ++num_boxes_;
    queue_.push(std::move(box));
  }

  // Uses p <= o and raises the lower ends of counts that the budgets force up.
  bool tighten(Box& box) {
    for (int i = 0; i < formulation_.num_counts(); i += 3) {
      box.upper[i + 1] = std::min(box.upper[i + 1], box.upper[i + 2]);
      box.lower[i + 2] = std::max(box.lower[i + 2], box.lower[i + 1]);
      if (box.lower[i + 1] > box.upper[i + 1] || box.lower[i + 2] > box.upper[i + 2]) return false;
    }
    if (!intervals_.fits(box)) return false;
    for (int i = 0; i < formulation_.num_counts(); ++i) {
      if (box.lower[i] < box.upper[i]) raise_lower(box, i);
    }
    return intervals_.fits(box);
  }

  // Smallest v such that the box cut to [lower, v] may still fit; everything below is impossible.
  void raise_lower(Box& box, int i) {
    const int original = box.upper[i];
    int low = box.lower[i], high = original;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      box.upper[i] = middle;
      if (intervals_.fits(box)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    box.upper[i] = original;
    box.lower[i] = low;
  }

  // The point with these p and o, and in each segment the smallest c that fits: time only grows
  // with c.
  void try_point(const Box& box, const std::vector<int>& at) {
    Box point{at, at};
    for (int i = 0; i < formulation_.num_counts(); i += 3) {
      point.lower[i] = box.lower[i];
      point.upper[i] = box.upper[i];
      point.lower[i + 1] = point.upper[i + 1] = std::min(at[i + 1], at[i + 2]);
    }
    if (!intervals_.fits(point)) return;
    for (int i = 0; i < formulation_.num_counts(); i += 3) {
      raise_lower(point, i);
      point.upper[i] = point.lower[i];
    }
    accept(point.lower);
  }

  void accept(const std::vector<int>& point) {
    std::vector<double> values(formulation_.variables.size(), 0);
    std::copy(point.begin(), point.end(), values.begin());
    const std::vector<SegmentCounts> counts = counts_of(formulation_, values);
    values = evaluate(formulation_, counts);
    if (!within_budgets(formulation_, values)) return;
    double cost = 0;
    for (std::size_t i = 0; i < cost_.size(); ++i) cost += cost_[i] * values[i];
    if (cost >= result_.objective - kSlack) return;
    result_.found = true;
    result_.objective = cost;
    result_.counts = counts;
  }

  // Halves the widest count.
  void explore(Box box) {
    int widest = 0;
    for (int i = 1; i < formulation_.num_counts(); ++i) {
      if (box.upper[i] - box.lower[i] > box.upper[widest] - box.lower[widest]) widest = i;
    }
    if (box.upper[widest] == box.lower[widest]) return;  // a point: push() has tried it
    Box rest = box;
    const int middle = box.lower[widest] + (box.upper[widest] - box.lower[widest]) / 2;
    box.upper[widest] = middle;
    rest.lower[widest] = middle + 1;
    push(std::move(box));
    push(std::move(rest));
  }

  const Formulation& formulation_;
  const std::vector<double> cost_;
  const SearchLimits limits_;
  bool (*const interrupted_)();
  Intervals intervals_;
  SearchResult result_;
  std::priority_queue<Box, std::vector<Box>, LaterFirst> queue_;
  long long num_boxes_ = 0;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

SearchResult search(const Formulation& formulation, Goal goal, const SearchLimits& limits,
                    bool (*interrupted)()) {
  return Search(formulation, goal, limits, interrupted).run();
}

}  // namespace autohete
