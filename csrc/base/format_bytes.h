// Sizes for messages, as autohete.planning.format_bytes writes them: "512 B", "1.50 KiB".
//
// Three digits are for reading; a message that names a size to be typed gives its bytes beside it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdio>
#include <string>

namespace autohete {

inline std::string format_bytes(std::size_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " B";
  double size = static_cast<double>(bytes) / 1024;
  const std::array<const char*, 5> units{"KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  for (; size >= 999.5 && unit + 1 < units.size(); ++unit) size /= 1024;
  std::array<char, 32> text{};
  const int digits = size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  std::snprintf(text.data(), text.size(), "%.*f %s", digits, size, units[unit]);
  return text.data();
}

}  // namespace autohete
