"""The native head as a drafter: its drafts, its slots, its shortlist, and whom it refuses.

The model is tiny and random, so its drafts are hardly ever accepted; what they must be is computed anew for
every round, from the whole context, without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from draftproof.decode import Decoding, plain_decode, speculate
from draftproof.depth import FixedDepth
from draftproof.drafters.base import Drafter
from draftproof.drafters.build import DrafterOptions, build_drafter, has_native_head
from draftproof.drafters.mtp import MtpDrafter, head_of
from draftproof.errors import DrafterError, RollbackError
from draftproof.models.decoder import DecoderSession, DecoderTarget
from draftproof.record import Draft, Round
from draftproof.rules import Rules, RuleSet
from draftproof.testing import FakeClock, ScriptedDrafter, TableTarget

PROMPT = [5, 80, 33, 2, 140, 7, 9]
NUM_NEW = 30


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., DecoderTarget]) -> DecoderTarget:
    return tiny_target("qwen3_5_mtp", torch.float32)


@dataclass
class Seen:
    """A drafter with a note of every draft, made after which context."""

    inner: MtpDrafter
    context: list[int] = field(default_factory=list)
    drafts: list[tuple[list[int], tuple[int, ...]]] = field(default_factory=list)
    name: str = "mtp"

    def reset(self, prompt_ids: Sequence[int]) -> None:
        self.context = list(prompt_ids)
        self.inner.reset(prompt_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        self.context += token_ids
        self.inner.observe(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        draft = self.inner.propose(max_tokens)
        self.drafts.append((list(self.context), draft.ids))
        return draft


def request(target: DecoderTarget, prompt: Sequence[int] = PROMPT) -> Decoding:
    rules = Rules(RuleSet(max_new_tokens=NUM_NEW, eos_ids=frozenset()), prompt, torch.device("cpu"))
    session = target.open(len(prompt) + NUM_NEW + target.max_rows)
    return Decoding(session=session, rules=rules, clock=FakeClock(), max_rows=target.max_rows)


def decode(
    target: DecoderTarget, depth: int, prompt: Sequence[int] = PROMPT, shortlist: Sequence[int] | None = None
) -> tuple[Seen, list[Round], DecoderSession]:
    run = request(target, prompt)
    session = run.session
    assert isinstance(session, DecoderSession)
    seen = Seen(MtpDrafter(target, session, 200, shortlist))
    rounds = list(speculate(run, prompt, seen, FixedDepth(depth)))
    return seen, rounds, session


def tokens(rounds: Sequence[Round]) -> list[int]:
    return [token for r in rounds for token in r.emitted]


def recomputed(target: DecoderTarget, context: Sequence[int], depth: int) -> list[int]:
    """The head's greedy draft after ``context``, every pass over the whole sequence from an empty cache."""
    session = target.open(400)
    session.hidden.keep()
    session.prefill(context[:-1])
    ids, hidden = list(context[1:]), session.hidden.take()
    head = head_of(target)
    drafted: list[int] = []
    while len(drafted) < depth:
        out = head.open(400, target.max_rows, target.tables(400)).prefill(torch.tensor(ids), hidden)
        drafted.append(int(head.output.rows(out[-1:]).argmax()))
        ids, hidden = [*ids, drafted[-1]], torch.cat([hidden, out[-1:]])
    return drafted


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_every_draft_is_the_one_recomputed_from_the_whole_context(target: DecoderTarget, depth: int) -> None:
    seen, _, _ = decode(target, depth)
    assert len(seen.drafts) > 15
    for context, ids in seen.drafts:
        assert list(ids) == recomputed(target, context, len(ids))
    assert max(len(ids) for _, ids in seen.drafts) == depth
    assert len({ids for _, ids in seen.drafts}) > 5, "constant drafts would prove little"


@pytest.mark.parametrize("depth", range(9))
def test_tokens_are_serial_decodings(target: DecoderTarget, depth: int) -> None:
    want = tokens(list(plain_decode(request(target), PROMPT)))
    assert tokens(decode(target, depth)[1]) == want


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 40])
def test_prompts_of_any_length(target: DecoderTarget, num_prompt: int) -> None:
    prompt = [(3 * i * i + 5) % 288 for i in range(num_prompt)]
    want = tokens(list(plain_decode(request(target, prompt), prompt)))
    seen, rounds, _ = decode(target, 3, prompt)
    assert tokens(rounds) == want
    assert all(list(ids) == recomputed(target, context, len(ids)) for context, ids in seen.drafts[:4])


def test_no_row_of_the_target_is_run_twice(target: DecoderTarget) -> None:
    """After a rejection nothing is forwarded again: the prompt, then a row a drafted token and one."""
    _, rounds, session = decode(target, 4)
    drafted = sum(r.num_drafted for r in rounds)
    assert sum(r.num_accepted for r in rounds) < drafted
    assert session.num_rows_run == len(PROMPT) + len(rounds) - 1 + drafted


def test_every_slot_is_run_once_with_the_targets_row(
    target: DecoderTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed slots: each token but the prompt's first, in order, once, with its hidden row."""
    slots: list[tuple[int, torch.Tensor]] = []
    module = type(head_of(target).open(8, 4, target.tables(8)))
    original = module.catch_up

    def noted(self: Any, ids_T: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        slots.extend(zip(ids_T.tolist(), hidden_TD, strict=True))
        return original(self, ids_T, hidden_TD)

    monkeypatch.setattr(module, "catch_up", noted)
    _, rounds, _ = decode(target, 3)
    context = [*PROMPT, *tokens(rounds)]
    assert [token for token, _ in slots] == context[1 : 1 + len(slots)]
    session = target.open(400)
    session.hidden.keep()
    session.prefill(PROMPT)
    for token in tokens(rounds)[:-1]:
        session.verify([token])
        session.commit(1)
    want = session.hidden.take()
    assert torch.equal(torch.stack([row for _, row in slots]), want[: len(slots)])


def test_rounds_without_a_draft_are_caught_up_with(target: DecoderTarget) -> None:
    run = request(target)
    drafter = MtpDrafter(target, run.session, 200)  # type: ignore[arg-type]
    drafter.reset(PROMPT)
    run.session.prefill(PROMPT)
    context = list(PROMPT)
    for turn, token in enumerate([8, 200, 31, 4, 99, 17]):
        context.append(token)
        drafter.observe([token])
        if turn % 3 == 2:
            assert list(drafter.propose(2).ids) == recomputed(target, context, 2)
        else:
            assert drafter.propose(0).ids == ()
        run.session.verify([token])
        run.session.commit(1)


def test_a_second_request_knows_nothing_of_the_first(target: DecoderTarget) -> None:
    first = decode(target, 3)[0].drafts
    decode(target, 5, [9, 9, 1])
    assert decode(target, 3)[0].drafts == first


def test_tokens_without_rows_are_refused(target: DecoderTarget) -> None:
    run = request(target)
    drafter = MtpDrafter(target, run.session, 200)  # type: ignore[arg-type]
    drafter.reset(PROMPT)
    run.session.prefill(PROMPT)
    drafter.observe([1, 2, 3])
    with pytest.raises(DrafterError, match="9 tokens to run, but 7 hidden rows"):
        drafter.propose(1)


class TestShortlist:
    IDS = (1, 40, 41, 120, 287)

    def test_only_its_ids_are_drafted(self, target: DecoderTarget) -> None:
        seen, rounds, _ = decode(target, 3, shortlist=self.IDS)
        assert {i for _, ids in seen.drafts for i in ids} <= set(self.IDS)
        assert tokens(rounds) == tokens(list(plain_decode(request(target), PROMPT)))

    def test_all_ids_change_nothing(self, target: DecoderTarget) -> None:
        whole = decode(target, 3)[0].drafts
        assert decode(target, 3, shortlist=range(288))[0].drafts == whole

    def test_order_and_repeats_do_not_matter(self, target: DecoderTarget) -> None:
        once = decode(target, 3, shortlist=self.IDS)[0].drafts
        assert decode(target, 3, shortlist=(*self.IDS[::-1], 40, 40))[0].drafts == once

    @pytest.mark.parametrize("ids", [(), (-1, 3), (288,)])
    def test_ids_the_model_lacks_are_refused(self, target: DecoderTarget, ids: tuple[int, ...]) -> None:
        with pytest.raises(DrafterError, match=r"ids in 0\.\.287, at least one"):
            decode(target, 1, shortlist=ids)


class TestBuild:
    def options(self, target: Any, **fields: Any) -> DrafterOptions:
        return DrafterOptions(target=target, policy=FixedDepth(2), capacity=100, **fields)

    def test_by_name(self, target: DecoderTarget) -> None:
        made = build_drafter("mtp", self.options(target, open_session=lambda: target.open(100)))
        assert isinstance(made, MtpDrafter)
        assert isinstance(made, Drafter)
        assert has_native_head(target)

    def test_auto_drafts_with_the_head(self, target: DecoderTarget) -> None:
        run = request(target)
        options = DrafterOptions(
            target=target, policy=FixedDepth(2), capacity=200, open_session=lambda: run.session
        )
        rounds = list(speculate(run, PROMPT, build_drafter("auto", options), FixedDepth(2)))
        assert "mtp" in {r.source for r in rounds}

    def test_without_a_session(self, target: DecoderTarget) -> None:
        with pytest.raises(DrafterError, match="the request's own session"):
            build_drafter("mtp", self.options(target))

    def test_a_model_without_a_head(self, tiny_target: Callable[..., DecoderTarget]) -> None:
        for other in (tiny_target("qwen3_5_text", torch.float32), TableTarget()):
            assert not has_native_head(other)
            with pytest.raises(DrafterError, match="needs a native head; this .* checkpoint holds none"):
                build_drafter("mtp", self.options(other))


def test_other_drafters_on_a_model_with_a_head_keep_no_hidden_rows(target: DecoderTarget) -> None:
    run = request(target)
    list(speculate(run, PROMPT, ScriptedDrafter(lambda *_: ()), FixedDepth(2)))
    with pytest.raises(RollbackError, match="no row was committed"):
        run.session.hidden.take()  # type: ignore[attr-defined]
