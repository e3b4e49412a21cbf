// The Python module autohete._glpk: one function that hands a mixed-integer program to GLPK.
//
// GLPK is GPLv3, so this file is a module of its own that the rest never links: autohete.planning
// loads it on demand and falls back to the built-in exact search without it.
//
// GLPK aborts the whole process on a bad index, a duplicate one, or numbers so unlike that its
// scaling over- or underflows, and silently computes with NaN, so everything is checked first. A
// problem is made, solved and freed inside one call on one thread.
#include <glpk.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/check.h"

namespace py = pybind11;

namespace autohete {
namespace {

constexpr double kUnbounded = 1e29;
constexpr std::size_t kMaxColumns = 200000;
constexpr double kMaxSeconds = 86400;
constexpr double kNothing = 1e-30;  // of a coefficient; far below GLPK's own tolerances
constexpr double kTooLarge = 1e30;

// minimise cost * x over 0 <= x <= upper, with every row sum(values * x) >= row_lower.
// Rows are compressed: row r owns entries row_starts[r] .. row_starts[r + 1].
struct Problem {
  std::vector<double> cost, upper;
  std::vector<bool> is_integer;
  std::vector<int> row_starts, columns;
  std::vector<double> values, row_lower;
};

void require_finite(const std::vector<double>& numbers, const char* name) {
  for (const double number : numbers) {
    require(std::isfinite(number), "glpk: ", name, " holds ", number, ", expected finite numbers");
  }
}

void require_row(const Problem& problem, std::size_t row, std::vector<std::size_t>& last_row) {
  for (int i = problem.row_starts[row]; i < problem.row_starts[row + 1]; ++i) {
    const int column = problem.columns[i];
    require(column >= 0 && static_cast<std::size_t>(column) < problem.cost.size(),
            "glpk: column index is ", column, ", expected 0 .. ", problem.cost.size() - 1);
    require(last_row[column] != row + 1, "glpk: column ", column, " appears twice in row ", row);
    last_row[column] = row + 1;
  }
}

void validate(const Problem& problem, double seconds) {
  const std::size_t columns = problem.cost.size(), rows = problem.row_lower.size();
  require(columns >= 1 && columns <= kMaxColumns, "glpk: it has ", columns,
          " variables, expected 1 .. ", kMaxColumns);
  require(problem.upper.size() == columns && problem.is_integer.size() == columns,
          "glpk: cost, upper and is_integer differ in length");
  require(problem.row_starts.size() == rows + 1 && problem.row_starts[0] == 0 &&
              problem.columns.size() == problem.values.size() &&
              problem.row_starts.back() == static_cast<int>(problem.columns.size()),
          "glpk: row_starts does not describe the entries");
  for (std::size_t r = 0; r < rows; ++r) {
    require(problem.row_starts[r] <= problem.row_starts[r + 1], "glpk: row_starts decreases");
  }
  require_finite(problem.cost, "cost");
  require_finite(problem.upper, "upper");
  require_finite(problem.values, "values");
  require_finite(problem.row_lower, "row_lower");
  for (const double upper : problem.upper) {
    require(upper >= 0, "glpk: upper is ", upper, ", expected >= 0");
  }
  require(std::isfinite(seconds) && seconds > 0 && seconds <= kMaxSeconds, "glpk: seconds is ",
          seconds, ", expected above 0 and at most ", kMaxSeconds);
  std::vector<std::size_t> last_row(columns, 0);
  for (std::size_t r = 0; r < rows; ++r) require_row(problem, r, last_row);
}

bool too_large(const std::vector<double>& numbers) {
  return std::any_of(numbers.begin(), numbers.end(),
                     [](double number) { return std::abs(number) > kTooLarge; });
}

struct ProblemDeleter {
  void operator()(glp_prob* problem) const { glp_delete_prob(problem); }
};
using GlpkProblem = std::unique_ptr<glp_prob, ProblemDeleter>;

void add_columns(glp_prob* out, const Problem& problem) {
  glp_add_cols(out, static_cast<int>(problem.cost.size()));
  for (std::size_t i = 0; i < problem.cost.size(); ++i) {
    const int column = static_cast<int>(i) + 1;
    const double upper = problem.upper[i];
    const int kind = upper >= kUnbounded ? GLP_LO : upper == 0 ? GLP_FX : GLP_DB;
    glp_set_col_bnds(out, column, kind, 0, upper);
    glp_set_obj_coef(out, column, problem.cost[i]);
    if (problem.is_integer[i]) glp_set_col_kind(out, column, GLP_IV);
  }
}

void add_rows(glp_prob* out, const Problem& problem) {
  if (problem.row_lower.empty()) return;
  glp_add_rows(out, static_cast<int>(problem.row_lower.size()));
  for (std::size_t r = 0; r < problem.row_lower.size(); ++r) {
    std::vector<int> columns{0};  // GLPK counts from 1
    std::vector<double> values{0};
    for (int i = problem.row_starts[r]; i < problem.row_starts[r + 1]; ++i) {
      if (std::abs(problem.values[i]) < kNothing) continue;
      columns.push_back(problem.columns[i] + 1);
      values.push_back(problem.values[i]);
    }
    const int row = static_cast<int>(r) + 1;
    glp_set_row_bnds(out, row, GLP_LO, problem.row_lower[r], 0);
    glp_set_mat_row(out, row, static_cast<int>(columns.size()) - 1, columns.data(), values.data());
  }
}

// Called by GLPK at every node: ends the solve on Ctrl-C.
void stop_on_signal(glp_tree* tree, void* interrupted) {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  *static_cast<bool*>(interrupted) = true;
  glp_ios_terminate(tree);
}

struct Solution {
  std::string status;  // "optimal", "feasible" (stopped by the limit), "infeasible", "none"
  std::vector<double> values;
};

Solution read_solution(glp_prob* problem, int code, std::size_t num_columns) {
  Solution solution;
  const int status = glp_mip_status(problem);
  if (code == GLP_ENOPFS || status == GLP_NOFEAS) {
    solution.status = "infeasible";
  } else if (status == GLP_OPT || status == GLP_FEAS) {
    solution.status = code == 0 && status == GLP_OPT ? "optimal" : "feasible";
    for (std::size_t i = 0; i < num_columns; ++i) {
      solution.values.push_back(glp_mip_col_val(problem, static_cast<int>(i) + 1));
    }
  } else {
    solution.status = "none";
  }
  return solution;
}

// The relaxation, which branch and cut starts from. Not GLPK's presolver: it drops a bound that is
// violated by less than 1e-3 whatever the scale, and so returned points outside the rows.
// Returns a code of glp_simplex.
int solve_relaxation(glp_prob* problem, double seconds) {
  glp_smcp options;
  glp_init_smcp(&options);
  options.msg_lev = GLP_MSG_OFF;
  options.tm_lim = static_cast<int>(seconds * 1000) + 1;
  glp_scale_prob(problem, GLP_SF_AUTO);
  glp_adv_basis(problem, 0);
  return glp_simplex(problem, &options);
}

// Without the GIL; `interrupted` is set when a signal handler raised.
Solution solve_unlocked(const Problem& problem, double seconds, bool& interrupted) {
  if (too_large(problem.cost) || too_large(problem.values) || too_large(problem.row_lower))
    return {"none", {}};
  glp_term_out(GLP_OFF);
  const GlpkProblem owned(glp_create_prob());
  glp_set_obj_dir(owned.get(), GLP_MIN);
  add_columns(owned.get(), problem);
  add_rows(owned.get(), problem);
  const int relaxed = solve_relaxation(owned.get(), seconds);
  if (relaxed != 0) return {"none", {}};
  if (glp_get_status(owned.get()) == GLP_NOFEAS) return {"infeasible", {}};
  if (glp_get_status(owned.get()) != GLP_OPT) return {"none", {}};
  glp_iocp options;
  glp_init_iocp(&options);
  options.msg_lev = GLP_MSG_OFF;
  options.tol_int = 1e-7;
  options.tol_obj = 1e-9;
  options.tm_lim = static_cast<int>(seconds * 1000) + 1;
  options.cb_func = stop_on_signal;
  options.cb_info = &interrupted;
  const int code = glp_intopt(owned.get(), &options);
  return read_solution(owned.get(), code, problem.cost.size());
}

py::tuple solve(std::vector<double> cost, std::vector<double> upper, std::vector<bool> is_integer,
                std::vector<int> row_starts, std::vector<int> columns, std::vector<double> values,
                std::vector<double> row_lower, double seconds) {
  const Problem problem{std::move(cost),       std::move(upper),   std::move(is_integer),
                        std::move(row_starts), std::move(columns), std::move(values),
                        std::move(row_lower)};
  validate(problem, seconds);
  bool interrupted = false;
  Solution solution;
  {
    py::gil_scoped_release unlocked;
    solution = solve_unlocked(problem, seconds, interrupted);
  }
  if (interrupted) throw py::error_already_set();
  return py::make_tuple(solution.status, solution.values);
}

}  // namespace
}  // namespace autohete

PYBIND11_MODULE(_glpk, module) {
  module.doc() = "GLPK (GPLv3), kept apart from the rest of autohete";
  module.def("solve", &autohete::solve, py::kw_only(), py::arg("cost"), py::arg("upper"),
             py::arg("is_integer"), py::arg("row_starts"), py::arg("columns"), py::arg("values"),
             py::arg("row_lower"), py::arg("seconds"));
  module.def("version", [] { return std::string(glp_version()); });
}
