// A formulation under construction: what its parts share. Included by the files that write its
// rows.
//
// Parts, in this order: counts and indicators (formulation.cpp), memory (formulation_memory.cpp),
// time (formulation_times.cpp). Each is a class of its own over one draft; the header formulation.h
// lists every row.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "csrc/plan/expression.h"
#include "csrc/plan/formulation.h"

namespace autohete {

// Indices of the variables of one segment.
struct SegmentVariables {
  int c, p, o, y, z, q, x, r, forward, backward;
};

struct Draft {
  const Profile& profile;
  const Budgets& budgets;
  const PlannerOptions& options;
  std::vector<SegmentVariables> of;  // by segment
  Formulation out;
};

// What every part reads, and how it adds variables and rows.
class RowWriter {
 protected:
  explicit RowWriter(Draft& draft)
      : profile_(draft.profile),
        budgets_(draft.budgets),
        options_(draft.options),
        of_(draft.of),
        out_(draft.out) {}

  int num_segments() const { return static_cast<int>(out_.segments.size()); }
  const Segment& segment(int g) const { return out_.segments[g]; }

  int new_variable(std::string name, double upper, bool integer = false) {
    out_.variables.push_back({std::move(name), upper, integer});
    return static_cast<int>(out_.variables.size()) - 1;
  }
  void at_least(int variable, Expression expression) {
    out_.bounds.push_back({variable, std::move(expression.terms), expression.constant});
  }

  static constexpr double kUnlimited = 1e30;
  const Profile& profile_;
  const Budgets& budgets_;
  const PlannerOptions& options_;
  std::vector<SegmentVariables>& of_;
  Formulation& out_;
};

// Variables `window`, `leaving` of each segment, `device` and `host`, and their rows.
void add_memory_rows(Draft& draft);

// Variables F and B of each segment and T, and their rows.
void add_time_rows(Draft& draft);

}  // namespace autohete
