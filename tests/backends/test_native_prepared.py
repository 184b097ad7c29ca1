"""Calls made again on tensors that lie elsewhere."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from clearhead.backends import native_prepared
from clearhead.backends.native_append import Append
from clearhead.backends.native_header import Call, Description, ProjectionDescription, Rule, TensorView
from clearhead.backends.native_prepared import Prepared, Stretch, Written, _pointers
from clearhead.backends.native_projection import Product
from tests.agreement import needs_native


class TestAddresses:
    def test_of_a_structure(self) -> None:
        assert _pointers(TensorView) == (0,)
        assert _pointers(Call) == (1,)

    @pytest.mark.parametrize("kind", [Description, ProjectionDescription], ids=lambda kind: kind.__name__)
    def test_every_pointer_is_found(self, kind: type[ctypes.Structure]) -> None:
        """Words that are set by name are those that are listed."""
        one = kind()
        words = (ctypes.c_uint64 * (ctypes.sizeof(one) // 8)).from_buffer(one)
        for name, own, *_ in kind._fields_:
            if own is ctypes.c_void_p:
                setattr(one, name, 1)
            elif own is TensorView:
                getattr(one, name).data = 1
        found = {place for place, word in enumerate(words) if word}
        assert found <= set(_pointers(kind))

    def test_those_in_arrays_of_structures(self) -> None:
        first, second, *_ = _pointers(Rule * 3)
        assert first < second < ctypes.sizeof(Rule) // 8
        assert len(_pointers(Rule * 3)) == 3 * len(_pointers(Rule))


def product(left: Tensor, right: Tensor) -> tuple[Product, list[Tensor]]:
    made = Product([(left, right)])
    return made, [left, right]


@needs_native
class TestPrepared:
    def test_other_tensors(self) -> None:
        made, reads = product(torch.randn(5, 7), torch.randn(7, 3))
        prepared = Prepared([made.call], reads, [made.output])
        assert prepared.complete
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            left, right = torch.randn(5, 7, generator=generator), torch.randn(7, 3, generator=generator)
            (output,) = prepared.rooms()
            assert prepared.run([left, right, output]) == (0, 1)
            assert torch.equal(output, Product([(left, right)]).run())

    def test_a_part_of_a_tensor(self) -> None:
        """An address within a tensor keeps its distance from the start."""
        both, right = torch.randn(10, 7), torch.randn(7, 3)
        made = Product([(both[5:], right)])
        prepared = Prepared([made.call], [both, right], [made.output])
        other = torch.randn(10, 7)
        output = torch.empty(5, 3)
        prepared.run([other, right, output])
        assert torch.equal(output, Product([(other[5:], right)]).run())

    def test_an_address_that_nobody_owns(self) -> None:
        made, (left, right) = product(torch.randn(5, 7), torch.randn(7, 3))
        assert not Prepared([made.call], [left], [made.output]).complete
        assert Prepared([made.call], [left], [made.output], stays=[right]).complete

    @pytest.mark.parametrize("most", [0, 5 * 9 * 4 - 1, 5 * 9 * 4])
    def test_what_is_not_read_later_is_written_again_where_it_is_small(
        self, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(native_prepared, "_MOST_KEPT", most)
        stretch, weights, found = Stretch(may_recur=True), [torch.randn(7, 9), torch.randn(9, 3)], list[list[Tensor]]()
        for _ in range(5):
            left = torch.randn(5, 7)

            def write_down(left: Tensor = left) -> Written:
                first = Product([(left, weights[0])])
                second = Product([(first.output, weights[1])])
                return Written(
                    [first.call, second.call], [first.output, second.output], [], (first, second), inner=1
                )  # fmt: skip

            writes, code, _ = stretch.run([left, *weights], write_down)
            assert code == 0
            first = Product([(left, weights[0])]).run()
            assert torch.equal(writes[1], Product([(first, weights[1])]).run())
            found.append(writes)
        kept = len({inner.data_ptr() for inner, _ in found[1:]}) == 1
        assert kept == (most == 5 * 9 * 4)
        assert len({output.data_ptr() for _, output in found}) == 5

    def test_fields_that_count_from_a_position(self) -> None:
        target = torch.zeros(2, 3, 9, 4)
        stretch, right = Stretch(may_recur=True), torch.zeros(2, 3, 9, 4)
        for place in (0, 2, 5, 4, 8, 1):
            source = torch.randn(2, 3, 1, 4)

            def write_down(source: Tensor = source) -> Written:
                # As any call but the first may find it.
                own = Append(source, target, 0)
                return Written([own.call], [], [], own, [own.counter])

            assert stretch.run([source, target], write_down, (), place)[1] == 0
            right[:, :, place] = source[:, :, 0]
            assert torch.equal(target, right)

    def test_a_stretch_keeps_what_comes_again(self) -> None:
        stretch, written = Stretch(may_recur=True), list[Tensor]()
        for count in range(4):
            left, right = torch.full((5, 7), float(count)), torch.ones(7, 3)

            def write_down(left: Tensor = left, right: Tensor = right) -> Written:
                made, _ = product(left, right)
                written.append(made.output)
                return Written([made.call], [made.output], [], made)

            (output,), code, done = stretch.run([left, right], write_down)
            assert (code, done) == (0, 1)
            assert bool((output == 7.0 * count).all())
        assert len(written) == 2

    def test_a_stretch_keeps_them_by_how_tensors_lie(self) -> None:
        """Rows further apart, in turn, broadcast: what was written down for others would read somewhere else."""
        stretch, written = Stretch(may_recur=True), list[Tensor]()
        generator = torch.Generator().manual_seed(0)
        for count in range(12):
            both = torch.randn(5, 14, generator=generator)
            left = (both[:, :7], both[:, 7:].contiguous(), both[:1, :7].expand(5, 7))[count % 3]
            right = torch.randn(7, 3, generator=generator)

            def write_down(left: Tensor = left, right: Tensor = right) -> Written:
                made, _ = product(left, right)
                written.append(made.output)
                return Written([made.call], [made.output], [], made)

            (output,), code, done = stretch.run([left, right], write_down)
            assert (code, done) == (0, 1)
            assert torch.equal(output, Product([(left, right)]).run())
        assert len(written) == 6

    def test_ways_to_lie_are_bounded(self) -> None:
        stretch = Stretch(may_recur=True)
        for count in range(3 * native_prepared._MOST_STRIDES):
            left, right = torch.ones(5, 7 + count)[:, :7], torch.ones(7, 3)
            made, _ = product(left, right)
            stretch.run([left, right], lambda made=made: Written([made.call], [made.output], [], made))  # type: ignore[misc]
        assert len(stretch._waiting.steps) == native_prepared._MOST_STRIDES
