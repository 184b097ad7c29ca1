"""The state of training of several processes as a folder of safetensors files, by torch's distributed checkpoint.

Each process writes its parts of the tensors. The files hold where a part belongs, so any number of processes on any
mesh can read them, and nothing in the folder is a pickle. The names of tensors are those of a checkpoint of one
process, which is read in the same way.
"""

from __future__ import annotations

import json
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.errors import DataError
from clearhead.train.checkpoint import Place, place_of, state_tensors
from clearhead.train.extra import need
from clearhead.train.files import LEFTOVER, read_json, read_note, sync_folder, write_json
from clearhead.train.ranks import Ranks
from clearhead.train.run import STEP

__all__ = ["load_shards", "remove_others", "save_shards"]

_PLACE = "place.json"


def save_shards(
    parent: Path,
    ranks: Ranks,
    *,
    model: nn.Module,
    average: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    place: Place,
) -> Path:
    """Write the state into a new folder of ``parent``; it has its name only once all of its files are on the disk.

    Cost: each process writes what it has of the tensors; tensors that several have are written once.
    """
    need("safetensors")
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    half = ranks.agreed(lambda: _new_folder(parent))
    tensors = state_tensors(model, average, optimizer)
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(half), save_distributed=True))

    def finish() -> Path:
        write_json(half / _PLACE, asdict(place))
        sync_folder(half)
        target = parent / f"{STEP}{place.step:010d}"
        shutil.rmtree(target, ignore_errors=True)
        half.replace(target)
        sync_folder(parent)
        return target

    return ranks.agreed(finish)


def _new_folder(parent: Path) -> Path:
    half = parent / f"{LEFTOVER}{secrets.token_hex(8)}"
    half.mkdir(parents=True)
    return half


def remove_others(last: Path) -> None:
    """Remove the checkpoints that ``last`` replaces."""
    for path in last.parent.iterdir():
        if path != last and path.name.startswith(STEP):
            shutil.rmtree(path, ignore_errors=True)
        elif path != last and path.suffix == last.with_suffix(".safetensors").suffix:
            path.unlink(missing_ok=True)


def load_shards(
    path: Path,
    *,
    model: nn.Module,
    average: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    function: str,
) -> Place:
    """Load a checkpoint of any number of processes into model, average and optimizer; each process reads its parts."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = path if path.is_dir() else path.parent
    place = place_of(path, _note(path, function), function)
    reader = HuggingFaceStorageReader(str(folder))
    with _damage_named(path, function):
        sizes = {
            name: each.size
            for name, each in reader.read_metadata().state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
    slots = _slots(optimizer, sizes)
    tensors = state_tensors(model, average, optimizer, slots)
    _check(path, tensors, sizes, function)
    with _damage_named(path, function), warnings.catch_warnings():
        # torch says that one process reads alone.
        warnings.simplefilter("ignore", UserWarning)
        load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
    return place


def _note(path: Path, function: str) -> dict[str, str]:
    if path.is_dir():
        return {"place": json.dumps(read_json(path / _PLACE, function=function))}
    return read_note(path, function=function)


def _slots(optimizer: torch.optim.Optimizer, sizes: Mapping[str, torch.Size]) -> dict[int, dict[str, Tensor]]:
    """Empty tensors for the optimizer's state, divided as the parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots: dict[int, dict[str, Tensor]] = {}
    for name, size in sizes.items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            number, _, slot = rest.partition("/")
            empty = torch.zeros(size)
            if int(number) < len(parameters) and parameters[int(number)].shape == size:
                empty = torch.zeros_like(parameters[int(number)])
            slots.setdefault(int(number), {})[slot] = empty
    return slots


def _check(path: Path, tensors: Mapping[str, Tensor], sizes: Mapping[str, torch.Size], function: str) -> None:
    missing, foreign = sorted(tensors.keys() - sizes.keys()), sorted(sizes.keys() - tensors.keys())
    wrong = [name for name in tensors.keys() & sizes.keys() if tensors[name].shape != sizes[name]]
    if missing or foreign or wrong:
        got = f"missing {missing[:2]}, unknown {foreign[:2]}, of another shape {wrong[:2]}"
        must, then = "have the state that config.json describes", "The run is damaged; train it again."
        raise DataError.about(function, str(path), must=must, got=got, then=then)


@contextmanager
def _damage_named(path: Path, function: str) -> Iterator[None]:
    """Raise ``DataError`` where a file of the checkpoint cannot be read."""
    from torch.distributed.checkpoint.api import CheckpointException

    safetensors = need("safetensors")
    try:
        yield
    except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
        must, then = "have complete safetensors files", "The checkpoint is damaged; remove it and train again."
        raise DataError.about(function, str(path), must=must, got=str(error), then=then) from error
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        must, then = "have complete safetensors files", "The checkpoint is damaged; remove it and train again."
        raise DataError.about(function, str(path), must=must, got=str(cause), then=then) from error
