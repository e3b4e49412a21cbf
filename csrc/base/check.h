// Contract errors. The caller broke a documented rule: std::invalid_argument, which pybind11 turns
// into ValueError. The machine failed: std::runtime_error -> RuntimeError. Our own bug: AH_ASSERT.
//
// Messages read "where: name is GOT, expected WANT; what to do".
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace autohete {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Throws std::invalid_argument with the parts joined when `condition` is false.
template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw std::invalid_argument(concat(parts...));
}

}  // namespace autohete

// An invariant of ours, checked in release builds too (all uses are outside inner loops).
#define AH_ASSERT(condition)                                                                    \
  do {                                                                                          \
    if (!(condition))                                                                           \
      throw std::logic_error(::autohete::concat("autohete bug: ", #condition, " at ", __FILE__, \
                                                ":", __LINE__, "; please report"));             \
  } while (false)
