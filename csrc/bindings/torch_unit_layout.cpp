// What a unit's parameters need of its blocks, and where in them they are.
#include <algorithm>

#include "csrc/bindings/torch_unit.h"

namespace autohete {

void TorchUnit::take_layout(const UnitLayout& layout) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TorchParameter& parameter = parameters_[i];
    parameter.offsets = layout.offsets[i];
    parameter.value = HomedTensor(parameter.value.tensor(), parameter.offsets.param);
  }
  param_bytes_ = layout.param_bytes;
  gradient_bytes_ = layout.gradient_bytes;
  state_bytes_ = layout.state_bytes;
  gradient_gaps_ = layout.gradient_gaps;
  spare_lead_ = layout.spare_lead;
}

StreamSizes TorchParameter::sizes(bool with_state, bool amsgrad) const {
  StreamSizes sizes;
  sizes.bytes = value.tensor().nbytes();
  sizes.part_begin = part_begin * value.tensor().element_size();
  sizes.array_bytes = part_numel * sizeof(float);
  sizes.has_gradient = has_room;
  if (has_room && with_state) sizes.has_array = {true, true, amsgrad, is_half()};
  return sizes;
}

// This rank's part of the parameter.
void TorchUnit::cut(TorchParameter& parameter, RankOf rank) {
  const at::Tensor& value = parameter.value.tensor();
  parameter.part_numel = static_cast<std::size_t>(value.numel());
  if (value.dim() > 0) parameter.num_rows = value.size(0);
  if (rank.size < 2 || value.dim() == 0 || value.numel() == 0 || !value.is_contiguous()) return;
  const std::int64_t rows = value.size(0);
  const std::int64_t each = (rows + rank.size - 1) / rank.size;
  parameter.is_shared = true;
  parameter.first_row = std::min(rank.rank * each, rows);
  parameter.num_rows = std::min(parameter.first_row + each, rows) - parameter.first_row;
  const auto of_a_row = static_cast<std::size_t>(value.numel() / rows);
  parameter.part_begin = static_cast<std::size_t>(parameter.first_row) * of_a_row;
  parameter.part_numel = static_cast<std::size_t>(parameter.num_rows) * of_a_row;
}

std::vector<std::int64_t> TorchParameter::state_sizes() const {
  std::vector<std::int64_t> sizes = value.tensor().sizes().vec();
  if (is_shared) sizes[0] = num_rows;
  return sizes;
}

at::Tensor TorchParameter::part_of(const at::Tensor& whole) const {
  return is_shared ? whole.narrow(0, first_row, num_rows) : whole;
}

}  // namespace autohete
