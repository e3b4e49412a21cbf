// The ledger of work ahead of step(): one task of a unit, the parts it comes in, and how far they
// are. Kept apart from the table of unit states, because nothing of it is visible before
// commit_ahead().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace autohete {

// No lock of its own: whoever has it guards it.
class AheadTask {
 public:
  struct Started {
    std::function<void()> work;  // empty: not wanted any more, or somebody else has begun it
    std::size_t num_parameters = 0;
  };

  // One more part, which waits for its gradients. The ticket is asked for by land() and start():
  // a part withdrawn meanwhile has none. An empty `work` is no part.
  std::uint64_t offer(std::function<void()> work, std::size_t num_parameters = 0) {
    if (!work) return kNoTicket;
    parts_.push_back({std::move(work), num_parameters, Stage::kOffered});
    return first_ticket_ + parts_.size() - 1;
  }
  // The parts so far are all.
  void offer_no_more() { is_whole_ = true; }

  // The part's gradients are there. False where it is not wanted any more.
  bool land(std::uint64_t ticket) {
    Part* part = find(ticket);
    if (!part || part->stage != Stage::kOffered) return false;
    part->stage = Stage::kLanded;
    return true;
  }
  Started start(std::uint64_t ticket) {
    Part* part = find(ticket);
    if (!part || part->stage != Stage::kLanded) return {};
    part->stage = Stage::kStarted;
    ++num_started_, ++num_running_;
    return {std::move(part->work), part->num_parameters};
  }
  void finish(bool succeeded) {
    --num_running_;
    if (succeeded) {
      ++num_done_;
    } else {
      has_failed_ = true;
    }
  }
  // Not while running.
  void withdraw() {
    first_ticket_ += parts_.size();
    parts_.clear();
    num_started_ = num_done_ = 0;
    is_whole_ = has_failed_ = false;
  }

  bool offered() const { return !parts_.empty() && !has_failed_; }
  bool started() const { return num_started_ > 0 && !has_failed_; }
  bool running() const { return num_running_ > 0; }
  bool done() const { return offered() && is_whole_ && num_done_ == parts_.size(); }
  // Something of it may still run.
  bool pending() const { return offered() && !done(); }
  std::size_t num_parts() const { return parts_.size(); }

 private:
  static constexpr std::uint64_t kNoTicket = 0;
  enum class Stage : std::uint8_t { kOffered, kLanded, kStarted };
  struct Part {
    std::function<void()> work;
    std::size_t num_parameters;
    Stage stage;
  };

  // None of a task that has failed: all of it is done again.
  Part* find(std::uint64_t ticket) {
    if (has_failed_ || ticket < first_ticket_ || ticket - first_ticket_ >= parts_.size())
      return nullptr;
    return &parts_[ticket - first_ticket_];
  }

  std::vector<Part> parts_;
  std::uint64_t first_ticket_ = 1;
  std::size_t num_started_ = 0, num_running_ = 0, num_done_ = 0;
  bool is_whole_ = false, has_failed_ = false;
};

}  // namespace autohete
