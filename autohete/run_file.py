"""autohete_run.json: what a run was and did, for `autohete report` and `trace`.

Layout: {"format": "autohete-run", "version": 1, "figures": {...}, "profile", "plan", ...}; spans
and samples as lists, in seconds. Written whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from autohete.planning import profile_file
from autohete.run_report import RunDetails, RunReport

FORMAT = "autohete-run"
VERSION = 1
DEFAULT_NAME = "autohete_run.json"


def save_run(path: str | os.PathLike[str], report: RunReport) -> None:
    """Write a report; the file is either the old or the new one, never half."""
    details = report.details
    assert details is not None
    profile, plan = details.profile, details.plan
    document = {
        "format": FORMAT,
        "version": VERSION,
        "figures": report.figures(),
        "profile": None if profile is None else profile_file.profile_to_dict(profile),
        "plan": None if plan is None else profile_file.plan_to_dict(plan),
        "unit_names": details.unit_names,
        "passes": details.passes,
        "spans": details.spans,
        "samples": details.samples,
    }
    profile_file.write_atomically(Path(path), json.dumps(document, allow_nan=False) + "\n")


def is_run(document: Any) -> bool:
    """Return whether a parsed JSON document says that it is a run."""
    return isinstance(document, dict) and document.get("format") == FORMAT


def load_run(path: str | os.PathLike[str]) -> RunReport:
    """Read what save_run() wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file, from another version, or damaged; says where.
    """
    where = os.fspath(path)
    again = "write it again with model.report().save()"
    try:
        document = json.loads(Path(path).read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged ({error}), expected a run; {again}") from None
    if not is_run(document):
        raise ValueError(f"{where} is no autohete run (no format {FORMAT!r}); {again}")
    if document.get("version") != VERSION:
        raise ValueError(
            f"{where} has version {document.get('version')!r}, expected {VERSION}; {again}"
        )
    try:
        return _report_from(document, where)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{where} lacks or misspells something ({type(error).__name__}: {error}), expected "
            f"what version {VERSION} holds; {again}"
        ) from None


def _report_from(document: dict[str, Any], where: str) -> RunReport:
    profile, plan = document["profile"], document["plan"]
    figures = _figures_from(document["figures"])
    details = RunDetails(
        unit_names=[str(name) for name in document["unit_names"]],
        plan=None if plan is None else profile_file.plan_from_dict(plan, f"{where}: plan"),
        profile=None
        if profile is None
        else profile_file.profile_from_dict(profile, f"{where}: profile"),
        spans=[
            (int(s[0]), int(s[1]), str(s[2]), float(s[3]), float(s[4]), int(s[5]))
            for s in document["spans"]
        ],
        samples=[(float(s[0]), int(s[1]), int(s[2])) for s in document["samples"]],
        passes=int(document["passes"]),
    )
    return RunReport(**figures, details=details)


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "None": (type(None),),
}


def _figures_from(figures: dict[str, Any]) -> dict[str, Any]:
    """The report's fields, each of the type that it is declared with."""
    found = {}
    for field in fields(RunReport):
        if field.name == "details":
            continue
        value, declared = figures[field.name], str(field.type)
        if type(value) not in [kind for name in declared.split(" | ") for kind in _KINDS[name]]:
            raise TypeError(f"figures.{field.name} is {value!r}, expected {declared}")
        found[field.name] = value
    return found
