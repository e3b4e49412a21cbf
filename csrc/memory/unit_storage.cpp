#include "csrc/memory/unit_storage.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/StorageImpl.h>

#include <cstring>
#include <utility>

#include "csrc/base/check.h"

namespace autohete {

namespace {

// The context of a DataPtr: one reference to the block.
void drop_reference(void* context) { delete static_cast<BlockPtr*>(context); }

}  // namespace

void point_storage(c10::StorageImpl& storage, const BlockPtr& block, std::size_t offset,
                   c10::Device device) {
  auto reference = std::make_unique<BlockPtr>(block);
  storage.set_data_ptr_noswap(
      c10::DataPtr(block->data() + offset, reference.release(), &drop_reference, device));
}

void copy_out(c10::StorageImpl& storage) {
  const std::size_t bytes = storage.nbytes();
  c10::Allocator* allocator = c10::GetAllocator(storage.device_type());
  c10::DataPtr memory = allocator->allocate(bytes);
  if (bytes > 0) allocator->copy_data(memory.mutable_get(), storage.data(), bytes);
  storage.set_data_ptr_noswap(std::move(memory));
}

bool owns_its_storage(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage_offset() == 0 &&
         tensor.storage().nbytes() == tensor.nbytes() && tensor.is_non_overlapping_and_dense();
}

HomedTensor::HomedTensor(at::Tensor tensor, std::size_t offset)
    : tensor_(std::move(tensor)), offset_(offset), bytes_(tensor_.nbytes()) {}

void HomedTensor::move_into(const BlockPtr& block, c10::Device device) {
  bytes_ = tensor_.nbytes();
  AH_ASSERT(offset_ + bytes_ <= block->bytes());
  const bool same_device = tensor_.device() == device;
  if (same_device && owns_its_storage(tensor_)) {
    storage_ = tensor_.storage().unsafeGetStorageImpl();
    if (bytes_ > 0) {
      at::Tensor source = tensor_.detach();
      at::Tensor target = at::empty_strided({0}, {1}, source.options());  // header only
      target.set_(c10::Storage(c10::Storage::use_byte_size_t(), bytes_,
                               c10::DataPtr(block->data() + offset_, device)),
                  0, source.sizes(), source.strides());
      if (target.data_ptr() != source.data_ptr()) target.copy_(source);
    }
    point_storage(*storage_, block, offset_, device);
    return;
  }
  // A header of its own over the block; the parameter object stays the user's.
  auto reference = std::make_unique<BlockPtr>(block);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes_,
      c10::DataPtr(block->data() + offset_, reference.release(), &drop_reference, device));
  at::Tensor home = at::empty_strided({0}, {1}, tensor_.options().device(device));
  const at::Tensor source =
      tensor_.is_non_overlapping_and_dense() ? tensor_.detach() : tensor_.detach().contiguous();
  home.set_(storage, 0, source.sizes(), source.strides());
  if (bytes_ > 0 && !tensor_.is_meta()) home.copy_(source);
  tensor_.set_data(home);
  storage_ = tensor_.storage().unsafeGetStorageImpl();
}

void HomedTensor::point_at(const BlockPtr& block) {
  if (tensor_.storage().data() == block->data() + offset_) return;
  point_storage(*storage_, block, offset_, tensor_.device());
}

bool HomedTensor::replaced() const {
  return tensor_.storage().unsafeGetStorageImpl() != storage_ || tensor_.nbytes() != bytes_ ||
         !owns_its_storage(tensor_);
}

}  // namespace autohete
