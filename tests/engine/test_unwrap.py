"""Leaving: unwrap(), garbage collection, the end of the interpreter, interrupts, forks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from models import batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, forced_plan, plain_loop, train

from autohete import AutoHeteWrapper
from autohete.guard import Guard
from autohete.hooks import HookedForward

TESTS = Path(__file__).parents[1]


def wrap(model, optimizer, kind="all+c"):
    plan = forced_plan(model, kind) if kind else None
    keywords = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None}
    return AutoHeteWrapper(model, optimizer, plan=plan, **keywords).to("cpu")


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def assert_threads_go_back_to(number: int) -> None:
    """A joined thread leaves the kernel's list a moment later."""
    for _ in range(100_000):
        if num_threads() <= number:
            return
        os.sched_yield()
    assert num_threads() <= number


@pytest.mark.parametrize("kind", ["all+c", "state", "device", None])
def test_an_unwrapped_pair_goes_on_to_the_bits_of_plain_training(kind):
    expected = train(wrap=None, steps=6)
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer, kind)
    torch.manual_seed(7)
    losses = [plain_loop(trained, optimizer, step) for step in range(3)]
    assert trained.unwrap() is model
    losses += [plain_loop(model, optimizer, step) for step in range(3, 6)]
    assert_bit_equal(Result(losses, model, optimizer), expected)


def test_wrapping_and_unwrapping_between_all_steps_changes_no_bit():
    expected = train(wrap=None, steps=6)
    model = make_gpt()
    optimizer = adamw(model)
    torch.manual_seed(7)
    losses = []
    for step, kind in enumerate(["all+c", None, "state", "device", "all", "state+c"]):
        trained = wrap(model, optimizer, kind)
        losses.append(plain_loop(trained, optimizer, step))
        trained.unwrap()
    assert_bit_equal(Result(losses, model, optimizer), expected)


def test_unwrapping_between_backward_and_step_keeps_the_gradients():
    expected = train(wrap=None, steps=2)
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    torch.manual_seed(7)
    losses = [plain_loop(trained, optimizer, 0)]
    loss = trained(*batch(1))
    loss.backward()
    trained.unwrap()
    optimizer.step()
    optimizer.zero_grad()
    assert_bit_equal(Result([*losses, loss.item()], model, optimizer), expected)


def test_unwrap_leaves_no_hook_thread_guard_or_block():
    wrapped_once = train(wrap={}, steps=1)  # torch and oneTBB start pools of their own once
    gc.collect()
    before = num_threads()
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    for step in range(2):
        plain_loop(trained, optimizer, step)
    assert num_threads() > before
    run = weakref.ref(trained.run)
    machine = trained.run.side.machine
    trained.unwrap()
    gc.collect()
    assert run() is None
    assert machine.device_used() == 0 and machine.host_used() == 0
    del machine
    assert_threads_go_back_to(before)
    assert "step" not in vars(optimizer)
    for module in model.modules():
        assert not isinstance(vars(module).get("forward"), HookedForward)
    for p in model.parameters():
        state = optimizer.state[p]
        for tensor in (p, state["exp_avg"], state["exp_avg_sq"]):
            assert not isinstance(tensor, Guard) and tensor.untyped_storage().resizable()
    del wrapped_once


def test_twenty_rounds_of_wrapping_keep_memory_flat():
    model = make_gpt(layers=4, width=128)
    optimizer = adamw(model)
    process = psutil.Process()
    sizes = []
    for round_number in range(20):
        trained = wrap(model, optimizer)
        plain_loop(trained, optimizer, round_number)
        trained.unwrap()
        del trained
        gc.collect()
        sizes.append(process.memory_info().rss)
    state_bytes = 16 * sum(p.numel() for p in model.parameters())
    assert sizes[-1] - sizes[4] < state_bytes, "less than one wrapped model's worth in 15 rounds"


def test_a_wrapped_model_that_is_garbage_leaves_no_thread():
    train(wrap={}, steps=1)
    gc.collect()
    before = num_threads()
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    plain_loop(trained, optimizer, 0)
    run = weakref.ref(trained.run)
    del trained, model, optimizer
    gc.collect()
    assert run() is None
    assert_threads_go_back_to(before)


@pytest.mark.parametrize("kind", ["all+c", "state", None])
def test_what_is_kept_of_a_model_that_is_garbage_holds_its_newest_values(kind):
    expected = train(wrap=None, steps=4)
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer, kind)
    torch.manual_seed(7)
    for step in range(3):
        plain_loop(trained, optimizer, step)
    trained.synchronize()
    trained.run.engine.set_update_rate(1e5)  # this step is still being taken below
    plain_loop(trained, optimizer, 3)
    run = weakref.ref(trained.run)
    parameters = list(model.parameters())
    moments = [optimizer.state[p]["exp_avg"] for p in parameters]
    del trained, model, optimizer
    gc.collect()
    assert run() is None
    for p, q in zip(parameters, expected.model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not isinstance(p, Guard)
    for moment, q in zip(moments, expected.model.parameters(), strict=True):
        assert torch.equal(moment, expected.optimizer.state[q]["exp_avg"])


def test_a_forward_wrapped_by_others_after_us_still_works_after_unwrap():
    model = make_gpt()
    trained = wrap(model, adamw(model))
    block = model.blocks[0]
    inner = block.forward
    block.forward = lambda x: inner(x) * 1.0
    trained.unwrap()
    model(*batch(0)).backward()
    assert all(p.grad is not None for p in block.parameters())


def script(body: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run `body` in a process of its own, after a step with updates and copies in flight."""
    prelude = """
        import os, signal, sys, threading, time
        import torch
        from models import batch, make_gpt
        from oracle import adamw, forced_plan, plain_loop
        from autohete import AutoHeteWrapper
        from autohete._C import CopyDirection
        torch.set_num_threads(2)
        model = make_gpt()
        optimizer = adamw(model)
        trained = AutoHeteWrapper(
            model, optimizer, gpu_mem="16MiB", cpu_mem="64MiB", plan=forced_plan(model, {5: "all"})
        ).to("cpu")
        machine = trained.run.side.machine
        plain_loop(trained, optimizer, 0)

        def hold_the_next_gradients():
            while trained.run.engine.unit_state(5)[1] != "idle":  # or these would not arrive
                pass
            machine.hold(CopyDirection.DEVICE_TO_HOST)
    """
    text = textwrap.dedent(prelude) + textwrap.dedent(body)
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("held", [False, True])
def test_the_interpreter_ends_with_updates_in_flight(held):
    """With copies that nobody will let go, too."""
    hold = "hold_the_next_gradients()" if held else ""
    done = script(f"""
        {hold}
        plain_loop(trained, optimizer, 1)
        print("over", flush=True)
    """, timeout=40)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "over" in done.stdout and "Error" not in done.stderr


INTERRUPTED = {
    "a parameter is read": ("plain_loop(trained, optimizer, 1)", "block.qkv.weight.norm()"),
    "a state is read": ("plain_loop(trained, optimizer, 1)", "state['exp_avg'].norm()"),
    "a gradient is read": ("trained(*batch(1)).backward()", "block.qkv.weight.grad.norm()"),
    "forward": ("plain_loop(trained, optimizer, 1)", "plain_loop(trained, optimizer, 2)"),
    "eval": ("plain_loop(trained, optimizer, 1)", "trained.eval(), trained(*batch(2))"),
    "synchronize": ("plain_loop(trained, optimizer, 1)", "trained.synchronize()"),
    "state_dict": ("plain_loop(trained, optimizer, 1)", "torch.save(model.state_dict(), kept)"),
    "clipping": (
        "trained(*batch(1)).backward()", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    ),
    "unwrap": ("plain_loop(trained, optimizer, 1)", "trained.unwrap()"),
}  # fmt: skip


@pytest.mark.parametrize("waits", INTERRUPTED)
def test_an_interrupt_ends_a_wait_for_a_copy(waits):
    """Whatever waits for it; training goes on, and leaving works, once the copy has arrived."""
    before, waiting = INTERRUPTED[waits]
    done = script(f"""
        import faulthandler, io

        faulthandler.dump_traceback_later(45, exit=True)
        # What a shell's `nohup` or `&` ignores is ignored in a child too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kept, block = io.BytesIO(), model.blocks[3]
        state = optimizer.state[block.qkv.weight]
        hold_the_next_gradients()
        {before}
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            {waiting}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        machine.release_all(CopyDirection.DEVICE_TO_HOST)
        trained.train()
        plain_loop(trained, optimizer, 3)
        trained.unwrap()
        print("went on", flush=True)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["interrupted", "went on"]


@pytest.mark.parametrize("reads", ["weight", "weight.grad"])
def test_an_interrupt_ends_a_wait_for_an_update_that_runs_ahead_of_step(reads):
    """One that takes thousands of seconds. A process of its own, which does not wait for it."""
    done = script(f"""
        import faulthandler

        faulthandler.dump_traceback_later(45, exit=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = trained.run.engine
        for step in range(1, 5):
            plain_loop(trained, optimizer, step)
        ahead = engine.counters()["updates_ahead"]
        assert ahead > 0
        for step in range(5, 100):  # until it had begun when it is waited for
            trained.synchronize()
            engine.set_update_rate(1.0)
            trained(*batch(step)).backward()
            timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                model.blocks[3].qkv.{reads}.norm()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                os._exit(0)
            timer.cancel()
            timer.join()
            engine.set_update_rate(0.0)
            optimizer.step()
            optimizer.zero_grad()
    """)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_a_data_loader_forks_while_updates_are_in_flight():
    done = script("""
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, index):
                tokens, targets = batch(index, rows=1)
                return tokens[0], targets[0]

        seen = 0
        for epoch in range(3):
            loader = DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork")
            for tokens, targets in loader:
                trained(tokens, targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += 1
        trained.unwrap()
        print("steps", seen, flush=True)
    """)
    assert done.returncode == 0, done.stderr
    assert "steps 9" in done.stdout


def test_a_forked_child_can_read_and_leave():
    done = script("""
        trained.synchronize()
        child = os.fork()
        if child == 0:
            same = all(torch.isfinite(p).all() for p in model.parameters())
            os._exit(0 if same else 3)
        status = os.waitpid(child, 0)[1]
        plain_loop(trained, optimizer, 1)
        trained.unwrap()
        print("child", os.waitstatus_to_exitcode(status), flush=True)
    """)
    assert done.returncode == 0, done.stderr
    assert "child 0" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_unwrapping_to_a_gpu_that_is_not_there_is_refused_and_training_goes_on():
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    plain_loop(trained, optimizer, 0)
    with pytest.raises(ValueError, match=r"unwrap: device is cuda, expected cpu"):
        trained.unwrap("cuda")
    plain_loop(trained, optimizer, 1)
    assert trained.unwrap("cpu") is model


def test_an_unwrapped_wrapper_is_attached_again_only_on_purpose():
    expected = train(wrap=None, steps=4)
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    torch.manual_seed(7)
    losses = [plain_loop(trained, optimizer, step) for step in range(2)]
    trained.unwrap()
    with pytest.raises(RuntimeError, match="called after unwrap"):
        trained(*batch(2))
    assert trained.run is None
    trained.to("cpu")
    losses += [plain_loop(trained, optimizer, step) for step in range(2, 4)]
    trained.unwrap()
    assert_bit_equal(Result(losses, model, optimizer), expected)
