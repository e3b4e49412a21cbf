"""Files of a run: where they cannot be written, nothing is lost and training goes on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from models import batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, plain_loop, train

from autohete import AutoHeteWrapper


def wrapped(profile_path: Path | None = None) -> tuple[AutoHeteWrapper, object]:
    model = make_gpt()
    optimizer = adamw(model)
    options = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": profile_path}
    return AutoHeteWrapper(model, optimizer, **options).to("cpu"), optimizer


def test_a_profile_that_cannot_be_written_is_one_warning_and_training_goes_on(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    trained, optimizer = wrapped(folder / "profile.json")
    folder.rmdir()
    with caplog.at_level(logging.WARNING, logger="autohete"):
        for rows in (2, 2, 5, 5, 9, 9):  # larger inputs: another plan, another file
            trained(*batch(rows, rows=rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert trained.report().num_replans > 0
    (warning,) = [r.getMessage() for r in caplog.records if "profile" in r.getMessage()]
    for part in ("profile_path is", "gone/profile.json'", "No such file or directory", "goes on"):
        assert part in warning
    assert ".tmp" not in warning
    trained.unwrap()


def test_training_where_nothing_can_be_written_gives_the_plain_bits(monkeypatch):
    expected = train(wrap=None, steps=4)
    monkeypatch.chdir("/proc")
    trained, optimizer = wrapped("autohete_profile.json")
    torch.manual_seed(7)
    losses = [plain_loop(trained, optimizer, step) for step in range(4)]
    model = trained.unwrap()
    assert_bit_equal(Result(losses, model, optimizer), expected)


def test_a_trace_that_cannot_be_written_is_not_lost(tmp_path):
    trained, optimizer = wrapped()
    trained.trace()
    for step in range(2):
        plain_loop(trained, optimizer, step)
    with pytest.raises(FileNotFoundError) as error:
        trained.trace(tmp_path / "nowhere" / "trace.json")
    assert str(error.value).endswith("nowhere/trace.json'")
    trained.trace(tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 10
    trained.unwrap()


def test_what_cannot_be_written_is_named_as_the_user_named_it(tmp_path):
    trained, optimizer = wrapped()
    plain_loop(trained, optimizer, 0)
    nowhere = tmp_path / "nowhere" / "file"
    for write in (trained.report().save, trained.save_checkpoint):
        with pytest.raises(FileNotFoundError) as error:
            write(nowhere)
        assert error.value.filename == str(nowhere)
    trained.unwrap()
