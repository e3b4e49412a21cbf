// One unit's tensors: parameters, gradients, moments, fp32 masters; where their bytes are, and how
// a gradient changes sides. Torch only; what moves when is the engine's business.
//
// Thread rule: the hook thread, with the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/kernels/adamw.h"
#include "csrc/memory/unit_layout.h"
#include "csrc/memory/unit_storage.h"
#include "csrc/plan/plan.h"
#include "csrc/runtime/engine.h"

namespace autohete {

// Copies bytes between tiers and waits. Supplied by the engine's owner.
using CopyAndWait = std::function<void(const BlockPtr& dst, const BlockPtr& src)>;

// Which of the ranks that train together this one is. Each has the optimizer state of its part of
// every parameter and updates that part: rows [rank * n, (rank + 1) * n) with n = rows / size,
// rounded up, as DTensor's Shard(0) cuts them. A parameter whose rows do not lie one after the
// other is every rank's as a whole.
struct RankOf {
  int rank = 0, size = 1;
  // Of gradients too only those rows go to the host; the others are NaN there.
  bool own_gradients = false;
};

// Some of a unit's spans, and where each begins in what is hashed of the unit.
struct PlacedSpans {
  std::vector<AdamSpan> spans;
  std::vector<std::uint64_t> positions;
};

// A parameter and what belongs to it.
struct TorchParameter {
  HomedTensor value;
  StreamOffsets offsets;  // in the unit's blocks
  // Where its gradient is on the host if not in the unit's block: somebody knows by address what is
  // there, and it is theirs now.
  BlockPtr gradient_block;
  int group = -1;         // index of its param group; -1: not in the optimizer
  bool has_room = false;  // for gradient and state: it was in the optimizer when it was wrapped
  // This rank's part: rows of dimension 0, and elements in memory. One rank: all.
  bool is_shared = false;  // other ranks have the rest
  std::int64_t first_row = 0, num_rows = 0;
  std::size_t part_begin = 0, part_numel = 0;

  // The gradient on its way to the host, and its version when the copy was queued.
  at::Tensor leaving;
  std::uint32_t leaving_version = 0;
  // The gradient whose bytes are on the host, but which was held when they came.
  c10::weak_intrusive_ptr<c10::TensorImpl> held_back{c10::intrusive_ptr<c10::TensorImpl>()};
  // The gradient that points at the host block, while somebody still holds it, and its version when
  // it came to point there.
  c10::weak_intrusive_ptr<c10::StorageImpl> landed{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::weak_intrusive_ptr<c10::TensorImpl> landed_tensor{c10::intrusive_ptr<c10::TensorImpl>()};
  std::uint32_t landed_version = 0;
  // The gradient's version when work ahead of step() was offered on it.
  std::uint32_t offered_version = 0;
  // The gradient is to be multiplied by this before use (clipping): applied by the update, or by
  // apply_gradient_factors() when somebody looks.
  float gradient_factor = 1.0F;

  // Optimizer state, all fp32 and shaped like the parameter; undefined until made.
  HomedTensor exp_avg, exp_avg_sq, max_exp_avg_sq, master;
  at::Tensor step;  // 0-dim float32 on the CPU

  // The user gave some of it other memory (state["exp_avg"].data = x).
  bool has_replaced_state() const {
    for (const HomedTensor* array : {&exp_avg, &exp_avg_sq, &max_exp_avg_sq, &master})
      if (array->defined() && array->replaced()) return true;
    return false;
  }

  bool is_half() const { return value.tensor().scalar_type() != at::kFloat; }
  StreamSizes sizes(bool with_state, bool amsgrad) const;
  // The shape of its state.
  std::vector<std::int64_t> state_sizes() const;
  // The rows of a tensor shaped like the parameter that this rank has.
  at::Tensor part_of(const at::Tensor& whole) const;
};

class TorchUnit {
 public:
  // Gives every parameter a home under `plan`, one unit's bytes at a time. masters[i] is the fp32
  // value of half parameter i (undefined: its present value, widened). `updated[i]`: the optimizer
  // has it, so its gradient gets room, and its state too with `with_state`.
  TorchUnit(std::string name, const std::vector<at::Tensor>& parameters,
            const std::vector<at::Tensor>& masters, const std::vector<bool>& updated,
            bool with_state, bool amsgrad, const UnitPlan& plan, Store& store, c10::Device device,
            const CopyAndWait& copy, RankOf rank = {});
  // Without leave() (the model is garbage): what somebody still knows by address stays mapped.
  ~TorchUnit() { drop_spare(); }

  const std::string& name() const { return name_; }
  const UnitPlan& plan() const { return plan_; }
  const BlockPtr& state_block() const { return state_; }
  UnitBlocks blocks() const;
  std::vector<TorchParameter>& parameters() { return parameters_; }
  std::size_t param_bytes() const { return param_bytes_; }
  // For the planner, what is copied: gaps between gradients stay, and count as state.
  std::size_t gradient_bytes() const { return gradient_bytes_ - gradient_gaps_; }
  std::size_t state_bytes() const { return state_bytes_ + gradient_gaps_; }

  // Moves everything to where `plan` wants it. The newest bytes must be in newest_block() and
  // nothing in flight.
  void rehome(const UnitPlan& plan, Store& store, const CopyAndWait& copy);
  // Gives every tensor plain torch memory again, on `device`. On out-of-memory it throws, and can
  // be called again (with another device).
  void leave(c10::Device device);

  void point_parameters(const BlockPtr& block);
  // Newest bytes when nothing computes.
  const BlockPtr& newest_block() const {
    return plan_.parameters == Tier::kHost ? params_host_ : params_device_;
  }

  // The user gave some parameter another storage (p.data = x). Throws std::invalid_argument when
  // they gave a storage other memory instead (share_memory_()), which cannot be followed.
  bool has_replaced() const;
  // Makes parameters the user gave another storage ours again (their bytes move into the newest
  // block; their state takes their layout). Returns true when there were any.
  bool adopt_replaced();
  // Parameters whose state has new tensors since the last call.
  std::vector<std::size_t> take_relaid() { return std::exchange(relaid_, {}); }
  // The user may have edited parameters: brings the host's copy of device parameters up to date.
  // (Masters of half parameters follow in the update itself, see AdamSpan::half_in.)
  void take_edits(const CopyAndWait& copy);

  // What has to go to the host now: gradients that are new, or changed while leaving. Marks them
  // as leaving. A CUDA gradient that kernels changed on the host is marked without a segment: its
  // bytes are final when those kernels are done. One whose memory somebody else points at (a NumPy
  // array, a storage) stays where it is and goes `at_step`, with what is in it then.
  // Those that are leaving already are left out. averaged: over the ranks, so of own gradients only
  // this rank's rows need to go.
  std::vector<CopySegment> collect_gradients(bool at_step = false, bool averaged = false);
  bool has_held_gradients() const;
  // Some parameter's gradient is on the host: another backward may be adding to it.
  bool has_landed_gradients() const;
  // Some gradient is not any more what it was when it was sent, or not its parameter's.
  bool changed_while_leaving() const;
  // Some parameter has a gradient that is neither on the host nor on its way, or changed on its
  // way.
  bool has_unsent_gradients() const;
  // The user gave a parameter another gradient than the one that is leaving or has landed: it may
  // be one of another parameter's, whose memory moves too.
  bool gradients_exchanged() const;
  // The copies are over: gradients point at the host block from here on, and their device memory
  // is free. Returns true when some changed meanwhile and must be sent again.
  bool land_gradients();
  // Gradients that were held when their bytes came and are not any more point at the host, too.
  // (Autograd holds some for a moment after their unit's backward.)
  void land_held_back();
  bool gradients_leaving() const { return leaving_; }

  // Makes moments of parameter i (zeros) and its step counter (0). Tensors it had before keep their
  // values, for who still holds them.
  void make_state(std::size_t i);
  // The state is gone (the user cleared it): the master starts from the parameter again, the rest
  // with make_state(). The parameter's bytes must be final.
  void forget_state(std::size_t i);
  // Takes the user's tensors as the state of parameter i: they become the visible ones, over the
  // state block; those of another dtype, device or layout are copied. Shaped like the parameter, or
  // like this rank's part of it.
  void adopt_state(std::size_t i, at::Tensor step, at::Tensor exp_avg, at::Tensor exp_avg_sq,
                   std::optional<at::Tensor> max_exp_avg_sq, std::optional<at::Tensor> master);

  // State that has memory of its own, since a tensor that was replaced kept the place, comes back
  // where no such tensor stands in the block any more. Not while an update runs.
  void join_state();

  // Counts the step and returns one span per parameter that has a gradient. `hypers` by group.
  std::vector<AdamSpan> make_spans(const std::vector<AdamHyper>& hypers);

  // --- ahead of step(): the update writes new parameters and state to spare blocks
  // Makes the spare blocks. False where the host's memory has no room for them.
  bool reserve_spare(Store& store);
  void drop_spare();
  std::size_t bytes_of_spare() const;  // what it would take
  std::size_t spare_bytes() const;     // what it takes
  // The spans of the step to come, into the spare blocks; nothing is counted. Empty where there is
  // no spare, or some parameter of the unit is not updated: its bytes would have to be copied.
  std::vector<AdamSpan> spans_ahead(const std::vector<AdamHyper>& hypers);
  // Of those of them that have a gradient which is leaving: more of the unit's are to come. Empty
  // where some cannot be updated ahead.
  PlacedSpans leaving_spans_ahead(const std::vector<AdamHyper>& hypers);
  // Of spans_ahead(), in their order.
  std::vector<std::uint64_t> hash_positions() const;
  // The same over the present state, for a caller who was promised that the step will come.
  std::vector<AdamSpan> spans_ahead_in_place(const std::vector<AdamHyper>& hypers);
  // Somebody holds memory of the unit's parameters or state by other means than the tensors we
  // know, or some of the state is not in its block, so the blocks must not change places.
  bool has_aliases() const;
  // The same of a parameter that has a gradient. (Autograd holds the others while their backward is
  // still to come.)
  bool has_aliases_beside_gradients() const;
  // Notes the present gradients as those that work ahead of step() reads. Returns whether somebody
  // holds the memory of one by other means than the tensor: it may change and be let go of unseen.
  // `leaving`: of those that are leaving.
  bool note_offered(bool leaving = false);
  // They are still there, on the host or on their way.
  bool offered_there() const;
  // And unchanged as far as torch knows, and nobody else has a view of them.
  bool offered_unchanged() const;
  // Nobody else has the tensors themselves.
  bool offered_alone() const;
  // The spare blocks become the unit's, and the other way round.
  void swap_spare();
  // Gradients as tensors over the host block, for reading on any thread (undefined where missing).
  std::vector<at::Tensor> host_gradients() const;
  bool has_gradients() const;
  // Bytes of gradients that are on the device, those on their way out included.
  std::size_t device_gradient_bytes() const;
  // Parameters of the host block that the ranks update a part of each and that have gradients.
  std::vector<at::Tensor> shared_parameters() const;
  // Some gradient that is still there waits to be multiplied.
  bool has_gradient_factors() const;
  // Multiplies the gradients by their factors, in place.
  void apply_gradient_factors();
  // Sum of the parameters' version counters: changes with every in-place write torch can see.
  std::uint64_t versions() const;

 private:
  void land(TorchParameter& parameter, const at::Tensor& gradient);
  BlockPtr gradient_block(const TorchParameter& parameter) const;
  std::size_t gradient_offset(const TorchParameter& parameter) const;
  at::Tensor host_gradient(const TorchParameter& parameter, const at::Tensor& gradient) const;
  void make_room_for_gradient(TorchParameter& parameter);
  void allocate(const UnitPlan& plan, Store& store);
  bool on_host(const TorchParameter& parameter, const at::Tensor& gradient) const;
  bool changed_on_host(const TorchParameter& parameter, const at::Tensor& gradient) const;
  c10::Device state_device() const;
  HomedTensor state_array(std::size_t i, int index, const BlockPtr& apart = nullptr) const;
  BlockPtr part_from(const TorchParameter& parameter, HomedTensor& old);
  BlockPtr block_beside(const TorchParameter& parameter, std::size_t bytes, Tier tier,
                        const std::string& what);
  AdamSpan span_at_home(TorchParameter& parameter, const std::vector<AdamHyper>& hypers);
  bool can_update_ahead(const TorchParameter& parameter) const;
  AdamSpan into_spare(AdamSpan span) const;
  void lay_out_like_parameter(std::size_t i);
  void cut(TorchParameter& parameter, RankOf rank);
  void take_layout(const UnitLayout& layout);
  void mark_other_gradients();
  void mark_other_gradients(const TorchParameter& parameter);
  static bool stays(const HomedTensor& home, c10::Device device, std::size_t num_owners);
  CopySegment gradient_segment(const TorchParameter& parameter, const at::Tensor& gradient,
                               bool own_rows) const;

  Store& store_;
  std::string name_;
  c10::Device device_;
  bool amsgrad_;
  bool own_gradients_;
  bool others_marked_ = false;  // the host's other rows are NaN: averaged ones went last
  UnitPlan plan_;
  std::vector<TorchParameter> parameters_;
  std::size_t param_bytes_ = 0, gradient_bytes_ = 0, state_bytes_ = 0;
  std::size_t gradient_gaps_ = 0, spare_lead_ = 0;
  BlockPtr params_host_, params_device_, gradients_host_, state_;
  BlockPtr spare_params_, spare_state_;
  // The blocks of earlier plans, while somebody who knows them by address keeps them: another plan
  // that wants such a block takes the same again.
  std::weak_ptr<Block> former_params_host_, former_params_device_;
  std::weak_ptr<Block> former_state_host_, former_state_device_;
  bool state_is_shared_ = false;  // a tensor that was replaced in optimizer.state has a place in it
  bool leaving_ = false;
  std::vector<std::size_t> relaid_;
};

}  // namespace autohete
