"""Simulated times against times that can be computed by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import ShapeError, UnsupportedError, distributed
from clearhead.distributed import AttentionSizes, Link, Machine, Plan, ShardLayout, plan_attention, simulate
from clearhead.distributed.costs import GatherCosts, HeadsCosts, RankWork, RingCosts
from clearhead.distributed.launch import RankError, run_ranks
from clearhead.distributed.layout import LAYOUTS
from clearhead.distributed.simulation import METHODS, Phase, finished
from clearhead.masks import Mask
from clearhead.ops.kinds import QUERY_BLOCK

#: One pair of one head takes a second forward and 2.5 s backward; a key and its value have 8 bytes, a query has 4.
SIZES = AttentionSizes(heads=1, head_dim=1, dtype=torch.float32)
FREE = Link(1e30)


def _machine(**options: Any) -> Machine:
    return Machine(**{"flops": 4.0, "link": FREE, **options})


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_computes_all_pairs_and_sends_nothing(method: Any) -> None:
    done = simulate(plan_attention(ch.Causal(), 16, ranks=1), SIZES, _machine(link=Link(1.0, 5.0)), method=method)
    # Gradients of queries and of keys apart need seven products in place of five.
    assert done.forward.seconds == 136.0
    assert done.backward.seconds == pytest.approx(340.0 * (1.4 if method == "gather" else 1.0))
    assert done.idle == 0.0
    assert done.forward.sent.tolist() == done.backward.sent.tolist() == [0.0]


@pytest.mark.parametrize("method", METHODS)
def test_time_grows_with_batch_heads_and_channels(method: Any) -> None:
    sizes = AttentionSizes(batch=2, heads=6, kv_heads=3, head_dim=5, dtype=torch.float32)
    plan = plan_attention(None, 16, ranks=2)
    small, large = (simulate(plan, one, _machine(), method="ring") for one in (SIZES, sizes))
    assert large.seconds == pytest.approx(60 * small.seconds)


def test_mask_of_a_batch_counts_each_entry_once() -> None:
    mask = ch.Padding([16, 8])
    plan = plan_attention(mask, 16, ranks=2)
    sizes = AttentionSizes(batch=2, heads=1, head_dim=1, dtype=torch.float32)
    assert simulate(plan, sizes, _machine()).forward.compute.sum() == mask.dense(16, 16).expand(2, 1, 16, 16).sum()


def test_gather_waits_for_all_messages_before_it_computes() -> None:
    mine, length = QUERY_BLOCK, 4 * QUERY_BLOCK
    done = simulate(plan_attention(None, length, ranks=4), SIZES, _machine(link=Link(0.1, 0.5)), method="gather")
    message, pairs = 3 * (2 * 0.5 + mine * 8 / 0.1), mine * length
    assert done.forward.seconds == pytest.approx(message + pairs)
    assert done.forward.idle == pytest.approx(message / (message + pairs))
    assert done.forward.sent.tolist() == [3 * mine * 8] * 4
    assert done.forward.critical_compute == pytest.approx(pairs)
    # Queries, gradients and three numbers of each row follow the keys, and arrive after gradients of queries are done.
    rows = 3 * (3 * 0.5 + mine * (8 + 12) / 0.1)
    assert done.backward.seconds == pytest.approx(message + rows + 2.0 * pairs)
    assert rows > 1.5 * pairs


def test_gather_computes_chunks_extended_to_whole_blocks() -> None:
    plan = plan_attention(None, 3 * QUERY_BLOCK, ranks=2)
    done = simulate(plan, SIZES, _machine(), method="gather")
    # Each of two ranks has one and a half blocks, and computes two.
    pairs = 3 * QUERY_BLOCK * 2 * QUERY_BLOCK
    assert done.forward.compute.tolist() == [pairs, pairs]
    mine = 1.5 * QUERY_BLOCK * 3 * QUERY_BLOCK
    assert done.backward.compute.tolist() == pytest.approx([1.5 * pairs + 2.0 * mine] * 2)


@pytest.mark.parametrize(("method", "calls"), [("gather", 2), ("heads", 1), ("ring", 2)])
def test_each_kernel_call_takes_time_for_its_queries_and_keys(method: Any, calls: int) -> None:
    sizes = AttentionSizes(heads=4, kv_heads=2, head_dim=1, dtype=torch.float32)
    plan = plan_attention(None, 2 * 4 * QUERY_BLOCK, ranks=2, layout="zigzag")
    plain, with_rows, with_keys = (
        simulate(plan, sizes, _machine(**options), method=method).forward.compute
        for options in ({}, {"row": 1.0}, {"key": 1.0})
    )
    length = plan.layout.length
    # Two chunks of queries with all keys; half of the heads with all tokens; two chunks with four of keys.
    rows = {"gather": 4 * length / 2, "heads": 2 * length, "ring": 4 * length / 2 * 4}[method]
    keys = {"gather": 2 * length * calls, "heads": length * calls, "ring": 2 * length * calls}[method]
    assert (with_rows - plain).tolist() == pytest.approx([rows, rows])
    assert (with_keys - plain).tolist() == pytest.approx([keys, keys])


def test_heads_exchanges_twice() -> None:
    sizes = AttentionSizes(heads=4, kv_heads=2, head_dim=1, dtype=torch.float32)
    done = simulate(plan_attention(None, 16, ranks=2), sizes, _machine(link=Link(2.0, 0.5)), method="heads")
    # Each rank keeps half of its 8 tokens' 16 + 16 bytes of inputs and 16 bytes of outputs.
    messages = 3 * 0.5 + 8 * 16 / 2 + 0.5 + 8 * 8 / 2
    assert done.forward.seconds == pytest.approx(messages + 16 * 16 * 2)
    assert done.backward.seconds == pytest.approx(messages + 2.5 * 16 * 16 * 2)
    assert done.forward.sent.tolist() == [192.0, 192.0]


def test_heads_that_do_not_divide_leave_ranks_idle() -> None:
    sizes = AttentionSizes(heads=3, head_dim=1, dtype=torch.float32)
    done = simulate(plan_attention(None, 16, ranks=2), sizes, _machine(), method="heads")
    assert done.forward.seconds == pytest.approx(2 * 256)
    assert done.forward.idle == pytest.approx(0.25)


def test_ring_hides_messages_that_are_shorter_than_computing() -> None:
    done = simulate(plan_attention(None, 6144, ranks=4), SIZES, _machine(link=Link(4.0, 1.0)))
    assert done.forward.seconds == pytest.approx(4 * 1536**2)
    assert done.forward.idle == 0.0
    # Backward waits for the gradients that each of nine pieces returns.
    assert done.backward.seconds == pytest.approx(2.5 * 4 * 1536**2 + 9 * (2 + 512 * 8 / 4))


def test_ring_waits_for_messages_that_are_longer_than_computing() -> None:
    piece = 1536**2 / 3
    done = simulate(plan_attention(None, 6144, ranks=4), SIZES, _machine(link=Link(512 * 8, 4 * piece)))
    assert done.forward.seconds == pytest.approx(9 * (8 * piece + 1) + piece)
    assert done.forward.critical_compute == pytest.approx(piece)


def test_ring_without_overlap_adds_messages_to_computing() -> None:
    done = simulate(plan_attention(None, 6144, ranks=4), SIZES, _machine(link=Link(0.5, 1.0), overlap=0.0))
    compute, messages = 4 * 1536**2, 9 * (2 + 512 * 8 / 0.5)
    assert done.forward.seconds == pytest.approx(compute + messages)
    assert done.forward.idle == pytest.approx(messages / (compute + messages))


def test_ring_of_few_keys_sends_them_at_once() -> None:
    done = simulate(plan_attention(None, 16, ranks=4), SIZES, _machine(link=Link(4.0, 1.0)))
    # The first message passes while the rank's own keys are computed.
    assert done.forward.seconds == pytest.approx(4 * 16 + 2 * 10)
    assert done.forward.sent.tolist() == [3 * 32] * 4


def test_ring_adds_up_partial_results_at_the_speed_of_memory() -> None:
    plan = plan_attention(None, 6144, ranks=4)
    free, slow = (simulate(plan, SIZES, _machine(memory=memory)) for memory in (None, 4.0))
    # A second for each float32. Outputs are filled, copied once and merged with sums; nine pieces of keys are cut.
    merged = 1536 + 2 * 1536 + 9 * (5 + 22) * 1536
    assert slow.forward.seconds == pytest.approx(free.forward.seconds + merged + 9 * 512 * 4)
    # Three sums are filled, rows are looked at, ten gradients of queries and the rank's own of keys are added to them.
    summed = 3 * 1536 + 1536 + 10 * 3 * 1536 + 3 * 2 * 1536
    assert slow.backward.seconds == pytest.approx(free.backward.seconds + summed + 9 * 512 * (4 + 6))


def test_ring_sends_what_the_plan_says() -> None:
    plan = plan_attention(ch.Causal() & ch.Window(3), 64, ranks=4)
    done = simulate(plan, SIZES, _machine())
    assert done.forward.sent.tolist() == [24.0, 24.0, 24.0, 0.0]
    assert done.backward.sent.tolist() == [24.0, 48.0, 48.0, 24.0]


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_idle_share_is_that_of_the_balance(method: Any) -> None:
    for layout in ("contiguous", "zigzag"):
        plan = plan_attention(ch.Causal(), 8 * QUERY_BLOCK, ranks=4, layout=layout)
        done = simulate(plan, SIZES, _machine(), method=method)
        assert done.forward.idle == pytest.approx(1 - 1 / plan.balance)
        assert done.forward.last_rank == (3 if layout == "contiguous" else 0)
        assert done.forward.critical_compute == pytest.approx(done.forward.seconds)


def ends(start: Tensor, seconds: Tensor, cores: int) -> list[float]:
    (end,) = finished(start, [Phase(seconds)], cores)
    return end.tolist()


def test_shared_processors_work_at_equal_shares() -> None:
    seconds = torch.tensor([1.0, 3.0, 5.0, 7.0], dtype=torch.float64)
    start = torch.zeros(4, dtype=torch.float64)
    assert ends(start, seconds, 4) == [1.0, 3.0, 5.0, 7.0]
    assert ends(start, seconds, 2) == pytest.approx([2.0, 5.0, 7.0, 9.0])
    assert ends(start, seconds, 1) == pytest.approx([4.0, 10.0, 14.0, 16.0])
    late = torch.tensor([0.0, 0.0, 4.0], dtype=torch.float64)
    assert ends(late, seconds[:3], 1) == pytest.approx([2.0, 4.0, 9.0])
    nothing = torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)
    assert ends(late, nothing, 1) == pytest.approx([0.0, 2.0, 4.0])


def test_ranks_in_different_phases_share_processors() -> None:
    first, second, arrival = (torch.tensor(each, dtype=torch.float64) for each in ([1.0, 3.0], [3.0, 1.0], [5.0, 0.0]))
    at_once, late = ([Phase(first), one] for one in (Phase(second), Phase(second, 0.5, arrival)))

    def ends_of(phases: list[Phase], cores: int) -> list[list[float]]:
        return [end.tolist() for end in finished(torch.zeros_like(first), phases, cores)]

    assert ends_of(at_once, 2) == [[1.0, 3.0], [4.0, 4.0]]
    assert ends_of(at_once, 1) == [[2.0, 6.0], [8.0, 8.0]]
    assert ends_of(late, 2) == [[1.0, 3.0], [8.0, 4.5]]
    assert ends_of(late, 1) == [[2.0, 4.0], [8.5, 6.0]]


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_processors_compute_no_more_than_they_have_time(method: Any, layout: Any) -> None:
    plan = plan_attention(ch.Causal(), 8 * QUERY_BLOCK, ranks=4, layout=layout)
    machine = replace(_machine(), cores=2)
    done = simulate(plan, SIZES, machine, method=method)
    for one in (done.forward, done.backward):
        assert float(one.compute.sum()) <= 2 * one.seconds * (1 + 1e-9)


def test_two_processors_for_four_ranks_take_twice_as_long() -> None:
    plan = plan_attention(None, 64, ranks=4)
    for method in ("gather", "ring"):
        alone, shared = (simulate(plan, SIZES, _machine(cores=cores), method=method) for cores in (None, 2))  # type: ignore[arg-type]
        assert shared.seconds == pytest.approx(2 * alone.seconds)
        assert shared.idle == pytest.approx(0.0)


def test_links_between_nodes_carry_what_leaves_a_node() -> None:
    machine = _machine(link=Link(1e30), outer=Link(2.0, 0.5), ranks_per_node=2)
    mine = QUERY_BLOCK
    plan = plan_attention(None, 4 * mine, ranks=4)
    message, pairs = 2 * 0.5 + mine * 8 / 2, 4 * mine**2
    gathered = simulate(plan, SIZES, machine, method="gather")
    assert gathered.forward.seconds == pytest.approx(2 * message + pairs)
    far = simulate(plan, SIZES, _machine(link=Link(2.0, 0.5)), method="gather")
    assert far.forward.seconds == pytest.approx(3 * message + pairs)


def test_rank_without_tokens_computes_nothing() -> None:
    mine = QUERY_BLOCK
    layout = ShardLayout(((range(mine),), (), (range(mine, 2 * mine),)))
    plan = plan_attention(None, 2 * mine, ranks=3, layout=layout)
    gather, ring = (simulate(plan, SIZES, _machine(), method=method) for method in ("gather", "ring"))  # type: ignore[arg-type]
    assert gather.forward.compute.tolist() == ring.forward.compute.tolist() == [2.0 * mine**2, 0.0, 2.0 * mine**2]
    assert gather.forward.idle == pytest.approx(1 / 3)


def _sent(call: tuple[str, Any, Mask, AttentionSizes, int]) -> tuple[int, int]:
    """Bytes that this rank sends, forward and backward."""
    method, layout, mask, sizes, length = call
    torch.manual_seed(0)
    heads = [sizes.heads, sizes.kv_heads or sizes.heads, sizes.kv_heads or sizes.heads]
    whole = [torch.randn(sizes.batch, count, length, sizes.head_dim, dtype=sizes.dtype) for count in heads]
    parts = [distributed.shard(tensor, layout=layout).requires_grad_() for tensor in whole]
    with distributed.traffic() as forward:
        output = distributed.attention(*parts, mask=mask, layout=layout, method=method)  # type: ignore[arg-type]
    with distributed.traffic() as backward:
        torch.autograd.grad(output.sum(), parts)
    return forward.bytes, backward.bytes


@pytest.mark.covering(0)
@pytest.mark.parametrize("method", METHODS)
def test_simulated_bytes_are_those_that_attention_sends(method: Any) -> None:
    length, ranks = 640, 2
    sizes = AttentionSizes(batch=2, heads=4, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    for layout, mask in (("contiguous", ch.Causal() & ch.Window(40)), ("zigzag", ch.Causal())):
        plan = plan_attention(mask, length, ranks=ranks, layout=layout)  # type: ignore[arg-type]
        done = simulate(plan, sizes, _machine(), method=method)
        sent = run_ranks(_sent, ranks, (method, layout, mask, sizes, length))
        assert [forward for forward, _ in sent] == done.forward.sent.tolist()
        assert [backward for _, backward in sent] == done.backward.sent.tolist()


#: How often an operator reads and writes the largest of its tensors.
_PASSES = {
    **{"aten::copy_": 2, "aten::fill_": 1, "aten::add_": 3, "aten::mul_": 2, "aten::addcmul_": 3, "aten::sum": 1},
    **{"aten::masked_fill_": 2, "aten::exp": 2, "aten::sub": 3, "aten::logaddexp": 3, "aten::eq": 1.25},
}


def _operator_bytes(run: Callable[[], Any]) -> tuple[Any, float]:
    """A call's result, and the bytes of float32 that torch's operators read and write in it."""
    joined, cat = [0], torch.cat

    def counted(tensors: Any, dim: int = 0) -> Tensor:
        result: Tensor = cat(tensors, dim=dim)
        joined[0] += 2 * result.nbytes
        return result

    torch.cat = counted  # type: ignore[assignment]
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            result = run()
    finally:
        torch.cat = cat
    total = 0.0
    for event in profile.events():
        shapes = [shape for shape in event.input_shapes if all(isinstance(size, int) for size in shape)]
        # Writing a number calls both copy_ and fill_.
        is_number = event.name == "aten::copy_" and not shapes[1]
        if event.name in _PASSES and not is_number:
            total += 4 * _PASSES[event.name] * max(math.prod(shape) if shape else 0 for shape in shapes)
    return result, total + joined[0]


def _moved(cases: list[tuple[str, Any, Mask | None]], length: int) -> list[tuple[float, float]]:
    """Bytes that torch's operators move on this rank in each case, forward and backward."""
    moved = []
    for method, layout, mask in cases:
        parts = [distributed.shard(torch.randn(1, 4, length, 32), layout=layout) for _ in range(4)]
        leaves = [part.requires_grad_() for part in parts[:3]]
        run = partial(distributed.attention, *leaves, mask=mask, layout=layout, method=method)  # type: ignore[arg-type]
        run()
        output, forward = _operator_bytes(run)
        _, backward = _operator_bytes(partial(torch.autograd.grad, output, leaves, parts[3]))
        moved.append((forward, backward))
    return moved


def _counted(method: str, plan: Plan, sizes: AttentionSizes, backward: bool) -> Tensor:
    """Bytes that the model counts for each rank."""
    work: list[RankWork] = []
    if method == "gather":
        gather = GatherCosts(plan, sizes)
        work += gather.backward() if backward else gather.forward()
    elif method == "heads":
        work += HeadsCosts(plan, sizes).work(backward)
    else:
        ring = RingCosts(plan, sizes)
        work += ring.ends(backward)
        for step in range(plan.ranks):
            done = ring.step(step, backward)
            for piece in (0, 1, 1) if step else (0,):
                work += [done.work[piece], *([done.cut[piece]] if step else [])]
                work += [done.returned[piece]] if step and backward else []
    return sum((one.moved.expand(plan.ranks) for one in work), torch.zeros(plan.ranks, dtype=torch.float64))


@pytest.mark.slow
def test_counted_copies_are_those_that_operators_make() -> None:
    length, ranks, sizes = 2304, 2, AttentionSizes(heads=4, head_dim=32, dtype=torch.float32)
    masks = {"contiguous": ch.Causal() & ch.Window(143), "zigzag": ch.Causal()}
    cases: list[Any] = [(method, layout, mask) for method in METHODS for layout, mask in masks.items()]
    cases.append(("gather", "zigzag", masks["contiguous"]))
    by_rank = run_ranks(_moved, ranks, cases, length, timeout=120)
    for place, (method, layout, mask) in enumerate(cases):
        plan = plan_attention(mask, length, ranks=ranks, layout=layout)
        for is_backward in (False, True):
            counted = _counted(method, plan, sizes, is_backward)
            for rank in range(ranks):
                moved = by_rank[rank][place][is_backward]
                assert counted[rank] == pytest.approx(moved, rel=0.15), (method, layout, is_backward, rank)


def _figures(sizes: AttentionSizes, length: int, cores: Any = None) -> Machine:
    return distributed.measure_machine(sizes, length, mask=ch.Causal(), cores=cores, repeats=1)


@pytest.mark.slow
def test_measured_machine_is_the_same_on_all_ranks() -> None:
    machines = run_ranks(_figures, 2, AttentionSizes(heads=2, head_dim=8, dtype=torch.float32), 128, 2)
    assert machines[0] == machines[1]
    machine = machines[0]
    figures = (machine.flops, machine.backward_flops, machine.split_flops, machine.memory, machine.fresh)
    assert all(figure and figure > 0 for figure in (*figures, machine.start, machine.call, machine.backward_call))
    assert machine.cores == 2
    assert machine.link.latency > 0


@pytest.mark.slow
def test_machine_is_not_measured_with_wrong_arguments() -> None:
    sizes = AttentionSizes(heads=2, head_dim=8, dtype=torch.float32)
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((sizes, 0), "length"),
        ((sizes, 16, 0), "cores"),
        ((None, 16), "sizes"),
    ]
    for arguments, name in wrong:
        with pytest.raises(RankError, match=f"measure_machine: {name} must") as caught:
            run_ranks(_figures, 2, *arguments)
        assert caught.value.raised


def test_empty_call_takes_no_time() -> None:
    done = simulate(plan_attention(ch.Prefix(0), 16, ranks=2), SIZES, _machine(link=Link(1.0, 1.0)))
    assert (done.seconds, done.idle) == (0.0, 0.0)
    assert "0 us" in str(done)


def test_simulation_prints_both_passes() -> None:
    text = str(simulate(plan_attention(ch.Causal(), 4096, ranks=4), SIZES, _machine(flops=1e9)))
    assert text.splitlines()[0].startswith("ring   forward")
    assert "critical path to rank 3: 100 % computing" in text


def test_wrong_arguments_are_refused() -> None:
    plan = plan_attention(None, 16, ranks=2)
    with pytest.raises(UnsupportedError, match="method must be one of gather, ring, heads"):
        simulate(plan, SIZES, _machine(), method="auto")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="be one for 1 key heads on 2 ranks"):
        simulate(plan, SIZES, _machine(), method="heads")
    with pytest.raises(UnsupportedError, match="plan must be a Plan; got None"):
        simulate(None, SIZES, _machine())  # type: ignore[arg-type]
    below = ({"flops": 0.0}, {"call": -1.0}, {"start": -1.0}, {"cores": 0}, {"ranks_per_node": 0.5})
    for options in (*below, {"overlap": 1.5}):
        with pytest.raises(ShapeError, match=f"Machine: {next(iter(options))} must be"):
            _machine(**options)
    with pytest.raises(ShapeError, match="Link: bandwidth must be a number above 0"):
        Link(float("nan"))
    with pytest.raises(ShapeError, match="AttentionSizes: kv_heads must be"):
        AttentionSizes(heads=4, kv_heads=0, head_dim=8)


@pytest.mark.slow
def test_measured_times_are_printed_beside_simulated_ones() -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "distributed_attention.py"
    command = [sys.executable, str(program), "--simulate", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(LAYOUTS) and "%" in line]
    # Ranks, masks, layouts and passes.
    assert len(rows) == 2 * 3 * 2 * 2 * len(METHODS)
    assert all(sent == simulated for *_, sent, simulated in rows)


@pytest.mark.slow
def test_ring_sends_needed_keys_and_keeps_one_block_of_others() -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "distributed_attention.py"
    command = [sys.executable, str(program), "--exchange"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    lines = [line.split() for line in done.stdout.splitlines() if "contiguous" in line or "zigzag" in line]
    assert len(lines) == 6
    for *_, sent, needed, _, _, alive, _, limit in lines:
        assert float(sent) <= 1.05 * float(needed)
        # A part of 1,024 tokens is cut into pieces of 342 tokens or fewer.
        assert float(alive) <= float(limit) * 1.002
    window = [float(line[-7]) / float(line[-5]) for line in lines if line[0] == "window"]
    assert len(window) == 2
    assert max(window) < 0.15
