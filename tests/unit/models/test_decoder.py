"""The pass around the layers: sessions, capacity, rotary tables, truncation, and failures half-way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftproof.errors import RollbackError
from draftproof.models.decoder import DecoderSession, RotaryTable
from draftproof.ops.rotary import sign_first_half

BF16 = torch.bfloat16
PROMPT = [5, 80, 17, 200, 3, 44, 121]
MORE = [9, 250, 31, 77, 8, 190, 66, 12]


@pytest.fixture(params=["llama", "gemma3_text"])
def found(request: pytest.FixtureRequest, pair: Callable[..., Any]) -> Any:
    return pair(request.param, BF16)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "glm4_moe", "qwen3_5_text"])
@pytest.mark.parametrize("inner", [36, 161])
def test_a_width_that_is_no_multiple_of_a_vector(kind: str, inner: int, pair: Callable[..., Any]) -> None:
    """Stock's activations run over contiguous rows, ours over halves of fused ones."""
    odd = pair(kind, torch.float32, "bitwise", intermediate_size=inner)
    assert {n: odd.differences(n, rows) for n, rows in ((1, 4), (5, 1), (33, 4))} == {1: [], 5: [], 33: []}


def one_by_one(session: DecoderSession, tokens: list[int]) -> Tensor:
    rows = []
    for token in tokens:
        rows.append(session.verify([token])[0])
        session.commit(1)
    return torch.stack(rows)


def test_describes_the_model(found: Any) -> None:
    target, config = found.target, found.stock.module.config
    assert target.name == config.model_type
    assert (target.vocab_size, target.max_context) == (config.vocab_size, config.max_position_embeddings)
    assert target.max_rows == found.plan.max_rows
    assert target.num_layers == config.num_hidden_layers


def test_bytes_are_those_of_the_linears(pair: Callable[..., Any]) -> None:
    """Tied: the head counts, the embedding does not count again. Zero columns may come on top."""
    found = pair("gemma3_text", torch.float32, "fixed")
    linears = [m for m in found.stock.module.modules() if isinstance(m, torch.nn.Linear)]
    assert found.target.nbytes == sum(m.weight.nbytes for m in linears)


def test_a_verification_waits_for_its_commit(found: Any) -> None:
    session = found.target.open(64)
    session.prefill(PROMPT)
    assert session.num_cached == len(PROMPT)
    session.verify(MORE[:3])
    assert session.num_cached == len(PROMPT)
    session.commit(2)
    assert session.num_cached == len(PROMPT) + 2


def test_verifications_append_to_each_other(found: Any) -> None:
    """Rows pending from an earlier call count as context; all are committed together."""
    if found.plan.claim != "bitwise":
        pytest.skip(f"the plan claims {found.plan.claim} here")
    serial, chained = found.target.open(64), found.target.open(64)
    assert torch.equal(serial.prefill(PROMPT), chained.prefill(PROMPT))
    want = one_by_one(serial, MORE)
    got = torch.cat([chained.verify(MORE[:1]), chained.verify(MORE[1:4]), chained.verify(MORE[4:6])])
    assert torch.equal(got, want[:6])
    chained.commit(6)
    assert torch.equal(one_by_one(chained, MORE[6:]), want[6:])


def test_sessions_do_not_share_anything(found: Any) -> None:
    alone = found.target.open(64)
    first = alone.prefill(PROMPT)
    want = one_by_one(alone, MORE)
    left, right = found.target.open(64), found.target.open(64)
    assert torch.equal(left.prefill(PROMPT), first)
    right.prefill(MORE)
    got = []
    for token in MORE:
        got.append(left.verify([token])[0])
        right.verify([token, 3])
        left.commit(1)
        right.commit(1)
    assert torch.equal(torch.stack(got), want)


def test_a_verification_that_fails_leaves_no_rows(found: Any) -> None:
    """Half-way through the layers too."""
    want_session, session = found.target.open(64), found.target.open(64)
    want_session.prefill(PROMPT)
    session.prefill(PROMPT)
    want = one_by_one(want_session, MORE)
    with pytest.raises(IndexError):
        session.verify([MORE[0], found.target.vocab_size])
    layers = found.target.parts.layers

    def interrupted(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    object.__setattr__(found.target.parts, "layers", (*layers[:-1], interrupted))
    try:
        with pytest.raises(KeyboardInterrupt):
            session.verify(MORE[:4])
    finally:
        object.__setattr__(found.target.parts, "layers", layers)
    assert session.cache.num_pending == 0
    assert torch.equal(one_by_one(session, MORE), want)


def test_an_output_layer_that_fails_leaves_no_hidden_rows(found: Any) -> None:
    parts, sessions = found.target.parts, [found.target.open(64) for _ in range(2)]
    for session in sessions:
        session.hidden.keep()
        session.prefill(PROMPT)
        session.hidden.take()

    class Broken:
        def rows(self, _: Tensor) -> Tensor:
            raise MemoryError

    head = parts.head
    object.__setattr__(parts, "head", Broken())
    try:
        with pytest.raises(MemoryError):
            sessions[0].verify(MORE[1:5])  # other tokens than those that follow
    finally:
        object.__setattr__(parts, "head", head)
    for session in sessions:
        session.verify(MORE[:2])
        session.commit(2)
    assert torch.equal(sessions[0].hidden.take(), sessions[1].hidden.take())


def test_what_does_not_fit_is_refused_and_changes_nothing(found: Any) -> None:
    session, roomy = found.target.open(len(PROMPT) + 4), found.target.open(64)
    session.prefill(PROMPT)
    roomy.prefill(PROMPT)
    want = one_by_one(roomy, MORE[:4])
    with pytest.raises(RollbackError, match="cache full"):
        session.verify(MORE[:5])
    session.verify(MORE[:2])
    for num_rows in (-1, 3):
        with pytest.raises(RollbackError, match="cannot commit"):
            session.commit(num_rows)
    session.commit(0)
    assert torch.equal(one_by_one(session, MORE[:4]), want)
    with pytest.raises(RollbackError, match="cache full"):
        session.verify(MORE[:1])


def test_more_rows_than_the_plan_allows_are_refused(found: Any) -> None:
    session = found.target.open(200)
    session.prefill(PROMPT)
    session.verify([1] * found.target.max_rows)
    with pytest.raises(RollbackError, match="at most"):
        session.verify([1])


def test_a_second_prompt_is_refused_and_changes_nothing(found: Any) -> None:
    want_session, session = found.target.open(64), found.target.open(64)
    want_session.prefill(PROMPT)
    session.prefill(PROMPT)
    with pytest.raises(RollbackError, match="a prompt can only fill an empty cache"):
        session.prefill(MORE)
    assert torch.equal(one_by_one(session, MORE), one_by_one(want_session, MORE))


def test_no_session_is_larger_than_the_context_allows(found: Any) -> None:
    target = found.target
    assert target.open(10_000).cache.capacity == target.max_context + target.max_rows
    assert target.open(50).cache.capacity == 50


def test_the_last_position_of_the_context_has_the_bits_of_stock(pair: Callable[..., Any]) -> None:
    """The rotary tables reach the end of the context, pending rows beyond it included."""
    found = pair("gemma3_text", BF16)
    length = found.target.max_context - 4
    prompt = found.prompt(length)
    run = found.stock.run(prompt, 4)
    session = found.target.open(length + 4 + found.target.max_rows)
    got = [session.prefill(prompt)[None]]
    for token in run.token_ids[:-1]:
        got.append(session.verify([token]))
        session.commit(1)
    assert torch.equal(torch.cat(got).float(), run.logits_NV)
    assert session.verify([1] * 20).shape == (20, found.target.vocab_size)


def test_rotary_tables_grow_and_keep_their_rows(
    tiny_folder: Callable[..., Path], make_pair: Callable[..., Any]
) -> None:
    target = make_pair(tiny_folder("llama", BF16, max_position_embeddings=3000), BF16, "bitwise").target
    sizes = {n: target.tables(n)["full"].cos_SK.shape[0] for n in (1, 512, 513, 900, 5, 2049)}
    assert sizes == {1: 512, 512: 512, 513: 1024, 900: 1024, 5: 1024, 2049: 4096}
    table = target.tables(1)["full"]
    short = {kind: t[:7] for kind, t in zip("cs", target.parts.make_rotary(7)["full"], strict=True)}
    assert torch.equal(table.cos_SK[:7], short["c"])
    assert torch.equal(table.signed_sin_SK[:7], sign_first_half(short["s"]))


def test_a_session_outlives_a_growing_table(
    tiny_folder: Callable[..., Path], make_pair: Callable[..., Any]
) -> None:
    target = make_pair(tiny_folder("llama", BF16, max_position_embeddings=3000), BF16, "bitwise").target
    alone, early = target.open(64), target.open(64)
    alone.prefill(PROMPT)
    want = one_by_one(alone, MORE)
    early.prefill(PROMPT)
    first = one_by_one(early, MORE[:4])
    target.open(1500)
    assert torch.equal(torch.cat([first, one_by_one(early, MORE[4:])]), want)


def test_rows_of_a_rotary_table() -> None:
    cos, sin = torch.arange(12.0).view(6, 2), -torch.arange(12.0).view(6, 2)
    rows = RotaryTable(cos_SK=cos, signed_sin_SK=sin).rows(2, 3)
    assert rows.cos_T1K.tolist() == [[[4.0, 5.0]], [[6.0, 7.0]], [[8.0, 9.0]]]
    assert torch.equal(rows.signed_sin_T1K, -rows.cos_T1K)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_truncated_target_is_the_model_without_its_last_layers(
    found: Any, num_layers: int, feed: Callable[..., Tensor]
) -> None:
    module = AutoModelForCausalLM.from_pretrained(
        found.folder, dtype=BF16, num_hidden_layers=num_layers
    ).eval()
    short = found.target.truncated(num_layers)
    assert (short.num_layers, found.target.num_layers) == (num_layers, 3)
    session = short.open(64)
    got = torch.cat([session.prefill(PROMPT)[None], one_by_one(session, MORE)])
    assert torch.equal(got, feed(module, PROMPT, MORE))


@pytest.mark.parametrize("num_layers", [0, 3, -1, 9])
def test_layers_that_are_not_there_cannot_be_kept(found: Any, num_layers: int) -> None:
    with pytest.raises(RollbackError, match=f"cannot keep {num_layers} of 3 layers"):
        found.target.truncated(num_layers)
