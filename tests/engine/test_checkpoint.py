"""save_checkpoint and load_checkpoint: torch's own layout, to the bit, whole at any moment."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from models import batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, forced_plan, plain_loop
from torch import nn

from autohete import AutoHeteWrapper, CPUAdamW

TESTS = Path(__file__).parents[1]
KINDS = ("all+c", "state", "device", "plain")


def build(half: bool = False, **options: Any) -> nn.Module:
    model = make_gpt(layers=2, dropout=0.0, **options)
    return model.bfloat16() if half else model


def wrap(model: nn.Module, optimizer: Any, kind: str | None = "all+c") -> AutoHeteWrapper:
    plan = forced_plan(model, kind) if kind else None
    keywords = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None}
    return AutoHeteWrapper(model, optimizer, plan=plan, **keywords).to("cpu")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Run:
    """Model, optimizer, scheduler and scaler; plain, or wrapped under a plan of one kind."""

    def __init__(self, kind: str, half: bool, make: Any = adamw) -> None:
        self.model = build(half)
        self.optimizer = make(self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.wrapped = kind != "plain"
        self.trained: Any = wrap(self.model, self.optimizer, kind) if self.wrapped else self.model

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = self.trained(*batch(step))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    @property
    def others(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler}

    def save(self, path: Path) -> None:
        if self.wrapped:
            self.trained.save_checkpoint(path, **self.others, epoch=3)
            return
        parts = {"model": self.model, "optimizer": self.optimizer, **self.others}
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": 3}, path)

    def load(self, path: Path) -> None:
        if self.wrapped:
            assert self.trained.load_checkpoint(path, **self.others) == {"epoch": 3}
            return
        saved = torch.load(path)
        parts = {"model": self.model, "optimizer": self.optimizer, **self.others}
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    def end(self, losses: list[float]) -> Result:
        if self.wrapped:
            self.trained.unwrap()
        scales = [self.scaler.get_scale(), self.scheduler.get_last_lr()[0]]
        return Result([*losses, *scales], self.model, self.optimizer)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("legs", [KINDS, KINDS[::-1], ("plain", "all+c", "plain", "state")])
def test_a_run_goes_from_autohete_to_plain_and_back_to_the_bit(legs, half, tmp_path):
    expected = Run("plain", half)
    reference = expected.end(expected.train(range(3 * len(legs))))
    losses: list[float] = []
    for leg, kind in enumerate(legs):
        run = Run(kind, half)
        run.train(range(50, 51))  # counters, moments and masters are not fresh
        if leg:
            run.load(tmp_path / "run.pt")
        else:
            run = Run(kind, half)
        losses += run.train(range(3 * leg, 3 * leg + 3))
        run.save(tmp_path / "run.pt")
        result = run.end(losses)
    assert_bit_equal(result, reference)


def test_an_optimizer_with_a_step_of_its_own_is_resumed(tmp_path):
    expected = Run("plain", False, sgd)
    reference = expected.end(expected.train(range(6)))
    first = Run("all+c", False, sgd)
    losses = first.train(range(3))
    first.save(tmp_path / "run.pt")
    first.end([])
    second = Run("state", False, sgd)
    second.load(tmp_path / "run.pt")
    assert_bit_equal(second.end(losses + second.train(range(3, 6))), reference)


def test_the_file_is_that_of_torch_save(tmp_path):
    ours, plain = Run("all+c", True), Run("plain", True)
    for run, name in ((ours, "ours"), (plain, "plain")):
        run.train(range(2))
        run.save(tmp_path / name)
    a, b = torch.load(tmp_path / "ours"), torch.load(tmp_path / "plain")
    assert list(a) == list(b)
    assert list(a["model"]) == list(b["model"])
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    assert all(torch.equal(a["model"][name], value) for name, value in b["model"].items())
    for index, state in b["optimizer"]["state"].items():
        assert state.keys() == a["optimizer"]["state"][index].keys()
        for key, value in state.items():
            assert torch.equal(a["optimizer"]["state"][index][key], value)
            assert a["optimizer"]["state"][index][key].dtype == value.dtype
    sizes = [os.path.getsize(tmp_path / name) for name in ("ours", "plain")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    assert sorted(os.listdir(tmp_path)) == ["ours", "plain"]
    ours.end([])


def test_a_checkpoint_is_loaded_before_the_model_is_on_a_device(tmp_path):
    expected = Run("plain", False)
    reference = expected.end(expected.train(range(4)))
    first = Run("all+c", False)
    losses = first.train(range(2))
    first.save(tmp_path / "run.pt")
    first.end([])
    second = Run("plain", False)
    second.trained = AutoHeteWrapper(
        second.model, second.optimizer, gpu_mem="16MiB", profile_path=None
    )
    second.wrapped = True
    second.load(tmp_path / "run.pt")
    second.trained.to("cpu")
    assert_bit_equal(second.end(losses + second.train(range(2, 4))), reference)


class Extra(nn.Module):
    """Weights in odd layouts, a buffer, an empty tensor, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.empty = nn.Linear(8, 0, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("running", torch.arange(10.0)[2:6])
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_odd_layouts_buffers_and_extra_state_are_taken_up(tmp_path):
    def make() -> tuple[Extra, AutoHeteWrapper]:
        model = Extra()
        optimizer = CPUAdamW(model.parameters())
        return model, AutoHeteWrapper(model, optimizer, gpu_mem="1MiB", profile_path=None).to("cpu")

    model, trained = make()
    model.count = 5
    model.running.mul_(3)
    trained.save_checkpoint(tmp_path / "extra.pt")
    other, second = make()
    assert second.load_checkpoint(tmp_path / "extra.pt") == {}
    assert other.count == 5
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(other.state_dict()[name], value)
    trained.unwrap(), second.unwrap()


class Counting(nn.Linear):
    """Its extra state is a tensor made anew at each call, of a size of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen = [0.0]

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.seen)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state.tolist()


def renamed(model: nn.Module) -> None:
    """State dicts with copies under other names, as some libraries make them."""

    def save(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for key in list(state):
            state[f"model.{key}"] = state.pop(key).clone()

    def load(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for key in list(state):
            state[key.removeprefix("model.")] = state.pop(key)

    model.register_state_dict_post_hook(save)
    model.register_load_state_dict_pre_hook(load)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("change", ["extra state", "copies", "other names"])
def test_what_is_not_the_models_own_memory_is_taken_up_too(change, attached, tmp_path):
    def make(value: float) -> tuple[nn.Module, AutoHeteWrapper]:
        model = nn.Sequential(Counting(), Counting())
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(value)
        if change == "copies":
            model.register_state_dict_post_hook(
                lambda m, state, *_: state.update(
                    {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
                )
            )
        if change == "other names":
            renamed(model)
        trained = AutoHeteWrapper(model, adamw(model), gpu_mem="1MiB", profile_path=None)
        return model, trained.to("cpu") if attached else trained

    model, trained = make(1.0)
    model[1].seen = [1.0, 2.0, 3.0]
    trained.save_checkpoint(tmp_path / "run.pt")
    other, second = make(2.0)
    second.load_checkpoint(tmp_path / "run.pt")
    for p in other.parameters():
        assert torch.equal(p, torch.ones_like(p))
    assert other[1].seen == [1.0, 2.0, 3.0]
    trained.unwrap(), second.unwrap()


def test_a_checkpoint_for_a_model_without_memory_is_refused(tmp_path):
    saved_file(tmp_path / "run.pt")
    with torch.device("meta"):
        model = build()
    trained = AutoHeteWrapper(model, adamw(model), gpu_mem="16MiB", profile_path=None)
    with pytest.raises(ValueError, match=r"positions is on the meta device, expected memory"):
        trained.load_checkpoint(tmp_path / "run.pt")


# ------------------------------------------------------------------- refusals


def saved_file(path: Path) -> dict[str, Any]:
    run = Run("plain", False)
    run.train(range(1))
    run.save(path)
    return torch.load(path)


def without(saved: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in saved.items() if key != name}


def of_another(**options: Any) -> dict[str, Any]:
    """Model and optimizer of a checkpoint of another model: the model is what has to be named."""
    model = make_gpt(**{"layers": 2, **options})
    return {"model": model.state_dict(), "optimizer": adamw(model).state_dict()}


REFUSED: dict[str, tuple[Any, str]] = {
    "no model": (lambda s: without(s, "model"), "expected model too"),
    "no scaler": (lambda s: without(s, "scaler"), "expected scaler too"),
    "a list": (lambda s: [s], "holds a list"),
    "a key less": (
        lambda s: s | {"model": without(s["model"], "head.weight")},
        r"1 of the model's keys are missing \['head.weight'\]",
    ),
    "a key more": (
        lambda s: s | {"model": s["model"] | {"x": torch.ones(1)}},
        r"not its own \['x'\]",
    ),
    "a shape": (
        lambda s: s | {"model": s["model"] | {"positions": torch.ones(2, 2)}},
        r"positions has shape \(2, 2\), expected \(16, 32\)",
    ),
    "groups": (
        lambda s: s | {"optimizer": s["optimizer"] | {"param_groups": []}},
        r"groups have \[\] parameters",
    ),
    "a model of more layers": (
        lambda s: s | of_another(layers=3),
        r"0 of the model's keys are missing \[\] and 12 are not its own \['blocks.2.norm1.weight'",
    ),
    "a wider model": (
        lambda s: s | of_another(width=64),
        r"positions has shape \(16, 64\), expected \(16, 32\)",
    ),
    "no tensor": (
        lambda s: s | {"model": s["model"] | {"positions": [1.0]}},
        r"positions is a list, expected a tensor of shape \(16, 32\)",
    ),
    "no state dict": (lambda s: s | {"model": 3}, "model is a int, expected the model's state"),
    "no optimizer": (lambda s: s | {"optimizer": 3}, "optimizer is a int, expected a state dict"),
    "half an optimizer": (
        lambda s: s | {"optimizer": {"state": {}}}, "optimizer is a dict, expected a state dict",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_of_something_else_is_refused_and_nothing_has_changed(case, tmp_path):
    change, message = REFUSED[case]
    torch.save(change(saved_file(tmp_path / "run.pt")), tmp_path / "run.pt")
    run = Run("all+c", False)
    run.train(range(2))
    before = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    with pytest.raises(ValueError, match=f"load_checkpoint: .*{message}"):
        run.trained.load_checkpoint(tmp_path / "run.pt", **run.others)
    after = run.model.state_dict(), run.optimizer.state_dict()
    assert all(
        torch.equal(a, b) for a, b in zip(before[0].values(), after[0].values(), strict=True)
    )
    for index, state in before[1]["state"].items():
        assert all(torch.equal(after[1]["state"][index][key], state[key]) for key in state)
    run.end([])


@pytest.mark.parametrize("size", [0, 10, 1000, -1000])
def test_a_file_that_is_not_whole_is_refused(size, tmp_path):
    path = tmp_path / "run.pt"
    saved_file(path)
    path.write_bytes(path.read_bytes()[:size])
    run = Run("all+c", False)
    with pytest.raises(ValueError, match=r"run.pt cannot be read .* expected a whole file"):
        run.trained.load_checkpoint(path)
    run.end([])


def legacy(path):
    torch.save({"model": {}}, path, _use_new_zipfile_serialization=False)


NO_CHECKPOINT = {
    "hello": (lambda p: p.write_text("hello"), "begins with b'hello'"),
    "empty": (lambda p: p.write_text(""), "it is empty"),
    "a device": (lambda p: p.symlink_to("/dev/null"), "no regular file"),
    "html": (lambda p: p.write_text("<html>404</html>"), "begins with b'<html>"),
    "json": (lambda p: p.write_text('{"step": 1}'), "begins with"),
    "git-lfs": (
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\nsize 5\n"),
        "git lfs pull",
    ),
    "an object": (lambda p: torch.save({"args": Namespace()}, p), "it holds argparse.Namespace"),
    "TorchScript": (
        lambda p: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), p),
        "a TorchScript archive",
    ),
    "old": (legacy, "format before 1.6"),
    "another archive": (lambda p: ZipFile(p, "w").writestr("a", "b"), "it is damaged: "),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", NO_CHECKPOINT)
def test_what_is_no_checkpoint_is_a_value_error_without_dangerous_advice(case, tmp_path):
    write, words = NO_CHECKPOINT[case]
    write(tmp_path / "run.pt")
    run = Run("all+c", False)
    with pytest.raises(ValueError, match=r"load_checkpoint: .*run.pt cannot be read") as error:
        run.trained.load_checkpoint(tmp_path / "run.pt")
    assert words in str(error.value)
    assert "weights_only" not in str(error.value) and "\n" not in str(error.value)
    run.end([])


def test_amsgrad_state_for_an_optimizer_without_is_refused_at_once(tmp_path):
    with_it, without_it = Run("all+c", False, partial(adamw, amsgrad=True)), Run("state", False)
    with_it.train(range(1))
    with_it.save(tmp_path / "run.pt")
    with pytest.raises(ValueError, match="has 'max_exp_avg_sq', expected step, exp_avg"):
        without_it.load(tmp_path / "run.pt")
    with_it.end([]), without_it.end([])


# ------------------------------------------------------------------- whole at any moment

ATOMIC = """
import os, random, resource, signal, sys
import torch
from models import make_gpt
from oracle import adamw, forced_plan, plain_loop
from autohete import AutoHeteWrapper
torch.set_num_threads(1)
model = make_gpt()
optimizer = adamw(model)
trained = AutoHeteWrapper(
    model, optimizer, gpu_mem="16MiB", cpu_mem="64MiB", plan=forced_plan(model, "all+c"),
    profile_path=None,
).to("cpu")
plain_loop(trained, optimizer, 0)
path = "run.pt"
trained.save_checkpoint(path, version=0)
size, version, random_number = os.path.getsize(path), 0, random.Random(0)

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def before(name):
    setattr(os, name, die)

def after(name):
    original = getattr(os, name)
    def call(*args):
        original(*args)
        die()
    setattr(os, name, call)

def at_byte(count):
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, count))

def at_a_moment(seconds):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)

ways = [(f, n) for f in (before, after) for n in ("fsync", "replace")]
ways += [(at_byte, random_number.randrange(1, size)) for _ in range(12)]
ways += [(at_a_moment, random_number.uniform(1e-4, 0.02)) for _ in range(12)]
ways += [(lambda _: None, 0)]
killed = 0
for way, argument in ways:
    version += 1
    child = os.fork()
    if child == 0:
        way(argument)
        trained.save_checkpoint(path, version=version)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    killed += os.WIFSIGNALED(status)
    saved = torch.load(path)
    assert saved["version"] in (previous := (0, version) if version == 1 else (last, version))
    if not os.WIFSIGNALED(status):
        assert saved["version"] == version
    last = saved["version"]
    for key, value in model.state_dict().items():
        assert torch.equal(saved["model"][key], value), key
    assert len(saved["optimizer"]["state"]) == len(list(model.parameters()))
print("killed", killed, "left", sorted(os.listdir(".")))
"""


def script(text: str, folder: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments], capture_output=True, text=True, timeout=100,
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint_whole(tmp_path):
    """Before and after each system call that matters, at random bytes, and at random moments."""
    words = script(ATOMIC, tmp_path).split()
    assert int(words[1]) >= 15
    assert words[-1] == "['run.pt']", "the last save, which was not killed, cleaned up"


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    text = ATOMIC[: ATOMIC.index("size, version")] + (
        "old = open(path, 'rb').read()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"  # Python ignores the signal
        "try:\n    trained.save_checkpoint(path, version=1)\n"
        "except (OSError, RuntimeError) as error:\n    print(type(error).__name__, error)\n"
        "assert open(path, 'rb').read() == old\n"
        "print(os.listdir('.'))\n"
    )
    lines = script(text, tmp_path).strip().splitlines()
    assert "Error" in lines[0]
    assert lines[-1] == "['run.pt']"


def test_two_writers_of_one_file_are_refused_in_words(tmp_path):
    import fcntl

    run = Run("all+c", False)
    with open(tmp_path / "run.pt.part", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="is being written by another process"):
            run.trained.save_checkpoint(tmp_path / "run.pt")
    run.trained.save_checkpoint(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]
    run.end([])


# ------------------------------------------------------------------- memory

MEMORY = """
import os, sys
import torch
from autohete import AutoHeteWrapper, CPUAdamW
from torch import nn
torch.set_num_threads(1)

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

def peak_of(action):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before

model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
optimizer = CPUAdamW(model.parameters())
trained = AutoHeteWrapper(model, optimizer, gpu_mem="64MiB", profile_path=None).to("cpu")
for _ in range(2):
    trained(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
trained.synchronize()
trained.save_checkpoint("run.pt")
trained.load_checkpoint("run.pt")
print(peak_of(lambda: trained.save_checkpoint("run.pt")))
print(peak_of(lambda: trained.load_checkpoint("run.pt")))
sizes = []
for _ in range(int(sys.argv[1])):
    trained.save_checkpoint("run.pt")
    sizes.append(status("VmRSS"))
print(sizes[2], sizes[-1])
"""


def test_saving_and_loading_need_at_most_one_unit_over_the_state(tmp_path):
    lines = script(MEMORY, tmp_path, "20").splitlines()
    unit = 1024 * 1024 * 4
    assert int(lines[0]) <= unit, "saving"
    assert int(lines[1]) <= unit, "loading"
    third, last = map(int, lines[2].split())
    assert last == pytest.approx(third, rel=0.01), "20 saves"


# ------------------------------------------------------------------- other people's formats


@pytest.mark.parametrize("helpers", [False, True], ids=["plain dicts", "get_state_dict"])
@pytest.mark.parametrize("writer", ["all+c", "plain"])
def test_torch_distributed_checkpoint_saves_and_loads_to_the_bit(helpers, writer, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def state_of(run: Run) -> dict[str, Any]:
        if helpers:
            model, optimizer = get_state_dict(run.model, run.optimizer)
            return {"model": model, "optimizer": optimizer}
        return {"model": run.trained.state_dict(), "optimizer": run.optimizer.state_dict()}

    expected = Run("plain", False)
    reference = expected.end(expected.train(range(4)))
    first = Run(writer, False)
    losses = first.train(range(2))
    dcp.save(state_of(first), checkpoint_id=tmp_path / "dcp", no_dist=True)
    first.end([])
    second = Run("all+c" if writer == "plain" else "state", False)
    second.train(range(50, 51))
    state = state_of(second)
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    if helpers:
        set_state_dict(
            second.model,
            second.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    else:
        second.trained.load_state_dict(state["model"])
        second.optimizer.load_state_dict(state["optimizer"])
    second.scheduler.last_epoch = second.scheduler._step_count = 2
    second.scaler.load_state_dict(first.scaler.state_dict())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    losses += second.train(range(2, 4))
    assert_bit_equal(second.end(losses), reference)


def test_safetensors_are_loaded_into_a_wrapped_model(tmp_path):
    from safetensors.torch import load_file, load_model, save_model

    source = build(seed=5)
    save_model(source, str(tmp_path / "model.safetensors"))
    for take in (
        lambda trained: load_model(trained.module, str(tmp_path / "model.safetensors")),
        lambda trained: trained.load_state_dict(load_file(tmp_path / "model.safetensors")),
    ):
        model = build()
        optimizer = adamw(model)
        trained = wrap(model, optimizer)
        plain_loop(trained, optimizer, 0)
        take(trained)
        assert all(
            torch.equal(p, q)
            for p, q in zip(trained.parameters(), source.parameters(), strict=True)
        )
        with torch.no_grad():
            assert torch.equal(trained.eval()(batch(0)[0]), source.eval()(batch(0)[0]))
        trained.unwrap()
