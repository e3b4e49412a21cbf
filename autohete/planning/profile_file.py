"""autohete_profile.json: a profile and, if made, its plan. Readable, versioned, written whole.

Layout: {"format": "autohete-profile", "version": 1, "profile": {...}, "plan": {...} or null}.
Units repeat, so runs of equal plan entries are stored once with their unit range.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from autohete import _C

FORMAT = "autohete-profile"
VERSION = 1
DEFAULT_NAME = "autohete_profile.json"
_MOST_BYTES = 256 << 20  # four times what 100,000 units take

PASS_SECONDS = ("outside_seconds", "loop_seconds")
UNIT_SECONDS = ("forward_seconds", "backward_seconds", "recompute_seconds")
_UNIT_FIELDS: dict[str, type] = {
    "name": str,
    "kind": str,
    "num_parameters": int,
    "param_bytes": int,
    "grad_bytes": int,
    "grad_tensors": int,
    "largest_grad_tensor_bytes": int,
    "state_bytes": int,
    "master_bytes": int,
    "activation_bytes": int,
    "checkpoint_bytes": int,
    "temporary_bytes": int,
    "forward_seconds": float,
    "backward_seconds": float,
    "recompute_seconds": float,
    "can_offload_parameters": bool,
    "can_recompute": bool,
}
_HARDWARE_FIELDS: dict[str, type] = {
    "h2d_bytes_per_second": float,
    "d2h_bytes_per_second": float,
    "link_latency_seconds": float,
    "cpu_params_per_second": float,
    "device_params_per_second": float,
    "h2d_share_during_d2h": float,
    "d2h_share_during_h2d": float,
    "copy_share_during_cpu": float,
    "cpu_share_during_copy": float,
    "cpu_share_during_compute": float,
    "compute_share_during_cpu": float,
    "compute_share_during_copy": float,
}
_RANK_FIELDS: dict[str, type] = {
    "num_ranks": int,
    "own_gradients": bool,
    "early_gathers": bool,
    "exchange_bytes_per_second": float,
    "gather_bytes_per_second": float,
    "device_gather_bytes_per_second": float,
    "exchange_latency_seconds": float,
    "gather_latency_seconds": float,
    "device_gather_latency_seconds": float,
    "pack_bytes_per_second": float,
    "compute_share_during_collective": float,
    "cpu_share_during_collective": float,
    "collective_share_during_compute": float,
    "collective_share_during_cpu": float,
    "collective_share_during_other": float,
}
_PROFILE_FIELDS: dict[str, type] = {
    "fixed_device_bytes": int,
    "fixed_host_bytes": int,
    "outside_seconds": float,
    "loop_seconds": float,
    "gradient_accumulation_steps": int,
    "gradients_persist": bool,
    "speculates": bool,
    "chunk_bytes": int,
}
_PLAN_FIELDS: dict[str, type] = {
    "strategy": str,
    "window": int,
    "chunk_bytes": int,
    "step_seconds": float,
    "device_peak_bytes": int,
    "host_bytes": int,
    "solver": str,
    "binding_lane": str,
}
_TIERS = {"device": _C.Tier.DEVICE, "host": _C.Tier.HOST}
_RULES = {"keep": _C.ActivationRule.KEEP, "recompute": _C.ActivationRule.RECOMPUTE}
_TIER_NAMES = {tier: name for name, tier in _TIERS.items()}
_RULE_NAMES = {rule: name for name, rule in _RULES.items()}
_UNIT_PLAN_FIELDS = ("parameters", "gradients", "optimizer_state", "activations")


def profile_to_dict(profile: _C.Profile) -> dict[str, Any]:
    """Return the profile as plain JSON values."""
    return {
        **_fields_of(profile, _PROFILE_FIELDS),
        "hardware": _fields_of(profile.hardware, _HARDWARE_FIELDS),
        "ranks": _fields_of(profile.ranks, _RANK_FIELDS),
        "units": [_fields_of(unit, _UNIT_FIELDS) for unit in profile.units],
    }


def profile_from_dict(data: Any, where: str = "profile") -> _C.Profile:
    """Return the profile that `profile_to_dict` described, checked."""
    profile = _C.Profile()
    # Of files from before they were written.
    alone = _fields_of(_C.RankProfile(), _RANK_FIELDS)
    later = {"speculates": False, "ranks": alone, **dict.fromkeys(PASS_SECONDS, 0.0)}
    data = _with_later_fields(data, **later)
    _check_keys(data, {*_PROFILE_FIELDS, "hardware", "ranks", "units"}, where)
    _set_fields(profile, data, _PROFILE_FIELDS, where)
    hardware = _C.HardwareProfile()
    rates = _with_later_fields(data["hardware"], compute_share_during_copy=1.0)
    _check_keys(rates, set(_HARDWARE_FIELDS), f"{where}.hardware")
    _set_fields(hardware, rates, _HARDWARE_FIELDS, f"{where}.hardware")
    profile.hardware = hardware
    ranks = _C.RankProfile()
    among = _with_later_fields(data["ranks"], early_gathers=False)
    _check_keys(among, set(_RANK_FIELDS), f"{where}.ranks")
    _set_fields(ranks, among, _RANK_FIELDS, f"{where}.ranks")
    profile.ranks = ranks
    profile.units = [
        _unit_from_dict(unit, f"{where}.units[{i}]")
        for i, unit in enumerate(_list(data["units"], f"{where}.units"))
    ]
    _C.validate_profile(profile)
    return profile


def plan_to_dict(plan: _C.Plan) -> dict[str, Any]:
    """Return the plan as plain JSON values."""
    units = [
        {
            "parameters": _TIER_NAMES[unit.parameters],
            "gradients": _TIER_NAMES[unit.gradients],
            "optimizer_state": _TIER_NAMES[unit.optimizer_state],
            "activations": _RULE_NAMES[unit.activations],
        }
        for unit in plan.units
    ]
    runs: list[dict[str, Any]] = []
    for index, unit in enumerate(units):
        if runs and all(runs[-1][field] == unit[field] for field in _UNIT_PLAN_FIELDS):
            runs[-1]["last"] = index
        else:
            runs.append({"first": index, "last": index, **unit})
    return {**_fields_of(plan, _PLAN_FIELDS), "units": runs}


def plan_from_dict(data: Any, where: str = "plan") -> _C.Plan:
    """Return the plan that `plan_to_dict` described."""
    plan = _C.Plan()
    _check_keys(data, {*_PLAN_FIELDS, "units"}, where)
    _set_fields(plan, data, _PLAN_FIELDS, where)
    units: list[_C.UnitPlan] = []
    for i, run in enumerate(_list(data["units"], f"{where}.units")):
        units.extend(_run_from_dict(run, len(units), f"{where}.units[{i}]"))
    plan.units = units
    return plan


def save_profile(
    path: str | os.PathLike[str], profile: _C.Profile, plan: _C.Plan | None = None
) -> None:
    """Write profile and plan; the file is either the old or the new one, never half."""
    _C.validate_profile(profile)
    if plan is not None:
        _C.validate_plan(profile, plan)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "profile": profile_to_dict(profile),
        "plan": None if plan is None else plan_to_dict(plan),
    }
    write_atomically(Path(path), json.dumps(document, indent=1, allow_nan=False) + "\n")


def load_profile(path: str | os.PathLike[str]) -> tuple[_C.Profile, _C.Plan | None]:
    """Read what save_profile() wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file, from another version, or damaged; says where.
    """
    where = os.fspath(path)
    with Path(path).open("rb") as file:  # what never ends, such as /dev/zero, is none
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise ValueError(
            f"{where} has more than {_MOST_BYTES} bytes, expected an autohete profile; make one "
            "with make_plan() or `autohete profile`"
        )
    document = _parse(raw, where)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(
            f"{where} is not an autohete profile (no format {FORMAT!r}); "
            "make one with make_plan() or `autohete profile`"
        )
    if document.get("version") != VERSION:
        raise ValueError(
            f"{where} has version {document.get('version')!r}, expected {VERSION}; "
            "make the profile again with this autohete"
        )
    _check_keys(document, {"format", "version", "profile", "plan"}, where)
    profile = profile_from_dict(document["profile"], f"{where}: profile")
    if document["plan"] is None:
        return profile, None
    plan = plan_from_dict(document["plan"], f"{where}: plan")
    _C.validate_plan(profile, plan)
    return profile, plan


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file with this text; on failure the old one is untouched.

    Raises:
        OSError: it cannot be written; names `path`, not the temporary file beside it.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _parse(raw: bytes, where: str) -> Any:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no finite number")

    try:
        return json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged ({error}); make the profile again") from None


def _fields_of(source: object, fields: dict[str, type]) -> dict[str, Any]:
    return {field: getattr(source, field) for field in fields}


def _set_fields(target: object, data: dict[str, Any], fields: dict[str, type], where: str) -> None:
    for field, kind in fields.items():
        value = data[field]
        number_for_float = kind is float and type(value) is int
        if type(value) is not kind and not number_for_float:
            raise ValueError(f"{where}.{field} is {value!r}, expected {kind.__name__}")
        try:
            setattr(target, field, value)
        except (TypeError, OverflowError):
            raise ValueError(f"{where}.{field} is {value!r}, out of range") from None


def _check_keys(data: Any, expected: set[str], where: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {type(data).__name__}, expected an object")
    missing, unknown = expected - data.keys(), data.keys() - expected
    if missing or unknown:
        problem = f"lacks {sorted(missing)}" if missing else f"has unknown {sorted(unknown)}"
        raise ValueError(f"{where} {problem}; make the profile again")


def _list(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{where} is {type(data).__name__}, expected a list")
    return data


def _with_later_fields(data: Any, **values: Any) -> Any:
    """Return the values with those that files did not have once."""
    return {**values, **data} if isinstance(data, dict) else data


def _unit_from_dict(data: Any, where: str) -> _C.UnitProfile:
    unit = _C.UnitProfile()
    data = _with_later_fields(
        data, recompute_seconds=0.0, grad_tensors=1, largest_grad_tensor_bytes=0
    )
    _check_keys(data, set(_UNIT_FIELDS), where)
    _set_fields(unit, data, _UNIT_FIELDS, where)
    return unit


def _run_from_dict(data: Any, first: int, where: str) -> list[_C.UnitPlan]:
    _check_keys(data, {"first", "last", *_UNIT_PLAN_FIELDS}, where)
    last = data["last"]
    if data["first"] != first or type(last) is not int or not first <= last < first + 100000:
        raise ValueError(
            f"{where} covers units {data['first']} to {last!r}, expected a run that "
            f"starts at {first}"
        )
    unit = _C.UnitPlan()
    for field in _UNIT_PLAN_FIELDS:
        names = _RULES if field == "activations" else _TIERS
        if not isinstance(data[field], str) or data[field] not in names:
            raise ValueError(
                f"{where}.{field} is {data[field]!r}, expected one of {', '.join(names)}"
            )
        setattr(unit, field, names[data[field]])
    return [unit] * (last - first + 1)
