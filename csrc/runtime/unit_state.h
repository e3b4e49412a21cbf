// The engine's specification: where a unit's parameters are, where its update stands, and which
// event may happen when. The engine asks this table before it moves; tests/runtime/test_unit_state
// walks every reachable state.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "csrc/base/check.h"

namespace autohete {

// Where the parameters can be used from.
enum class Residency : std::uint8_t {
  kHost,       // only in the host block
  kUploading,  // a copy host block -> device block is queued or running
  kResident,   // the device block holds the newest bytes, nobody computes with them
  kComputing,  // between acquire and release
};

// Where the gradients and the update are.
enum class Progress : std::uint8_t {
  kIdle,       // no gradient on the host that the engine has not consumed
  kLeaving,    // a copy device -> host gradient block is queued or running
  kLanded,     // the gradient block holds this backward's gradients
  kCommitted,  // step() was called, gradients still leaving
  kUpdating,   // the update is queued or running
};

enum class UnitEvent : std::uint8_t {
  kUploadStarted,
  kUploadDone,
  kAcquired,
  kReleased,
  kDropped,         // the device block is given away or its bytes are old
  kGradientsReady,  // backward produced gradients
  kGradientsLanded,
  kCommit,  // step() with gradients landed (or none leaving)
  kUpdateDone,
};

struct UnitState {
  Residency residency = Residency::kHost;
  Progress progress = Progress::kIdle;
  bool operator==(const UnitState&) const = default;

  // Nothing writes the parameters: they may be uploaded, computed with, read or edited.
  bool parameters_final() const {
    return progress != Progress::kCommitted && progress != Progress::kUpdating;
  }
};

// The state after `event`, or nothing where the event may not happen.
constexpr std::optional<UnitState> next_state(UnitState state, UnitEvent event) {
  using R = Residency;
  using P = Progress;
  const bool final = state.progress != P::kCommitted && state.progress != P::kUpdating;
  switch (event) {
    case UnitEvent::kUploadStarted:
      if (state.residency == R::kHost && final) return UnitState{R::kUploading, state.progress};
      break;
    case UnitEvent::kUploadDone:
      if (state.residency == R::kUploading) return UnitState{R::kResident, state.progress};
      break;
    case UnitEvent::kAcquired:
      if (state.residency == R::kResident && final) return UnitState{R::kComputing, state.progress};
      break;
    case UnitEvent::kReleased:
      if (state.residency == R::kComputing) return UnitState{R::kResident, state.progress};
      break;
    case UnitEvent::kDropped:
      if (state.residency == R::kResident) return UnitState{R::kHost, state.progress};
      break;
    case UnitEvent::kGradientsReady:
      if (state.progress == P::kIdle || state.progress == P::kLanded)
        return UnitState{state.residency, P::kLeaving};
      break;
    case UnitEvent::kGradientsLanded:
      if (state.progress == P::kLeaving) return UnitState{state.residency, P::kLanded};
      if (state.progress == P::kCommitted) return UnitState{state.residency, P::kUpdating};
      break;
    case UnitEvent::kCommit:
      // The device copy is old from here on: it must have been dropped.
      if (state.residency != R::kHost) break;
      if (state.progress == P::kLeaving) return UnitState{state.residency, P::kCommitted};
      if (state.progress == P::kIdle || state.progress == P::kLanded)
        return UnitState{state.residency, P::kUpdating};
      break;
    case UnitEvent::kUpdateDone:
      if (state.progress == P::kUpdating) return UnitState{state.residency, P::kIdle};
      break;
  }
  return std::nullopt;
}

inline void advance(UnitState& state, UnitEvent event) {
  const std::optional<UnitState> next = next_state(state, event);
  AH_ASSERT(next.has_value());
  state = *next;
}

}  // namespace autohete
