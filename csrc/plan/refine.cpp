#include "csrc/plan/refine.h"

#include <algorithm>
#include <limits>
#include <set>

#include "csrc/plan/simulator.h"

namespace autohete {
namespace {

constexpr double kWorthwhile = 1 - 1e-6;  // shorter by less than this is a tie
constexpr double kMostVisits = 1e7;  // simulated in all: some seconds, which nothing interrupts

// Simulations of a walk so long; the solver's own plans at least.
int affordable(const Profile& profile, int steps, int wanted) {
  const double visits =
      2.0 * static_cast<double>(profile.units.size()) * profile.gradient_accumulation_steps * steps;
  return std::min(wanted, std::max(3, static_cast<int>(kMostVisits / visits)));
}

// What gives way when a move no longer fits: recomputing in any segment, or what the largest
// segment offloads.
enum class Repair { kRecompute, kParameters, kState };

struct Candidate {
  std::vector<SegmentCounts> counts;
  Spacing spacing = Spacing::kTrailing;
};

class Climber {
 public:
  Climber(const Profile& profile, const Formulation& formulation, const PlannerOptions& options)
      : profile_(profile),
        formulation_(formulation),
        options_(options),
        most_(affordable(profile, policy_.steps, options.max_simulations)),
        limit_(most_) {
    policy_.gated = options.gated;
    policy_.early_uploads = options.early_uploads;
    for (std::size_t g = 0; g < formulation.segments.size(); ++g) {
      if (formulation.segments[g].count > formulation.segments[main_].count) main_ = g;
    }
  }

  Plan climb(const std::vector<SegmentCounts>& start) {
    best_.counts.resize(start.size());
    const bool all_fits = fits(best_.counts);
    if (all_fits && profile_.ranks.num_ranks == 1) return decode();  // all on the device
    const std::vector<SegmentCounts> all = best_.counts;
    best_.counts = start;
    // Several ranks gather what the device updated before the next step, the rest behind it.
    if (all_fits) attempt({all, Spacing::kTrailing});
    attempt({start, Spacing::kTrailing});
    attempt({start, Spacing::kSpread});
    const int largest = formulation_.segments[main_].count;
    for (int stride = std::max(1, largest / 8); stride >= 1; stride /= 2) {
      // Coarse moves may use half of what is left, so that fine ones get their turn.
      const int left = most_ - simulations_;
      limit_ = stride > 1 ? simulations_ + left / 2 : most_;
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
  bool spent() const { return simulations_ >= limit_; }

  // Moves of `stride` from the best, each made to fit in one of three ways; true when one was
  // better.
  bool try_neighbours(int stride) {
    const double before = best_seconds_;
    Candidate other = best_;
    other.spacing = other.spacing == Spacing::kSpread ? Spacing::kTrailing : Spacing::kSpread;
    attempt(std::move(other));
    const Candidate from = best_;
    for (const Repair repair : {Repair::kRecompute, Repair::kParameters, Repair::kState}) {
      for (std::size_t g = 0; g < from.counts.size(); ++g) {
        const int move = std::min(stride, formulation_.segments[g].count);
        try_moves(from, g, -move, repair);
        try_moves(from, g, move, repair);
      }
    }
    return best_seconds_ < before;
  }

  void try_moves(const Candidate& from, std::size_t g, int move, Repair repair) {
    const auto moved = [&](int recompute, int parameters, int state) {
      Candidate next = from;
      next.counts[g].recompute += recompute;
      next.counts[g].parameters += parameters;
      next.counts[g].state += state;
      attempt(std::move(next), repair);
    };
    moved(0, 0, move);
    moved(0, move, 0);
    moved(0, move, move);
    // Where recomputation is what is adjusted, moving it would be undone.
    if (repair != Repair::kRecompute) moved(move, 0, 0);
  }

  void attempt(Candidate candidate, Repair repair = Repair::kRecompute) {
    if (spent() || !make_fit(candidate, repair)) return;
    if (!tried_.insert(signature(candidate)).second) return;
    const Plan plan = decode_plan(profile_, formulation_.segments, candidate.counts,
                                  options_.window, candidate.spacing);
    ++simulations_;
    const double seconds = simulate(profile_, plan, policy_).step_seconds;
    if (seconds >= best_seconds_ * kWorthwhile) return;
    best_seconds_ = seconds;
    best_ = std::move(candidate);
  }

  bool allowed(const std::vector<SegmentCounts>& counts) const {
    for (std::size_t g = 0; g < counts.size(); ++g) {
      const Segment& segment = formulation_.segments[g];
      const SegmentCounts& c = counts[g];
      if (c.recompute < 0 || c.recompute > segment.max_recompute) return false;
      if (c.state < 0 || c.state > segment.max_state) return false;
      if (c.parameters < 0 || c.parameters > std::min(c.state, segment.max_parameters)) {
        return false;
      }
    }
    return true;
  }

  // Brings a candidate within the budgets by one kind of count; false when that cannot be done.
  bool make_fit(Candidate& candidate, Repair repair) const {
    if (!allowed(candidate.counts)) return false;
    if (repair == Repair::kRecompute) {
      for (std::size_t g = 0; g < candidate.counts.size(); ++g) {
        const int most = formulation_.segments[g].max_recompute;
        least_that_fits(candidate, most, candidate.counts[g].recompute);
      }
    } else {
      const Segment& segment = formulation_.segments[main_];
      SegmentCounts& counts = candidate.counts[main_];
      if (repair == Repair::kState)
        least_that_fits(candidate, segment.max_state, counts.state, counts.state);
      const int most = std::min(counts.state, segment.max_parameters);
      const int least = repair == Repair::kState ? 0 : counts.parameters;
      least_that_fits(candidate, most, counts.parameters, least);
    }
    return allowed(candidate.counts) && fits(candidate.counts);
  }

  // Sets `count`, one of the candidate's, to the smallest of least .. most that fits; most if none.
  void least_that_fits(Candidate& candidate, int most, int& count, int least = 0) const {
    int low = least, high = std::max(least, most);
    while (low < high) {
      count = low + (high - low) / 2;
      if (fits(candidate.counts)) {
        high = count;
      } else {
        low = count + 1;
      }
    }
    count = low;
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
  const int most_;        // simulations
  std::size_t main_ = 0;  // the longest segment
  std::set<std::vector<int>> tried_;
  Candidate best_;
  double best_seconds_ = std::numeric_limits<double>::infinity();
  int simulations_ = 0;
  int limit_;  // of simulations, in the present stage
};

}  // namespace

Plan refine(const Profile& profile, const Formulation& formulation,
            const std::vector<SegmentCounts>& counts, const PlannerOptions& options) {
  return Climber(profile, formulation, options).climb(counts);
}

}  // namespace autohete
