"""What a random training loop consists of, drawn from a seed; tests/random_loops.py runs it.

A Recipe holds everything that was drawn, so that a run under plain PyTorch and one under autohete
do the same things at the same time. A leg is what happens between two resumes: new objects, filled
from the state dicts of the leg before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

LAYERS, WIDTH, LENGTH = 3, 32, 12
EDITS = (
    "load", "data", "init", "new storage", "swapped", "exchanged", "added to", "state cleared",
    "state kept and put back",
)  # fmt: skip
PARTS = ("tokens", "positions", "blocks.0", "blocks.1", "blocks.2", "norm", "head")


@dataclass
class Step:
    """What one optimizer step does, in this order."""

    evaluate_first: str = ""  # the context of an evaluation before the forward
    frozen: tuple[str, ...] = ()
    skipped_blocks: tuple[int, ...] = ()
    micro_batches: int = 1
    backward: str = "one"
    lengths: tuple[int, ...] = (LENGTH,)
    evaluate_between: str = ""  # between forward and backward
    fails: str = ""  # "forward" or "backward": the first try ends in an exception
    infinite: bool = False
    gradients: str = ""  # what the user does to them
    closure: bool = False
    zero: str = "none"
    hyper: str = ""
    edit: str = ""
    evaluate_last: str = ""
    resumes: bool = False


@dataclass
class Recipe:
    seed: int
    tied: bool
    dropout: float
    groups: str
    precision: str  # "", "autocast bf16", "autocast fp16", "bf16"
    scaler: bool
    scheduler: str
    checkpointing: str
    max_grad_norm: float | None
    amsgrad: bool
    steps: list[Step]
    legs: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def draw(seed: int) -> Recipe:
        r = random.Random(seed)
        precision = r.choice(("", "", "autocast bf16", "autocast fp16", "bf16"))
        scaler = precision == "autocast fp16" or (precision == "autocast bf16" and r.random() < 0.5)
        recipe = Recipe(
            seed=seed,
            tied=r.random() < 0.3,
            dropout=r.choice((0.0, 0.1)),
            groups=r.choice(("one", "no decay", "own lr", "some left out")),
            precision=precision,
            scaler=scaler,
            scheduler=r.choice(("", "OneCycle", "Lambda", "Cosine", "Plateau")),
            checkpointing=r.choice(("", "", "reentrant", "non-reentrant", "over two")),
            max_grad_norm=None if scaler else r.choice((None, None, 0.3)),
            amsgrad=r.random() < 0.2,
            steps=[_draw_step(r, scaler) for _ in range(r.randint(4, 7))],
        )
        legs = 1 + sum(step.resumes for step in recipe.steps)
        recipe.legs = [_draw_leg(r) for _ in range(legs)]
        if all(leg.get("plain") for leg in recipe.legs):
            recipe.legs[-1] |= {"plain": False, "strategy": "autohete"}
        return recipe


def _draw_step(r: random.Random, scaler: bool) -> Step:
    def sometimes(chance: float, *values: Any) -> Any:
        return r.choice(values) if r.random() < chance else type(values[0])()

    contexts = ("no_grad", "inference_mode", "train mode, no_grad", "graph thrown away")
    micro = r.choice((1, 1, 1, 2, 3, 4))
    edits = ("norm", "norm", "value", "halved", "replaced", "one dropped", "read", "zeroed")
    return Step(
        evaluate_first=sometimes(0.15, *contexts),
        frozen=tuple(part for part in PARTS if r.random() < 0.25) if r.random() < 0.3 else (),
        skipped_blocks=tuple(i for i in range(LAYERS) if r.random() < 0.4)
        if r.random() < 0.2
        else (),
        micro_batches=micro,
        backward=r.choice(
            ("one", "one", "one", "twice", "two losses", "two forwards", "summed", "grad")
        ),
        lengths=tuple(r.choice((LENGTH, LENGTH, 7, 9)) for _ in range(2 * micro)),
        evaluate_between=sometimes(0.15, *contexts[:2]),
        fails=sometimes(0.08, "forward", "backward"),
        infinite=scaler and r.random() < 0.2,
        gradients=sometimes(0.5, *edits),
        closure=not scaler and r.random() < 0.1,
        zero=r.choice(("none", "none", "zero", "model", "by hand", "before backward", "never")),
        hyper=sometimes(0.15, "lr", "betas", "decay"),
        edit=sometimes(0.3, *EDITS),
        evaluate_last=sometimes(0.2, *contexts),
        resumes=r.random() < 0.15,
    )


def _draw_leg(r: random.Random) -> dict[str, Any]:
    """How the autohete run trains the leg: plain, under a forced plan, or planned."""
    leg: dict[str, Any] = {
        "delays": r.choice((None, r.randrange(1000))),
        "window": r.choice((1, 2, 3)),
    }
    leg["load_late"] = r.random() < 0.5
    leg["early_updates"] = r.random() < 0.7
    kind = r.random()
    if kind < 0.1:
        leg["plain"] = True
    elif kind < 0.8:
        kinds = ("device", "state", "all", "device+c", "state+c", "all+c")
        leg["kinds"] = [r.choice(kinds) for _ in range(LAYERS + 5)]
    else:
        leg["strategy"] = r.choice(("autohete", "zero_offload", "stronghold"))
    return leg
