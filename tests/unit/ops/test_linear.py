"""Forms keep the weights exactly, move columns exactly, and cut rows into the calls the plan allows.

Which form has the bits of one-row calls is the machine's business: ``tests/unit/test_probe.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.errors import OptionError
from draftproof.ops.linear import (
    SPACINGS,
    LinearSpec,
    PackedLinear,
    PlainLinear,
    RowLinear,
    build_form,
    candidate_forms,
    gather_columns,
    has_packed,
    reference,
    spread_columns,
)

CPU = torch.device("cpu")
SIZES = [(64, (64,)), (1, (1,)), (77, (3, 5)), (513, (7, 2, 9)), (1100, (33,)), (512, (16, 16))]
FORMS = ["plain", "packed", "spaced:256", "spaced:512", "spaced:1024", "spaced:7", "spaced:64"]


def needs(form: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Not every processor has every form in every dtype."""
    if form != "plain" and not has_packed(CPU, dtype):
        pytest.skip(f"no prepacked linear for {dtype} here")


def draw(*size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(num_in: int, parts: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [draw(n, num_in, dtype=dtype, seed=i) for i, n in enumerate(parts)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_in", "parts"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_form_gives_the_weights_back(
    form: str, num_in: int, parts: tuple[int, ...], dtype: torch.dtype
) -> None:
    needs(form, dtype)
    given = weights(num_in, parts, dtype)
    linear = build_form(form, given)
    assert linear.form == form
    back = linear.dense_parts()
    assert [w.shape for w in back] == [w.shape for w in given]
    assert all(torch.equal(a, b) for a, b in zip(back, given, strict=True))
    linear(draw(5, num_in, dtype=dtype))
    assert all(torch.equal(a, b) for a, b in zip(linear.dense_parts(), given, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_in", "parts"), SIZES)
def test_every_form_multiplies(form: str, num_in: int, parts: tuple[int, ...]) -> None:
    """Small integers, whose sums are exact in any order; more rows, then fewer, in one layer."""
    needs(form)
    generator = torch.Generator().manual_seed(3)
    given = [torch.randint(-1, 2, (n, num_in), generator=generator).bfloat16() for n in parts]
    linear = build_form(form, given)
    for num_rows in (1, 3, 20, 2, 1):
        x_TK = torch.randint(-1, 2, (num_rows, num_in), generator=generator).bfloat16()
        exact = x_TK.double() @ torch.cat(given).double().T
        got = linear(x_TK)
        assert got.shape == exact.shape
        assert torch.equal(got, exact.bfloat16())


def test_gaps_stay_zero_between_calls() -> None:
    """A row of infinities leaves nothing that the next row could meet."""
    needs("spaced:4", torch.float32)
    linear = build_form("spaced:4", [torch.ones(2, 10, dtype=torch.float32)])
    assert linear(torch.full((9, 10), torch.inf)).tolist() == [[torch.inf] * 2] * 9
    assert linear(torch.ones(3, 10)).tolist() == [[10.0, 10.0]] * 3


@pytest.mark.parametrize("num_in", [1, 3, 4, 5, 8, 9, 12, 17])
@pytest.mark.parametrize("spacing", [1, 4, 20])
def test_columns_are_spread_and_gathered(num_in: int, spacing: int) -> None:
    given = draw(3, num_in, dtype=torch.float32)
    spread = spread_columns(given, spacing)
    expected: list[Tensor] = []
    for start in range(0, num_in, spacing):
        if expected:
            expected.append(torch.zeros(3, spacing))
        expected.append(given[:, start : start + spacing])
    assert torch.equal(spread, torch.cat(expected, 1))
    assert torch.equal(gather_columns(spread, num_in, spacing), given)


def test_reference_is_one_call_a_part_and_row() -> None:
    given, x_TK = weights(40, (3, 4)), draw(3, 40, seed=9)
    want = [torch.cat([F.linear(x_TK[t][None], w) for w in given], 1) for t in range(3)]
    assert torch.equal(reference(x_TK, given), torch.cat(want))


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown linear form 'dense'; known: plain, packed, spaced:N"):
        build_form("dense", weights(4, (2,)))


def test_forms_offered() -> None:
    needs("packed")

    def offered(num_in: int, dtype: torch.dtype, device: str = "cpu") -> tuple[str, ...]:
        spec = LinearSpec(name="down", num_in=num_in, parts=(8,))
        return candidate_forms(spec, torch.device(device), dtype)

    assert offered(64, torch.bfloat16) == ("packed", "plain")
    assert offered(512, torch.float32) == ("packed", "spaced:256", "plain")
    assert offered(513, torch.bfloat16) == ("packed", "spaced:512", "spaced:256", "plain")
    assert offered(4096, torch.bfloat16) == ("packed", *(f"spaced:{c}" for c in SPACINGS), "plain")
    assert offered(4096, torch.float16) == ("plain",)
    assert offered(4096, torch.bfloat16, "meta") == ("plain",)


def test_without_the_private_operators_only_the_plain_form_is_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nothing:
        pass

    monkeypatch.setattr(torch.ops, "mkldnn", Nothing())
    assert not has_packed(CPU, torch.bfloat16)
    spec = LinearSpec(name="down", num_in=4096, parts=(8,))
    assert candidate_forms(spec, CPU, torch.bfloat16) == ("plain",)


class Recorder:
    """In place of packed weights: notes the rows of every call, answers with their doubles."""

    def __init__(self) -> None:
        self.calls: list[Tensor] = []

    def __call__(self, x_TK: Tensor) -> Tensor:
        self.calls.append(x_TK.clone())
        return 2 * x_TK


@pytest.mark.parametrize(
    ("num_rows", "max_rows", "sizes"),
    [(1, 4, [1]), (4, 4, [4]), (5, 4, [4, 1]), (9, 4, [4, 4, 1]), (3, 1, [1, 1, 1]), (32, 32, [32])],
)
def test_rows_are_cut_into_the_calls_the_plan_allows(num_rows: int, max_rows: int, sizes: list[int]) -> None:
    recorder, x_TK = Recorder(), draw(num_rows, 6)
    got = RowLinear(recorder, max_rows).rows(x_TK)
    assert [len(call) for call in recorder.calls] == sizes
    assert torch.equal(torch.cat(recorder.calls), x_TK)
    assert torch.equal(got, 2 * x_TK)


@pytest.mark.parametrize(("num_rows", "num_calls"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)], ids=str)
def test_fixed_rows_fill_every_call(num_rows: int, num_calls: int) -> None:
    """Whatever the other limit is; padding is zeros and is cut off."""
    for max_rows in (1, 2, 32):
        recorder, x_TK = Recorder(), draw(num_rows, 6)
        got = RowLinear(recorder, max_rows, fixed_rows=4).rows(x_TK)
        assert [len(call) for call in recorder.calls] == [4] * num_calls
        fed = torch.cat(recorder.calls)
        assert torch.equal(fed[:num_rows], x_TK)
        assert not fed[num_rows:].any()
        assert torch.equal(got, 2 * x_TK)


@pytest.mark.parametrize("form", ["plain", "packed", "spaced:512"])
@pytest.mark.parametrize("parts", [(96,), (96, 32, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 40])
def test_a_prompt_is_computed_by_stocks_own_calls(
    form: str, parts: tuple[int, ...], dtype: torch.dtype, num_rows: int
) -> None:
    needs(form, dtype)
    given, x_TK = weights(1088, parts, dtype), draw(num_rows, 1088, dtype=dtype, seed=9)
    linear = RowLinear(build_form(form, given), 8)
    assert torch.equal(linear.prompt(x_TK), torch.cat([F.linear(x_TK, w) for w in given], -1))


def test_bytes_held() -> None:
    given = weights(1100, (8, 4))
    assert PlainLinear(given).nbytes == 12 * 1100 * 2
    needs("packed")
    assert PackedLinear(given).nbytes == 12 * 1100 * 2
    # Two gaps of 512 in three blocks.
    assert PackedLinear(given, spacing=512).nbytes == 12 * (1100 + 2 * 512) * 2
    assert RowLinear(PlainLinear(given), 8).nbytes == 12 * 1100 * 2


def test_only_the_plain_form_holds_the_tensors_given() -> None:
    given = weights(32, (8,))
    assert RowLinear(build_form("plain", given), 8).shares(given[0])
    assert not RowLinear(build_form("plain", given), 8).shares(given[0].clone())
    needs("packed")
    assert not RowLinear(build_form("packed", given), 8).shares(given[0])


def test_shape_of_a_spec() -> None:
    assert LinearSpec(name="qkv", num_in=64, parts=(64, 16, 16)).shape == (64, 64, 16, 16)
