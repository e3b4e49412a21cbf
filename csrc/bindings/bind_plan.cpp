// Plan data, planner, cost model and simulator as Python objects. Names are the C++ ones.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/plan/cost_model.h"
#include "csrc/plan/formulation.h"
#include "csrc/plan/order.h"
#include "csrc/plan/plan.h"
#include "csrc/plan/planner.h"
#include "csrc/plan/search.h"
#include "csrc/plan/segments.h"
#include "csrc/plan/simulator.h"
#include "csrc/plan/validate.h"

namespace py = pybind11;

namespace autohete {
namespace {

bool python_signal() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

void bind_data(py::module_& module) {
  py::enum_<Tier>(module, "Tier").value("DEVICE", Tier::kDevice).value("HOST", Tier::kHost);
  py::enum_<ActivationRule>(module, "ActivationRule")
      .value("KEEP", ActivationRule::kKeep)
      .value("RECOMPUTE", ActivationRule::kRecompute);
  py::class_<UnitProfile>(module, "UnitProfile")
      .def(py::init<>())
      .def(py::init<const UnitProfile&>(), py::arg("other"))  // a copy
      .def_readwrite("name", &UnitProfile::name)
      .def_readwrite("kind", &UnitProfile::kind)
      .def_readwrite("num_parameters", &UnitProfile::num_parameters)
      .def_readwrite("param_bytes", &UnitProfile::param_bytes)
      .def_readwrite("grad_bytes", &UnitProfile::grad_bytes)
      .def_readwrite("grad_tensors", &UnitProfile::grad_tensors)
      .def_readwrite("largest_grad_tensor_bytes", &UnitProfile::largest_grad_tensor_bytes)
      .def_readwrite("state_bytes", &UnitProfile::state_bytes)
      .def_readwrite("master_bytes", &UnitProfile::master_bytes)
      .def_readwrite("activation_bytes", &UnitProfile::activation_bytes)
      .def_readwrite("checkpoint_bytes", &UnitProfile::checkpoint_bytes)
      .def_readwrite("temporary_bytes", &UnitProfile::temporary_bytes)
      .def_readwrite("forward_seconds", &UnitProfile::forward_seconds)
      .def_readwrite("backward_seconds", &UnitProfile::backward_seconds)
      .def_readwrite("recompute_seconds", &UnitProfile::recompute_seconds)
      .def_readwrite("can_offload_parameters", &UnitProfile::can_offload_parameters)
      .def_readwrite("can_recompute", &UnitProfile::can_recompute);
  py::class_<HardwareProfile>(module, "HardwareProfile")
      .def(py::init<>())
      .def(py::init<const HardwareProfile&>(), py::arg("other"))  // a copy
      .def_readwrite("h2d_bytes_per_second", &HardwareProfile::h2d_bytes_per_second)
      .def_readwrite("d2h_bytes_per_second", &HardwareProfile::d2h_bytes_per_second)
      .def_readwrite("link_latency_seconds", &HardwareProfile::link_latency_seconds)
      .def_readwrite("cpu_params_per_second", &HardwareProfile::cpu_params_per_second)
      .def_readwrite("device_params_per_second", &HardwareProfile::device_params_per_second)
      .def_readwrite("h2d_share_during_d2h", &HardwareProfile::h2d_share_during_d2h)
      .def_readwrite("d2h_share_during_h2d", &HardwareProfile::d2h_share_during_h2d)
      .def_readwrite("copy_share_during_cpu", &HardwareProfile::copy_share_during_cpu)
      .def_readwrite("cpu_share_during_copy", &HardwareProfile::cpu_share_during_copy)
      .def_readwrite("cpu_share_during_compute", &HardwareProfile::cpu_share_during_compute)
      .def_readwrite("compute_share_during_cpu", &HardwareProfile::compute_share_during_cpu)
      .def_readwrite("compute_share_during_copy", &HardwareProfile::compute_share_during_copy);
  py::class_<RankProfile>(module, "RankProfile")
      .def(py::init<>())
      .def(py::init<const RankProfile&>(), py::arg("other"))  // a copy
      .def_readwrite("num_ranks", &RankProfile::num_ranks)
      .def_readwrite("own_gradients", &RankProfile::own_gradients)
      .def_readwrite("early_gathers", &RankProfile::early_gathers)
      .def_readwrite("exchange_bytes_per_second", &RankProfile::exchange_bytes_per_second)
      .def_readwrite("gather_bytes_per_second", &RankProfile::gather_bytes_per_second)
      .def_readwrite("device_gather_bytes_per_second", &RankProfile::device_gather_bytes_per_second)
      .def_readwrite("exchange_latency_seconds", &RankProfile::exchange_latency_seconds)
      .def_readwrite("gather_latency_seconds", &RankProfile::gather_latency_seconds)
      .def_readwrite("device_gather_latency_seconds", &RankProfile::device_gather_latency_seconds)
      .def_readwrite("pack_bytes_per_second", &RankProfile::pack_bytes_per_second)
      .def_readwrite("compute_share_during_collective",
                     &RankProfile::compute_share_during_collective)
      .def_readwrite("cpu_share_during_collective", &RankProfile::cpu_share_during_collective)
      .def_readwrite("collective_share_during_compute",
                     &RankProfile::collective_share_during_compute)
      .def_readwrite("collective_share_during_cpu", &RankProfile::collective_share_during_cpu)
      .def_readwrite("collective_share_during_other", &RankProfile::collective_share_during_other);
  py::class_<Profile>(module, "Profile")
      .def(py::init<>())
      .def(py::init<const Profile&>(), py::arg("other"))  // a copy
      .def_readwrite("units", &Profile::units)
      .def_readwrite("hardware", &Profile::hardware)
      .def_readwrite("ranks", &Profile::ranks)
      .def_readwrite("fixed_device_bytes", &Profile::fixed_device_bytes)
      .def_readwrite("fixed_host_bytes", &Profile::fixed_host_bytes)
      .def_readwrite("outside_seconds", &Profile::outside_seconds)
      .def_readwrite("loop_seconds", &Profile::loop_seconds)
      .def_readwrite("gradient_accumulation_steps", &Profile::gradient_accumulation_steps)
      .def_readwrite("gradients_persist", &Profile::gradients_persist)
      .def_readwrite("speculates", &Profile::speculates)
      .def_readwrite("chunk_bytes", &Profile::chunk_bytes);
  py::class_<Budgets>(module, "Budgets")
      .def(py::init([](std::size_t device, std::size_t host) { return Budgets{device, host}; }),
           py::arg("device_bytes") = 0, py::arg("host_bytes") = 0)
      .def_readwrite("device_bytes", &Budgets::device_bytes)
      .def_readwrite("host_bytes", &Budgets::host_bytes);
}

void bind_plan_data(py::module_& module) {
  py::class_<UnitPlan>(module, "UnitPlan")
      .def(py::init<>())
      .def(py::init<const UnitPlan&>(), py::arg("other"))  // a copy
      .def_readwrite("parameters", &UnitPlan::parameters)
      .def_readwrite("gradients", &UnitPlan::gradients)
      .def_readwrite("optimizer_state", &UnitPlan::optimizer_state)
      .def_readwrite("activations", &UnitPlan::activations)
      .def("__eq__", [](const UnitPlan& a, const UnitPlan& b) {
        return a.parameters == b.parameters && a.gradients == b.gradients &&
               a.optimizer_state == b.optimizer_state && a.activations == b.activations;
      });
  py::class_<Plan>(module, "Plan")
      .def(py::init<>())
      .def(py::init<const Plan&>(), py::arg("other"))  // a copy
      .def_readwrite("units", &Plan::units)
      .def_readwrite("strategy", &Plan::strategy)
      .def_readwrite("window", &Plan::window)
      .def_readwrite("chunk_bytes", &Plan::chunk_bytes)
      .def_readwrite("step_seconds", &Plan::step_seconds)
      .def_readwrite("device_peak_bytes", &Plan::device_peak_bytes)
      .def_readwrite("host_bytes", &Plan::host_bytes)
      .def_readwrite("solver", &Plan::solver)
      .def_readwrite("binding_lane", &Plan::binding_lane);
}

void bind_formulation(py::module_& module) {
  py::enum_<Goal>(module, "Goal")
      .value("STEP_SECONDS", Goal::kStepSeconds)
      .value("DEVICE_BYTES", Goal::kDeviceBytes)
      .value("HOST_BYTES", Goal::kHostBytes);
  py::class_<PlannerOptions>(module, "PlannerOptions")
      .def(py::init([](int window, bool gated, bool early_uploads, int max_simulations) {
             return PlannerOptions{window, gated, early_uploads, max_simulations};
           }),
           py::kw_only(), py::arg("window") = 2, py::arg("gated") = true,
           py::arg("early_uploads") = false, py::arg("max_simulations") = 60)
      .def_readwrite("window", &PlannerOptions::window)
      .def_readwrite("gated", &PlannerOptions::gated)
      .def_readwrite("early_uploads", &PlannerOptions::early_uploads)
      .def_readwrite("max_simulations", &PlannerOptions::max_simulations);
  py::class_<SegmentCounts>(module, "SegmentCounts")
      .def(py::init([](int recompute, int parameters, int state) {
             return SegmentCounts{recompute, parameters, state};
           }),
           py::arg("recompute") = 0, py::arg("parameters") = 0, py::arg("state") = 0)
      .def_readwrite("recompute", &SegmentCounts::recompute)
      .def_readwrite("parameters", &SegmentCounts::parameters)
      .def_readwrite("state", &SegmentCounts::state);
  py::class_<Segment>(module, "Segment")
      .def_readonly("first", &Segment::first)
      .def_readonly("count", &Segment::count)
      .def_readonly("period", &Segment::period)
      .def_readonly("max_recompute", &Segment::max_recompute)
      .def_readonly("max_parameters", &Segment::max_parameters)
      .def_readonly("max_state", &Segment::max_state);
  py::class_<Formulation>(module, "Formulation")
      .def_readonly("segments", &Formulation::segments)
      .def_readonly("device", &Formulation::device)
      .def_readonly("host", &Formulation::host)
      .def_readonly("step", &Formulation::step)
      .def_readonly("device_scale", &Formulation::device_scale)
      .def_readonly("host_scale", &Formulation::host_scale)
      .def_readonly("time_scale", &Formulation::time_scale)
      .def("objective", &objective, py::arg("goal"))
      .def("evaluate", &evaluate, py::arg("counts"))
      .def("counts_of", &counts_of, py::arg("values"))
      .def(
          "search",
          [](const Formulation& formulation, Goal goal, double seconds) {
            const SearchResult r = search(formulation, goal, SearchLimits{seconds});
            return py::make_tuple(r.found, r.optimal, r.counts, r.objective);
          },
          py::arg("goal"), py::arg("seconds"))
      .def("rows", [](const Formulation& formulation) {
        // What solve() of autohete._glpk takes: each bound is variable - terms >= constant.
        std::vector<double> upper, values, row_lower;
        std::vector<bool> is_integer;
        std::vector<int> row_starts{0}, columns;
        for (const Variable& variable : formulation.variables) {
          upper.push_back(variable.upper);
          is_integer.push_back(variable.integer);
        }
        for (const Bound& bound : formulation.bounds) {
          columns.push_back(bound.variable);
          values.push_back(1);
          for (const Term& term : bound.terms) {
            columns.push_back(term.variable);
            values.push_back(-term.coefficient);
          }
          row_starts.push_back(static_cast<int>(columns.size()));
          row_lower.push_back(bound.constant);
        }
        return py::dict(py::arg("upper") = upper, py::arg("is_integer") = is_integer,
                        py::arg("row_starts") = row_starts, py::arg("columns") = columns,
                        py::arg("values") = values, py::arg("row_lower") = row_lower);
      });
}

Plan decode(const Profile& profile, const std::vector<SegmentCounts>& counts, int window,
            bool spread) {
  const std::vector<Segment> segments = segments_of(profile);
  require(counts.size() == segments.size(), "decode_plan: it got ", counts.size(),
          " counts, expected one for each of the ", segments.size(), " runs of equal units");
  return decode_plan(profile, segments, counts, window,
                     spread ? Spacing::kSpread : Spacing::kTrailing);
}

void bind_simulator(py::module_& module) {
  py::class_<SimulationPolicy>(module, "SimulationPolicy")
      .def(py::init<>())
      .def_readwrite("gated", &SimulationPolicy::gated)
      .def_readwrite("early_uploads", &SimulationPolicy::early_uploads)
      .def_readwrite("priority_order", &SimulationPolicy::priority_order)
      .def_readwrite("iteration_barrier", &SimulationPolicy::iteration_barrier)
      .def_readwrite("synchronous_moves", &SimulationPolicy::synchronous_moves)
      .def_readwrite("preempt_downloads", &SimulationPolicy::preempt_downloads)
      .def_readwrite("gradient_buffers", &SimulationPolicy::gradient_buffers)
      .def_readwrite("steps", &SimulationPolicy::steps);
  py::enum_<SimulatedLane>(module, "SimulatedLane")
      .value("COMPUTE", SimulatedLane::kCompute)
      .value("H2D", SimulatedLane::kH2d)
      .value("D2H", SimulatedLane::kD2h)
      .value("CPU", SimulatedLane::kCpu)
      .value("EXCHANGE", SimulatedLane::kExchange)
      .value("GATHER", SimulatedLane::kGather);
  py::class_<SimulatedSpan>(module, "SimulatedSpan")
      .def_readonly("lane", &SimulatedSpan::lane)
      .def_readonly("unit", &SimulatedSpan::unit)
      .def_readonly("what", &SimulatedSpan::what)
      .def_readonly("start_seconds", &SimulatedSpan::start_seconds)
      .def_readonly("end_seconds", &SimulatedSpan::end_seconds);
  py::class_<Simulation>(module, "Simulation")
      .def_readonly("step_seconds", &Simulation::step_seconds)
      .def_readonly("first_step_seconds", &Simulation::first_step_seconds)
      .def_readonly("compute_seconds", &Simulation::compute_seconds)
      .def_readonly("gap_seconds", &Simulation::gap_seconds)
      .def_readonly("leaving_bytes", &Simulation::leaving_bytes)
      .def_readonly("spans", &Simulation::spans);
  module.def("simulate", &simulate, py::call_guard<py::gil_scoped_release>(), py::arg("profile"),
             py::arg("plan"), py::arg("policy") = SimulationPolicy{},
             py::arg("keep_spans") = false);
  module.def("policy_of", &policy_of, py::arg("strategy"));
}

void bind_planner(py::module_& module) {
  static py::exception<InfeasibleError> infeasible(module, "InfeasibleError", PyExc_ValueError);
  infeasible.attr("__doc__") = "No placement fits gpu_mem and cpu_mem.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const InfeasibleError& error) {
      py::object instance = py::reinterpret_borrow<py::object>(infeasible)(error.what());
      instance.attr("smallest_gpu_mem") = error.smallest_device_bytes;
      instance.attr("smallest_cpu_mem") = error.smallest_host_bytes;
      instance.attr("binding") = error.binding;
      PyErr_SetObject(infeasible.ptr(), instance.ptr());
    }
  });
  module.def("validate_profile", py::overload_cast<const Profile&>(&validate), py::arg("profile"));
  module.def("validate_hardware", py::overload_cast<const HardwareProfile&>(&validate),
             py::arg("hardware"));
  module.def("validate_plan", py::overload_cast<const Profile&, const Plan&>(&validate),
             py::arg("profile"), py::arg("plan"));
  module.def(
      "formulate",
      [](const Profile& profile, const Budgets& budgets, const PlannerOptions& options) {
        validate(profile);
        validate(budgets);
        return formulate(profile, budgets, options);
      },
      py::arg("profile"), py::arg("budgets"), py::arg("options"));
  module.def("decode_plan", &decode, py::arg("profile"), py::arg("counts"), py::arg("window"),
             py::kw_only(), py::arg("spread") = false);
  module.def("predict_plan", &predict_plan, py::arg("profile"), py::arg("plan"), py::arg("policy"));
  module.def("require_within", &require_within, py::arg("profile"), py::arg("plan"),
             py::arg("budgets"));
  module.def("finish_plan", &finish_plan, py::call_guard<py::gil_scoped_release>(),
             py::arg("profile"), py::arg("formulation"), py::arg("counts"), py::arg("options"),
             py::arg("solver"));
  module.def(
      "search_plan",
      [](const Profile& profile, const Budgets& budgets, const PlannerOptions& options,
         double seconds) {
        Plan plan;
        try {
          py::gil_scoped_release unlocked;
          plan = make_plan(profile, budgets, options, SearchLimits{seconds}, python_signal);
        } catch (const std::runtime_error&) {
          if (!PyErr_Occurred()) throw;  // else it was Ctrl-C that stopped the search
        }
        if (PyErr_Occurred()) throw py::error_already_set();
        return plan;
      },
      py::arg("profile"), py::arg("budgets"), py::arg("options"), py::arg("seconds"));
  module.def("require_feasible", &require_feasible, py::call_guard<py::gil_scoped_release>(),
             py::arg("profile"), py::arg("budgets"), py::arg("options"));
  module.def("minimum_device_bytes", &minimum_device_bytes,
             py::call_guard<py::gil_scoped_release>(), py::arg("profile"), py::arg("host_budget"),
             py::arg("options"));
  module.def("minimum_host_bytes", &minimum_host_bytes, py::call_guard<py::gil_scoped_release>(),
             py::arg("profile"), py::arg("device_budget"), py::arg("options"));
}

void bind_cost_model(py::module_& module) {
  module.def("device_peak_bytes", &device_peak_bytes, py::arg("profile"), py::arg("plan"));
  module.def("host_bytes", &host_bytes, py::arg("profile"), py::arg("plan"));
  module.def(
      "device_visits",
      [](const Profile& profile, const Plan& plan,
         const std::optional<std::vector<std::size_t>>& leaving) {
        require(!leaving || leaving->size() == plan.units.size(),
                "device_visits: leaving has another length than the plan, expected one number for "
                "each unit");
        py::list visits;
        for (const DeviceVisit& visit :
             leaving ? device_visits(profile, plan, *leaving) : device_visits(profile, plan))
          visits.append(py::make_tuple(visit.unit, visit.backward, visit.bytes));
        return visits;
      },
      py::arg("profile"), py::arg("plan"), py::arg("leaving_bytes") = std::nullopt,
      "(unit, whether backward, bytes on the device), in the order of a step; with the most that "
      "may be leaving, or with what a simulation saw.");
  module.def(
      "lane_seconds",
      [](const Profile& profile, const Plan& plan) {
        const LaneSeconds lanes = lane_seconds(profile, plan);
        return py::dict(py::arg("compute") = lanes.compute, py::arg("h2d") = lanes.h2d,
                        py::arg("d2h") = lanes.d2h, py::arg("cpu") = lanes.cpu,
                        py::arg("exchange") = lanes.exchange, py::arg("gather") = lanes.gather);
      },
      py::arg("profile"), py::arg("plan"));
  module.def(
      "next_use_distance",
      [](bool forward, int position, int unit, int num_units) {
        return next_use_distance(forward ? Direction::kForward : Direction::kBackward, position,
                                 unit, num_units);
      },
      py::arg("forward"), py::arg("position"), py::arg("unit"), py::arg("num_units"));
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_data(module);
  bind_plan_data(module);
  bind_formulation(module);
  bind_simulator(module);
  bind_planner(module);
  bind_cost_model(module);
}

}  // namespace autohete
