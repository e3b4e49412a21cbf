// The planning problem as a small mixed-integer linear program, written down once. GLPK, the
// built-in exact search and any other solver read the same rows, so they optimise the same thing.
//
// Every auxiliary variable is *defined from below*: its bounds say "variable >= terms + constant",
// and nothing gains from a larger one (z would, and is at most p). So for given counts its value is
// the largest of its bounds (rounded up when integer), computed in one pass in the order of the
// variables: evaluate().
//
// A super-layer (segments.h) counts with its sums; where a row means one layer (window slots, the
// leaving gradients, a loop's own D, U, H, f, b beside y) with its largest layer's bytes and its
// mean layer's seconds. r's a is the largest layer's, as only one is recomputed at a time.
//
// Variables per segment g of n identical units, all >= 0 (meaning of c, p, o: segments.h):
//   c, p, o   integers;   y = [o > 0], z = [p > 0], q = [c > 0]
//   x >= c + o - n;   r >= c - n + 1
//   F, B      seconds of the segment's forward and backward, stalls for parameters included
// and for the whole step:
//   window       bytes of the device's slots
//   leaving_g    bytes of gradients on their way out while a unit of the segment runs backward
//   device, host        bytes;    T seconds of a step in the steady state
//
// Memory rows. The device's peak is at a visit of backward; inside a segment the sum is convex in
// the unit, so its two ends are enough (cost_model.h walks every unit and is never above these
// rows):
//   window >= every sum of w layers' P among segments with z
//   leaving_g >= every sum of two other layers' G among own and later segments with y (m > 1: all)
//   base = fixed + window + leaving_g + sum[ P(n-p) + S(n-o) ]
//   (a' is a - k, what recomputing brings back)
//   last unit:   device >= base + earlier and own(a(n-c) + k c) + a' r + t
//                          + sum G(n-o) + G y, or where gradients do not persist later G(n-o) + G
//   and, where gradients do not persist:
//   first unit:  device >= base + earlier(a(n-c) + k c) + a + t + later and own G(n-o) + G y
//   last one that is recomputed:
//                device >= base + earlier(a(n-c) + k c) + k c + a' q + t + later and own G(n-o)
//                          - G(c - q) + G y
//   host >= fixed + sum[ (S + G) o + P p + master (o - p) ]  (+ sum (S + G) o if it speculates)
// Time rows (f, b forward and backward, H upload, D download, U and A update on CPU and device;
// m accumulation steps; w window; one-machine bounds "released here, due there"):
//   F >= n f;              F >= (p-w)H;   F >= (n-o) f + (p-w)H
//   B >= n b + c f;        B >= (p-w)H;   B >= (n-o) b + (p-w)H
//   (to the last segment's first, third and next bound, outside_seconds is added)
//   B >= (n-o+1) b + (o-2)D [+ (c-o) f]   where D > b: three gradient buffers
//   T >= m sum(F+B) + sum (n-o)A;  T >= sum o U;  T >= m sum o D;  T >= sum[(o-p)H' + 2 m p H - w H
//   z] and, for each segment with something to update, its own loop backward -> D2H -> update ->
//   H2D
//   -> forward, behind the work of earlier segments. Ungated (updates start during backward):
//     X in {U, H'}, X' the other:
//     T >= (m-1)sum(F+B) + later(F+B) + o(f+b) + x f + earlier(o X) + y(D+X+X')
//     T >= (m-1)sum(F+B) + later(F+B) + y(f+b) + earlier and own(o X) + y(D+X')
//     T >= (m-1)sum(F+B) + later(F+B) + 2(p-w)H + earlier(o U) + y(D+U+H')
//   and, without early_uploads:
//     T >= (m-1)sum(F+B) + sum B + later F + o f + earlier(o H') + y H'
//     T >= (m-1)sum(F+B) + sum B + later F + y f + earlier and own(o H')
//   Gated (updates start when the whole backward has ended):
//     T >= (m-1)sum(F+B) + sum B + later F + o f + earlier(o X) + y(U+H')
//     T >= (m-1)sum(F+B) + sum B + later F + y f + earlier and own(o X) + y X'
//     T >= (m-1)sum(F+B) + later(F+B) + o(f+b) + y(D+U+H')
//     T >= (m-1)sum(F+B) + later(F+B) + y(f+b) + earlier and own(o D) + y(U+H')
//     if the first segment is one unit, for each other segment h with a longer update than its D:
//     T >= (m-1)sum(F+B) + sum B + later F + o f + y(U+H') + U_h (y + y_h - 1)
// With several ranks a unit's exchange E, gather R and pack K come in: b is b + 2 K / m, each
// loop's U is U + R, and
//   B >= ((m-1)(n b + c f) + n E) / m     (one exchange at a time in a step's last backward)
//   T >= sum o R
//   T >= (m-1)sum(F+B) + sum B + later F + o f + earlier(o R) + y(R+H')
//   T >= (m-1)sum(F+B) + sum B + later F + y f + earlier and own(o R) + y H'
//   (with early gathers these two as the ungated ones, X = R)
// The objective is T + 1e-6 (sum of counts) / (sum of units): of equal times, the smaller counts.
//
// Numbers are scaled: bytes by device_scale / host_scale, seconds by time_scale.
#pragma once

#include <string>
#include <vector>

#include "csrc/plan/plan.h"
#include "csrc/plan/segments.h"

namespace autohete {

struct PlannerOptions {
  int window = 2;
  bool gated = true;  // updates start at step(), after the whole backward
  bool early_uploads =
      false;  // ungated: what is updated goes up at once; the engine waits for step()
  int max_simulations = 60;  // to refine the formulation's plan (refine.h); 0: the plan as it is
};

struct Variable {
  std::string name;
  double upper = 0;
  bool integer = false;
};

struct Term {
  int variable;
  double coefficient;
};

// variable >= sum of terms + constant
struct Bound {
  int variable;
  std::vector<Term> terms;
  double constant = 0;
};

struct Formulation {
  std::vector<Segment> segments;
  std::vector<Variable> variables;  // c, p, o of segment 0, of segment 1, ...; then auxiliary ones
  // Each after the bounds of what it mentions; but p <= o is a bound of o, and z <= p one of p.
  std::vector<Bound> bounds;
  int device = 0, host = 0, step = 0;  // indices of variables
  double device_scale = 1, host_scale = 1, time_scale = 1;
  double tie_break = 0;  // cost of one count

  int num_counts() const { return 3 * static_cast<int>(segments.size()); }
};

// What to minimise.
enum class Goal { kStepSeconds, kDeviceBytes, kHostBytes };

// Builds the rows for a profile that validate() passed. The budgets become upper bounds of the
// device and host variables.
Formulation formulate(const Profile& profile, const Budgets& budgets,
                      const PlannerOptions& options);

// Objective coefficient of every variable.
std::vector<double> objective(const Formulation& formulation, Goal goal);

// Values of all variables for given counts (each auxiliary one as small as its bounds allow).
std::vector<double> evaluate(const Formulation& formulation,
                             const std::vector<SegmentCounts>& counts);

// True when evaluated values are within the budgets, rounding of sums forgiven (a tenth of a byte
// in a terabyte).
bool within_budgets(const Formulation& formulation, const std::vector<double>& values);

// Counts from a solver's values, rounded to integers.
std::vector<SegmentCounts> counts_of(const Formulation& formulation,
                                     const std::vector<double>& values);

}  // namespace autohete
