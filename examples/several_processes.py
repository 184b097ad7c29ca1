"""Train one model on several meshes of processes, and compare with one process; attend over a sharded sequence.

    python examples/several_processes.py                      # starts two processes on this machine
    torchrun --standalone --nproc-per-node 4 examples/several_processes.py    # or runs in those that torchrun started

It needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import clearhead as ch

VOCABULARY, LENGTH, BATCH = 64, 64, 8


def new_model() -> ch.nn.LanguageModel:
    """The same model on every rank."""
    torch.manual_seed(0)
    return ch.nn.LanguageModel(VOCABULARY, 64, num_heads=4, num_layers=2, max_len=LENGTH, dropout=0.1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, equal on every rank: a counting text, and the next tokens."""
    draw = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=draw)
    tokens = (first + torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def part(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's sequences, and of each this rank's tokens."""
    names = mesh.mesh_dim_names or ()
    for name in ("data", "shard"):
        if name in names:
            x = x.chunk(mesh[name].size())[mesh.get_local_rank(name)]
    if "context" in names:
        x = ch.distributed.shard(x, dim=1, layout="zigzag", group=mesh.get_group("context"))
    return x


def train(mesh: DeviceMesh | None, steps: int) -> tuple[ch.nn.LanguageModel, list[float]]:
    """The model after some steps, and its losses; without a mesh in this process alone."""
    model = new_model()
    if mesh is not None:
        ch.distributed.parallelize(model, mesh, layout="zigzag")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        ids, labels = batch(step)
        # Dropout draws by the seed and the place in the whole batch.
        torch.manual_seed(step)
        if mesh is None:
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        else:
            ids, labels = part(ids, mesh), part(labels, mesh)
            total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
            loss = ch.distributed.mean_loss(total, labels.numel(), mesh)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def attend(mesh: DeviceMesh) -> float:
    """The largest difference between attention over a sharded sequence and over the whole one."""
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 1, 4, 512, 16)
    options = {"layout": "zigzag", "group": mesh.get_group("context")}
    parts = [ch.distributed.shard(each, **options) for each in (query, key, value)]
    mask = ch.Causal() & ch.Window(99)
    output = ch.distributed.attention(*parts, mask=mask, **options)
    expected = ch.distributed.shard(ch.attention(query, key, value, mask=mask), **options)
    return float((output - expected).abs().max())


def save_and_load(model: ch.nn.LanguageModel, mesh: DeviceMesh) -> bool:
    """Whether a checkpoint of a model on one mesh is the same model on another."""
    folder: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    other = ch.distributed.parallelize(new_model(), mesh)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(one.full_tensor(), two.full_tensor()) for one, two in pairs)


def run(steps: int) -> None:
    """Every mesh of this number of ranks with one axis, beside one process."""
    ranks, shows = dist.get_world_size(), dist.get_rank() == 0
    _, expected = train(None, steps)
    if shows:
        print(f"one process: loss {expected[0]:.3f}, after {steps} steps {expected[-1]:.3f}")
    models = {}
    for axis in ("data", "shard", "tensor", "context"):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,))
        models[axis], losses = train(mesh, steps)
        worst = max(abs(one - two) / two for one, two in zip(losses, expected, strict=True))
        if shows:
            print(f"{ranks} ranks along {axis!r}: losses within 1e-6 of one process: {worst < 1e-6}")
    difference = attend(mesh)
    tensor = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))
    same = save_and_load(models["shard"], tensor)
    if shows:
        print(f"attention over a sharded sequence within 1e-6: {difference < 1e-6}")
        print(f"checkpoint of 'shard' loaded along 'tensor': the same weights: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 steps in place of 50")
    steps = 5 if parser.parse_args().quick else 50
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        run(steps)
        dist.destroy_process_group()
    else:
        from clearhead.distributed.launch import run_ranks

        run_ranks(run, 2, steps, timeout=300)


if __name__ == "__main__":
    main()
