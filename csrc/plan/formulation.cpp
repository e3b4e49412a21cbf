// Scales, counts and indicators; the rows of memory and time have files of their own.
#include "csrc/plan/formulation.h"

#include <string>

#include "csrc/base/check.h"
#include "csrc/plan/formulation_rows.h"

namespace autohete {
namespace {

constexpr double kTieBreak = 1e-6;

class CountRows : RowWriter {
 public:
  explicit CountRows(Draft& draft) : RowWriter(draft) {}

  void add() {
    out_.segments = segments_of(profile_);
    set_scales();
    add_counts();
    add_indicators();
  }

 private:
  void set_scales() {
    double device = static_cast<double>(profile_.fixed_device_bytes) + 1;
    double host = static_cast<double>(profile_.fixed_host_bytes) + 1;
    double time = profile_.outside_seconds + profile_.loop_seconds;
    int units = 0;
    for (const Segment& s : out_.segments) {
      const UnitProfile& u = s.unit;
      device += static_cast<double>(s.count) *
                static_cast<double>(u.param_bytes + u.state_bytes + u.grad_bytes +
                                    u.activation_bytes + u.temporary_bytes);
      host +=
          static_cast<double>(s.count) *
          static_cast<double>(u.param_bytes + 2 * (u.state_bytes + u.grad_bytes) + u.master_bytes);
      time += s.count * (s.seconds.forward + s.seconds.backward + s.seconds.cpu_update);
      units += s.count;
    }
    out_.device_scale = device;
    out_.host_scale = host;
    out_.time_scale = time > 0 ? time * profile_.gradient_accumulation_steps : 1;
    out_.tie_break = kTieBreak / units;
    for (Segment& s : out_.segments) {
      s.seconds.backward += 2 * s.seconds.pack / profile_.gradient_accumulation_steps;
      s.of_layer.backward += 2 * s.of_layer.pack / profile_.gradient_accumulation_steps;
      scale_seconds(s.seconds);
      scale_seconds(s.of_layer);
      s.recompute_seconds /= out_.time_scale;
    }
  }

  // From here on the segments' seconds are in units of time_scale.
  void scale_seconds(UnitSeconds& s) const {
    for (double* value :
         {&s.forward, &s.backward, &s.upload, &s.upload_update, &s.download, &s.recompute,
          &s.cpu_update, &s.device_update, &s.exchange, &s.gather, &s.pack}) {
      *value /= out_.time_scale;
    }
  }

  void add_counts() {
    for (int g = 0; g < num_segments(); ++g) {
      const std::string tag = std::to_string(g);
      SegmentVariables v{};
      v.c = new_variable("c" + tag, segment(g).max_recompute, true);
      v.p = new_variable("p" + tag, segment(g).max_parameters, true);
      v.o = new_variable("o" + tag, segment(g).max_state, true);
      at_least(v.o, Expression().add(v.p, 1));
      of_.push_back(v);
    }
  }

  void add_indicators() {
    for (int g = 0; g < num_segments(); ++g) {
      const std::string tag = std::to_string(g);
      const int n = segment(g).count;
      SegmentVariables& v = of_[g];
      v.y = indicator("y" + tag, v.o, n);
      v.z = indicator("z" + tag, v.p, n);
      at_least(v.p, Expression().add(v.z, 1));  // a window saves uploads of what streams only
      v.q = indicator("q" + tag, v.c, n);
      v.x = new_variable("x" + tag, n);
      at_least(v.x, Expression().add(v.c, 1).add(v.o, 1).add(-n));
      v.r = new_variable("r" + tag, 1);
      at_least(v.r, Expression().add(v.c, 1).add(1 - n));
    }
  }

  int indicator(std::string name, int count, int n) {
    const int variable = new_variable(std::move(name), 1, true);
    at_least(variable, Expression().add(count, 1.0 / n));
    return variable;
  }
};

}  // namespace

Formulation formulate(const Profile& profile, const Budgets& budgets,
                      const PlannerOptions& options) {
  require(options.window >= 1 && options.window <= 1024, "planner: window is ", options.window,
          ", expected 1 .. 1024");
  Draft draft{profile, budgets, options, {}, {}};
  CountRows(draft).add();
  add_memory_rows(draft);
  add_time_rows(draft);
  return std::move(draft.out);
}

}  // namespace autohete
