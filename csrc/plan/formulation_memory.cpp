// The memory rows of a formulation (formulation.h), in the order of the header.
#include <algorithm>
#include <string>
#include <vector>

#include "csrc/plan/formulation_rows.h"

namespace autohete {
namespace {

constexpr std::size_t kMaxChoices = 220;  // of largest layers; past it all are as large as one

class MemoryRows : RowWriter {
 public:
  explicit MemoryRows(Draft& draft) : RowWriter(draft) {}

  void add() {
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

 private:
  double device_units(std::size_t bytes) const {
    return static_cast<double>(bytes) / out_.device_scale;
  }
  double host_units(std::size_t bytes) const {
    return static_cast<double>(bytes) / out_.host_scale;
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

  // While a layer of the segment runs backward, two of it and of later ones may be on their way;
  // of earlier ones too where they had a micro-batch before.
  void add_leaving_gradients(int leaving, int g) {
    std::vector<Candidate> layers;
    for (int h = profile_.gradient_accumulation_steps > 1 ? 0 : g; h < num_segments(); ++h) {
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
};

}  // namespace

void add_memory_rows(Draft& draft) { MemoryRows(draft).add(); }

}  // namespace autohete
