// One user-visible tensor whose bytes live in a block: it keeps its own StorageImpl, which is
// pointed at block + offset as the block changes. Views and autograd's saved tensors follow,
// because they share that storage. The only place outside csrc/bindings/ that knows torch.
//
// Thread rule: the hook thread, with the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>

#include "csrc/device/store.h"

namespace autohete {

// Points `storage` at `bytes` of the block; the storage holds a reference to the block, and to what
// it keeps (below).
void point_storage(c10::StorageImpl& storage, const BlockPtr& block, std::size_t offset,
                   c10::Device device);

// Gives the storage torch memory of its own, on its own device, with the same bytes. `tier` is
// where they are now: a CUDA storage may stand over pinned host memory. When torch has no memory
// left it throws and the storage is as it was.
void copy_out(c10::StorageImpl& storage, Tier tier);

// Somebody knows by address what the storage points at (a NumPy array, a DLPack capsule): that
// memory, whoever had it, stays where it is for as long as the storage lives, wherever the storage
// points later. It costs its bytes until then.
void keep_memory(c10::StorageImpl& storage);
// The same for a block the storage pointed at earlier.
void keep_memory(c10::StorageImpl& storage, const BlockPtr& block);
// Nobody does any more: gives back what was kept beside the present memory.
void forget_kept(c10::StorageImpl& storage);

// A CPU tensor of `model`'s dtype, sizes and strides over the block's bytes, which it keeps alive.
at::Tensor tensor_over(const BlockPtr& block, std::size_t offset, const at::Tensor& model);

// True when the storage holds exactly this tensor: no view of something larger, no gaps.
bool owns_its_storage(const at::Tensor& tensor);

// True when the storage was pointed at a block: it belongs to a unit.
bool stands_in_a_block(const c10::Storage& storage);

// A NumPy array of this very tensor was made at some time: torch forbids its storage to be resized
// from then on, and nothing else tells. (One of a detached tensor is an owner of the storage.)
inline bool has_array(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.storage().unsafeGetStorageImpl()->resizable();
}

class HomedTensor {
 public:
  HomedTensor() = default;
  // `tensor` keeps its identity, sizes, strides and dtype. `apart`: a block of its own, in which it
  // is until join(), because what stands at its place in the common one is somebody else's.
  HomedTensor(at::Tensor tensor, std::size_t offset, BlockPtr apart = nullptr);

  bool defined() const { return tensor_.defined(); }
  const at::Tensor& tensor() const { return tensor_; }
  std::size_t offset() const { return offset_; }
  std::size_t bytes() const { return bytes_; }

  // Copies the present bytes into the block and points there. A tensor that is a view of a larger
  // storage, or has gaps, first gets a storage of its own. `device` is the tensor's device from now
  // on (a CPU tensor may become one of `cuda`). Where the user replaced the storage (p.data = x)
  // and holds the old one, that one keeps its bytes.
  void move_into(const BlockPtr& block, c10::Device device);
  // Points at a block that already holds the bytes; a storage that was replaced, too. Memory that a
  // NumPy array stands on is kept. What is apart stays there.
  void point_at(const BlockPtr& block);
  bool is_apart() const { return apart_ != nullptr; }
  // Copies what is apart into the block, and points there.
  void join(const BlockPtr& block);
  // See keep_memory(): before the storage is pointed elsewhere.
  void keep_memory() { autohete::keep_memory(*storage_.unsafeGetStorageImpl()); }
  void keep_memory(const BlockPtr& block) {
    autohete::keep_memory(*storage_.unsafeGetStorageImpl(), block);
  }
  // Unless it is the memory that the tensor came with, and who had that then has it still.
  void forget_kept() {
    if (!came_known_ || storage_.use_count() < owners_)
      autohete::forget_kept(*storage_.unsafeGetStorageImpl());
  }
  // Gives the storage memory of its own, with its present bytes, if anybody else holds it or the
  // tensor: they keep them when the block is used for something else.
  void let_go(Tier tier);
  // Gives the tensor torch memory of its own on `device` with the bytes it has in `block`; it is
  // not ours any more. On its present device its views follow, on another one they stay behind.
  void leave(const BlockPtr& block, c10::Device device);
  // Somebody holds the storage who did not when it moved in: a view, a NumPy array of p.detach(), a
  // saved tensor of a graph.
  bool has_aliases() const {
    return tensor_.defined() &&
           (storage_.use_count() > owners_ ||
            (!tensor_.requires_grad() && was_resizable_ && has_array(tensor_)));
  }
  // The user gave the tensor another storage, dtype or size since move_into (p.data = x).
  bool replaced() const;
  // False when somebody gave the storage itself other memory (share_memory_()).
  bool has_our_memory() const { return stands_in_a_block(storage_); }

 private:
  // Where it is in the block, or apart.
  std::pair<BlockPtr, std::size_t> home(const BlockPtr& block) const {
    return apart_ ? std::pair(apart_, std::size_t{0}) : std::pair(block, offset_);
  }

  at::Tensor tensor_;
  std::size_t offset_ = 0;
  std::size_t bytes_ = 0;
  std::size_t owners_ = 0;  // of the storage when it moved in
  bool was_resizable_ = false;
  bool came_known_ = false;  // its memory before it moved in was kept
  BlockPtr apart_;
  c10::Storage storage_;  // the one we point; held, since the user may give the tensor another
};

}  // namespace autohete
