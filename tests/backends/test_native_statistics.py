"""Statistics of the CPU kernels, besides the tests of every backend: bitwise results, instruction sets, memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import clearhead as ch
from clearhead.ops import library as native_library
from tests.agreement import draw, needs_native
from tests.instruction_sets import use_set
from tests.problems import MASKS, RULES, tensors
from tests.statistics_agreement import check_statistics, everything

pytestmark = [needs_native, pytest.mark.covering(1)]

#: Calls that take different ways through the kernels: (batch, heads, kv_heads, q_len, k_len, head_dim).
WAYS = {
    "whole heads": (3, 4, 4, 130, 130, 16),
    "shared keys": (1, 3, 3, 400, 400, 16),
    "grouped heads": (1, 8, 2, 150, 150, 16),
    "split keys": (1, 4, 2, 3, 2100, 16),
    "keys where they lie": (16, 8, 4, 2, 300, 64),
    "a long row": (1, 1, 1, 7, 5000, 8),
}


def inputs_of(way: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    batch, heads, kv_heads, q_len, k_len, dim = WAYS[way]
    sizes = ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len))
    return tuple(draw(batch, h, t, dim, seed=s, dtype=dtype, grad=False) for s, (h, t) in enumerate(sizes))


def tensors_of(observation: ch.Observation) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(observation).items() if value is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("_threads_as_before")
def test_statistics_are_bitwise_equal_at_any_thread_count(way: str, causal: bool, dtype: torch.dtype) -> None:
    inputs = inputs_of(way, dtype)
    q_len, k_len = inputs[0].shape[2], inputs[1].shape[2]
    options = {"mask": ch.Causal() if causal else None, "query_offset": k_len - q_len}
    want = everything(inputs, top_k=9, heatmap=37)
    torch.set_num_threads(1)
    check_statistics("native", inputs, want, **options)
    alone = ch.observe_attention(*inputs, want=want, backend="native", **options)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        second = ch.observe_attention(*inputs, want=want, backend="native", **options)
        for name, right in tensors_of(alone).items():
            assert torch.equal(getattr(second, name), right), f"{name} at {threads} threads"


@pytest.mark.parametrize("name", native_library.isa_names())
@pytest.mark.parametrize(
    ("mask", "rule"), [("none", "none"), ("causal window", "cap, then dense bias"), ("dense", "sink")]
)
def test_every_instruction_set(name: str, mask: str, rule: str) -> None:
    use_set(name)
    inputs = tensors()
    check_statistics("native", inputs, everything(inputs, top_k=20), mask=MASKS[mask].mask, scores=RULES[rule].rules)


def test_statistics_without_gradient_do_not_require_one() -> None:
    inputs = tensors()
    observation = ch.observe_attention(*inputs, want=everything(inputs), backend="native")
    learned = {name for name, value in tensors_of(observation).items() if value.requires_grad}
    assert learned == {"output", "lse", "max_score", "entropy", "distance", "sink", "received"}


@pytest.mark.parametrize("want", [ch.Want(rows=[0]), ch.Want(lse=True, row_weights=torch.ones(1, 1, 2, 1))])
def test_auto_gives_rows_and_row_weights_a_gradient_when_needed(want: ch.Want) -> None:
    query, key, value = tensors()
    inputs = query[:, :, :1], key, value
    observation = ch.observe_attention(*inputs, want=want)
    assert all(each.requires_grad for each in tensors_of(observation).values())
    assert ch.explain_dispatch(*inputs, want=want).choice == "tiled"
    with torch.no_grad():
        assert ch.explain_dispatch(*inputs, want=want).choice == "native"


def test_learned_row_weights_choose_a_backend_with_their_gradient() -> None:
    inputs = tensors()
    want = ch.Want(row_weights=torch.ones(1, 1, 1, inputs[0].shape[2], requires_grad=True))
    assert ch.explain_dispatch(*inputs, want=want).choice == "tiled"
    with pytest.raises(ch.UnsupportedError, match="native: has no gradient for row_weights"):
        ch.observe_attention(*inputs, want=want, backend="native")


def test_the_largest_score_of_a_decoded_token_has_a_gradient() -> None:
    # Forward reads such keys in place, backward packs them: their largest scores differ by 1 ULP.
    query, key, value = (tensor.requires_grad_() for tensor in inputs_of("keys where they lie"))
    observation = ch.observe_attention(
        query, key, value, want=ch.Want(max_score=True), backend="native", query_offset=298
    )
    grad = torch.autograd.grad(observation.max_score.sum(), query)[0]
    groups = query.shape[1] // key.shape[1]
    scores = query.detach() @ key.detach().repeat_interleave(groups, dim=1).transpose(-2, -1)
    best = key.detach().repeat_interleave(groups, dim=1).gather(2, scores.argmax(dim=-1)[..., None].expand_as(query))
    torch.testing.assert_close(grad, best * query.shape[-1] ** -0.5)


LONG = """
import torch, clearhead as ch
torch.set_num_threads(2)
length = 32_768
query, key, value = (torch.randn(1, 12, length, 64) for _ in range(3))
want = ch.Want(lse=True, max_score=True, entropy=True, top_k=8, received=True, heatmap=64, sink=4, distance=True,
               row_weights=torch.rand(1, 1, 1, length), rows=[0, length - 1])
small = [tensor[:, :, :64] for tensor in (query, key, value)]
ch.observe_attention(*small, want=ch.Want(lse=True, top_k=8, heatmap=16), backend="native")
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
open("/proc/self/clear_refs", "w").write("5")
before = peak()
seen = ch.observe_attention(query, key, value, want=want, mask=ch.Causal(), backend="native")
print((peak() - before) // 1024, round(float(seen.received.double().sum())))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from Linux's /proc")
def test_all_statistics_of_32768_tokens_fit_400_mib() -> None:
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    mib, mass = map(int, done.stdout.split())
    assert mib <= 400
    assert mass == 12 * 32_768, "every row gives away a mass of 1"
