#include "csrc/plan/refine.h"

#include <algorithm>
#include <limits>
#include <set>

#include "csrc/plan/simulator.h"

namespace autohete {
namespace {

constexpr double kWorthwhile = 1 - 1e-6;  // shorter by less than this is a tie

struct Candidate {
  std::vector<SegmentCounts> counts;
  Spacing spacing = Spacing::kTrailing;
};

class Climber {
 public:
  Climber(const Profile& profile, const Formulation& formulation, const PlannerOptions& options)
      : profile_(profile), formulation_(formulation), options_(options) {
    policy_.gated = options.gated;
  }

  Plan climb(const std::vector<SegmentCounts>& start) {
    best_.counts.resize(start.size());
    if (fits(best_.counts)) return decode();  // all on the device
    best_.counts = start;
    attempt({start, Spacing::kTrailing});
    attempt({start, Spacing::kSpread});
    int largest = 1;
    for (const Segment& segment : formulation_.segments) largest = std::max(largest, segment.count);
    for (int stride = std::max(1, largest / 8); stride >= 1; stride /= 2) {
      while (!spent() && try_neighbours(stride)) {
      }
    }
    return decode();
  }

 private:
  Plan decode() const {
    return decode_plan(profile_, formulation_.segments, best_.counts, options_.window,
                       best_.spacing);
  }
  bool spent() const { return simulations_ >= options_.max_simulations; }

  // All single moves of `stride` from the best; true when one of them was better.
  bool try_neighbours(int stride) {
    const Candidate from = best_;
    const double before = best_seconds_;
    for (std::size_t g = 0; g < from.counts.size(); ++g) {
      for (const int move : {-stride, stride}) {
        for (int SegmentCounts::*count :
             {&SegmentCounts::state, &SegmentCounts::parameters, &SegmentCounts::recompute}) {
          Candidate next = from;
          next.counts[g].*count += move;
          attempt(std::move(next));
        }
        Candidate both = from;
        both.counts[g].state += move;
        both.counts[g].parameters += move;
        attempt(std::move(both));
      }
    }
    return best_seconds_ < before;
  }

  void attempt(Candidate candidate) {
    if (spent() || !repair(candidate) || !tried_.insert(signature(candidate)).second) return;
    const Plan plan = decode_plan(profile_, formulation_.segments, candidate.counts,
                                  options_.window, candidate.spacing);
    ++simulations_;
    const double seconds = simulate(profile_, plan, policy_).step_seconds;
    if (seconds >= best_seconds_ * kWorthwhile) return;
    best_seconds_ = seconds;
    best_ = std::move(candidate);
  }

  // Within the limits of every count and the budgets, recomputing no more than memory asks for.
  bool repair(Candidate& candidate) const {
    for (std::size_t g = 0; g < candidate.counts.size(); ++g) {
      const Segment& segment = formulation_.segments[g];
      const SegmentCounts& c = candidate.counts[g];
      if (c.recompute < 0 || c.recompute > segment.max_recompute) return false;
      if (c.state < 0 || c.state > segment.max_state) return false;
      if (c.parameters < 0 || c.parameters > std::min(c.state, segment.max_parameters)) return false;
    }
    for (std::size_t g = 0; g < candidate.counts.size(); ++g) recompute_least(candidate, g);
    return fits(candidate.counts);
  }
  // The smallest count of recomputed units that fits; all of them where none does.
  void recompute_least(Candidate& candidate, std::size_t g) const {
    int low = 0, high = formulation_.segments[g].max_recompute;
    while (low < high) {
      candidate.counts[g].recompute = low + (high - low) / 2;
      if (fits(candidate.counts)) {
        high = candidate.counts[g].recompute;
      } else {
        low = candidate.counts[g].recompute + 1;
      }
    }
    candidate.counts[g].recompute = low;
  }
  bool fits(const std::vector<SegmentCounts>& counts) const {
    return within_budgets(formulation_, evaluate(formulation_, counts));
  }

  static std::vector<int> signature(const Candidate& candidate) {
    std::vector<int> numbers{static_cast<int>(candidate.spacing)};
    for (const SegmentCounts& c : candidate.counts) {
      numbers.insert(numbers.end(), {c.recompute, c.parameters, c.state});
    }
    return numbers;
  }

  const Profile& profile_;
  const Formulation& formulation_;
  const PlannerOptions& options_;
  SimulationPolicy policy_;
  std::set<std::vector<int>> tried_;
  Candidate best_;
  double best_seconds_ = std::numeric_limits<double>::infinity();
  int simulations_ = 0;
};

}  // namespace

Plan refine(const Profile& profile, const Formulation& formulation,
            const std::vector<SegmentCounts>& counts, const PlannerOptions& options) {
  return Climber(profile, formulation, options).climb(counts);
}

}  // namespace autohete
