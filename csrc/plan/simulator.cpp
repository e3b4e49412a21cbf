// One state machine over one set of members, so one file: walk, gradients, parameters. What the
// lanes do with time is lanes.h.
#include "csrc/plan/simulator.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <set>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/plan/lanes.h"
#include "csrc/plan/order.h"
#include "csrc/plan/segments.h"
#include "csrc/plan/validate.h"

namespace autohete {
namespace {

enum class Action { kForward, kBackward, kDeviceUpdate };

// Where a unit stands.
struct UnitState {
  UnitSeconds seconds;
  bool host_parameters = false;
  bool host_state = false;
  bool trainable = false;
  double backward = 0;  // recomputed forward included, and the loss in the last unit's
  std::size_t param_bytes = 0;
  std::size_t grad_bytes = 0;
  std::size_t others_leaving = 0;  // when a backward began
  int chunks_up = 1;
  int chunks_down = 1;
  int downloads = 0;        // finished
  int updates = 0;          // on the CPU, finished
  int uploads = 0;          // after an update, finished
  int slot = -1;            // its bytes are there, or on their way
  bool resident = false;    // in a slot, current
  bool loading = false;     // in a slot, on its way
  int own_updates = 0;      // of this rank's rows; one rank: as updates
  double up_remaining = 0;  // of an overtaken copy; 0: none
  double down_remaining = 0;
};

struct Slot {
  std::size_t bytes;
  int unit;  // -1: free
};

// Ready work of one kind, by priority; equal keys cannot happen.
using Queue = std::set<std::pair<long long, int>>;  // (key, unit)

class Simulator {
 public:
  Simulator(const Profile& profile, const Plan& plan, const SimulationPolicy& policy, bool keep)
      : policy_(policy),
        keep_(keep),
        repeats_(profile.gradient_accumulation_steps),
        exchanges_(profile.ranks.num_ranks > 1),
        lanes_(profile.hardware, profile.ranks) {
    for (std::size_t i = 0; i < plan.units.size(); ++i) {
      units_.push_back(unit_state(profile, plan, static_cast<int>(i)));
    }
    num_units_ = static_cast<int>(units_.size());
    for (int i = 0; i < num_units_; ++i) {
      if (units_[i].host_parameters) slots_.push_back({units_[i].param_bytes, -1});
      if (!units_[i].host_state && units_[i].trainable) device_updated_.push_back(i);
      if (units_[i].host_state) host_updated_.push_back(i);
    }
    std::sort(slots_.begin(), slots_.end(),
              [](const Slot& a, const Slot& b) { return a.bytes > b.bytes; });
    slots_.resize(std::min(slots_.size(), static_cast<std::size_t>(plan.window)));
  }

  Simulation run() {
    while (step_ < policy_.steps) {
      while (start_something()) {
      }
      advance();
    }
    return result();
  }

 private:
  // ---- set-up
  UnitState unit_state(const Profile& profile, const Plan& plan, int i) const {
    const UnitProfile& unit = profile.units[i];
    UnitState state;
    state.seconds = unit_seconds(unit, profile);
    state.host_parameters = plan.units[i].parameters == Tier::kHost && unit.param_bytes > 0;
    state.trainable = unit.grad_bytes > 0;
    state.host_state = plan.units[i].optimizer_state == Tier::kHost && state.trainable;
    const bool recompute = plan.units[i].activations == ActivationRule::kRecompute;
    state.backward = state.seconds.backward + (recompute ? state.seconds.recompute : 0);
    if (i + 1 == static_cast<int>(plan.units.size())) state.backward += profile.outside_seconds;
    state.param_bytes = unit.param_bytes;
    state.grad_bytes = unit.grad_bytes;
    state.chunks_up = num_chunks(unit.param_bytes, profile.chunk_bytes);
    state.chunks_down = num_chunks(unit.grad_bytes, profile.chunk_bytes);
    return state;
  }
  static int num_chunks(std::size_t bytes, std::size_t chunk_bytes) {
    return static_cast<int>(std::max<std::size_t>(1, (bytes + chunk_bytes - 1) / chunk_bytes));
  }

  // ---- the walk
  Action action() const {
    if (visit_ < num_units_) return Action::kForward;
    return visit_ < 2 * num_units_ ? Action::kBackward : Action::kDeviceUpdate;
  }
  int visited_unit() const {
    if (action() == Action::kDeviceUpdate) return device_updated_[visit_ - 2 * num_units_];
    return unit_of_visit(visit_, num_units_);
  }
  bool last_repeat() const { return repeat_ == repeats_ - 1; }
  // Place on the walk for distances: during device updates, the start of the next forward.
  std::pair<Direction, int> place() const {
    if (action() == Action::kDeviceUpdate) return {Direction::kBackward, 0};
    const Direction direction =
        action() == Action::kForward ? Direction::kForward : Direction::kBackward;
    return {direction, visited_unit()};
  }
  bool waits_to_visit() const { return !visiting() && !held_ && action() != Action::kDeviceUpdate; }
  // Visits until the unit is next needed; the visit that is waiting to start counts as 0.
  int distance(int unit) const {
    if (waits_to_visit() && visited_unit() == unit) return 0;
    const auto [direction, position] = place();
    return next_use_distance(direction, position, unit, num_units_);
  }
  // Updates that must be done before the unit's next visit.
  int updates_needed(int unit) const {
    const auto [direction, position] = place();
    const int next = distance(unit) + visit_index(direction, position, num_units_);
    const bool next_walk = next >= 2 * num_units_;
    return step_ + (next_walk && (last_repeat() || action() == Action::kDeviceUpdate) ? 1 : 0);
  }
  // What the given number of updates made: the step has been taken.
  bool may_go_up(int updates) const { return policy_.early_uploads || updates <= gates_open_; }
  bool current_on_host(int unit) const {
    const int needed = updates_needed(unit);
    return may_go_up(needed) && (!units_[unit].host_state || units_[unit].updates >= needed);
  }

  // ---- compute lane
  bool visiting() const { return compute().busy && !taking_up_; }
  bool start_compute() {
    if (compute().busy || step_ >= policy_.steps) return false;
    if (!held_ && must_take_up()) return start_taking_up();
    if (!may_visit()) return false;
    const UnitState& unit = units_[visited_unit()];
    switch (action()) {
      case Action::kForward:
        if (visit_ == 0 && repeat_ == 0 && step_ > 0) gaps_.push_back(lanes_.now() - step_ended_);
        lanes_.begin(SimulatedLane::kCompute, visited_unit(), "forward", unit.seconds.forward);
        break;
      case Action::kBackward:
        note_leaving(units_[visited_unit()]);
        lanes_.begin(SimulatedLane::kCompute, visited_unit(), "backward",
                     unit.backward + (last_repeat() ? unit.seconds.pack : 0));
        break;
      case Action::kDeviceUpdate:
        lanes_.begin(SimulatedLane::kCompute, visited_unit(), "update", unit.seconds.device_update);
    }
    return true;
  }

  void note_leaving(UnitState& running) const {
    if (step_ < policy_.steps / 2) return;
    std::size_t bytes = d2h().busy ? units_[d2h().unit].grad_bytes : 0;
    for (const auto& entry : downloads_) bytes += units_[entry.second].grad_bytes;
    running.others_leaving = std::max(running.others_leaving, bytes);
  }

  bool may_visit() const {
    if (action() == Action::kDeviceUpdate) return !held_;
    const int k = visited_unit();
    const UnitState& unit = units_[k];
    if (held_) return false;
    if (policy_.synchronous_moves && copies_pending()) return false;
    if (policy_.iteration_barrier && visit_ == 0 && repeat_ == 0 && !all_updated()) return false;
    if (unit.host_parameters && !unit.resident) return false;
    return action() == Action::kBackward || fresh(unit);
  }
  bool copies_pending() const {
    return h2d().busy || d2h().busy || !downloads_.empty() || next_update_back() >= 0;
  }
  // Forward: the unit's own updates of all earlier steps have come back.
  bool fresh(const UnitState& unit) const {
    if (!unit.host_state) return true;
    return (unit.host_parameters ? unit.updates : unit.uploads) >= step_;
  }
  bool all_updated() const {
    return std::all_of(units_.begin(), units_.end(),
                       [this](const UnitState& unit) { return fresh(unit); });
  }

  void end_compute(int k) {
    if (taking_up_) return end_taking_up(k);
    if (action() == Action::kBackward) {
      if (exchanges_ && last_repeat() && units_[k].trainable) {
        sent_.push_back(k);
      } else {
        gradients_ready(k);
      }
    }
    held_ = leaving_ >= policy_.gradient_buffers;
    if (!held_) end_visit();
  }
  void end_visit() {
    ++visit_;
    if (visit_ != 2 * num_units_) return end_walk_at_last_visit();
    if (sent_.empty()) end_of_backward();
  }
  void gradients_ready(int k) {
    if (!units_[k].host_state) return;
    ++leaving_;
    downloads_.insert({key(k), k});
  }
  void end_of_backward() {
    end_walk();
    end_walk_at_last_visit();
  }
  void end_walk_at_last_visit() {
    if (visit_ == end_of_visits()) next_walk();
  }

  // ---- gradients averaged over the ranks, parts brought together
  // One may be on its way while the next unit computes; none when backward is over.
  bool must_take_up() const { return sent_.size() > (visit_ == 2 * num_units_ ? 0 : 1); }
  bool start_taking_up() {
    if (num_exchanged_ == 0) return false;
    taking_up_ = true;
    const int k = sent_.front();
    lanes_.begin(SimulatedLane::kCompute, k, "take up", units_[k].seconds.pack);
    return true;
  }
  void end_taking_up(int k) {
    taking_up_ = false;
    sent_.pop_front();
    --num_exchanged_;
    gradients_ready(k);
    if (visit_ == 2 * num_units_ && sent_.empty()) end_of_backward();
  }
  bool start_exchange() {
    if (lanes_[SimulatedLane::kExchange].busy || sent_.size() == num_exchanged_) return false;
    const int k = sent_[num_exchanged_];
    lanes_.begin(SimulatedLane::kExchange, k, "exchange", units_[k].seconds.exchange);
    return true;
  }
  // All ranks gather in one order, whatever is ready first.
  bool start_gather() {
    if (!exchanges_ || host_updated_.empty() || lanes_[SimulatedLane::kGather].busy) return false;
    const int k = host_updated_[num_gathered_ % host_updated_.size()];
    const int step = num_gathered_ / static_cast<int>(host_updated_.size());
    if (step >= gates_open_ || units_[k].own_updates <= step) return false;
    lanes_.begin(SimulatedLane::kGather, k, "gather", units_[k].seconds.gather);
    return true;
  }
  void end_walk() {
    if (!last_repeat()) return;
    gates_open_ = step_ + 1;
    backward_ends_.push_back(lanes_.now());
  }
  int end_of_visits() const {
    return 2 * num_units_ + (last_repeat() ? static_cast<int>(device_updated_.size()) : 0);
  }
  void next_walk() {
    visit_ = 0;
    if (last_repeat()) {
      repeat_ = 0;
      ++step_;
      step_ended_ = lanes_.now();
    } else {
      ++repeat_;
    }
  }

  // ---- gradients down, then updates
  bool start_download() {
    if (d2h().busy) {
      return policy_.preempt_downloads && !downloads_.empty() &&
             downloads_.begin()->first < key(d2h().unit) && lanes_.overtake(SimulatedLane::kD2h);
    }
    if (downloads_.empty() || (policy_.synchronous_moves && compute().busy)) return false;
    const int k = downloads_.begin()->second;
    downloads_.erase(downloads_.begin());
    const double left = std::exchange(units_[k].down_remaining, 0);
    const double seconds = units_[k].seconds.download;
    lanes_.begin(SimulatedLane::kD2h, k, "download", left > 0 ? left : seconds,
                 seconds / units_[k].chunks_down);
    return true;
  }
  void end_download(int k) {
    --leaving_;
    if (held_ && leaving_ < policy_.gradient_buffers) {
      held_ = false;
      end_visit();
    }
    if (++units_[k].downloads % repeats_ == 0) arrived_.insert({key(k), k});
  }

  bool start_update() {
    if (cpu().busy) return false;
    for (const auto& entry : arrived_) {
      const int k = entry.second;
      if (policy_.gated && units_[k].own_updates >= gates_open_) continue;
      lanes_.begin(SimulatedLane::kCpu, k, "update", units_[k].seconds.cpu_update);
      arrived_.erase(entry);
      return true;
    }
    return false;
  }
  void end_update(int k) {
    ++units_[k].own_updates;
    if (!exchanges_) updated_everywhere(k);
  }
  void end_gather(int k) {
    ++num_gathered_;
    updated_everywhere(k);
  }
  void updated_everywhere(int k) {
    UnitState& unit = units_[k];
    ++unit.updates;
    if (!unit.host_parameters) {
      uploads_.insert({key(k), k});
      return;
    }
    drop(unit);  // the slot's bytes are old
  }

  // ---- parameters up
  bool start_upload() {
    if (policy_.synchronous_moves && compute().busy) return false;
    const auto [after_update, first] = most_urgent_upload();
    if (h2d().busy) {
      if (first < 0 || !policy_.priority_order) return false;
      return distance(first) < distance(h2d().unit) && lanes_.overtake(SimulatedLane::kH2d);
    }
    if (first < 0) return false;
    if (after_update) {
      uploads_.erase({uploads_key_of(first), first});
    } else if (!units_[first].loading && !take_slot(first)) {
      return false;
    }
    UnitState& unit = units_[first];
    const double seconds = after_update ? unit.seconds.upload_update : unit.seconds.upload;
    const double left = std::exchange(unit.up_remaining, 0);
    lanes_.begin(SimulatedLane::kH2d, first, "upload", left > 0 ? left : seconds,
                 seconds / unit.chunks_up);
    return true;
  }
  long long uploads_key_of(int unit) const {
    const auto found = std::find_if(uploads_.begin(), uploads_.end(),
                                    [unit](const auto& entry) { return entry.second == unit; });
    AH_ASSERT(found != uploads_.end());
    return found->first;
  }
  // (is it an update on its way back, unit); unit -1: nothing to do.
  std::pair<bool, int> most_urgent_upload() const {
    const int load = next_load();
    const int update = next_update_back();
    if (load < 0 || update < 0) return {load < 0, std::max(load, update)};
    const bool update_first = distance(update) <= distance(load);
    return {update_first, update_first ? update : load};
  }
  // The first unit whose update is on its way back, of a step that has been taken.
  int next_update_back() const {
    const auto found = std::find_if(uploads_.begin(), uploads_.end(), [this](const auto& entry) {
      return may_go_up(units_[entry.second].updates);
    });
    return found == uploads_.end() ? -1 : found->second;
  }
  // The nearest unit that the window should hold, does not, and could load now.
  int next_load() const {
    if (slots_.empty()) return -1;
    if (policy_.synchronous_moves) return load_on_demand();
    for (const int k : wanted()) {
      const UnitState& unit = units_[k];
      if (unit.resident || is_loading_now(k) || !current_on_host(k)) continue;
      return k;
    }
    return -1;
  }
  int load_on_demand() const {
    if (visiting() || action() == Action::kDeviceUpdate) return -1;
    const int k = visited_unit();
    const bool missing = units_[k].host_parameters && !units_[k].resident;
    return missing && !is_loading_now(k) && current_on_host(k) ? k : -1;
  }
  bool is_loading_now(int k) const { return h2d().busy && h2d().unit == k; }
  // The units the window should hold, nearest first: the running one and the next on the walk.
  std::vector<int> wanted() const {
    std::vector<int> units;
    int room = static_cast<int>(slots_.size());
    if (visiting() && units_[compute().unit].host_parameters && action() != Action::kDeviceUpdate) {
      --room;
    }
    const auto [direction, position] = place();
    const int here = visit_index(direction, position, num_units_) + (waits_to_visit() ? 0 : 1);
    for (int ahead = 0; ahead < 2 * num_units_ && room > 0; ++ahead) {
      const int k = unit_of_visit((here + ahead) % (2 * num_units_), num_units_);
      if (!units_[k].host_parameters || running(k)) continue;
      if (std::find(units.begin(), units.end(), k) != units.end()) continue;
      units.push_back(k);
      --room;
    }
    return units;
  }
  bool running(int k) const { return visiting() && compute().unit == k; }

  // As the engine does: the smallest free slot that the unit fits in, or the one whose unit is
  // needed last, if that is later than `k`.
  bool take_slot(int k) {
    int best = -1;
    for (int i = 0; i < static_cast<int>(slots_.size()); ++i) {
      if (slots_[i].bytes < units_[k].param_bytes) break;  // largest first
      const int holder = slots_[i].unit;
      if (holder < 0) {
        best = i;
        continue;
      }
      if (best >= 0 && slots_[best].unit < 0) continue;
      if (running(holder) || is_loading_now(holder) || distance(holder) <= distance(k)) continue;
      if (best < 0 || distance(holder) > distance(slots_[best].unit)) best = i;
    }
    if (best < 0) return false;
    if (slots_[best].unit >= 0) drop(units_[slots_[best].unit]);
    slots_[best].unit = k;
    units_[k].slot = best;
    units_[k].loading = true;
    return true;
  }
  void drop(UnitState& unit) {
    if (unit.slot >= 0) slots_[unit.slot].unit = -1;
    unit.slot = -1;
    unit.resident = unit.loading = false;
    unit.up_remaining = 0;
  }

  void end_upload(int k) {
    UnitState& unit = units_[k];
    if (!unit.host_parameters) {
      ++unit.uploads;
      return;
    }
    unit.loading = false;
    unit.resident = true;
  }

  // ---- lanes
  const LaneWork& compute() const { return lanes_[SimulatedLane::kCompute]; }
  const LaneWork& h2d() const { return lanes_[SimulatedLane::kH2d]; }
  const LaneWork& d2h() const { return lanes_[SimulatedLane::kD2h]; }
  const LaneWork& cpu() const { return lanes_[SimulatedLane::kCpu]; }

  // Smallest unit first, or first come first served.
  long long key(int unit) {
    return policy_.priority_order ? static_cast<long long>(gradient_priority(unit)) : ++arrivals_;
  }

  bool start_something() {
    const bool computed = start_compute(), downloaded = start_download();
    const bool updated = start_update(), uploaded = start_upload();
    const bool exchanged = start_exchange(), gathered = start_gather();
    return computed || downloaded || updated || uploaded || exchanged || gathered;
  }

  // Moves time to the next end of anything.
  void advance() {
    for (const SimulatedLane lane : lanes_.advance()) {
      const LaneWork was = lanes_[lane];
      if (keep_) spans_.push_back({lane, was.unit, was.what, was.start, lanes_.now()});
      if (was.remaining > 0) {
        put_back(lane, was);
      } else {
        end(lane, was.unit);
      }
    }
  }
  void end(SimulatedLane lane, int unit) {
    switch (lane) {
      case SimulatedLane::kCompute:
        return end_compute(unit);
      case SimulatedLane::kH2d:
        return end_upload(unit);
      case SimulatedLane::kD2h:
        return end_download(unit);
      case SimulatedLane::kCpu:
        return end_update(unit);
      case SimulatedLane::kExchange:
        ++num_exchanged_;
        return;
      case SimulatedLane::kGather:
        return end_gather(unit);
    }
  }
  // An overtaken copy keeps what it has moved.
  void put_back(SimulatedLane lane, const LaneWork& was) {
    UnitState& unit = units_[was.unit];
    const bool up = lane == SimulatedLane::kH2d;
    (up ? unit.up_remaining : unit.down_remaining) = was.remaining;
    if (!up) downloads_.insert({key(was.unit), was.unit});
    if (up && !unit.host_parameters) uploads_.insert({key(was.unit), was.unit});
  }

  static double mean_of_second_half(const std::vector<double>& values) {
    const auto half = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    return std::accumulate(half, values.end(), 0.0) / static_cast<double>(values.end() - half);
  }

  Simulation result() {
    Simulation out;
    const std::size_t steps = backward_ends_.size(), half = steps / 2;
    out.first_step_seconds = backward_ends_[0];
    out.step_seconds =
        (backward_ends_[steps - 1] - backward_ends_[half - 1]) / static_cast<double>(steps - half);
    for (const UnitState& unit : units_) {
      out.compute_seconds += repeats_ * (unit.seconds.forward + unit.backward);
      out.compute_seconds += 2 * unit.seconds.pack;
      if (!unit.host_state) out.compute_seconds += unit.seconds.device_update;
      out.leaving_bytes.push_back(unit.others_leaving);
    }
    out.gap_seconds = mean_of_second_half(gaps_);
    out.spans = std::move(spans_);
    return out;
  }

  const SimulationPolicy policy_;
  const bool keep_;
  const int repeats_;
  int num_units_ = 0;
  std::vector<UnitState> units_;
  std::vector<Slot> slots_;  // as large as the largest units that live on the host, largest first
  std::vector<int> device_updated_, host_updated_;
  const bool exchanges_;  // there are several ranks
  Lanes lanes_;
  int step_ = 0, repeat_ = 0, visit_ = 0;
  int gates_open_ = 0;             // steps whose updates may start
  int leaving_ = 0;                // gradients computed and not yet on the host
  bool held_ = false;              // a backward has ended, and waits for one of them to be there
  bool taking_up_ = false;         // what compute is busy with
  std::deque<int> sent_;           // units whose gradients are not taken up yet
  std::size_t num_exchanged_ = 0;  // of those, the first ones
  int num_gathered_ = 0;           // over all steps
  long long arrivals_ = 0;
  Queue downloads_, arrived_, uploads_;
  std::vector<double> backward_ends_, gaps_;
  double step_ended_ = 0;
  std::vector<SimulatedSpan> spans_;
};

}  // namespace

Simulation simulate(const Profile& profile, const Plan& plan, const SimulationPolicy& policy,
                    bool keep_spans) {
  validate(profile);
  validate(profile, plan);
  require(policy.steps >= 3 && policy.steps <= 1000, "simulate: steps is ", policy.steps,
          ", expected 3 .. 1000");
  require(policy.gradient_buffers >= 1, "simulate: gradient_buffers is ", policy.gradient_buffers,
          ", expected at least 1");
  return Simulator(profile, plan, policy, keep_spans).run();
}

SimulationPolicy policy_of(const std::string& strategy) {
  SimulationPolicy policy;
  if (strategy == "zero_offload") {
    policy.priority_order = false;
    policy.iteration_barrier = true;
  } else if (strategy == "patrickstar") {
    policy.priority_order = false;
    policy.iteration_barrier = policy.synchronous_moves = true;
  } else if (strategy == "stronghold") {
    policy.priority_order = policy.gated = false;
    policy.iteration_barrier = true;
  }
  return policy;
}

}  // namespace autohete
