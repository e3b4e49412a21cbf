"""Write the generated parts of the documentation: docs/what-fits.md and docs/pictures/.

PYTHONPATH=. python buildtools/make_docs.py [--check]

Everything comes from the planner: nothing is measured here. --check writes nothing and fails where
a page on disk is not what it would write (pictures are not compared: their text depends on fonts).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from autohete.planning import InfeasibleError, make_plan, minimum_gpu_mem, plan_for
from autohete.planning.gpt2_shape import GPT2Shape
from autohete.planning.library import find_machine, profile_on
from autohete.planning.model_profile import ModelDescription, describe_gpt2
from autohete.report.content import content_of_plan_report
from autohete.report.pictures import save_picture

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GPU_GB = (8, 12, 16, 24, 40, 80)
RAM_GB = (64, 128, 256, 512)
BATCH, SEQ, WIDTH, HEADS = 1, 1024, 4096, 32
_HOST_SHARE = 0.9  # of the RAM; the rest is the system's and the process's own
_MOST_LAYERS = 400

SYSTEMS = {
    "autohete": "",
    "ZeRO-Offload": "zero_offload",
    "FSDP2 with CPUOffloadPolicy": "offload_everything",
}


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page, text = DOCS / "what-fits.md", what_fits_page()
    if check:
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            sys.exit(f"{page.relative_to(ROOT)} is out of date; run buildtools/make_docs.py")
        return
    page.write_text(text, encoding="utf-8")
    write_pictures(DOCS / "pictures")


# ---------------------------------------------------------------- what fits


def fits(description: ModelDescription, gpu_gb: int, ram_gb: int, strategy: str) -> bool:
    """Whether a model can be trained with a GPU and RAM of these sizes."""
    machine = find_machine("a100-40", memory_bytes=gpu_gb * 2**30)
    profile = profile_on(description, machine)
    host = int(ram_gb * 2**30 * _HOST_SHARE)
    if not strategy:
        return 0 < minimum_gpu_mem(profile, host) <= machine.usable_bytes
    try:
        make_plan(profile, machine.usable_bytes, host, strategy)
    except InfeasibleError:
        return False
    return True


def largest(passes: Callable[[int], bool], high: int) -> int:
    """The largest number in 1 .. high that passes, 0 for none; what passes has no gaps."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if passes(middle):
            low = middle
        else:
            high = middle - 1
    return low


def what_fits_page() -> str:
    """Return the page."""
    two_layers = describe_gpt2(GPT2Shape(2, WIDTH, HEADS, SEQ), BATCH, SEQ, "bf16")
    cells = {
        (system, gpu, ram): _largest_parameters(two_layers, gpu, ram, strategy)
        for system, strategy in SYSTEMS.items()
        for gpu in GPU_GB
        for ram in RAM_GB
    }
    tables = "\n\n".join(_table(system, cells) for system in SYSTEMS)
    return _PAGE.format(
        batch=BATCH, seq=SEQ, width=WIDTH, heads=HEADS, share=f"{_HOST_SHARE:.0%}", tables=tables
    )


def _largest_parameters(two: ModelDescription, gpu: int, ram: int, strategy: str) -> int:
    layers = largest(lambda n: fits(two.with_layers(n), gpu, ram, strategy), _MOST_LAYERS)
    return two.with_layers(layers).num_parameters if layers else 0


def _table(system: str, cells: dict[tuple[str, int, int], int]) -> str:
    lines = [
        f"**{system}**\n",
        "| GPU | " + " | ".join(f"{ram} GB of RAM" for ram in RAM_GB) + " |",
        "| --- | " + " | ".join("---:" for _ in RAM_GB) + " |",
    ]
    for gpu in GPU_GB:
        sizes = [cells[system, gpu, ram] for ram in RAM_GB]
        shown = " | ".join(f"{n / 1e9:.1f}B" if n else "-" for n in sizes)
        lines.append(f"| {gpu} GB | {shown} |")
    return "\n".join(lines)


_PAGE = """# What fits

<!-- Written by buildtools/make_docs.py. -->

The largest model that can be trained at all, from the planner: GPT-2 shapes of width {width} with
{heads} heads and as many layers as fit, batch {batch} x {seq} tokens, bf16 with fp32 masters,
AdamW, one GPU. Of the GPU all but 5 % and 0.8 GB is used, of the RAM {share}. Computed, not
measured; `autohete plan MODEL --gpu NAME` answers for your own.

{tables}

How the others are counted, in the planner's terms (their code was not run for this page):

- ZeRO-Offload: half parameters stay on the GPU (2 bytes each, beside gradient buffers and
  activations), all optimizer state and masters in RAM, every layer recomputed or none. On small
  cards the GPU's memory is its limit.
- FSDP2 with `CPUOffloadPolicy`, on one GPU: parameters, gradients and state in RAM, two layers on
  the GPU at a time. It keeps 16 bytes a parameter in RAM whatever the GPU could hold.
- autohete keeps on the GPU what has room there, so RAM and GPU memory add up.

Every number is where training becomes possible, and there it is slow. How fast: `autohete plan`,
or the [tuning guide](tuning.md).
"""


# ---------------------------------------------------------------- pictures


def write_pictures(folder: Path) -> None:
    """Draw what the pages show."""
    folder.mkdir(exist_ok=True)
    report = plan_for("gpt2-medium", "a100-40", 8, 512, gpu_mem="6GiB", suggest=False)
    for title, spec in content_of_plan_report(report).figures().items():
        name = title.lower().replace(" ", "-")
        save_picture(folder / f"{name}.svg", {title: spec})


if __name__ == "__main__":
    main()
