// A linear expression over a formulation's variables, under construction. Header-only.
#pragma once

#include <algorithm>
#include <vector>

#include "csrc/plan/formulation.h"

namespace autohete {

// sum of terms + constant. A variable appears once (GLPK insists).
struct Expression {
  std::vector<Term> terms;
  double constant = 0;

  Expression& add(int variable, double coefficient) {
    const auto known = std::find_if(terms.begin(), terms.end(),
                                    [&](const Term& term) { return term.variable == variable; });
    if (known != terms.end()) {
      known->coefficient += coefficient;
    } else if (coefficient != 0) {
      terms.push_back({variable, coefficient});
    }
    return *this;
  }
  Expression& add(double value) {
    constant += value;
    return *this;
  }
  Expression& add(const Expression& other) {
    for (const Term& term : other.terms) add(term.variable, term.coefficient);
    return add(other.constant);
  }
};

}  // namespace autohete
