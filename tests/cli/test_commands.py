"""Every command: JSON a program can read, plain text in a pipe, what it writes, how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from autohete.cli.main import SUBCOMMANDS, group
from autohete.demo.traced import traced_run
from autohete.planning import plan_for, save_profile
from autohete.run_file import load_run, save_run

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> Result:
    return CliRunner().invoke(group, list(arguments))


def as_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "autohete_profile.json"
    report = plan_for("gpt2", "a100-40", 4, 512, gpu_mem="3GiB", suggest=False)
    save_profile(path, report.profile, report.plan)
    return path


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "autohete_run.json"
    save_run(path, traced_run(steps=6))
    return path


# ---------------------------------------------------------------- conventions


@pytest.mark.parametrize("name", sorted(SUBCOMMANDS))
def test_every_command_takes_json_and_shows_examples(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    assert any("--json" in parameter.opts for parameter in command.params)
    assert command.epilog is not None
    assert "Example" in command.epilog


@pytest.mark.parametrize(
    "arguments", ["doctor", "compare --steps 1 --layers 1 --width 32", "plan gpt2 --gpu a100-40"]
)
def test_in_a_pipe_there_are_no_colours_and_no_boxes(arguments: str) -> None:
    out = run(*arguments.split()).output
    assert "\x1b" not in out
    assert not set("│─┃━╭╰") & set(out)


def test_on_a_terminal_there_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from autohete.cli import output

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    import io

    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", shown)
    output.print_rows("title", [("torch", "ok", "2.13")], ("what", "how", "which"))
    assert "─" in shown.getvalue()
    assert "\x1b[" in shown.getvalue()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell(shell: str) -> None:
    script = as_json("completion", shell)["script"]
    assert "_AUTOHETE_COMPLETE" in script
    assert run("completion", shell).output.strip() == script.strip()


def test_a_shell_that_asks_is_told_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autohete"],
        cwd=ROOT,
        env={"_AUTOHETE_COMPLETE": "bash_complete", "COMP_WORDS": "autohete re", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
    )
    assert "report" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "demo --layers 1 --width 32 --steps 2",
        "demo --layers 2 --width 64 --steps 3",
        "compare --layers 1 --width 8 --steps 2",
        "compare --layers 2 --width 64 --steps 2",
    ],
)
def test_a_small_model_fits_the_budget_that_is_its_default(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a run leaves its profile there
    result = run(*arguments.split())
    assert result.exit_code == 0, result.output


def test_an_unknown_file_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autohete", "report", str(tmp_path / "nowhere.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- report


def test_report_writes_a_page_and_figures_about_a_plan(profile_file: Path, tmp_path: Path) -> None:
    page, figure = tmp_path / "plan.html", tmp_path / "plan.svg"
    said = as_json(
        "report", str(profile_file), "-o", str(page), "--figure", str(figure), "--gpu-mem", "3GiB"
    )
    assert said["page"] == str(page)
    assert len(said["figures"]) == 4
    assert page.read_text().startswith("<!doctype html>")
    assert "<svg" in figure.read_text()


def test_report_about_a_run_has_what_was_measured(run_file: Path, tmp_path: Path) -> None:
    said = as_json("report", str(run_file), "-o", str(tmp_path / "run.html"))
    assert "step time: measured (median)" in said["facts"]
    assert "The lanes over two steps" in said["figures"]


def test_report_about_a_model_has_both_sweeps(tmp_path: Path) -> None:
    page = str(tmp_path / "gpt2.html")
    said = as_json("report", "gpt2", "--gpu", "a100-40", "--gpu-mem", "3GiB", "-o", page)
    assert {"Tokens per second by batch", "Tokens per second by device memory"} <= set(
        said["figures"]
    )


def test_report_without_a_plan_says_what_to_give(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, plan_for("gpt2", "a100-40", 1, 64, suggest=False).profile)
    result = run("report", str(path))
    assert result.exit_code == 2
    assert "--gpu-mem" in result.output


# ---------------------------------------------------------------- trace


def test_trace_of_a_run_has_every_lane(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    said = as_json("trace", str(run_file), "-o", str(out))
    events = json.loads(out.read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert said["spans"] == len(work)
    assert {event["tid"] for event in work} == {0, 1, 2, 3}


def test_trace_trains_by_itself_and_keeps_the_run(tmp_path: Path) -> None:
    kept, out = tmp_path / "run.json", tmp_path / "trace.json"
    as_json("trace", "--steps", "5", "-o", str(out), "--run", str(kept))
    report = load_run(kept)
    assert report.num_steps == 5
    assert report.details is not None
    assert report.details.spans


def test_trace_of_a_run_without_one_says_how_to_get_it(run_file: Path, tmp_path: Path) -> None:
    document = json.loads(run_file.read_text())
    document["spans"] = []
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"holds no trace, expected .* call model.trace\(\)"):
        CliRunner().invoke(group, ["trace", str(path)], catch_exceptions=False)


@pytest.mark.parametrize("value", ["x", None, [], {}, True])
def test_a_run_with_a_figure_that_is_none_is_refused(
    run_file: Path, tmp_path: Path, value: object
) -> None:
    document = json.loads(run_file.read_text())
    document["figures"]["h2d_bytes"] = value
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"run\.json .*figures\.h2d_bytes is .*, expected int"):
        CliRunner().invoke(group, ["report", str(path)], catch_exceptions=False)


# ---------------------------------------------------------------- compare


def test_compare_in_fp32_finds_no_difference_at_all() -> None:
    small = ["--steps", "3", "--layers", "2", "--width", "64", "--gpu-mem", "4MiB"]
    found = as_json("compare", *small)
    assert {d["kind"] for d in found} == {"gradient", "exp_avg", "exp_avg_sq", "weight"}
    assert {d["unit"] for d in found} >= {"token", "blocks.0", "blocks.1", "head"}
    assert [d for d in found if d["relative"] != 0 or d["largest"] != 0] == []
    assert all(d["norm"] > 0 for d in found)


def test_compare_in_bf16_finds_differences_and_fails_past_the_bar() -> None:
    small = ["compare", "--precision", "bf16", "--steps", "2", "--layers", "2", "--width", "64"]
    found = as_json(*small)
    gradients = [d for d in found if d["kind"] == "gradient"]
    assert all(0 < d["relative"] < 0.2 and d["cosine"] > 0.98 for d in gradients)
    failed = run(*small, "--most", "1e-9")
    assert failed.exit_code == 1
    assert "expected at most 1e-09" in failed.output


# ---------------------------------------------------------------- figures of other commands


@pytest.mark.parametrize(
    "arguments",
    [
        "plan gpt2 --gpu a100-40 --figure {path}",
        "plan gpt2 --gpu a100-40 --gpu-mem 3GiB --sweep batch --figure {path}",
        "simulate {profile} --figure {path}",
    ],
)
def test_a_command_draws_what_it_says(profile_file: Path, tmp_path: Path, arguments: str) -> None:
    path = tmp_path / "figure.png"
    result = run(*arguments.format(path=path, profile=profile_file).split())
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_profile_of_a_model_is_json_too(tmp_path: Path) -> None:
    said = as_json("profile", "gpt2", "--output", str(tmp_path / "p.json"))
    assert said["num_parameters"] > 1e8
    assert (tmp_path / "p.json").exists()


# ---------------------------------------------------------------- several devices


def test_plan_and_simulate_print_speed_up_and_efficiency_for_devices_that_are_not_here(
    profile_file: Path,
) -> None:
    cluster = ("--devices", "16", "--machines", "4", "--inter-bandwidth", "5GB")
    for arguments in (
        ("plan", "gpt2", "--gpu", "a100-40", "--batch", "4", "--seq", "512"),
        ("simulate", str(profile_file), "--gpu-mem", "3GiB"),
    ):
        figures = as_json(*arguments, *cluster)
        assert figures["assumed"]["machine_bytes_per_second"] == 5e9
        assert [point["devices"] for point in figures["devices"]] == [1, 2, 4, 8, 16]
        assert figures["devices"][-1]["efficiency"] < figures["devices"][0]["efficiency"] == 1
        text = run(*arguments, *cluster).output
        assert "speed-up" in text and "efficiency" in text and "5 GB/s" in text


def test_what_is_about_several_devices_needs_their_number() -> None:
    result = run("plan", "gpt2", "--gpu", "a100-40", "--machines", "4")
    assert result.exit_code == 2
    assert "give --devices" in result.output
