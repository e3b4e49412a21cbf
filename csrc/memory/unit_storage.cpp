#include "csrc/memory/unit_storage.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/base/check.h"

namespace autohete {

namespace {

// The context of a DataPtr.
struct Held {
  BlockPtr block;                                 // where the bytes are; null: in what is kept
  std::vector<std::shared_ptr<const void>> kept;  // that somebody knows by address
};

void drop_held(void* context) { delete static_cast<Held*>(context); }

Held* held_by(const c10::StorageImpl& storage) {
  const c10::DataPtr& memory = storage.data_ptr();
  return memory.get_deleter() == &drop_held ? static_cast<Held*>(memory.get_context()) : nullptr;
}

c10::DataPtr data_of(const BlockPtr& block, std::size_t offset, c10::Device device,
                     std::vector<std::shared_ptr<const void>> kept = {}) {
  auto held = std::make_unique<Held>(Held{block, std::move(kept)});
  return {block->data() + offset, held.release(), &drop_held, device};
}

// Torch's own memory becomes part of what the storage keeps.
void keep_torchs(c10::StorageImpl& storage, std::vector<std::shared_ptr<const void>> kept) {
  const c10::Device device = storage.device();
  auto memory = std::make_shared<c10::DataPtr>(storage.set_data_ptr(c10::DataPtr(nullptr, device)));
  void* const data = memory->get();
  kept.push_back(std::move(memory));
  auto held = std::make_unique<Held>(Held{nullptr, std::move(kept)});
  storage.set_data_ptr_noswap(c10::DataPtr(data, held.release(), &drop_held, device));
}

// A tensor shaped like `model` over `memory`: a header only.
at::Tensor header_over(c10::DataPtr memory, const at::Tensor& model) {
  at::Tensor header =
      at::empty_strided({0}, {1}, model.options().device(memory.device()).requires_grad(false));
  header.set_(c10::Storage(c10::Storage::use_byte_size_t(), model.nbytes(), std::move(memory)), 0,
              model.sizes(), model.strides());
  return header;
}

// Where copies have to take the bytes of a `tensor_device` tensor for: CUDA tensors that stand over
// host memory are read and written as what they are, so that torch copies in the right direction
// and waits, and so that memory the GPU cannot read is copied too.
c10::Device true_device(Tier tier, c10::Device tensor_device) {
  return tier == Tier::kHost ? c10::Device(c10::kCPU) : tensor_device;
}

}  // namespace

void point_storage(c10::StorageImpl& storage, const BlockPtr& block, std::size_t offset,
                   c10::Device device) {
  Held* const old = held_by(storage);
  std::vector<std::shared_ptr<const void>> kept;
  if (old) kept = std::move(old->kept);
  storage.set_data_ptr_noswap(data_of(block, offset, device, std::move(kept)));
}

void keep_memory(c10::StorageImpl& storage) {
  if (Held* const held = held_by(storage)) {
    if (held->block) keep_memory(storage, held->block);
  } else {
    keep_torchs(storage, {});
  }
}

void keep_memory(c10::StorageImpl& storage, const BlockPtr& block) {
  if (!held_by(storage)) keep_torchs(storage, {});
  auto& kept = held_by(storage)->kept;
  if (std::find(kept.begin(), kept.end(), block) == kept.end()) kept.push_back(block);
}

void forget_kept(c10::StorageImpl& storage) {
  Held* const held = held_by(storage);
  if (held && held->block) held->kept.clear();
}

void copy_out(c10::StorageImpl& storage, Tier tier) {
  const c10::Device device = storage.device();
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  const auto options = at::TensorOptions().dtype(at::kByte);
  const at::Tensor memory = at::empty({bytes}, options.device(device));
  if (bytes > 0) {
    const c10::Device source = true_device(tier, device);
    memory.copy_(header_over(c10::DataPtr(storage.mutable_data(), source), memory));
  }
  std::vector<std::shared_ptr<const void>> kept;
  if (Held* const held = held_by(storage)) kept = std::move(held->kept);
  // The memory comes with what frees it; `memory` is left without.
  storage.set_data_ptr_noswap(memory.storage().set_data_ptr(c10::DataPtr(nullptr, device)));
  if (!kept.empty()) keep_torchs(storage, std::move(kept));
}

at::Tensor tensor_over(const BlockPtr& block, std::size_t offset, const at::Tensor& model) {
  return header_over(data_of(block, offset, c10::kCPU), model);
}

bool owns_its_storage(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage_offset() == 0 &&
         tensor.storage().nbytes() == tensor.nbytes() && tensor.is_non_overlapping_and_dense();
}

bool stands_in_a_block(const c10::Storage& storage) {
  const Held* const held = held_by(*storage.unsafeGetStorageImpl());
  return held && held->block;
}

HomedTensor::HomedTensor(at::Tensor tensor, std::size_t offset, BlockPtr apart)
    : tensor_(std::move(tensor)),
      offset_(offset),
      bytes_(tensor_.nbytes()),
      apart_(std::move(apart)) {}

void HomedTensor::move_into(const BlockPtr& block, c10::Device device) {
  bytes_ = tensor_.nbytes();
  const auto [place, offset] = this->home(block);
  AH_ASSERT(offset + bytes_ <= place->bytes());
  std::byte* home = place->data() + offset;
  const bool keeps_storage = tensor_.device() == device && owns_its_storage(tensor_);
  if (storage_ && storage_.unsafeGetStorageImpl() != tensor_.storage().unsafeGetStorageImpl()) {
    keep_memory();  // others may know it by address
    let_go(block->tier());
    if (!keeps_storage && tensor_.storage().use_count() > 1) {
      TORCH_WARN_ONCE(
          "autohete: a parameter was given a view of a larger tensor; its values were copied, so "
          "that the larger tensor does not follow the parameter any more");
    }
  }
  at::Tensor source =
      tensor_.is_non_overlapping_and_dense() ? tensor_.detach() : tensor_.detach().contiguous();
  if (bytes_ > 0 && !tensor_.is_meta() && source.data_ptr() != home)
    header_over(c10::DataPtr(home, true_device(block->tier(), device)), source).copy_(source);
  if (!keeps_storage) {
    // A header of its own over the block; the parameter object stays the user's.
    tensor_.set_data(header_over(c10::DataPtr(home, device), source));
  }
  source.reset();
  storage_ = tensor_.storage();
  owners_ = storage_.use_count();
  was_resizable_ = !has_array(tensor_);
  // Torch's own memory that an array stands on: of the tensor itself, or of one beside it. (An
  // array that memory was made of holds itself.)
  const bool known = !was_resizable_ && storage_.allocator() != nullptr &&
                     (owners_ > 2 || !tensor_.requires_grad());
  came_known_ = known && !stands_in_a_block(storage_);
  if (came_known_) keep_memory();
  point_storage(*storage_.unsafeGetStorageImpl(), place, offset, device);
}

void HomedTensor::point_at(const BlockPtr& block) {
  if (apart_ || storage_.data() == block->data() + offset_) return;
  if (storage_.use_count() > owners_ && !storage_.unsafeGetStorageImpl()->resizable())
    keep_memory();
  point_storage(*storage_.unsafeGetStorageImpl(), block, offset_, storage_.device());
}

void HomedTensor::join(const BlockPtr& block) {
  std::byte* const home = block->data() + offset_;
  if (bytes_ > 0)
    header_over(c10::DataPtr(home, true_device(block->tier(), tensor_.device())), tensor_)
        .copy_(tensor_.detach());
  apart_.reset();
  point_storage(*storage_.unsafeGetStorageImpl(), block, offset_, storage_.device());
}

void HomedTensor::let_go(Tier tier) {
  // One reference is ours; the storage has another through the tensor, while that has it.
  const bool through_tensor =
      tensor_.storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
  const bool held = (through_tensor && tensor_.use_count() > 1) ||
                    storage_.use_count() > (through_tensor ? 2U : 1U);
  if (held) copy_out(*storage_.unsafeGetStorageImpl(), tier);
}

void HomedTensor::leave(const BlockPtr& block, c10::Device device) {
  if (device == tensor_.device()) {
    copy_out(*storage_.unsafeGetStorageImpl(), block->tier());
    return;
  }
  const c10::Device source = true_device(block->tier(), tensor_.device());
  const at::Tensor away = at::empty_strided(tensor_.sizes(), tensor_.strides(),
                                            tensor_.options().device(device).requires_grad(false));
  const auto [place, offset] = home(block);
  if (bytes_ > 0) away.copy_(header_over(c10::DataPtr(place->data() + offset, source), away));
  tensor_.set_data(away);
}

bool HomedTensor::replaced() const {
  return tensor_.storage().unsafeGetStorageImpl() != storage_.unsafeGetStorageImpl() ||
         tensor_.nbytes() != bytes_ || !owns_its_storage(tensor_);
}

}  // namespace autohete
