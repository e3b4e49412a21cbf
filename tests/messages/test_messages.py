"""Every error message that the public API can reach, listed with its trigger.

Each says what was got, what is wanted, and what to do; a message that is new in the sources and
neither listed nor excused fails the last test.
"""

from __future__ import annotations

import ast
import re
import tempfile
from functools import cache
from pathlib import Path

import messages_planning
import messages_training
import pytest
from message_case import Case

ROOT = Path(__file__).resolve().parent.parent.parent
CASES: dict[str, Case] = {
    **{f"planning: {name}": case for name, case in messages_planning.CASES.items()},
    **{f"training: {name}": case for name, case in messages_training.CASES.items()},
}

# Messages that no case here brings about -> why; each is a part of the message in the sources.
EXCUSED = {
    "has no attribute": "Python's own words for a wrong name",
    "expected pinned memory that the GPU reads": "needs a GPU that refuses",
    "this build has no CUDA side": "needs a CUDA torch",
    "torch sees no GPU": "needs a CUDA torch",
    "what CUDA's libraries": "needs a GPU",
    "unwrap: model and optimizer state need": "needs a GPU",
    "(not differentiable) on a GPU": "needs a GPU",
    "bytes of Python sources": "needs a Python with a packed library",
    "GLPK is missing": "tests/planning, with the module hidden",
    "needs transformers; pip install": "needs an environment without transformers",
    "the plotting library is missing": "tests/report/test_pictures.py, with the library hidden",
    "'s model is another": "tests/integrations/test_trainer.py: needs a Trainer",
    "the Trainer uses": "tests/integrations/test_trainer.py: needs a Trainer",
    "model.to: device is": "tests/integrations/test_trainer.py: needs a Trainer",
    "is being written by another process": "tests/engine/test_checkpoint.py: needs two processes",
    "the file ends inside a tensor": "tests/engine/test_checkpoint.py",
    "give the optimizer the options it was saved with": "tests/engine/test_checkpoint.py",
    " of parameter ": "tests/engine/test_checkpoint.py",
    "elements, expected one": "a tensor in a param group",
    "AutoHeteStrategy": "tests/integrations/test_lightning.py: needs Lightning",
    "was put around it": "needs a process group",
    "expected a group of torch.distributed": "tests/distributed: needs ranks, as the next ones",
    "waits for ranks that are gone": "tests/distributed/test_ranks_that_end.py",
    "nothing has come for": "tests/distributed/test_ranks_that_end.py",
    "though all ranks": "a collective that fails while all live",
    "so the ranks do not agree any more": "an exception inside a backward of several ranks",
    "was added to after its unit": "a graph that changes under accumulation",
    "the last backward was under no_sync()": "tests/distributed/test_loops.py",
    "each has only its rows": "tests/distributed/test_checkpoints.py",
    "(on ": "one rank without room for a plan",
    "a gradient of unit": "tests/engine/test_after_wrapping.py",
    "and was frozen when it was wrapped": "tests/engine/test_after_wrapping.py",
    "its forward gave another output": "tests/engine/test_recompute.py",
    "an input was edited in place": "tests/engine/test_attacks.py",
    "stepped by another autohete wrapper": "tests/engine/test_errors.py",
    "nothing was computed yet": "tests/engine/test_budget.py",
    " is a DTensor": "tests/distributed/test_fully_shard.py: needs ranks",
    "expected the same; redistribute the gradient": "tests/distributed/test_fully_shard.py",
    "expected shards or replicas": "needs ranks and a partial parameter",
    "expected the CPU; give fully_shard": "needs a GPU and ranks",
    "failed (": "tests/distributed/test_sharded_updates.py",
    "ShardedUpdates: ": "tests/distributed/test_sharded_updates.py",
    "ranks, expected by one process": "tests/planning/test_cluster.py",
    "whole_gradients is False and the optimizer": "tests/distributed/test_own_rows.py",
    "gradients were averaged already": "tests/distributed/test_own_rows.py",
    "a GradScaler reads every gradient": "tests/distributed/test_own_rows.py",
    ": called from a hook inside forward or backward": "tests/engine/test_attacks.py",
    "unwrap: device is": "tests/engine/test_unwrap.py: needs a torch without a GPU",
    "holds no trace": "tests/cli/test_commands.py",
}


@cache
def message_of(name: str) -> str:
    """What the case's trigger says, which raises what it should."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder, pytest.raises(case.kind) as error:
        case.trigger(Path(folder))
    return str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_the_message_says_what_was_got_what_is_wanted_and_what_to_do(name: str) -> None:
    case, text = CASES[name], message_of(name)
    for part in (case.got, case.wanted, case.do):
        assert part in text, f"{part!r} is not in: {text}"
    assert "Traceback" not in text
    assert not re.search(r"0x[0-9a-f]{6}|<built-in|<function", text), text


def fragments(file: Path) -> list[tuple[str, str]]:
    """Of every message that the file raises: its longest constant part, and all of them."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
            continue
        if "UsageError" in ast.unparse(node.exc.func):
            continue  # the command line's own, in tests/cli
        texts = [
            part.value
            for part in ast.walk(node.exc)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if longest := max(texts, key=len, default="").strip():
            found.append((longest, "".join(texts)))
    return found


def test_no_message_in_the_sources_is_missing_here() -> None:
    texts = [message_of(name) for name in CASES]
    lacking = [
        f"{file.relative_to(ROOT)}: {fragment}"
        for file in sorted((ROOT / "autohete").rglob("*.py"))
        for fragment, whole in fragments(file)
        if not any(fragment in text for text in texts)
        and not any(part in whole for part in EXCUSED)
    ]
    assert lacking == []


def test_no_excuse_is_out_of_date() -> None:
    source = "\n".join(
        ast.unparse(ast.parse(f.read_text(encoding="utf-8")))
        for f in sorted((ROOT / "autohete").rglob("*.py"))
    )
    assert [part for part in EXCUSED if part not in source.replace("\\'", "'")] == []
