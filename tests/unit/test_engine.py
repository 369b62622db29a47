"""The engine on a target without weights: prompts, refusals, streams, interruption, independence.

The loading half (``load``, ``load_target``) runs on tiny random models; the packaged one is in tests/e2e.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from draftproof import engine as engines
from draftproof.engine import Engine
from draftproof.errors import DrafterError, ModelError, ModelNotFoundError, OptionError, PromptError
from draftproof.models.generic import GenericTarget
from draftproof.models.stock import StockModel
from draftproof.record import CostCurve, Draft, Plan, Round
from draftproof.rules import RuleSet
from draftproof.stream import Generation
from draftproof.testing import FakeClock, TableTarget

LETTERS = "abcdefgh"
# Looks back on two tokens, so that its text repeats and retrieval drafts are often right.
TARGET = TableTarget(8, period=2, max_context=200)
PROMPT = [3, 1, 4, 1, 5]
PLAN = Plan(claim="bitwise", dtype="float32", fingerprint="0" * 16, ops=(), max_rows=32)
CURVE = CostCurve(rows=(1, 2, 17), contexts=(64,), seconds=((1e-6, 1.05e-6, 2e-6),))
OPENING, CLOSING = 7, 6


class LetterTokenizer:
    """One letter a token; a conversation is opened and closed by two more."""

    def __init__(self, *, template: str | None = "yes") -> None:
        self.chat_template = template

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [LETTERS.index(letter) for letter in text]}

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert self.chat_template is not None
        assert add_generation_prompt
        assert not return_dict
        turns = [[OPENING, *self(turn["content"])["input_ids"]] for turn in conversation]
        return [*(i for turn in turns for i in turn), CLOSING]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(LETTERS[i] for i in ids)


class FakeRules:
    """Stands in for ``RuleFactory``: an end token, a stop predicate; remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, Any, dict[str, Any]]] = []

    def build(self, num_prompt: int, max_new_tokens: int, tokenizer: Any, **options: Any) -> RuleSet:
        self.calls.append((num_prompt, max_new_tokens, tokenizer, dict(options)))
        options.pop("stop_strings", None)
        rule_set = RuleSet(
            max_new_tokens=max_new_tokens,
            eos_ids=frozenset(options.pop("eos_token_id", ())),
            processors=tuple(options.pop("logits_processor", ())),
        )
        if options:
            raise OptionError(f"generate() has no option {sorted(options)}")
        return rule_set


def make_engine(target: Any = TARGET, *, tokenizer: Any = None, rules: FakeRules | None = None) -> Engine:
    return Engine(
        target,
        replace(PLAN, max_rows=target.max_rows),
        CURVE,
        tokenizer=tokenizer or LetterTokenizer(),
        rule_factory=rules or FakeRules(),  # type: ignore[arg-type]
        folder=Path("nowhere"),
        name="table",
        clock=FakeClock(),
    )


def serial(prompt: Sequence[int], num_tokens: int, target: TableTarget = TARGET) -> tuple[int, ...]:
    out: list[int] = []
    for _ in range(num_tokens):
        out.append(int(target.logits([*prompt, *out]).argmax()))
    return tuple(out)


def shape(rounds: Sequence[Round]) -> list[Round]:
    """The rounds without their times."""
    return [replace(r, draft_ns=0, verify_ns=0, commit_ns=0) for r in rounds]


TRUTH = serial(PROMPT, 60)


class TestPrompts:
    def test_text_becomes_a_user_turn(self) -> None:
        assert make_engine().encode("abc") == [OPENING, 0, 1, 2, CLOSING]

    def test_raw_text_stays_as_it_is(self) -> None:
        assert make_engine().encode("abc", raw=True) == [0, 1, 2]

    @pytest.mark.parametrize("template", [None, ""])
    def test_text_stays_as_it_is_without_a_template(self, template: str | None) -> None:
        assert make_engine(tokenizer=LetterTokenizer(template=template)).encode("abc") == [0, 1, 2]

    def test_messages_use_the_template_even_when_raw(self) -> None:
        messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
        for raw in (False, True):
            assert make_engine().encode(messages, raw=raw) == [OPENING, 0, 1, OPENING, 2, CLOSING]

    def test_messages_need_a_template(self) -> None:
        engine = make_engine(tokenizer=LetterTokenizer(template=None))
        with pytest.raises(PromptError, match="no chat template"):
            engine.encode([{"role": "user", "content": "a"}])

    @pytest.mark.parametrize("prompt", [[3, 1], (3, 1), range(3, 0, -2), torch.tensor([3, 1]).tolist()])
    def test_ids_are_taken_as_they_are(self, prompt: Sequence[int]) -> None:
        got = make_engine().encode(prompt)
        assert got == [3, 1]
        assert all(type(i) is int for i in got)

    @pytest.mark.parametrize("prompt", ["", " ", " \n\t", "\u00a0", [], ()])
    @pytest.mark.parametrize("raw", [False, True])
    def test_an_empty_prompt_is_refused(self, prompt: Any, raw: bool) -> None:
        with pytest.raises(PromptError, match="empty"):
            make_engine().encode(prompt, raw=raw)

    def test_text_that_gives_no_ids_is_refused(self) -> None:
        class Silent(LetterTokenizer):
            def __call__(self, text: str) -> dict[str, list[int]]:
                return {"input_ids": []}

        with pytest.raises(PromptError, match="empty"):
            make_engine(tokenizer=Silent()).encode("abc", raw=True)

    @pytest.mark.parametrize("prompt", [[-1], [8], [0, 8], [7, -1, 0], [10**9]])
    def test_ids_outside_the_vocabulary_are_refused(self, prompt: list[int]) -> None:
        with pytest.raises(PromptError, match=r"0\.\.7"):
            make_engine().encode(prompt)

    def test_the_first_and_the_last_id_are_inside(self) -> None:
        assert make_engine().encode([0, 7]) == [0, 7]

    def test_generate_decodes_what_encode_gives(self) -> None:
        done = make_engine().generate("abc", max_new_tokens=9)
        assert done.prompt_ids == (OPENING, 0, 1, 2, CLOSING)
        assert done.token_ids == serial(done.prompt_ids, 9)
        raw = make_engine().generate("abc", max_new_tokens=9, raw=True)
        assert raw.prompt_ids == (0, 1, 2)


class TestRefusals:
    @pytest.mark.parametrize("max_new_tokens", [0, -1, -256])
    def test_no_new_tokens(self, max_new_tokens: int) -> None:
        with pytest.raises(OptionError, match=f"got {max_new_tokens}"):
            make_engine().generate(PROMPT, max_new_tokens=max_new_tokens)

    def test_one_position_too_many(self) -> None:
        room = TARGET.max_context - len(PROMPT)
        with pytest.raises(PromptError, match=f"5 prompt tokens and {room + 1} new ones .* 200"):
            make_engine().generate(PROMPT, max_new_tokens=room + 1)
        assert len(make_engine().generate(PROMPT, max_new_tokens=room).token_ids) == room

    @pytest.mark.parametrize(("depth", "told"), [(-1, "0 or more"), (32, "at most 31"), (99, "at most 31")])
    def test_depth_out_of_range(self, depth: int, told: str) -> None:
        for drafter in ("auto", "none"):
            with pytest.raises(OptionError, match=f"{told}.*got {depth}"):
                make_engine().generate(PROMPT, max_new_tokens=4, depth=depth, drafter=drafter)

    def test_the_deepest_depth_is_one_row_less_than_the_target_takes(self) -> None:
        engine = make_engine(TableTarget(8, period=2, max_rows=4))
        want = serial(PROMPT, 20, TableTarget(8, period=2))
        assert engine.generate(PROMPT, max_new_tokens=20, depth=3, drafter="suffix").token_ids == want
        with pytest.raises(OptionError, match="at most 3"):
            engine.generate(PROMPT, max_new_tokens=20, depth=4)

    @pytest.mark.parametrize("depth", ["deep", "3", ""])
    def test_depth_that_is_no_number(self, depth: Any) -> None:
        with pytest.raises(OptionError, match="'auto'"):
            make_engine().generate(PROMPT, max_new_tokens=4, depth=depth)

    def test_unknown_drafter(self) -> None:
        with pytest.raises(OptionError, match=r"'psychic'.*none.*auto.*lookup.*suffix"):
            make_engine().generate(PROMPT, max_new_tokens=4, drafter="psychic")

    def test_drafters_that_cannot_serve(self) -> None:
        with pytest.raises(DrafterError, match="--draft-model"):
            make_engine().generate(PROMPT, max_new_tokens=4, drafter="draft_model")
        with pytest.raises(DrafterError, match="row-exact"):
            make_engine().generate(PROMPT, max_new_tokens=4, drafter="early_exit")
        for drafter in ("draft_model", "auto"):
            with pytest.raises(DrafterError, match=r"9 entries.* 8;"):
                make_engine().generate(PROMPT, max_new_tokens=4, drafter=drafter, draft_model=TableTarget(9))

    def test_an_unknown_option(self) -> None:
        with pytest.raises(OptionError, match="warmth"):
            make_engine().generate(PROMPT, max_new_tokens=4, warmth=1.0)

    def test_refusals_come_before_the_first_forward(self) -> None:
        class NeverOpened(TableTarget):
            def open(self, capacity: int) -> Any:
                raise AssertionError("a session was opened")

        engine = make_engine(NeverOpened(8))
        for options in (
            {"depth": -1}, {"depth": 99}, {"drafter": "psychic"}, {"max_new_tokens": 0}, {"warmth": 1.0},
            {"max_new_tokens": 5000}, {"drafter": "draft_model"},
        ):  # fmt: skip
            with pytest.raises((OptionError, PromptError, DrafterError)):
                engine.stream(PROMPT, **{"max_new_tokens": 4, **options})

    def test_a_target_that_cannot_roll_back_decodes_without_a_drafter_only(self) -> None:
        class Stateful(GenericTarget):
            def __init__(self) -> None:
                self.vocab_size, self.max_context, self.max_rows = 8, 200, 32

            def refuse_drafting(self) -> str | None:
                return "layer 0 keeps a state"

            def open(self, capacity: int) -> Any:
                return TARGET.open(capacity)

        engine = make_engine(Stateful())
        with pytest.raises(DrafterError, match="layer 0 keeps a state; use drafter 'none'"):
            engine.generate(PROMPT, max_new_tokens=9)
        assert engine.generate(PROMPT, max_new_tokens=9, drafter="none").token_ids == TRUTH[:9]


class TestOutput:
    @pytest.mark.parametrize("drafter", ["none", "auto", "lookup", "suffix", "draft_model"])
    @pytest.mark.parametrize("depth", ["auto", 0, 1, 4, 31])
    def test_is_the_serial_one(self, drafter: str, depth: Any) -> None:
        draft_model = TARGET if drafter == "draft_model" else None
        done = make_engine().generate(
            PROMPT, max_new_tokens=60, drafter=drafter, depth=depth, draft_model=draft_model
        )
        assert done.token_ids == TRUTH
        assert done.prompt_ids == tuple(PROMPT)
        assert done.text == "".join(LETTERS[i] for i in TRUTH)
        assert done.finish_reason == "length"
        assert done.plan == PLAN
        assert done.trace.token_ids == TRUTH
        assert done.trace.num_prompt == len(PROMPT)
        assert done.trace.prefill_ns > 0

    def test_speculation_really_happens(self) -> None:
        rounds = make_engine().generate(PROMPT, max_new_tokens=60, depth=4).trace.rounds
        assert sum(r.num_accepted for r in rounds) > 20
        assert {r.source for r in rounds} <= {"prompt", "none", "suffix", "lookup"}

    def test_a_model_drafting_for_itself_is_always_right(self) -> None:
        done = make_engine().generate(
            PROMPT, max_new_tokens=61, drafter="draft_model", depth=5, draft_model=TARGET
        )
        drafted = done.trace.rounds[1:]
        assert [r.num_drafted for r in drafted] == [5] * 10
        assert [r.num_accepted for r in drafted] == [5] * 10

    @pytest.mark.parametrize("bound", [None, 0.0, 1e9])
    def test_under_a_margin_bound_near_ties_are_decided_again(self, bound: float | None) -> None:
        engine = make_engine()
        engine.plan = replace(PLAN, claim="guarded", margin_bound=bound)
        done = engine.generate(PROMPT, max_new_tokens=60, depth=4)
        assert done.token_ids == TRUTH
        assert done.plan.margin_bound == bound
        assert (sum(r.num_redecided for r in done.trace.rounds) > 0) == (bound == 1e9)

    def test_an_early_end_is_a_stop(self) -> None:
        end = TRUTH[10]
        num = TRUTH.index(end) + 1
        for drafter in ("none", "auto"):
            done = make_engine().generate(PROMPT, max_new_tokens=60, drafter=drafter, eos_token_id=[end])
            assert done.token_ids == TRUTH[:num]
            assert done.finish_reason == "stop"

    def test_an_end_token_on_the_last_place_is_a_stop(self) -> None:
        num = TRUTH.index(TRUTH[10]) + 1
        done = make_engine().generate(PROMPT, max_new_tokens=num, eos_token_id=[TRUTH[10]])
        assert (done.token_ids, done.finish_reason) == (TRUTH[:num], "stop")

    def test_logits_processors_are_applied_to_every_row(self) -> None:
        def never_the_last_token_again(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[0, ids[0, -1]] = -torch.inf
            return scores

        target = TableTarget(8, period=1)
        engine = make_engine(target)
        want: list[int] = []
        for _ in range(40):
            ids = torch.tensor([[*PROMPT, *want]])
            scores = target.logits(ids[0].tolist())[None].clone()
            want.append(int(never_the_last_token_again(ids, scores).argmax()))
        for drafter in ("none", "auto", "lookup"):
            done = engine.generate(
                PROMPT, max_new_tokens=40, drafter=drafter, logits_processor=[never_the_last_token_again]
            )
            assert done.token_ids == tuple(want)

    def test_rules_are_built_for_the_request(self) -> None:
        rules, tokenizer = FakeRules(), LetterTokenizer()
        engine = make_engine(rules=rules, tokenizer=tokenizer)
        engine.generate(PROMPT, max_new_tokens=4, eos_token_id=[7], stop_strings=["x"])
        ((num_prompt, max_new_tokens, given, options),) = rules.calls
        assert (num_prompt, max_new_tokens) == (5, 4)
        assert given is tokenizer
        assert options == {"eos_token_id": [7], "stop_strings": ["x"]}

    def test_a_bare_decode_gives_the_same_trace_and_needs_no_tokenizer(self) -> None:
        class NoTokenizer:
            def __getattr__(self, name: str) -> Any:
                raise AssertionError(f"the tokenizer was asked for {name}")

        want = make_engine().generate(PROMPT, max_new_tokens=40).trace
        got = make_engine(tokenizer=NoTokenizer()).decode(PROMPT, max_new_tokens=40)
        assert shape(got.rounds) == shape(want.rounds)
        assert got.num_prompt == len(PROMPT)
        assert got.prefill_ns > 0


class TestStream:
    def test_chunks_are_the_rounds(self) -> None:
        stream = make_engine().stream(PROMPT, max_new_tokens=60, depth=4)
        chunks = list(stream)
        done = stream.result()
        assert [chunk.round for chunk in chunks] == list(done.trace.rounds)
        assert tuple(i for chunk in chunks for i in chunk.token_ids) == TRUTH
        assert "".join(chunk.text for chunk in chunks) == done.text
        assert [chunk.num_accepted for chunk in chunks] == [chunk.round.num_accepted for chunk in chunks]
        for chunk in chunks:
            assert chunk.text == chunk.drafted_text + chunk.own_text
            assert len(chunk.drafted_text) == chunk.num_accepted
            assert len(chunk.own_text) == len(chunk.token_ids) - chunk.num_accepted
        assert any(chunk.drafted_text and chunk.own_text for chunk in chunks)

    def test_nothing_runs_before_the_first_chunk_is_asked_for(self) -> None:
        stream = make_engine().stream(PROMPT, max_new_tokens=60)
        done = stream.result()
        assert (done.token_ids, done.text, done.finish_reason) == ((), "", "interrupted")
        assert tuple(i for chunk in stream for i in chunk.token_ids) == TRUTH

    @pytest.mark.parametrize("num_chunks", [1, 2, 5, 9])
    def test_a_consumer_that_stops_has_a_prefix(self, num_chunks: int) -> None:
        stream = make_engine().stream(PROMPT, max_new_tokens=60, depth=2)
        seen: list[int] = []
        for number, chunk in enumerate(stream, start=1):
            seen.extend(chunk.token_ids)
            if number == num_chunks:
                break
        done = stream.result()
        assert done.finish_reason == "interrupted"
        assert done.token_ids == tuple(seen) == TRUTH[: len(seen)]
        assert done.text == "".join(LETTERS[i] for i in seen)
        assert len(done.trace.rounds) == num_chunks
        assert done.trace.prefill_ns > 0
        # Listening again goes on where it stopped.
        rest = [i for chunk in stream for i in chunk.token_ids]
        assert (*seen, *rest) == TRUTH
        assert stream.result().finish_reason == "length"
        assert stream.result().token_ids == TRUTH

    @pytest.mark.parametrize("method", ["propose", "observe", "reset"])
    @pytest.mark.parametrize("when", [1, 2, 4, 7])
    def test_an_interrupt_inside_the_drafter_leaves_a_prefix(
        self, monkeypatch: pytest.MonkeyPatch, method: str, when: int
    ) -> None:
        drafter = InterruptedDrafter(method, when)
        monkeypatch.setattr(engines, "build_drafter", lambda name, options: drafter)
        stream = make_engine().stream(PROMPT, max_new_tokens=60)
        seen: list[int] = []
        will_be_hit = method != "reset" or when == 1
        try:
            for chunk in stream:
                seen.extend(chunk.token_ids)
        except KeyboardInterrupt:
            assert will_be_hit
            done = stream.result()
            assert done.finish_reason == "interrupted"
            assert (
                len(done.trace.rounds) == {"reset": 1, "propose": when, "observe": max(1, when - 1)}[method]
            )
        else:
            assert not will_be_hit
            done = stream.result()
            assert done.finish_reason == "length"
        assert seen
        assert done.token_ids == tuple(seen) == TRUTH[: len(seen)]

    @pytest.mark.parametrize("when", [0, 1, 3])
    def test_an_interrupt_inside_a_forward_leaves_a_prefix(self, when: int) -> None:
        class Interrupted(TableTarget):
            def open(self, capacity: int) -> Any:
                session = super().open(capacity)
                verify, calls = session.verify, [0]

                def interrupted(token_ids: Sequence[int]) -> torch.Tensor:
                    calls[0] += 1
                    if calls[0] > when:
                        raise KeyboardInterrupt
                    return verify(token_ids)

                session.verify = interrupted  # type: ignore[method-assign]
                return session

        for drafter in ("none", "auto"):
            stream = make_engine(Interrupted(8, period=2)).stream(PROMPT, max_new_tokens=60, drafter=drafter)
            with pytest.raises(KeyboardInterrupt):
                drain(stream)
            done = stream.result()
            assert len(done.trace.rounds) == when + 1
            assert done.token_ids == TRUTH[: len(done.token_ids)]
            assert done.finish_reason == "interrupted"

    def test_a_consumer_may_stop_after_the_last_chunk(self) -> None:
        stream = make_engine().stream(PROMPT, max_new_tokens=1)
        next(iter(stream))
        assert stream.result().token_ids == TRUTH[:1]


class InterruptedDrafter:
    """Drafts two wrong tokens a round until the ``when``-th call of ``method``, which is interrupted."""

    name = "interrupted"

    def __init__(self, method: str, when: int) -> None:
        self._method, self._left = method, when

    def _count(self, method: str) -> None:
        self._left -= method == self._method
        if not self._left:
            raise KeyboardInterrupt

    def reset(self, prompt_ids: Sequence[int]) -> None:
        self._count("reset")

    def observe(self, token_ids: Sequence[int]) -> None:
        self._count("observe")

    def propose(self, max_tokens: int) -> Draft:
        self._count("propose")
        return Draft(ids=(0, 0)[:max_tokens], source=self.name)


def drain(stream: Any) -> None:
    for _ in stream:
        pass


class TestIndependence:
    def request(self, engine: Engine, **options: Any) -> Generation:
        return engine.generate(PROMPT, **{"max_new_tokens": 50, **options})

    @pytest.mark.parametrize("drafter", ["none", "auto", "lookup", "suffix", "draft_model"])
    def test_the_third_request_is_like_the_first_of_a_fresh_engine(self, drafter: str) -> None:
        options: dict[str, Any] = {"drafter": drafter}
        if drafter == "draft_model":
            options["draft_model"] = TableTarget(8, period=1, seed=3)
        want = self.request(make_engine(), **options)
        engine = make_engine()
        engine.generate([2, 2, 2, 2], max_new_tokens=80, eos_token_id=[5], **options)
        engine.generate([*PROMPT, *TRUTH[:20]], max_new_tokens=30, **options)
        got = self.request(engine, **options)
        assert got.token_ids == want.token_ids
        assert got.text == want.text
        assert got.finish_reason == want.finish_reason
        assert shape(got.trace.rounds) == shape(want.trace.rounds)

    def test_an_abandoned_request_leaves_nothing_behind(self) -> None:
        want = self.request(make_engine())
        engine = make_engine()
        next(iter(engine.stream([5, 4, 3], max_new_tokens=40)))
        with pytest.raises(OptionError):
            engine.generate(PROMPT, max_new_tokens=4, depth=-1)
        assert shape(self.request(engine).trace.rounds) == shape(want.trace.rounds)

    def test_two_requests_may_take_turns(self) -> None:
        engine = make_engine()
        prompts = [PROMPT, [2, 2, 6]]
        streams: list[Iterator[Any]] = [iter(engine.stream(p, max_new_tokens=40)) for p in prompts]
        got: list[list[int]] = [[], []]
        going = {0, 1}
        while going:
            for index in sorted(going):
                chunk = next(streams[index], None)
                if chunk is None:
                    going.discard(index)
                else:
                    got[index].extend(chunk.token_ids)
        assert [tuple(ids) for ids in got] == [serial(p, 40) for p in prompts]

    def test_a_stateful_processor_is_copied_for_every_request(self) -> None:
        class Once:
            """Forbids the best token of its first call only."""

            def __init__(self) -> None:
                self.num_calls = 0

            def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                self.num_calls += 1
                if self.num_calls == 1:
                    scores[0, scores.argmax()] = -torch.inf
                return scores

        engine, once = make_engine(), Once()
        first = engine.generate(PROMPT, max_new_tokens=20, logits_processor=[once])
        second = engine.generate(PROMPT, max_new_tokens=20, logits_processor=[once])
        assert once.num_calls == 0
        assert first.token_ids == second.token_ids
        assert first.token_ids[0] != TRUTH[0]


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache folder for this file, as a probe takes seconds; one thread, as models are tiny."""
    folder, num_threads = tmp_path_factory.mktemp("cache"), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTPROOF_CACHE", str(folder))
        yield folder
    torch.set_num_threads(num_threads)


class TestLoad:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"dtype": "int8"}, "dtype 'int8'.*bfloat16"),
            ({"dtype": "bf16"}, "dtype 'bf16'"),
            ({"claim": "exact"}, "claim 'exact'.*bitwise"),
            ({"claim": "unproved"}, "claim 'unproved'"),
            ({"device": "abacus"}, "device 'abacus'"),
            ({"device": ""}, "device ''"),
            ({"threads": 0}, "threads.*got 0"),
            ({"threads": -2}, "threads.*got -2"),
        ],
    )
    def test_options_are_checked_before_the_model_is_looked_for(
        self, options: dict[str, Any], told: str
    ) -> None:
        with pytest.raises(OptionError, match=told):
            engines.load("no-such-model", **options)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
    def test_a_device_that_is_not_there(self) -> None:
        with pytest.raises(OptionError, match="device 'cuda'"):
            engines.load("no-such-model", device="cuda")
        with pytest.raises(OptionError, match="device 'cuda'"):
            engines.load_target("no-such-model", device="cuda")

    def test_an_unknown_model(self) -> None:
        for load in (engines.load, engines.load_target):
            with pytest.raises(ModelNotFoundError, match=r"'smolm2'.*did you mean 'smollm2"):
                load("smolm2")

    def test_threads_are_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[int] = []
        monkeypatch.setattr(torch, "set_num_threads", told.append)
        with pytest.raises(ModelNotFoundError):
            engines.load("no-such-model", threads=3)
        assert told == [3]

    @pytest.mark.slow
    def test_a_tiny_model_is_planned_once_and_decodes_as_stock(
        self, tiny_folder: Any, shared_cache: Path
    ) -> None:
        folder = tiny_folder("llama", torch.bfloat16)
        stages: list[str] = []
        first = engines.load(str(folder), refresh=True, progress=lambda stage, *_: stages.append(stage))
        assert any("prob" in stage for stage in stages)
        assert any("curve" in stage for stage in stages)
        assert list(shared_cache.glob("plans/*.json"))
        again: list[str] = []
        engine = engines.load(str(folder), progress=lambda stage, *_: again.append(stage))
        assert again == []
        assert (engine.plan, engine.curve) == (first.plan, first.curve)
        assert engine.plan.claim in ("bitwise", "guarded")
        assert (engine.plan.claim == "guarded") == (engine.plan.margin_bound is not None)
        assert engine.name == str(folder)
        stock = StockModel(folder, torch.bfloat16, torch.device("cpu"))
        prompt = engine.encode("the other is there, the other is")
        want = stock.generate(prompt, 41)
        for drafter in ("none", "auto", "early_exit"):
            assert engine.generate(prompt, max_new_tokens=41, drafter=drafter).token_ids == want
        itself = engines.load_target(str(folder))
        done = engine.generate(prompt, max_new_tokens=41, drafter="draft_model", draft_model=itself, depth=4)
        assert done.token_ids == want
        assert [r.num_accepted for r in done.trace.rounds[1:]] == [4] * 8

    @pytest.mark.slow
    def test_refresh_probes_again(self, tiny_folder: Any, shared_cache: Path) -> None:
        folder = str(tiny_folder("llama", torch.bfloat16))
        engines.load(folder)
        stages: list[str] = []
        engines.load(folder, refresh=True, progress=lambda stage, *_: stages.append(stage))
        assert any("prob" in stage for stage in stages)
        assert any("curve" in stage for stage in stages)

    @pytest.mark.parametrize("drafter", ["none", "auto"])
    @pytest.mark.parametrize("kind", ["gpt2", "mistral"])
    def test_other_models_run_guarded_through_transformers(
        self, kind: str, drafter: str, tiny_folder: Any, shared_cache: Path
    ) -> None:
        folder = tiny_folder(kind, torch.float32)
        engine = engines.load(str(folder), dtype="float32")
        assert isinstance(engine.target, GenericTarget)
        assert engine.plan.claim == "guarded"
        assert engine.plan.margin_bound is not None
        assert engine.plan.margin_bound > 0
        prompt = engine.encode("in the other tin")
        want = StockModel(folder, torch.float32, torch.device("cpu")).generate(prompt, 40)
        assert engine.generate(prompt, max_new_tokens=40, drafter=drafter).token_ids == want

    def test_a_margin_belongs_to_weights_and_not_to_a_folders_name(
        self, tiny_folder: Any, shared_cache: Path, tmp_path: Path
    ) -> None:
        """These logits, and so their rounding errors, are 64 times larger."""
        bounds = []
        for scale in (1.0, 64.0):
            folder = tmp_path / str(scale) / "model"
            shutil.copytree(tiny_folder("gpt2", torch.float32), folder)
            weights = load_file(folder / "model.safetensors")
            weights["transformer.ln_f.weight"] *= scale
            weights["transformer.ln_f.bias"] *= scale
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
            bounds.append(engines.load(str(folder), dtype="float32").plan.margin_bound)
        assert bounds[0] is not None
        assert bounds[1] is not None
        assert bounds[1] > 8 * bounds[0]

    @pytest.mark.slow
    def test_a_draft_model_must_share_every_token(
        self, tiny_folder: Any, shared_cache: Path, tmp_path: Path
    ) -> None:
        folder = tiny_folder("llama", torch.bfloat16)
        engine = engines.load(str(folder))
        assert engines.load_target(str(folder), like=engine).vocab_size == engine.target.vocab_size
        other = tmp_path / "other"
        shutil.copytree(folder, other)
        file = other / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        file.write_text(json.dumps(tokenizer))
        with pytest.raises(DrafterError, match="another vocabulary"):
            engines.load_target(str(other), like=engine)

    @pytest.mark.parametrize("claim", ["bitwise", "fixed"])
    def test_a_claim_that_needs_a_row_exact_target(
        self, claim: Any, tiny_folder: Any, shared_cache: Path
    ) -> None:
        with pytest.raises(ModelError, match=f"{claim}.*'gpt2'"):
            engines.load(str(tiny_folder("gpt2")), claim=claim)

    @pytest.mark.slow
    def test_a_guarded_engine_has_a_bound_and_emits_stocks_tokens(
        self, tiny_folder: Any, shared_cache: Path
    ) -> None:
        folder = tiny_folder("llama", torch.float32)
        engine = engines.load(str(folder), dtype="float32", claim="guarded")
        assert engine.plan.claim == "guarded"
        assert engine.plan.margin_bound is not None
        prompt = engine.encode("the other is there, the other is")
        want = StockModel(folder, torch.float32, torch.device("cpu")).generate(prompt, 40)
        assert engine.generate(prompt, max_new_tokens=40).token_ids == want

    @pytest.mark.slow
    def test_requests_print_nothing(self, tiny_folder: Any, shared_cache: Path, capfd: Any) -> None:
        engine = engines.load(str(tiny_folder("llama", torch.bfloat16)))
        before = logging.get_verbosity()
        capfd.readouterr()
        try:
            logging.set_verbosity_warning()  # what users have
            engine.generate("the other", max_new_tokens=4, repetition_penalty=1.2, stop_strings=["zz"])
        finally:
            logging.set_verbosity(before)
        assert tuple(capfd.readouterr()) == ("", "")
