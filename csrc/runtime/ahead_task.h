// The ledger of work ahead of step(): one task of a unit, and how far it has come. Kept apart from
// the table of unit states, because nothing of it is visible before commit_ahead().
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace autohete {

// No lock of its own: whoever has it guards it.
class AheadTask {
 public:
  enum class Stage : std::uint8_t {
    kNone,     // nothing, or withdrawn
    kOffered,  // waits for the gradients to land
    kQueued,   // in the CPU lane's queue
    kRunning,
    kDone,
  };

  Stage stage() const { return stage_; }
  bool started() const { return stage_ == Stage::kRunning || stage_ == Stage::kDone; }

  // An empty `work` offers nothing. Not while running.
  void offer(std::function<void()> work) {
    work_ = std::move(work);
    stage_ = work_ ? Stage::kOffered : Stage::kNone;
  }
  // The ticket that start() will ask for: a task withdrawn meanwhile, or offered anew, has another.
  std::uint64_t queue() {
    stage_ = Stage::kQueued;
    return ++ticket_;
  }
  // The work to run now, or nothing where it is not wanted any more.
  std::function<void()> start(std::uint64_t ticket) {
    if (stage_ != Stage::kQueued || ticket != ticket_) return nullptr;
    stage_ = Stage::kRunning;
    return std::move(work_);
  }
  void finish(bool succeeded) { stage_ = succeeded ? Stage::kDone : Stage::kNone; }
  // Not while running.
  void withdraw() {
    stage_ = Stage::kNone;
    work_ = nullptr;
  }

 private:
  Stage stage_ = Stage::kNone;
  std::uint64_t ticket_ = 0;
  std::function<void()> work_;
};

}  // namespace autohete
