"""Any split of a text into verifications and commits leaves what one-token steps leave, in every layer.

Recurrent state, convolution window, keys and values, and the keys and values of the native head, byte for
byte, on a tiny random Qwen3.5 with a head. Every verification also carries wrong tokens, some are dropped
whole, and the head drafts ahead in between. Broken on purpose, the same comparison must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.cache import KVCache
from draftproof.drafters.mtp import head_of
from draftproof.models.decoder import DecoderSession, DecoderTarget
from draftproof.models.mtp import HeadSession
from draftproof.recurrent import RecurrentCache, RecurrentRows

NUM_PROMPT, NUM_TOKENS, MAX_ROWS = 5, 24, 12
VOCAB = 288


@dataclass(frozen=True)
class Turn:
    """One verification: ``right`` tokens kept, ``wrong`` ones dropped; then the head drafts ``ahead``."""

    right: int
    wrong: int
    ahead: int
    in_two: bool


TURNS = st.lists(
    st.builds(
        Turn, right=st.integers(0, 6), wrong=st.integers(0, 5), ahead=st.integers(0, 3), in_two=st.booleans()
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip
Held = dict[str, list[Tensor]]


class Run:
    """A request's session with its head following it, as the drafter lets it."""

    def __init__(self, target: DecoderTarget, tokens: Sequence[int]) -> None:
        self.target, self.tokens = target, tokens
        self.session = target.open(80)
        self.head: HeadSession = head_of(target).open(80, MAX_ROWS, target.tables(80))
        self.session.hidden.keep()
        self.session.prefill(tokens[:NUM_PROMPT])
        self.done, self.seen = NUM_PROMPT, 1

    def catch_up(self, ahead: int) -> None:
        """Run the head's slots of the rows committed since, then ``ahead`` drafted ones that are dropped."""
        ids = torch.tensor(self.tokens[self.seen : self.done + 1])
        out = self.head.catch_up(ids, self.session.hidden.take())
        self.seen = self.done + 1
        for step in range(ahead):
            out = self.head.extend((ids[-1:] + step) % VOCAB, out)
        self.head.cache.commit(0)

    def turn(self, turn: Turn, rng: Random) -> None:
        right = list(self.tokens[self.done : min(self.done + turn.right, NUM_TOKENS)])
        wrong = [rng.randrange(VOCAB) for _ in range(turn.wrong)]
        rows = [*right, *wrong]
        if not rows:
            return
        cut = len(rows) // 2 if turn.in_two else 0
        for part in (rows[:cut], rows[cut:]):
            if part:
                self.session.verify(part)
        self.session.commit(len(right))
        self.done += len(right)
        if right:
            self.catch_up(turn.ahead)

    def held(self) -> Held:
        """Copies of everything committed, by kind and layer."""
        states, session = self.session.recurrent, self.session
        assert states is not None
        num_states = len(self.target.parts.recurrent_shapes)
        num_attention = len(self.target.parts.attention_shapes)
        both = [states.snapshot(layer) for layer in range(num_states)]
        keys = [tensor for layer in range(num_attention) for tensor in session.cache.snapshot(layer)]
        return {
            "recurrent state": [state for state, _ in both],
            "convolution window": [window for _, window in both],
            "keys and values": keys,
            "head keys and values": list(self.head.cache.snapshot(0)),
        }


def serial(target: DecoderTarget, tokens: Sequence[int], num_done: int) -> Run:
    """The same text, one token a step, nothing ever dropped."""
    run = Run(target, tokens)
    run.catch_up(0)
    while run.done < num_done:
        run.turn(Turn(right=1, wrong=0, ahead=0, in_two=False), Random(0))
    return run


def text(seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(VOCAB) for _ in range(NUM_TOKENS + 1)]


@dataclass(frozen=True)
class Case:
    """A text, its split, and what one-token steps leave of it."""

    target: DecoderTarget
    turns: Sequence[Turn]
    seed: int
    want: Run

    @classmethod
    def of(cls, target: DecoderTarget, turns: Sequence[Turn], seed: int) -> Case:
        num_done = min(NUM_PROMPT + sum(turn.right for turn in turns), NUM_TOKENS)
        return cls(target, turns, seed, serial(target, text(seed), num_done))

    def differing(self) -> list[str]:
        """What the split leaves otherwise, the logits of the next row included."""
        run, rng = Run(self.target, text(self.seed)), Random(self.seed)
        run.catch_up(2)
        for turn in self.turns:
            run.turn(turn, rng)
        assert run.done == self.want.done
        held = run.held()
        found = [
            kind
            for kind, tensors in self.want.held().items()
            if not all(torch.equal(a, b) for a, b in zip(tensors, held[kind], strict=True))
        ]
        after = [r.session.verify([text(self.seed)[-1]]) for r in (run, self.want)]
        return found if torch.equal(*after) else [*found, "logits of the next row"]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def target(request: pytest.FixtureRequest, tiny_target: Callable[..., DecoderTarget]) -> DecoderTarget:
    return tiny_target("qwen3_5_mtp", request.param)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS, seed=st.integers(0, 99))
def test_every_split_leaves_what_one_token_steps_leave(
    target: DecoderTarget, turns: list[Turn], seed: int
) -> None:
    assert Case.of(target, turns, seed).differing() == []


SOME = [
    Turn(right=2, wrong=3, ahead=2, in_two=False),
    Turn(right=0, wrong=4, ahead=0, in_two=False),
    Turn(right=3, wrong=1, ahead=1, in_two=True),
    Turn(right=1, wrong=2, ahead=3, in_two=False),
]


def skip_the_window(self: RecurrentCache, num_rows: int) -> None:
    base = self._base
    _COMMIT(self, num_rows)
    self._base = base


def take_a_stale_row(self: RecurrentCache, num_rows: int) -> None:
    """The state of the row before the last one kept, as an off-by-one selection takes it."""
    if num_rows > 1:
        self._pending[num_rows - 2], self._pending[num_rows - 1] = (
            self._pending[num_rows - 1],
            self._pending[num_rows - 2],
        )
    _COMMIT(self, num_rows)


def take_the_last_row(self: RecurrentCache, num_rows: int) -> None:
    """The state after every row verified, whatever was kept."""
    if num_rows and self._pending:
        self._pending[num_rows - 1] = self._pending[-1]
    _COMMIT(self, num_rows)


def restore_by_reference(self: RecurrentCache, num_rows: int) -> RecurrentRows:
    """The first row's slot is the committed state itself: a rejection restores what was overwritten."""
    _BEGIN(self, num_rows)
    if len(self._pending) == num_rows:
        self._pending[0] = self._state
    return RecurrentRows(self, len(self._pending) - num_rows, num_rows)


def keep_the_drafted_slots(self: KVCache, num_rows: int) -> None:
    """Whatever is pending stays, also what was drafted and dropped."""
    _KEEP(self, self.num_pending)


_COMMIT, _BEGIN, _KEEP = RecurrentCache.commit, RecurrentCache.begin, KVCache.commit
FAULTS: dict[str, tuple[type, str, Callable[..., object], str]] = {
    "skip the convolution window": (RecurrentCache, "commit", skip_the_window, "convolution window"),
    "reuse a stale row": (RecurrentCache, "commit", take_a_stale_row, "recurrent state"),
    "take the last row": (RecurrentCache, "commit", take_the_last_row, "recurrent state"),
    "restore by reference": (RecurrentCache, "begin", restore_by_reference, "recurrent state"),
    "keep what was drafted": (KVCache, "commit", keep_the_drafted_slots, "head keys and values"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_on_purpose_it_is_seen(
    target: DecoderTarget, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Case.of(target, SOME, seed=4).differing() == []
    case = Case.of(target, SOME, seed=4)
    owner, name, broken, kind = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    assert kind in case.differing()


def test_the_model_holds_every_kind_of_state(target: DecoderTarget) -> None:
    assert isinstance(target.open(20), DecoderSession)
    assert (len(target.parts.recurrent_shapes), len(target.parts.attention_shapes)) == (3, 2)
