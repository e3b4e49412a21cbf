// The whole system of rows in one place, in the order of the header, so that it can be checked
// against it line by line; longer than other files for that.
#include "csrc/plan/formulation.h"

#include <algorithm>
#include <cmath>

#include "csrc/base/check.h"
#include "csrc/plan/expression.h"

namespace autohete {
namespace {

constexpr double kTieBreak = 1e-6;
constexpr std::size_t kMaxChoices = 220;  // of largest layers; past it all are as large as one

// Indices of the variables of one segment.
struct SegmentVariables {
  int c, p, o, y, z, q, x, r, forward, backward;
};

class Builder {
 public:
  Builder(const Profile& profile, const Budgets& budgets, const PlannerOptions& options)
      : profile_(profile), budgets_(budgets), options_(options) {
    out_.segments = segments_of(profile);
  }

  Formulation build() {
    set_scales();
    add_counts();
    add_indicators();
    add_memory();
    add_segment_times();
    add_step_time();
    return std::move(out_);
  }

 private:
  int num_segments() const { return static_cast<int>(out_.segments.size()); }
  const Segment& segment(int g) const { return out_.segments[g]; }
  const UnitSeconds& seconds(int g) const { return out_.segments[g].seconds; }
  const UnitSeconds& of_layer(int g) const { return out_.segments[g].of_layer; }

  int new_variable(std::string name, double upper, bool integer = false) {
    out_.variables.push_back({std::move(name), upper, integer});
    return static_cast<int>(out_.variables.size()) - 1;
  }
  void at_least(int variable, Expression expression) {
    out_.bounds.push_back({variable, std::move(expression.terms), expression.constant});
  }

  double device_units(std::size_t bytes) const {
    return static_cast<double>(bytes) / out_.device_scale;
  }
  double host_units(std::size_t bytes) const {
    return static_cast<double>(bytes) / out_.host_scale;
  }

  void set_scales() {
    double device = static_cast<double>(profile_.fixed_device_bytes) + 1;
    double host = static_cast<double>(profile_.fixed_host_bytes) + 1;
    double time = profile_.outside_seconds;
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

  void add_memory() {
    const int window = new_variable("window", kUnlimited);
    std::vector<int> leaving;
    for (int g = 0; g < num_segments(); ++g)
      leaving.push_back(new_variable("leaving" + std::to_string(g), kUnlimited));
    out_.device = new_variable("device", device_units(budgets_.device_bytes));
    out_.host = new_variable("host", host_units(budgets_.host_bytes));
    add_slots(window);
    for (int g = 0; g < num_segments(); ++g) add_leaving_gradients(leaving[g], g);
    const Expression base = always_on_device(window);
    for (int g = 0; g < num_segments(); ++g) {
      Expression with_leaving = base;
      add_device_rows(g, with_leaving.add(leaving[g], 1));
    }
    add_host_row();
  }

  Expression always_on_device(int window) const {
    Expression base;
    base.add(device_units(profile_.fixed_device_bytes)).add(window, 1);
    for (int g = 0; g < num_segments(); ++g) {
      const UnitProfile& u = segment(g).unit;
      const double n = segment(g).count;
      base.add(n * device_units(u.param_bytes)).add(of_[g].p, -device_units(u.param_bytes));
      base.add(n * device_units(u.state_bytes)).add(of_[g].o, -device_units(u.state_bytes));
      if (profile_.gradients_persist) base.add(device_gradients(g));
    }
    return base;
  }
  Expression device_gradients(int g) const {
    const double bytes = device_units(segment(g).unit.grad_bytes);
    return Expression().add(segment(g).count * bytes).add(of_[g].o, -bytes);
  }
  Expression saved(int g) const {
    const UnitProfile& u = segment(g).unit;
    const double kept = device_units(u.activation_bytes);
    return Expression()
        .add(segment(g).count * kept)
        .add(of_[g].c, device_units(u.checkpoint_bytes) - kept);
  }

  void add_device_rows(int g, const Expression& base) {
    const UnitProfile& u = segment(g).unit;
    Expression first = base, last = base;
    for (int h = 0; h < g; ++h) {
      first.add(saved(h));
      last.add(saved(h));
    }
    const std::size_t again = segment(g).largest_recomputed_bytes;
    last.add(saved(g)).add(of_[g].r, device_units(again));
    first.add(device_units(std::max(u.activation_bytes, u.checkpoint_bytes + again)));
    first.add(device_units(u.temporary_bytes));
    last.add(device_units(u.temporary_bytes));
    const double own = device_units(segment(g).largest_grad_bytes);
    if (profile_.gradients_persist) {
      last.add(of_[g].y, own);
    } else {
      for (int h = g; h < num_segments(); ++h) {
        first.add(device_gradients(h));
        if (h > g) last.add(device_gradients(h));
      }
      first.add(of_[g].y, own);
      last.add(std::max(own, device_units(u.grad_bytes)));  // wherever it goes
      at_least(out_.device, first);
      at_least(out_.device, last_recomputed(g, base));
    }
    at_least(out_.device, last);
  }

  // The visit of the last unit that is recomputed: fewer gradients have appeared before it than
  // before the first unit, and more than at the last.
  Expression last_recomputed(int g, Expression row) const {
    const UnitProfile& u = segment(g).unit;
    const SegmentVariables& v = of_[g];
    for (int h = 0; h < g; ++h) row.add(saved(h));
    for (int h = g; h < num_segments(); ++h) row.add(device_gradients(h));
    const double gradients = device_units(u.grad_bytes);
    row.add(v.c, device_units(u.checkpoint_bytes) - gradients);
    row.add(v.q, device_units(segment(g).largest_recomputed_bytes) + gradients);
    row.add(v.y, device_units(segment(g).largest_grad_bytes));
    return row.add(device_units(u.temporary_bytes));
  }

  void add_host_row() {
    Expression host;
    host.add(host_units(profile_.fixed_host_bytes));
    for (int g = 0; g < num_segments(); ++g) {
      const UnitProfile& u = segment(g).unit;
      host.add(of_[g].o, host_units(u.state_bytes + u.grad_bytes + u.master_bytes));
      if (profile_.speculates) host.add(of_[g].o, host_units(u.state_bytes + u.grad_bytes));
      host.add(of_[g].p, host_units(u.param_bytes) - host_units(u.master_bytes));
    }
    at_least(out_.host, host);
  }

  // A layer that may be among the largest: what it takes where the segment's indicator is on.
  struct Candidate {
    int indicator;
    double size;
    int count;  // layers of that size
  };

  // The window's slots are as large as the largest offloaded layers.
  void add_slots(int window) {
    std::vector<Candidate> layers;
    for (int g = 0; g < num_segments(); ++g) {
      const Segment& s = segment(g);
      layers.push_back({of_[g].z, device_units(s.largest_param_bytes), s.count * s.period});
    }
    add_largest(window, layers, options_.window);
  }

  // While a layer of the segment runs backward, two of it and of later ones may be on their way.
  void add_leaving_gradients(int leaving, int g) {
    std::vector<Candidate> layers;
    for (int h = g; h < num_segments(); ++h) {
      const Segment& s = segment(h);
      const int others = s.count * s.period - (h == g ? 1 : 0);
      layers.push_back({of_[h].y, device_units(s.largest_grad_bytes), others});
    }
    add_largest(leaving, layers, 2);
  }

  // variable >= the sizes of every choice of `how_many` layers; where those are too many, of as
  // many of one size.
  void add_largest(int variable, const std::vector<Candidate>& layers, int how_many) {
    std::vector<Expression> choices;
    choose(layers, 0, how_many, Expression(), choices);
    if (choices.size() > kMaxChoices) {
      choices.clear();
      for (const Candidate& layer : layers)
        choices.push_back(Expression().add(layer.indicator, how_many * layer.size));
    }
    for (Expression& choice : choices) at_least(variable, std::move(choice));
  }

  // Fewer are left out: all there are of a smaller size would fit too.
  void choose(const std::vector<Candidate>& layers, std::size_t from, int how_many,
              const Expression& chosen, std::vector<Expression>& choices) const {
    if (choices.size() > kMaxChoices) return;
    if (how_many == 0 || from == layers.size()) {
      choices.push_back(chosen);
      return;
    }
    const Candidate& layer = layers[from];
    for (int taken = std::min(how_many, layer.count); taken >= 0; --taken) {
      Expression more = chosen;
      more.add(layer.indicator, taken * layer.size);
      choose(layers, from + 1, how_many - taken, more, choices);
    }
  }

  void add_segment_times() {
    for (int g = 0; g < num_segments(); ++g) {
      const std::string tag = std::to_string(g);
      of_[g].forward = new_variable("F" + tag, kUnlimited);
      of_[g].backward = new_variable("B" + tag, kUnlimited);
      add_forward(g);
      add_backward(g);
    }
  }

  // Uploads of all but the first `window` units of the segment, which the window holds already.
  Expression streaming(int g, double times = 1) const {
    return Expression()
        .add(of_[g].p, times * seconds(g).upload)
        .add(-times * options_.window * of_layer(g).upload);
  }

  void add_forward(int g) {
    const double n = segment(g).count, f = seconds(g).forward;
    const SegmentVariables& v = of_[g];
    at_least(v.forward, Expression().add(n * f));
    at_least(v.forward, streaming(g));
    at_least(v.forward, streaming(g).add(n * f).add(v.o, -f));
  }

  void add_backward(int g) {
    const double n = segment(g).count, again = segment(g).recompute_seconds;
    const double b = seconds(g).backward, download = seconds(g).download;
    const SegmentVariables& v = of_[g];
    // The loss comes before the last segment's backward; uploads go on meanwhile.
    const double loss = g + 1 == num_segments() ? profile_.outside_seconds / out_.time_scale : 0;
    at_least(v.backward, Expression().add(n * b + loss).add(v.c, again));
    at_least(v.backward, streaming(g));
    at_least(v.backward, streaming(g).add(n * b + loss).add(v.o, -b));
    if (among_ranks()) {
      const double m = profile_.gradient_accumulation_steps, others = (m - 1) / m;
      const double exchanges = n * seconds(g).exchange / m;
      at_least(v.backward,
               Expression().add(others * (n * b + loss) + exchanges).add(v.c, others * again));
    }
    if (download > b) {  // else the buffers never run out
      Expression leaving;
      leaving.add(n * b + loss + of_layer(g).backward - 2 * of_layer(g).download);
      leaving.add(v.o, download - b);
      at_least(v.backward, leaving);
      at_least(v.backward, leaving.add(v.c, again).add(v.o, -again));
    }
  }

  void add_step_time() {
    out_.step = new_variable("T", kUnlimited);
    const double m = profile_.gradient_accumulation_steps;
    Expression compute, cpu, d2h, h2d, gather;
    for (int g = 0; g < num_segments(); ++g) {
      const SegmentVariables& v = of_[g];
      const UnitSeconds& s = seconds(g);
      compute.add(v.forward, m).add(v.backward, m);
      compute.add(segment(g).count * s.device_update).add(v.o, -s.device_update);
      cpu.add(v.o, s.cpu_update);
      gather.add(v.o, s.gather);
      d2h.add(v.o, m * s.download);
      h2d.add(v.o, s.upload_update).add(v.p, 2 * m * s.upload - s.upload_update);
      h2d.add(v.z, -options_.window * of_layer(g).upload);
    }
    for (const Expression& lane : {compute, cpu, d2h, h2d}) at_least(out_.step, lane);
    if (among_ranks()) at_least(out_.step, gather);
    for (int g = 0; g < num_segments(); ++g) {
      if (trainable_parameters(segment(g).unit) > 0) add_loop(g);
    }
  }

  // (m-1) sum(F+B) + what follows the segment.
  Expression around(int g, bool whole_backward) const {
    Expression sum;
    const double repeats = profile_.gradient_accumulation_steps - 1;
    for (int h = 0; h < num_segments(); ++h) {
      const bool later = h > g;
      sum.add(of_[h].forward, repeats + (later ? 1 : 0));
      sum.add(of_[h].backward, repeats + (later || whole_backward ? 1 : 0));
    }
    return sum;
  }

  bool among_ranks() const { return profile_.ranks.num_ranks > 1; }

  enum class Work { kUpdate, kUpload, kDownload, kGather };
  double work_seconds(int g, Work work) const { return work_seconds(seconds(g), work); }
  static double work_seconds(const UnitSeconds& s, Work work) {
    if (work == Work::kUpdate) return s.cpu_update;
    if (work == Work::kGather) return s.gather;
    return work == Work::kUpload ? s.upload_update : s.download;
  }
  void add_queue(Expression& sum, int end, Work work) const {
    for (int h = 0; h < end; ++h) sum.add(of_[h].o, work_seconds(h, work));
  }

  void add_loop(int g) {
    if (options_.gated) {
      add_gated_loop(g);
    } else {
      add_ungated_loop(g);
    }
    if (among_ranks()) add_gather_loop(g);
  }

  // Gathers wait for the end of backward, whatever updates do.
  void add_gather_loop(int g) {
    const SegmentVariables& v = of_[g];
    const UnitSeconds& layer = of_layer(g);
    Expression first = around(g, true), last = around(g, true);
    first.add(v.o, seconds(g).forward).add(v.y, layer.gather + layer.upload_update);
    add_queue(first, g, Work::kGather);
    last.add(v.y, layer.forward + layer.upload_update);
    add_queue(last, g + 1, Work::kGather);
    at_least(out_.step, first);
    at_least(out_.step, last);
  }

  void add_ungated_loop(int g) {
    const SegmentVariables& v = of_[g];
    const UnitSeconds& s = seconds(g);
    const UnitSeconds& layer = of_layer(g);
    const double loop = layer.download + layer.cpu_update + layer.gather + layer.upload_update;
    for (const Work work : {Work::kUpdate, Work::kUpload}) {
      Expression first = around(g, false), last = around(g, false);
      first.add(v.o, s.forward + s.backward).add(v.x, segment(g).recompute_seconds).add(v.y, loop);
      add_queue(first, g, work);
      last.add(v.y, layer.forward + layer.backward + loop - work_seconds(layer, work));
      add_queue(last, g + 1, work);
      at_least(out_.step, first);
      at_least(out_.step, last);
    }
    if (!options_.early_uploads) add_late_uploads(g);
    Expression stream = around(g, false);
    stream.add(streaming(g, 2)).add(v.y, loop);
    add_queue(stream, g, Work::kUpdate);
    at_least(out_.step, stream);
  }

  // What was updated early goes up when the step is taken, after the whole backward.
  void add_late_uploads(int g) {
    const SegmentVariables& v = of_[g];
    Expression first = around(g, true), last = around(g, true);
    first.add(v.o, seconds(g).forward).add(v.y, of_layer(g).upload_update);
    add_queue(first, g, Work::kUpload);
    last.add(v.y, of_layer(g).forward);
    add_queue(last, g + 1, Work::kUpload);
    at_least(out_.step, first);
    at_least(out_.step, last);
  }

  void add_gated_loop(int g) {
    const SegmentVariables& v = of_[g];
    const UnitSeconds& s = seconds(g);
    const UnitSeconds& layer = of_layer(g);
    const double renew = layer.cpu_update + layer.gather + layer.upload_update;
    for (const Work work : {Work::kUpdate, Work::kUpload}) {
      Expression first = around(g, true), last = around(g, true);
      first.add(v.o, s.forward).add(v.y, renew);
      add_queue(first, g, work);
      last.add(v.y, layer.forward + renew - work_seconds(layer, work));
      add_queue(last, g + 1, work);
      at_least(out_.step, first);
      at_least(out_.step, last);
    }
    Expression first = around(g, false), last = around(g, false);
    first.add(v.o, s.forward + s.backward).add(v.y, layer.download + renew);
    last.add(v.y, layer.forward + layer.backward + renew);
    add_queue(last, g + 1, Work::kDownload);
    at_least(out_.step, first);
    at_least(out_.step, last);
    if (g == 0 && segment(0).count * segment(0).period == 1) add_blocking();
  }

  // The first unit's gradients land after the gate has opened; by then the CPU has begun with
  // another unit's, and an update is not interrupted.
  void add_blocking() {
    const UnitSeconds& s = seconds(0);
    for (int h = 1; h < num_segments(); ++h) {
      const double blocked = of_layer(h).cpu_update;
      if (blocked <= s.download) continue;
      Expression wait = around(0, true);
      wait.add(of_[0].o, s.forward).add(of_[0].y, s.cpu_update + s.upload_update + blocked);
      wait.add(of_[h].y, blocked).add(-blocked);
      at_least(out_.step, wait);
    }
  }

  static constexpr double kUnlimited = 1e30;
  const Profile& profile_;
  const Budgets& budgets_;
  const PlannerOptions& options_;
  std::vector<SegmentVariables> of_;
  Formulation out_;
};

}  // namespace

Formulation formulate(const Profile& profile, const Budgets& budgets,
                      const PlannerOptions& options) {
  require(options.window >= 1 && options.window <= 1024, "planner: window is ", options.window,
          ", expected 1 .. 1024");
  return Builder(profile, budgets, options).build();
}

}  // namespace autohete
