// autohete._C, the part that trains: devices and the engine with tensors. Names and meaning are
// those of the C++ classes; every method that can block drops the GIL inside.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "csrc/bindings/budget_allocator.h"
#include "csrc/bindings/python_error.h"
#include "csrc/bindings/torch_engine.h"
#include "csrc/device/host_device.h"
#include "csrc/device/host_store.h"

namespace py = pybind11;

namespace autohete {
namespace {

// A host device with its two budgets and its links, as Python holds it.
struct HostMachine {
  std::shared_ptr<Budget> device_budget, host_budget;
  std::shared_ptr<HostStore> store;
  std::shared_ptr<HostDevice> device;
  std::shared_ptr<ActivationAccount> account;

  HostMachine(std::size_t gpu_mem, std::size_t cpu_mem, bool pin, py::object warn)
      : device_budget(std::make_shared<Budget>(gpu_mem)),
        host_budget(std::make_shared<Budget>(cpu_mem)),
        account(std::make_shared<ActivationAccount>()) {
    HostStoreOptions options{device_budget, host_budget, pin, {}};
    if (!warn.is_none()) {
      options.warn = [warn](const std::string& text) {
        py::gil_scoped_acquire gil;
        warn(text);
      };
    }
    store = std::make_shared<HostStore>(std::move(options));
    device = std::make_shared<HostDevice>(device_budget);
    account->budget = device_budget;
  }
  ~HostMachine() { account->close(); }
  HostLink& link(CopyDirection direction) { return device->link(direction); }
};

void bind_device(py::module_& module) {
  py::enum_<CopyDirection>(module, "CopyDirection")
      .value("HOST_TO_DEVICE", CopyDirection::kHostToDevice)
      .value("DEVICE_TO_HOST", CopyDirection::kDeviceToHost);
  py::enum_<Direction>(module, "Direction")
      .value("FORWARD", Direction::kForward)
      .value("FORWARD_ONLY", Direction::kForwardOnly)
      .value("BACKWARD", Direction::kBackward);
  py::class_<DeviceHandle>(module, "DeviceHandle");
  const auto charge = [](HostMachine& self, bool on) {
    return set_activation_account(on ? self.account : nullptr) != nullptr;
  };
  py::class_<HostMachine, std::shared_ptr<HostMachine>>(module, "HostMachine")
      .def(py::init<std::size_t, std::size_t, bool, py::object>(), py::arg("gpu_mem"),
           py::arg("cpu_mem"), py::arg("pin") = true, py::arg("warn") = py::none())
      .def("handle",
           [](HostMachine& self) { return DeviceHandle{self.device, self.store, c10::kCPU}; })
      .def("charge_activations", charge, py::arg("on"))
      .def("set_advice", [](HostMachine& self, std::string text) { self.account->advice = text; })
      .def("device_used", [](HostMachine& self) { return self.device_budget->used(); })
      .def(
          "waiting_bytes", [](HostMachine& self) { return self.account->cache.waiting_bytes(); },
          "Bytes of freed activations that wait to be used again; not counted as used.")
      .def(
          "close", [](HostMachine& self) { self.account->close(); },
          "Nobody trains on it any more: what waits goes back to the system.")
      .def("device_peak", [](HostMachine& self) { return self.device_budget->peak(); })
      .def("device_limit", [](HostMachine& self) { return self.device_budget->limit(); })
      .def("set_device_limit",
           [](HostMachine& self, std::size_t bytes) { self.device_budget->set_limit(bytes); })
      .def("num_device_refusals",
           [](HostMachine& self) { return self.device_budget->num_refusals(); })
      .def("reset_device_peak", [](HostMachine& self) { self.device_budget->reset_peak(); })
      .def("host_used", [](HostMachine& self) { return self.host_budget->used(); })
      .def("host_peak", [](HostMachine& self) { return self.host_budget->peak(); })
      .def("host_limit", [](HostMachine& self) { return self.host_budget->limit(); })
      .def(
          "set_link",
          [](HostMachine& self, CopyDirection direction, double bytes_per_second,
             double latency_seconds, double duplex_factor) {
            self.link(direction).set_speed({bytes_per_second, latency_seconds, duplex_factor});
          },
          py::arg("direction"), py::arg("bytes_per_second"), py::arg("latency_seconds") = 0.0,
          py::arg("duplex_factor") = 1.0)
      .def("set_random_delays",
           [](HostMachine& self, std::uint64_t seed, double max_seconds) {
             self.link(CopyDirection::kHostToDevice).set_random_delays(seed, max_seconds);
             self.link(CopyDirection::kDeviceToHost).set_random_delays(seed + 1, max_seconds);
           })
      .def("hold", [](HostMachine& self, CopyDirection d) { self.link(d).hold(); })
      .def("release",
           [](HostMachine& self, CopyDirection d, std::size_t n) { self.link(d).release(n); })
      .def("release_all", [](HostMachine& self, CopyDirection d) { self.link(d).release_all(); })
      .def("fail_next_copies",
           [](HostMachine& self, CopyDirection d, std::size_t n) { self.link(d).fail_next(n); })
      .def("num_copies_ended",
           [](HostMachine& self, CopyDirection d) { return self.link(d).num_ended(); })
      .def("refuse_pinning",
           [](HostMachine& self, std::size_t bytes) { self.store->refuse_pinning(bytes); })
      .def("set_poison", [](HostMachine& self, bool on) { self.store->set_poison(on); });
}

py::dict counters(TorchEngine& self) {
  const EngineCounters c = self.engine().counters();
  py::dict out;
  out["h2d_bytes"] = c.h2d_bytes;
  out["d2h_bytes"] = c.d2h_bytes;
  out["updates"] = c.updates;
  out["updates_ahead"] = c.updates_ahead;
  out["updates_redone"] = self.updates_redone();
  out["withdrawn"] = c.withdrawn;
  out["slot_misses"] = c.slot_misses;
  out["wait_update_seconds"] = c.wait_update_seconds;
  out["wait_upload_seconds"] = c.wait_upload_seconds;
  out["wait_gradients_seconds"] = c.wait_gradients_seconds;
  const std::array<double, 4> busy = self.engine().timeline().busy_seconds();
  const char* const names[] = {"wait_seconds", "h2d_busy_seconds", "d2h_busy_seconds",
                               "cpu_busy_seconds"};
  for (int lane = 0; lane < 4; ++lane) out[names[lane]] = busy[lane];
  return out;
}

// Residency, progress and events in words, see csrc/runtime/unit_state.h.
constexpr const char* kResidency[] = {"host", "uploading", "resident", "computing"};
constexpr const char* kProgress[] = {"idle", "leaving", "landed", "committed", "updating"};
constexpr const char* kEvents[] = {"upload_started",   "upload_done", "acquired",
                                   "released",         "dropped",     "gradients_ready",
                                   "gradients_landed", "commit",      "update_done"};

py::tuple in_words(UnitState state) {
  return py::make_tuple(kResidency[static_cast<int>(state.residency)],
                        kProgress[static_cast<int>(state.progress)]);
}

template <typename Words>
int index_of(const Words& words, const std::string& word) {
  const auto found = std::find(std::begin(words), std::end(words), word);
  require(found != std::end(words), "unit state: ", word, " is not one");
  return static_cast<int>(found - std::begin(words));
}

// The engine's table, for its own test: the state after an event, or None where it may not happen.
py::object next_in_words(const std::string& residency, const std::string& progress,
                         const std::string& event) {
  const UnitState state{static_cast<Residency>(index_of(kResidency, residency)),
                        static_cast<Progress>(index_of(kProgress, progress))};
  const auto next = next_state(state, static_cast<UnitEvent>(index_of(kEvents, event)));
  return next ? py::object(in_words(*next)) : py::none();
}

// (lane, unit, what, start_seconds, end_seconds, bytes) of everything since the last call.
py::list take_timeline(TorchEngine& self) {
  py::list spans;
  for (const TimelineSpan& span : self.engine().timeline().take())
    spans.append(py::make_tuple(static_cast<int>(span.lane), span.unit, span.what,
                                span.start_seconds, span.end_seconds, span.bytes));
  return spans;
}

// The state of one parameter, under torch's names.
py::dict state(TorchEngine& self, int unit, int index) {
  const TorchParameter& parameter = self.unit(unit).parameters().at(index);
  py::dict out;
  if (!parameter.step.defined()) return out;
  out["step"] = parameter.step;
  out["exp_avg"] = parameter.exp_avg.tensor();
  out["exp_avg_sq"] = parameter.exp_avg_sq.tensor();
  if (parameter.max_exp_avg_sq.defined()) out["max_exp_avg_sq"] = parameter.max_exp_avg_sq.tensor();
  if (parameter.master.defined()) out["master"] = parameter.master.tensor();
  return out;
}

void bind_engine(py::module_& module) {
  py::class_<TorchEngine>(module, "Engine")
      .def(py::init<DeviceHandle, int>(), py::arg("device"), py::arg("num_workers") = 0)
      .def(
          "set_ranks",
          [](TorchEngine& self, int rank, int size, TorchEngine::Share share, bool own_gradients) {
            self.set_ranks({rank, size, own_gradients},
                           [share = std::move(share)](int unit, std::vector<at::Tensor> tensors) {
                             call_python([&] { share(unit, std::move(tensors)); });
                           });
          },
          py::arg("rank"), py::arg("size"), py::arg("share"), py::kw_only(),
          py::arg("own_gradients") = false)
      .def("add_unit", &TorchEngine::add_unit, py::arg("name"), py::arg("parameters"),
           py::arg("masters"), py::arg("updated"), py::arg("with_state"), py::arg("amsgrad"),
           py::arg("plan"))
      .def(
          "configure",
          [](TorchEngine& self, const std::vector<UnitPlan>& plans, int window,
             std::size_t chunk_bytes, bool priority_order, bool synchronous_moves, bool barrier,
             bool aggregate) {
            self.configure(plans,
                           {window, chunk_bytes, priority_order, synchronous_moves, aggregate});
            self.set_barrier(barrier);
          },
          py::arg("plans"), py::arg("window"), py::arg("chunk_bytes"),
          py::arg("priority_order") = true, py::arg("synchronous_moves") = false,
          py::arg("barrier") = false, py::arg("aggregate") = true)
      .def("set_update_rate",
           [](TorchEngine& self, double rate) { self.engine().set_update_rate(rate); })
      .def("leave", &TorchEngine::leave, py::arg("device"))
      .def("bytes_to_leave", &TorchEngine::bytes_to_leave)
      .def("acquire", &TorchEngine::acquire)
      .def("release", &TorchEngine::release)
      .def("send_gradients", &TorchEngine::send_gradients, py::arg("unit"), py::arg("final"),
           py::arg("averaged") = false)
      .def("send_first_gradients", &TorchEngine::send_first_gradients, py::arg("unit"))
      .def("finish_backward", &TorchEngine::finish_backward, py::arg("averaged") = false)
      .def("abandon", &TorchEngine::abandon)
      .def("settle", &TorchEngine::settle, py::arg("unit"), py::arg("adopt") = true)
      .def("take_back", [](TorchEngine& self) { self.engine().take_back(); })
      .def("settle_gradients", &TorchEngine::settle_gradients)
      .def("synchronize", &TorchEngine::synchronize)
      .def("gradient_parts", &TorchEngine::gradient_parts)
      .def("take_relaid", &TorchEngine::take_relaid)
      .def("replaced_state", &TorchEngine::replaced_state)
      .def("missing_state", &TorchEngine::missing_state)
      .def("make_state", &TorchEngine::make_state)
      .def("forget_state",
           [](TorchEngine& self, int unit, int index) {
             self.settle(unit);
             self.unit(unit).forget_state(index);
           })
      .def("state", &state)
      .def("adopt_state",
           [](TorchEngine& self, int unit, int index, at::Tensor step, at::Tensor exp_avg,
              at::Tensor exp_avg_sq, std::optional<at::Tensor> max_exp_avg_sq,
              std::optional<at::Tensor> master) {
             self.settle(unit);
             self.unit(unit).adopt_state(index, step, exp_avg, exp_avg_sq, max_exp_avg_sq, master);
           })
      .def("part",
           [](TorchEngine& self, int unit, int index) {
             const TorchParameter& p = self.unit(unit).parameters().at(index);
             return py::make_tuple(p.is_shared, p.first_row, p.num_rows);
           })
      .def("set_group", &TorchEngine::set_group)
      .def("commit", &TorchEngine::commit)
      .def("reserve_ahead", &TorchEngine::reserve_ahead, py::arg("max_bytes"))
      .def("bytes_reserved_ahead", &TorchEngine::bytes_reserved_ahead)
      .def(
          "expect_step",
          [](TorchEngine& self, std::vector<AdamHyper> hypers, bool update, bool measure,
             bool in_place, float norm_scale) {
            self.expect_step({std::move(hypers), update, measure, in_place, norm_scale});
          },
          py::arg("hypers"), py::arg("update"), py::arg("measure"), py::arg("in_place") = false,
          py::arg("norm_scale") = 1.0F)
      .def("withdraw_ahead", &TorchEngine::withdraw_ahead)
      .def("place_of", &TorchEngine::place_of, py::arg("unit"), py::arg("gradient"))
      .def("gradient_norm", &TorchEngine::gradient_norm)
      .def("gradient_is_finite", &TorchEngine::gradient_is_finite)
      .def("scale_gradient", &TorchEngine::scale_gradient)
      .def("num_units", &TorchEngine::num_units)
      .def("num_workers", [](TorchEngine& self) { return self.workers().num_workers(); })
      .def("param_bytes", [](TorchEngine& s, int unit) { return s.unit(unit).param_bytes(); })
      .def("land_gradients", &TorchEngine::land_gradients)
      .def("device_gradient_bytes",
           [](TorchEngine& s) {
             std::size_t bytes = 0;
             for (int u = 0; u < s.num_units(); ++u) bytes += s.unit(u).device_gradient_bytes();
             return bytes;
           })
      .def("gradient_bytes", [](TorchEngine& s, int unit) { return s.unit(unit).gradient_bytes(); })
      .def("state_bytes", [](TorchEngine& s, int unit) { return s.unit(unit).state_bytes(); })
      .def("unit_state", [](TorchEngine& s, int unit) { return in_words(s.engine().state(unit)); })
      .def("counters", &counters)
      .def("record_timeline", [](TorchEngine& s, bool on) { s.engine().timeline().enable(on); })
      .def("take_timeline", &take_timeline);
}

}  // namespace

void bind_runtime(py::module_& module) {
  static PyObject* out_of_memory =
      py::module_::import("torch").attr("OutOfMemoryError").cast<py::object>().release().ptr();
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const OutOfMemory& e) {
      PyErr_SetString(out_of_memory, e.what());
    } catch (const PythonError& e) {
      e.set();
    }
  });
  bind_device(module);
  module.attr("UNIT_EVENTS") =
      py::cast(std::vector<std::string>(std::begin(kEvents), std::end(kEvents)));
  module.def("next_unit_state", &next_in_words);
  bind_engine(module);
}

}  // namespace autohete
