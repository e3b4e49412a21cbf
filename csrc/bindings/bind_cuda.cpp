// autohete._C, the CUDA side: present only in a build for a CUDA torch (AUTOHETE_WITH_CUDA). No
// CUDA header is needed here: the seam's factory and torch's device-neutral calls do it all.
#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "csrc/bindings/torch_engine.h"
#include "csrc/device/budget.h"
#ifdef AUTOHETE_WITH_CUDA
#include "csrc/device/cuda_device.h"
#endif

namespace py = pybind11;

namespace autohete {

#ifdef AUTOHETE_WITH_CUDA
namespace {

using Bytes = std::atomic<std::size_t>;

// A block of torch's, counted while it lives.
struct TorchMemory {
  at::Tensor tensor;
  std::shared_ptr<Bytes> held;
  ~TorchMemory() { *held -= tensor.nbytes(); }
};

// Device memory from torch's caching allocator, so that torch's own statistics and limits see it.
std::pair<void*, std::shared_ptr<void>> torch_memory(int index, std::size_t bytes,
                                                     const std::shared_ptr<Bytes>& held) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(c10::Device(c10::kCUDA, index));
  try {
    at::Tensor tensor = at::empty({static_cast<std::int64_t>(bytes)}, options);
    void* data = tensor.data_ptr();
    *held += tensor.nbytes();
    return {data, std::shared_ptr<TorchMemory>(new TorchMemory{std::move(tensor), held})};
  } catch (const c10::OutOfMemoryError&) {
    return {nullptr, nullptr};
  }
}

struct CudaMachine {
  std::shared_ptr<Budget> host_budget;
  std::shared_ptr<Bytes> held = std::make_shared<Bytes>(0);
  DeviceHandle parts;

  CudaMachine(int index, std::size_t cpu_mem, bool pin, py::object warn, py::object device_room)
      : host_budget(std::make_shared<Budget>(cpu_mem)) {
    CudaStoreOptions options;
    options.index = index;
    options.allocate_device = [index, held = held](std::size_t bytes) {
      return torch_memory(index, bytes, held);
    };
    options.host_budget = host_budget;
    options.device_room = [device_room] {
      py::gil_scoped_acquire gil;
      return device_room().cast<std::pair<std::size_t, std::size_t>>();
    };
    options.pin = pin;
    options.warn = [warn](const std::string& text) {
      py::gil_scoped_acquire gil;
      warn(text);
    };
    parts = DeviceHandle{make_cuda_device(index), make_cuda_store(std::move(options)),
                         c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index))};
  }
};

}  // namespace
#endif

void bind_cuda(py::module_& module) {
#ifdef AUTOHETE_WITH_CUDA
  module.def("cuda_device_count", &cuda_device_count);
  py::class_<CudaMachine, std::shared_ptr<CudaMachine>>(module, "CudaMachine")
      .def(py::init<int, std::size_t, bool, py::object, py::object>(), py::arg("index"),
           py::arg("cpu_mem"), py::arg("pin"), py::arg("warn"), py::arg("device_room"))
      .def("handle", [](CudaMachine& self) { return self.parts; })
      .def("pins_host_memory", [](CudaMachine& s) { return s.parts.store->pins_host_memory(); })
      .def("host_memory_readable",
           [](CudaMachine& s) {
             return s.parts.device->capabilities().host_memory_readable_by_device;
           })
      .def("device_block_bytes", [](CudaMachine& self) { return self.held->load(); })
      .def("host_used", [](CudaMachine& self) { return self.host_budget->used(); })
      .def("host_peak", [](CudaMachine& self) { return self.host_budget->peak(); });
#else
  (void)module;
#endif
}

}  // namespace autohete
