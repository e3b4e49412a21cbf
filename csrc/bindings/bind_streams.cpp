// Where large streams begin, for tensors that Python makes; see csrc/base/stream_place.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <new>
#include <tuple>
#include <vector>

#include "csrc/base/stream_place.h"
#include "csrc/bindings/tensor_argument.h"
#include "csrc/device/mapped_memory.h"
#include "csrc/memory/unit_layout.h"

namespace autohete {
namespace {

constexpr std::size_t kTensorAlignment = 64;  // torch's own

void unmap(void* context) { delete static_cast<MappedMemory*>(context); }

// The addresses of those that have memory on the host.
std::vector<std::size_t> addresses(const py::list& tensors) {
  std::vector<std::size_t> found;
  for (const py::handle object : tensors) {
    if (!THPVariable_Check(object.ptr())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (tensor.is_cpu() && tensor.has_storage() &&
        !tensor.unsafeGetTensorImpl()->is_python_dispatch())
      found.push_back(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()));
  }
  return found;
}

// The mapping begins with a large page, so a place in it is an offset.
void begin_apart(py::handle object, const py::list& others) {
  const at::Tensor tensor = unpack("begin_apart", "tensor", object).tensor;
  const std::size_t bytes = tensor.storage().nbytes();
  if (bytes < kLargeStreamBytes) return;
  const std::size_t lead = place_apart(0, kTensorAlignment, addresses(others));
  std::unique_ptr<MappedMemory> memory;
  try {
    memory = std::make_unique<MappedMemory>(lead + bytes);
  } catch (const std::bad_alloc&) {
    return;  // torch's own serves as well, only slower
  }
  std::byte* const data = memory->data() + lead;
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.set_data_ptr_noswap({data, memory.release(), &unmap, storage.device()});
}

// Memory for many small tensors that are walked one after the other: they lie so, on large pages.
// It is there for as long as the pool or one of them is.
class TensorPool {
 public:
  // Room for `bytes`; `number` pools that are walked side by side begin apart.
  TensorPool(std::size_t bytes, std::size_t number)
      : memory_(std::make_shared<MappedMemory>(number * kStreamStep + bytes)),
        at_(number * kStreamStep) {}

  // Gives a new tensor, nothing of which has been written, the next piece. False: no room.
  bool give(py::handle object) {
    const at::Tensor tensor = unpack("TensorPool.give", "tensor", object).tensor;
    const std::size_t bytes = tensor.storage().nbytes();
    const std::size_t rounded =
        (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
    if (rounded > memory_->mapped_bytes() - at_) return false;
    auto held = std::make_unique<Held>(memory_);
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    storage.set_data_ptr_noswap({memory_->data() + at_, held.release(), &let_go, storage.device()});
    at_ += rounded;
    return true;
  }

 private:
  using Held = std::shared_ptr<MappedMemory>;
  static void let_go(void* context) { delete static_cast<Held*>(context); }

  const Held memory_;
  std::size_t at_;
};

std::tuple<std::size_t, std::size_t, std::size_t> block_bytes(
    const std::vector<std::tuple<std::size_t, std::size_t, bool>>& parameters, bool with_state,
    bool amsgrad) {
  std::vector<StreamSizes> sizes;
  for (const auto& [bytes, numel, updated] : parameters) {
    StreamSizes& one = sizes.emplace_back();
    one.bytes = bytes;
    one.array_bytes = numel * sizeof(float);
    one.has_gradient = updated;
    if (updated && with_state) one.has_array = {true, true, amsgrad, bytes < one.array_bytes};
  }
  const UnitLayout layout = lay_out(sizes);
  return {layout.param_bytes, layout.gradient_bytes, layout.state_bytes};
}

}  // namespace

void bind_streams(py::module_& module) {
  module.def("begin_apart", &begin_apart, py::arg("tensor"), py::arg("others"),
             "Give a new tensor, nothing of which has been written, memory that begins at another "
             "place of a large page than the others do. A small one keeps its own.");
  py::class_<TensorPool>(module, "TensorPool",
                         "Memory for many small tensors that are walked one after the other.")
      .def(py::init<std::size_t, std::size_t>(), py::arg("bytes"), py::arg("number"))
      .def("give", &TensorPool::give, py::arg("tensor"),
           "Give a new tensor, nothing of which has been written, the next piece; False: no room.");
  module.def("block_bytes", &block_bytes, py::arg("parameters"), py::arg("with_state"),
             py::arg("amsgrad"),
             "Bytes of a unit's blocks of parameters, gradients and optimizer state; of each "
             "parameter its bytes, its numel and whether it is updated.");
}

}  // namespace autohete
