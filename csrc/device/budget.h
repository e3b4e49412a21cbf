// Counts live bytes of one memory against a limit. Header-only; lock-free.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace autohete {

// Any thread. charge() either takes the bytes and returns true, or changes nothing and returns
// false (counted by num_refusals()). The peak is the largest `used` since the last reset_peak().
class Budget {
 public:
  explicit Budget(std::size_t limit_bytes) : limit_(limit_bytes) {}

  bool charge(std::size_t bytes) {
    std::size_t used = used_.load(std::memory_order_relaxed);
    do {
      if (bytes > limit() - std::min(limit(), used)) {
        num_refusals_.fetch_add(1, std::memory_order_relaxed);
        return false;
      }
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    raise_peak(used + bytes);
    return true;
  }
  void refund(std::size_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  std::size_t used() const { return used_.load(std::memory_order_relaxed); }
  std::size_t peak() const { return peak_.load(std::memory_order_relaxed); }
  std::size_t limit() const { return limit_.load(std::memory_order_relaxed); }
  std::size_t free() const { return limit() - std::min(limit(), used()); }
  std::size_t num_refusals() const { return num_refusals_.load(std::memory_order_relaxed); }
  void set_limit(std::size_t bytes) { limit_.store(bytes, std::memory_order_relaxed); }
  void reset_peak() { peak_.store(used(), std::memory_order_relaxed); }

 private:
  void raise_peak(std::size_t used) {
    std::size_t peak = peak_.load(std::memory_order_relaxed);
    while (used > peak && !peak_.compare_exchange_weak(peak, used, std::memory_order_relaxed)) {
    }
  }
  std::atomic<std::size_t> limit_;
  std::atomic<std::size_t> used_{0};
  std::atomic<std::size_t> peak_{0};
  std::atomic<std::size_t> num_refusals_{0};
};

// Bytes taken from a budget, given back by the destructor. Tests true when the budget had them.
class BudgetCharge {
 public:
  BudgetCharge() = default;
  BudgetCharge(std::shared_ptr<Budget> budget, std::size_t bytes) {
    if (budget->charge(bytes)) budget_ = std::move(budget), bytes_ = bytes;
  }
  ~BudgetCharge() {
    if (budget_) budget_->refund(bytes_);
  }
  BudgetCharge(BudgetCharge&& other) noexcept
      : budget_(std::move(other.budget_)), bytes_(other.bytes_) {}
  BudgetCharge& operator=(BudgetCharge&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  explicit operator bool() const { return budget_ != nullptr; }

 private:
  std::shared_ptr<Budget> budget_;
  std::size_t bytes_ = 0;
};

}  // namespace autohete
