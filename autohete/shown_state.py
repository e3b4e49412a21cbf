"""What of an optimizer's state was shown last, to find at a step what its user changed since."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any, NamedTuple

from torch import nn


def fingerprint(state: dict[str, Any]) -> list[Any]:
    """What changes when a value of the state is replaced, or gets another name."""
    return [*state, *map(id, state.values())]


class State(NamedTuple):
    """One parameter's state as it was shown last."""

    shown: dict[str, Any]
    """The values, as the optimizer has them; held, so that their ids stay theirs."""

    local: dict[str, Any]
    """What of them this rank has."""

    given: dict[str, Any]
    """The optimizer's own dict, and its fingerprint when the values came into it."""

    fingerprint: list[Any]


class Shown:
    """All states as they were shown last: a step of the usual kind finds them unchanged.

    Args:
        parameters: those the engine updates.
        given: for each the optimizer's own dict, or None where it has none.
    """

    def __init__(self, parameters: list[nn.Parameter], given: list[dict[str, Any] | None]) -> None:
        self._parameters = parameters
        self._given = given
        self._dicts = [each for each in given if each is not None]
        self._names, self._ids = self._fingerprints()
        self._values = [value for each in self._dicts for value in each.values()]  # ids stay theirs

    def _fingerprints(self) -> tuple[list[str], list[int]]:
        values = chain.from_iterable(map(dict.values, self._dicts))
        return list(chain.from_iterable(self._dicts)), list(map(id, values))

    def is_still(self, states: dict[Any, Any]) -> bool:
        """Whether the same dicts hold the same objects under the same names."""
        same = map(operator.is_, map(states.get, self._parameters), self._given)
        return all(same) and self._fingerprints() == (self._names, self._ids)
