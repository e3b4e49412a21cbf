// The engine with tensors: what Python's hooks call. Each method does the engine's part without the
// GIL and then points the unit's tensors at the block it got.
//
// Thread rule: the hook thread, with the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/bindings/torch_unit.h"
#include "csrc/device/device.h"
#include "csrc/device/store.h"
#include "csrc/kernels/kernels.h"
#include "csrc/runtime/engine.h"
#include "csrc/runtime/workers.h"

namespace autohete {

// A device and its memory, as Python builds them.
struct DeviceHandle {
  std::shared_ptr<Device> device;
  std::shared_ptr<Store> store;
  c10::Device torch_device{c10::kCPU};
};

class TorchEngine {
 public:
  TorchEngine(DeviceHandle handle, int num_workers);
  ~TorchEngine();

  // --- set-up, with nothing in flight
  // Units added from here on are cut among ranks: this one has its part of the optimizer state, and
  // `share(unit, parameters)` brings the other ranks' parts after each update, on a thread of its
  // own and for all ranks in the same order.
  using Share = std::function<void(int unit, std::vector<at::Tensor> parameters)>;
  void set_ranks(RankOf rank, Share share);
  int add_unit(const std::string& name, const std::vector<at::Tensor>& parameters,
               const std::vector<std::optional<at::Tensor>>& masters,
               const std::vector<bool>& updated, bool with_state, bool amsgrad,
               const UnitPlan& plan);
  // Applies a plan: moves what has to move and makes the slots. On OutOfMemory nothing has changed
  // but the slots: call again with a smaller plan.
  void configure(const std::vector<UnitPlan>& plans, const EngineOptions& options);
  // step() waits until all updates and uploads are done, as other systems do.
  void set_barrier(bool on) { barrier_ = on; }
  // Gives all tensors plain torch memory on `device`; the engine is empty afterwards. On
  // out-of-memory it throws, and can be called again with another device.
  void leave(c10::Device device);
  // Bytes that leave(cuda) needs beyond what the device holds now.
  std::size_t bytes_to_leave() const;

  // --- forward and backward
  void acquire(int unit, Direction direction);
  void release(int unit);
  // Backward is through with the unit: its gradients leave, if the plan says so. `final`: no more
  // of them are expected, so work ahead of step() may be offered. `averaged`: over the ranks, so of
  // own gradients only this rank's rows need to go. Waits when more than
  // kMaxUnitsLeaving units' gradients are still on the device.
  void send_gradients(int unit, bool final, bool averaged = false);
  // The unit's last backward is in the middle: the gradients it has so far leave, and their part of
  // the update ahead may begin, if one is expected. send_gradients() sends the others. False where
  // they wait for that.
  bool send_first_gradients(int unit);
  // Frees the device memory of gradients that have landed; the calls above do it too.
  void land_gradients() { land(/*all=*/false); }
  // Every unit that is still acquired or has new gradients: released and sent.
  void finish_backward(bool averaged = false);
  void abandon();

  // --- ahead of step()
  // What comes now is expected to be the last backward before step(hypers): as gradients land,
  // updates start beside the present state (`update`), and norms are taken (`measure`).
  struct Expectation {
    std::vector<AdamHyper> hypers;
    bool update = false;
    bool measure = false;
    // The user has promised that step() comes with these very gradients and numbers: updates write
    // over the present state. What breaks the promise is an error from then on.
    bool in_place = false;
    // What gradients will have been multiplied by when their norms are asked for (a loss scale is
    // taken out).
    float norm_scale = 1.0F;
  };
  // Makes room for it where the host's memory allows, the units of the end first: their gradients
  // land first, and no more than `max_bytes`. Returns how many units can be updated ahead.
  int reserve_ahead(std::size_t max_bytes);
  std::size_t bytes_reserved_ahead() const;
  void expect_step(Expectation expectation);
  // Gradients are about to change (another backward): what ran ahead is void, factors are applied.
  void withdraw_ahead();
  // Which of the unit's parameters has this gradient; nothing where none has.
  std::optional<int> place_of(int unit, const at::Tensor& gradient) const;
  // torch's 2-norm of one gradient, where `measure` took it and nothing has changed it since.
  std::optional<at::Tensor> gradient_norm(int unit, int index);
  // All its values are known to be finite, by the same means.
  bool gradient_is_finite(int unit, int index);
  // Multiplies a float32 gradient by `factor` as torch's mul_ would: the update does it, or whoever
  // looks first. False where the caller has to do it itself.
  bool scale_gradient(int unit, int index, float factor);

  // --- what the user touches
  // The unit's parameters, moments and gradients hold their newest values and nothing writes them.
  // Storages the user put in become ours, unless `adopt` is off: then they stay the user's.
  void settle(int unit, bool adopt = true);
  // The gradients are whole and where the user sees them; updates may go on.
  void settle_gradients(int unit);
  void synchronize();

  // (unit, gradient) where the gradient is part of a larger tensor.
  std::vector<std::pair<int, at::Tensor>> gradient_parts() const;

  // --- the step
  // (unit, index) of parameters whose state has new tensors, since their layout was changed.
  std::vector<std::pair<int, int>> take_relaid();
  // (unit, index) of parameters with state that the user gave other memory: adopt_state() it.
  std::vector<std::pair<int, int>> replaced_state() const;
  // (unit, index) of parameters that have a gradient and no optimizer state yet.
  std::vector<std::pair<int, int>> missing_state();
  void make_state(int unit, int index) { units_.at(unit)->make_state(index); }
  void set_group(int unit, int index, int group);
  // Starts the update of every unit that has gradients and returns. `hypers` by group.
  void commit(const std::vector<AdamHyper>& hypers);

  // Updates ahead that step() took over and the CPU lane found to be void.
  std::uint64_t updates_redone() const { return updates_redone_; }

  TorchUnit& unit(int index) { return *units_.at(index); }
  int num_units() const { return static_cast<int>(units_.size()); }
  Engine& engine() { return engine_; }
  Workers& workers() { return workers_; }
  const DeviceHandle& device() const { return handle_; }

 private:
  static constexpr int kMaxUnitsLeaving = 2;
  // The next forward asks for these first, and waits for all that becomes of their gradients: where
  // they are large, copies and updates take turns part by part, in at most so many parts.
  static constexpr int kUnitsAtTheTurn = 4;
  static constexpr std::size_t kMaxParts = 8;

  void use_current_stream();
  void point(int unit, const BlockPtr& block);
  void land(bool all);
  void send(int unit, bool final, bool at_step = false, bool averaged = false);
  void offer_landed(int unit);
  void send_rest(int unit);
  bool send_in_parts(int unit, std::vector<CopySegment>& segments, AheadWork& ahead);
  void send_no_more(int unit);
  void settle_leaving(int unit);
  struct Offer {
    bool open = false;      // made since the last step(), not withdrawn
    bool in_place = false;  // cannot be taken back once it has started
    std::vector<AdamSpan> spans;
    std::vector<AdamSpan> first;        // of these: whose gradients went before the unit's others
    std::shared_ptr<ContentHash> hash;  // of the gradients that the update ahead read
    std::shared_ptr<std::vector<at::Tensor>> norms;
    float norm_scale = 1.0F;  // what they are the norms of: gradients times this
  };
  AheadWork offer(int unit);
  AheadWork offer_first(int unit);
  AheadWork offer_rest(int unit);
  void offer_norms(int unit, AheadWork& work);
  std::optional<at::Tensor> measured_norm(int unit, int index);
  void withdraw(int unit, bool ticking = true);
  bool commit_ahead(int unit, const std::vector<AdamSpan>& spans);
  std::string broken_promise(int unit, const char* how) const;
  void require_promise_kept() const;
  void update_now(const std::vector<AdamSpan>& spans);
  UpdateStats run_update(const std::vector<AdamSpan>& spans, bool by_products,
                         const std::uint64_t* positions = nullptr);
  std::function<void()> part_of_update(PlacedSpans part, std::shared_ptr<ContentHash> hash);
  ContentHash hash_of_gradients(const std::vector<AdamSpan>& spans);
  static std::size_t count_parameters(const std::vector<AdamSpan>& spans);
  void update_on_device(const std::vector<AdamHyper>& hypers);
  bool share_later(int unit);
  CopyAndWait copier();

  DeviceHandle handle_;
  Workers workers_;
  StreamId copy_streams_[2];
  std::vector<std::unique_ptr<TorchUnit>> units_;
  std::vector<std::uint64_t> versions_;  // at acquire
  std::vector<int> users_;               // acquires without release, as seen by Python
  std::vector<bool> touched_;            // the user may have edited the parameters
  std::vector<bool> gradients_touched_;  // the user may have edited the gradients
  std::vector<Offer> offers_;            // by unit
  std::vector<bool> more_gradients_;     // the first have been sent, the others not
  std::vector<int> leaving_;             // units whose gradients were sent; some have landed
  Expectation expectation_;
  std::string broken_promise_;
  bool barrier_ = false;
  bool priority_order_ = true;
  std::size_t chunk_bytes_ = 0;
  RankOf rank_;
  Share share_;
  std::atomic<std::uint64_t> updates_redone_{0};
  Engine engine_;  // last: its lanes stop first
};

}  // namespace autohete
