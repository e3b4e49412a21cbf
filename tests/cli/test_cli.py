"""The command line: help, exit codes, JSON, and a doctor that works when nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from autohete._version import __version__
from autohete.cli import doctor
from autohete.cli.main import SUBCOMMANDS, group

ROOT = Path(__file__).resolve().parent.parent.parent
START = "from autohete.cli import main; main()"


def autohete(*arguments: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", prelude + START, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("name", sorted(SUBCOMMANDS))
def test_every_subcommand_has_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(group, [name, "--help"])
    assert result.exit_code == 0
    assert f"autohete {name}" in result.output


def test_the_version_is_the_packages() -> None:
    result = CliRunner().invoke(group, ["--version"])
    assert __version__ in result.output


def test_a_wrong_option_is_exit_code_2() -> None:
    assert CliRunner().invoke(group, ["doctor", "--nonsense"]).exit_code == 2


def test_help_needs_no_torch() -> None:
    done = autohete("--help", prelude="import sys; sys.modules['torch'] = None; ")
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


def test_doctor_finds_this_installation_sound() -> None:
    done = autohete("doctor", "--json")
    assert done.returncode == 0, done.stdout
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["compiled core"]["status"] == "ok"
    assert findings["torch"]["status"] == "ok"


def test_doctor_works_without_torch_and_says_how_to_get_it() -> None:
    done = autohete("doctor", "--json", prelude="import sys; sys.modules['torch'] = None; ")
    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["torch"]["status"] == "failed"
    assert findings["torch"]["remedy"] == "pip install torch"


def test_doctor_names_a_core_that_was_built_for_another_torch() -> None:
    prelude = "import torch; torch.__version__ = '1.0'; "
    done = autohete("doctor", "--json", prelude=prelude)
    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert "torch is 1.0" in findings["compiled core"]["detail"]
    assert "\n" not in findings["compiled core"]["detail"]


def test_doctor_prints_for_people_too() -> None:
    result = CliRunner().invoke(doctor.command, [])
    assert "host memory" in result.output


def test_an_error_of_the_work_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "damaged.json").write_text("{")
    done = autohete("simulate", str(tmp_path / "damaged.json"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"autohete: {tmp_path}/damaged.json is damaged")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan 7b --gpu a100", "'a100' is not known, expected one of"),
        ("plan 7x --gpu a100-40", "'7x' is not known, expected a config.json or one of"),
        ("plan ./nope.json --gpu a100-40", "there is no file ./nope.json"),
        ("report ./nope.json --gpu a100-40", "there is no file ./nope.json"),
        ("plan 7b --gpu a100-40 --strategy fast", "'fast' is not known, expected one of autohete"),
        ("plan 7b --gpu a100-40 --gpu-mem 12GiBs", "--gpu-mem is '12GiBs': unknown unit"),
        ("plan 7b --gpu a100-40 --gpu-mem -3GiB", "--gpu-mem is '-3GiB', expected between 0"),
        ("plan 7b --gpu a100-40 --cpu-mem lots", "--cpu-mem is 'lots', expected a size"),
        ("plan 7b --gpu a100-40 --figure x.jpg", "'x.jpg' expected to end in .svg, .png, .pdf"),
        ("plan 7b --gpu a100-40 --figure /proc/x.svg", "/proc/x.svg cannot be written"),
        ("plan 7b --gpu a100-40 --devices 3 --machines 2", "devices is 3 on 2 machines"),
        ("report 7b --gpu a100-40 -o /nowhere/x.html", "/nowhere/x.html cannot be written"),
        ("trace -o /proc/trace.json --steps 5", "/proc/trace.json cannot be written"),
        ("profile 7x", "'7x' is not known"),
        ("demo --heads 3", "width is 256, expected a multiple of the 3 heads"),
        ("demo --gpu-mem much", "--gpu-mem is 'much'"),
    ],
)
def test_a_wrong_value_is_exit_code_2_before_anything_is_done(arguments: str, words: str) -> None:
    result = CliRunner().invoke(group, arguments.split())
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "there", "python"),
    [
        ("demo --gpu-mem 1MiB --layers 1", "--gpu-mem is 1.00 MiB", "layers="),
        ("demo --gpu-mem 1MiB --layers 1", "a smaller --width", "gpu_mem"),
        ("demo --gpu-mem 5MiB --layers 2 --width 64", "needs at least", "gpu_mem"),
        pytest.param(
            "demo --device cuda --layers 1", "--device host", ".to(",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_messages_are_in_the_command_lines_words(arguments: str, there: str, python: str) -> None:
    done = autohete(*arguments.split())
    assert done.returncode == 1
    assert there in done.stderr
    assert python not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("trace --steps 5", "training: step 5 of 5"),
        ("compare --layers 2 --width 64 --steps 10", "plain PyTorch: step 20 of 20"),
    ],
)
def test_what_takes_long_shows_its_way_in_a_pipe(
    arguments: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(group, [*arguments.split(), "--json"])
    assert result.exit_code == 0, result.output
    assert shown in result.stderr
    json.loads(result.stdout)


def test_check_without_the_host_device_is_refused() -> None:
    result = CliRunner().invoke(group, ["demo", "--check", "--plain"])
    assert result.exit_code == 2
    assert "--check compares" in result.output


def test_plan_needs_no_gpu_and_its_json_is_whole() -> None:
    arguments = "plan gpt2-xl --gpu a100-40 --gpu-mem 12GiB --batch 2 --json".split()
    done = autohete(*arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["gpu_mem"] == 12 * 2**30
    assert report["plan"]["device_peak_bytes"] <= report["gpu_mem"]


def test_a_plan_that_cannot_fit_names_the_smallest_size_and_exits_with_1() -> None:
    done = autohete(*"plan 7b --gpu a100-40 --gpu-mem 100MiB --batch 1".split())
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "smallest --gpu-mem" in done.stderr


def test_simulate_reads_a_profile_and_writes_a_trace(tmp_path: Path) -> None:
    from autohete.planning import make_plan, plan_for, save_profile

    profile = plan_for("gpt2", "a100-40", 1, 512, suggest=False).profile
    file, trace = tmp_path / "autohete_profile.json", tmp_path / "trace.json"
    save_profile(file, profile, make_plan(profile, "4GiB"))
    done = autohete("simulate", str(file), "--json", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["step_seconds"] * (1 + 1e-9) >= figures["compute_seconds"] > 0  # last bit
    assert len(json.loads(trace.read_text())["traceEvents"]) > 0


def test_simulate_without_a_plan_says_what_to_give(tmp_path: Path) -> None:
    from autohete.planning import plan_for, save_profile

    file = tmp_path / "autohete_profile.json"
    save_profile(file, plan_for("gpt2", "a100-40", 1, 512, suggest=False).profile)
    done = autohete("simulate", str(file))
    assert done.returncode == 2
    assert "--gpu-mem" in done.stderr


def test_simulate_compares_every_strategy_and_ablation(tmp_path: Path) -> None:
    from autohete.planning import plan_for, save_profile

    file = tmp_path / "autohete_profile.json"
    save_profile(file, plan_for("gpt2", "a100-40", 1, 512, suggest=False).profile)
    done = autohete("simulate", str(file), "--gpu-mem", "1GiB", "--compare", "--json")
    assert done.returncode == 0, done.stderr
    names = [result["strategy"] for result in json.loads(done.stdout)]
    assert names[:2] == ["autohete", "zero_offload"]
    assert names[-3:] == ["without fifo", "without barrier", "without aggregation"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("simulate", "--table paper"),
        ("simulate {file} --compare", "--gpu-mem"),
        ("plan --gpu a100-40", "give one model"),
        ("plan gpt2 --model gpt2 --gpu a100-40", "give one model"),
        ("report nowhere.json", "give a profile"),
    ],
)
def test_a_command_line_that_lacks_something_names_it(
    tmp_path: Path, arguments: str, reason: str
) -> None:
    file = tmp_path / "autohete_profile.json"
    file.write_text("{}")
    result = CliRunner().invoke(group, arguments.format(file=file).split())
    assert result.exit_code == 2
    assert reason in result.output


def test_plan_sweeps_memory_as_json() -> None:
    done = autohete(*"plan --model gpt2 --gpu a100-40 --gpu-mem 3GB --sweep gpu_mem --json".split())
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    assert points[-1]["value"] == 3_000_000_000
    assert all(point["device_peak_bytes"] <= point["value"] for point in points)
