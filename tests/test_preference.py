"""Which of the CPU kernels and torch's attention "auto" takes where nobody knows which is faster."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import preference
from clearhead.locks import lock_for_process
from clearhead.nn import MultiHeadAttention
from tests.agreement import draw, needs_native
from tests.budget import within_budget
from tests.processes import told

BF16 = torch.bfloat16


@pytest.fixture
def torch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which torch's attention in bfloat16 has turned out to be twice as fast."""
    monkeypatch.setattr(preference, "unknown", lambda: frozenset({BF16}))
    monkeypatch.setattr(preference, "_PACES", {BF16: preference.Pace("bfloat16", 2.0, 1.0)})


def _choice(*inputs: Tensor, **options: object) -> str | None:
    return ch.explain_dispatch(*inputs, **options).choice  # type: ignore[arg-type]


def _large(dtype: torch.dtype = BF16) -> list[Tensor]:
    return [draw(1, 2, 100, 16, seed=seed, dtype=dtype, grad=False) for seed in (1, 2, 3)]


@needs_native
@pytest.mark.usefixtures("torch_ahead")
class TestWhereTorchLeads:
    @pytest.mark.parametrize("mask", [None, ch.Causal()], ids=repr)
    def test_large_plain_calls_are_torchs(self, mask: ch.Mask | None) -> None:
        inputs = _large()
        assert _choice(*inputs, mask=mask) == "sdpa"
        assert _choice(*inputs, mask=mask, backend="native") == "native"
        found = ch.attention(*inputs, mask=mask)
        assert torch.equal(found, ch.attention(*inputs, mask=mask, backend="sdpa"))
        exact = ch.attention(*(own.double() for own in inputs), mask=mask, backend="reference")
        within_budget("output", found, ch.attention(*inputs, mask=mask, backend="native"), exact, terms=100)

    def test_what_torch_would_do_worse_stays_with_the_kernels(self) -> None:
        inputs = _large()
        for options in (
            {"dropout": 0.1}, {"mask": ch.Window(9)}, {"scores": ch.SoftCap(3.0)}, {"scores": ch.Sink(0.0)},
            {"want": ch.Want(lse=True)}, {"mask": ch.Causal(), "query_offset": 3},
        ):  # fmt: skip
            assert _choice(*inputs, **options) == "native", options
        assert _choice(*_large(torch.float32)) == "native"
        assert _choice(inputs[0][:, :, :63], *inputs[1:]) == "native"
        assert _choice(inputs[0], *(own[:, :, :63] for own in inputs[1:])) == "native"
        assert _choice(inputs[0].requires_grad_(), *inputs[1:]) == "native"

    def test_with_gradients_in_float32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preference, "unknown", lambda: frozenset({torch.float32}))
        monkeypatch.setattr(preference, "_PACES", {torch.float32: preference.Pace("float32", 2.0, 1.0)})
        inputs = [own.requires_grad_() for own in _large(torch.float32)]
        assert _choice(*inputs) == "sdpa"
        doubles = [own.detach().double().requires_grad_() for own in inputs]
        found, right = (
            torch.autograd.grad(ch.attention(*own, backend=backend).square().sum(), own)
            for own, backend in ((inputs, "auto"), (doubles, "reference"))
        )
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)

    def test_what_the_kernels_cannot_see_is_not_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Numbers that are not there: nothing is timed while a tracer or a transform looks on."""
        monkeypatch.setattr(preference, "_PACES", {})
        monkeypatch.setattr(preference, "_measure", lambda dtype: pytest.fail("it was measured"))
        inputs = _large()
        with torch.no_grad():
            torch.func.vmap(lambda query: ch.attention(query, *inputs[1:]))(torch.stack([inputs[0]] * 2))
        hollow = [own.to("meta") for own in inputs]
        assert ch.attention(*hollow).device.type == "meta"

    def test_a_module_agrees_with_itself(self) -> None:
        """Its one step is the kernels'; where torch leads the parts are taken one by one."""
        torch.manual_seed(0)
        module = MultiHeadAttention(32, 2).to(BF16).eval()
        tokens = draw(2, 100, 32, dtype=BF16, grad=False)
        with torch.no_grad():
            found = module(tokens)
            preference._PACES[BF16] = preference.Pace("bfloat16", 1.0, 2.0)
            other = module(tokens)
        torch.testing.assert_close(found.float(), other.float(), rtol=0.05, atol=0.02)


def test_the_margin() -> None:
    assert preference.Pace("bfloat16", 1.2, 1.0).torch_leads
    assert not preference.Pace("bfloat16", 1.05, 1.0).torch_leads
    assert not preference.Pace("bfloat16", 1.0, 2.0).torch_leads


@needs_native
def test_measured_once_and_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference, "_PACES", {})
    before = torch.get_rng_state()
    found = preference.measured(torch.float32)
    assert 0.0 < found.native < 1.0
    assert 0.0 < found.sdpa < 1.0
    assert preference.measured(torch.float32) is found
    assert torch.equal(torch.get_rng_state(), before)


@needs_native
def test_on_the_baseline_set_the_faster_one_is_taken() -> None:
    """The set that any processor has, as if it were the only one: whichever is faster here, the choice says so."""
    code = """if True:
        import json, os
        from clearhead.backends import native_library
        assert native_library.isa_name() == "baseline"
        del os.environ["CLEARHEAD_ISA"]
        import torch, clearhead as ch
        from clearhead import doctor, preference
        query = torch.randn(1, 8, 256, 64)
        choice = ch.explain_dispatch(query, query, query).choice
        paces = [(pace.dtype, pace.torch_leads) for pace in doctor.diagnose().paces]
        print(json.dumps([choice, preference.measured(torch.float32).torch_leads, paces]))
    """
    done = told(code, environment={"CLEARHEAD_ISA": "baseline", "CLEARHEAD_NATIVE": ""})
    assert done.returncode == 0, done.stderr
    choice, leads, paces = json.loads(done.stdout)
    assert choice == ("sdpa" if leads else "native")
    assert [dtype for dtype, _ in paces] == ["bfloat16", "float16", "float32"]
    assert ["float32", leads] in paces


@needs_native
def test_who_names_a_set_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_ISA", "baseline")
    assert preference.unknown.__wrapped__() == frozenset()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_finds_the_lock_open() -> None:
    """The parent's other thread holds it while the child is made, and lets go a moment later."""
    lock, held, free = lock_for_process(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            free.wait(0.2)

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=5) else 1)
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
