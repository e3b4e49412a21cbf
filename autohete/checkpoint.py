"""Checkpoints in torch's own layout, written atomically and read one tensor at a time.

The file is what `torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})`
gives, so plain PyTorch reads ours and we read its. Writing goes straight from the tensors' memory
to the file, reading straight from the file to the tensors' memory: neither copies the state.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_map

from autohete.unreadable import why_not_a_checkpoint, why_torch_refused

PathLike = str | os.PathLike[str]


def content_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written: the state dict of each object that has one, other values as is."""
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in values.items()
        if value is not None
    }


def write_whole(path: PathLike, content: Mapping[str, Any]) -> None:
    """Write `content` as torch.save does, so that `path` is at any moment the old file or the new.

    It is written beside `path` ("NAME.part"), brought to the disk and then renamed. What an
    interrupted writer left there is overwritten by the next.

    Raises:
        RuntimeError: another process is writing to the same place.
        OSError: the disk is full, say; the old file is as it was.
    """
    target = Path(path).resolve()
    part = target.with_name(target.name + ".part")
    with _locked(part, target) as descriptor:
        try:
            torch.save(dict(content), part)
            os.fsync(descriptor)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:  # the user knows of no NAME.part
        raise OSError(error.errno, error.strerror, str(target)) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"save_checkpoint: {path} is being written by another process, expected one "
                "writer; let one process save, or give each a path of its own"
            ) from None
        yield descriptor
    finally:
        os.close(descriptor)


class SavedFile:
    """A torch.save file whose tensors stay in it until they are asked for.

    `content` has stand-ins where the file has tensors; everything else is as it was saved.

    Raises:
        ValueError: it is not a whole file of torch.save.
    """

    def __init__(self, path: PathLike) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self.content: Any = self._load(path)
        except BaseException:
            self.close()
            raise

    def _load(self, path: PathLike) -> Any:
        wrong = None if os.path.isdir(path) else why_not_a_checkpoint(self._descriptor)
        if wrong is None:
            try:
                with FakeTensorMode():
                    return torch.load(path, map_location="cpu", weights_only=True)
            except (OSError, MemoryError):
                raise
            except Exception as error:  # of damaged bytes, whatever the unpickler stumbles on
                wrong = why_torch_refused(error)
        raise ValueError(
            f"load_checkpoint: {os.fspath(path)} cannot be read ({wrong}), expected a whole file "
            "of save_checkpoint() or torch.save()"
        )

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, saved: Tensor) -> Tensor:
        """Return a stand-in's tensor in memory of its own."""
        tensor = torch.empty_strided(saved.size(), saved.stride(), dtype=saved.dtype, device="cpu")
        self._read_bytes(tensor, saved)
        return tensor

    def read_into(self, target: Tensor, saved: Tensor) -> None:
        """Bring a stand-in's values into `target`, converted where dtype or device differ."""
        same = target.dtype == saved.dtype and target.stride() == saved.stride()
        if same and target.device.type == "cpu" and _is_dense(target):
            self._read_bytes(target, saved)
        else:
            target.copy_(self.read(saved))

    def read_all(self, value: Any) -> Any:
        """Return nested values with every stand-in read."""
        return tree_map(lambda leaf: self.read(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def _read_bytes(self, target: Tensor, saved: Tensor) -> None:
        storage: Any = saved.untyped_storage()
        offset: int = storage._checkpoint_offset
        if not _is_dense(saved):
            whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
            self._fill(whole, offset)
            view: Any = torch.empty(0, dtype=saved.dtype, device="cpu")
            view.set_(whole.untyped_storage(), saved.storage_offset(), saved.size(), saved.stride())
            target.copy_(view)
            return
        flat: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
        start = target.storage_offset() * target.itemsize
        flat.set_(target.untyped_storage(), start, (target.nbytes,), (1,))
        self._fill(flat, offset + int(saved.storage_offset()) * saved.itemsize)

    def _fill(self, flat: Tensor, offset: int) -> None:
        array: Any = flat.numpy()
        memory = memoryview(array)
        while memory:
            count = os.preadv(self._descriptor, [memory], offset)
            if count == 0:
                raise ValueError("load_checkpoint: the file ends inside a tensor, expected all")
            memory, offset = memory[count:], offset + count


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one range of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def check_entries(saved: Any, wanted: Mapping[str, Any]) -> None:
    """Raise ValueError unless `saved` has what is wanted; None marks what may be missing."""
    if not isinstance(saved, dict):
        raise ValueError(
            f"load_checkpoint: the file holds a {type(saved).__name__}, expected a dict with the "
            'state dicts "model" and "optimizer"; load it yourself and call load_state_dict'
        )
    for name, value in wanted.items():
        if value is not None and name not in saved:
            raise ValueError(
                f"load_checkpoint: the file has {', '.join(map(str, saved))}, expected {name} too; "
                "save it, or do not ask for it"
            )
        if value is not None and not hasattr(value, "load_state_dict"):
            raise ValueError(
                f"load_checkpoint: {name} is {type(value).__name__}, expected an object with "
                "load_state_dict(); values are in the returned dict"
            )


def check_model(model: nn.Module, saved: Any) -> None:
    """Raise ValueError unless the state dict is one of this model, by its keys and shapes."""
    if not isinstance(saved, Mapping):
        raise ValueError(
            f"load_checkpoint: model is a {type(saved).__name__}, expected the model's state dict; "
            'save {"model": model.state_dict()}'
        )
    present = model.state_dict()
    missing = [name for name in present if name not in saved]
    foreign = [name for name in saved if name not in present]
    if missing or foreign:
        raise ValueError(
            f"load_checkpoint: {len(missing)} of the model's keys are missing {missing[:3]} and "
            f"{len(foreign)} are not its own {foreign[:3]}, expected this model's; build the model "
            "that was saved"
        )
    for name, target in present.items():
        value = saved[name]
        if name.endswith(_EXTRA_STATE_KEY_SUFFIX):
            continue  # whatever a module makes of it
        if isinstance(target, Tensor) and not isinstance(value, Tensor):
            raise ValueError(
                f"load_checkpoint: {name} is a {type(value).__name__}, expected a tensor of shape "
                f"{tuple(target.shape)}; build the model that was saved"
            )
        if isinstance(target, Tensor) and target.shape != value.shape:
            raise ValueError(
                f"load_checkpoint: {name} has shape {tuple(value.shape)}, expected "
                f"{tuple(target.shape)}; build the model that was saved"
            )
        if isinstance(target, Tensor) and target.is_meta:
            raise ValueError(
                f"load_checkpoint: {name} is on the meta device, expected memory to load into; "
                'call .cuda() or .to("cpu") on the wrapper first'
            )


@torch.no_grad()
def load_model(file: SavedFile, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Bring a model's state dict in, tensor by tensor, which check_model() has taken.

    What state_dict() gives that is not the model's own memory (get_extra_state(), hooks that copy)
    goes through load_state_dict().
    """
    own: dict[str, Tensor] = {}
    own.update(model.named_parameters(remove_duplicate=False))
    own.update(model.named_buffers(remove_duplicate=False))
    others: dict[str, Any] = {}
    for name, target in model.state_dict().items():
        if name in own and own[name].data_ptr() == target.data_ptr():
            file.read_into(target, saved[name])
        else:
            others[name] = file.read_all(saved[name])
    if others:
        model.load_state_dict(others, strict=False)


def check_optimizer(
    optimizer: torch.optim.Optimizer, saved: Any, state_keys: Collection[str] | None
) -> None:
    """Raise ValueError unless the state dict fits the optimizer.

    Args:
        state_keys: what a parameter's state may consist of; None: anything.
    """
    if not isinstance(saved, Mapping) or not saved.keys() >= {"state", "param_groups"}:
        raise ValueError(
            f"load_checkpoint: optimizer is a {type(saved).__name__}, expected a state dict with "
            '"state" and "param_groups"; save {"optimizer": optimizer.state_dict()}'
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != given:
        raise ValueError(
            f"load_checkpoint: the optimizer's groups have {given} parameters, expected {sizes}; "
            "build the optimizer that was saved"
        )
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in saved["param_groups"] for name in group["params"]]
    for name, param in zip(names, params, strict=True) if state_keys is not None else ():
        for key, value in saved["state"].get(name, {}).items():
            if state_keys is not None and key not in state_keys:
                raise ValueError(
                    f"load_checkpoint: the state of parameter {name} has {key!r}, expected "
                    f"{', '.join(state_keys)}; give the optimizer the options it was saved with"
                )
            if isinstance(value, Tensor) and key != "step" and value.shape != param.shape:
                raise ValueError(
                    f"load_checkpoint: {key} of parameter {name} has shape {tuple(value.shape)}, "
                    f"expected {tuple(param.shape)}; build the optimizer that was saved"
                )


StateMaker = Callable[[nn.Parameter], dict[str, Any]]
PartOf = Callable[[nn.Parameter, Tensor], Tensor]


def whole_of(value: Any) -> Any:
    """Return nested values with every tensor that the ranks have parts of whole. Collective."""
    return tree_map(lambda v: v.full_tensor() if hasattr(v, "full_tensor") else v, value)


def load_optimizer(
    file: SavedFile,
    optimizer: torch.optim.Optimizer,
    saved: Any,
    make_state: StateMaker | None,
    part_of: PartOf = lambda param, whole: whole,
) -> None:
    """Bring an optimizer's state dict in.

    Args:
        part_of: of something shaped like a parameter, what belongs into its state here.
        make_state: returns the tensors that are a parameter's state, to be overwritten; left out:
            the optimizer gets new ones.
    """
    if make_state is None:
        optimizer.load_state_dict(file.read_all(saved))
        return
    optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in saved["param_groups"] for name in group["params"]]
    with torch.no_grad():
        for name, param in zip(names, params, strict=True):
            if name in saved["state"]:
                _load_state(file, param, saved["state"][name], make_state, part_of)


def _load_state(
    file: SavedFile,
    param: nn.Parameter,
    saved: dict[str, Any],
    make_state: StateMaker,
    part_of: PartOf,
) -> None:
    state = make_state(param)
    for key in state.keys() - saved.keys():
        # Of a loop without masters, or before amsgrad was turned on.
        state[key].copy_(part_of(param, param)) if key == "master" else state[key].zero_()
    for key, value in saved.items():
        if key not in state:
            continue  # the master of a parameter that is fp32 now
        if isinstance(value, Tensor):
            file.read_into(state[key], value if key == "step" else part_of(param, value))
        else:
            state[key].fill_(value)
