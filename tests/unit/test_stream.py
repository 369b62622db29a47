"""A stream's chunks, its result at any point, and text that is never half a character."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftproof.decode import Decoding, plain_decode, speculate
from draftproof.depth import FixedDepth
from draftproof.record import Plan
from draftproof.rules import Rules, RuleSet
from draftproof.stream import Stream, TextStream
from draftproof.testing import FakeClock, ScriptedDrafter, TableTarget

PLAN = Plan(claim="bitwise", dtype="float32", fingerprint="0" * 16, ops=(), max_rows=32)
PROMPT = [1]
TEXT = "plain, ä and ß, 中文字, 🙂🙂, e\u0301, [b]\\[/b], tab\tand\nline"


class ByteTokenizer:
    """One byte a token; ids from 256 on are special and have no text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class Spelling(TableTarget):
    """Emits the given ids, over and over, after a prompt of one token."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(258)
        self._ids = list(ids)

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        out = torch.zeros(258)
        out[self._ids[(len(prefix) - 1) % len(self._ids)]] = 1.0
        return out


def make_stream(
    ids: Sequence[int], *, depth: int | None = None, num_right: int = 99, max_new_tokens: int | None = None,
    eos: Sequence[int] = (),
) -> Stream:  # fmt: skip
    """Stream ``ids``: serially, or by drafts of ``depth`` tokens of which ``num_right`` are right."""
    num_new = max_new_tokens or len(ids)
    rules = Rules(RuleSet(max_new_tokens=num_new, eos_ids=frozenset(eos)), PROMPT, torch.device("cpu"))
    clock = FakeClock()
    run = Decoding(session=Spelling(ids).open(num_new + 40), rules=rules, clock=clock, max_rows=32)

    def draft(context: Sequence[int], max_tokens: int) -> list[int]:
        place = len(context) - 1
        coming = [ids[(place + i) % len(ids)] for i in range(max_tokens)]
        return [token if i < num_right else 257 for i, token in enumerate(coming)]

    if depth is None:
        rounds = plain_decode(run, PROMPT)
    else:
        rounds = speculate(run, PROMPT, ScriptedDrafter(draft), FixedDepth(depth))
    return Stream(rounds, run, PROMPT, PLAN, ByteTokenizer(), clock)


def texts(stream: Stream) -> list[str]:
    return [chunk.text for chunk in stream]


class TestTextStream:
    def test_a_character_waits_for_its_last_token(self) -> None:
        text = TextStream(ByteTokenizer())
        assert [text.push([byte]) for byte in "aé🙂b".encode()] == ["a", "", "é", "", "", "", "🙂", "b"]

    @pytest.mark.parametrize("seed", range(20))
    def test_any_split_gives_the_same_text(self, seed: int) -> None:
        draw, ids, text = random.Random(seed), list(TEXT.encode()), TextStream(ByteTokenizer())
        shown = []
        while ids:
            num = draw.randint(0, 7)
            shown.append(text.push(ids[:num]))
            ids = ids[num:]
        assert "".join(shown) == TEXT
        assert not any("\ufffd" in piece for piece in shown)

    def test_special_tokens_have_no_text(self) -> None:
        text = TextStream(ByteTokenizer())
        ids = [256, *"é".encode()[:1], 257, *"é".encode()[1:], *b"x", 256]
        assert "".join(text.push([i]) for i in ids) == "éx"

    def test_bytes_that_are_no_character_are_shown_once_the_next_one_is_complete(self) -> None:
        text = TextStream(ByteTokenizer())
        assert text.push([0xFF]) == ""
        assert text.push([0xFE]) == ""
        assert text.push(list(b"ok")) == "\ufffd\ufffdok"
        assert text.push(list(b"!")) == "!"

    def test_a_tokenizer_that_drops_a_leading_space_drops_only_the_first(self) -> None:
        class Words:
            """As SentencePiece: every token brings a space, the text does not begin with one."""

            def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
                return "".join(f" w{i}" for i in ids)[1:]

        text = TextStream(Words())
        assert "".join(text.push([i]) for i in range(5)) == "w0 w1 w2 w3 w4"

    def test_only_the_last_tokens_are_decoded_again(self) -> None:
        longest = 0

        class Counting(ByteTokenizer):
            def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
                nonlocal longest
                longest = max(longest, len(ids))
                return super().decode(ids, skip_special_tokens=skip_special_tokens)

        text = TextStream(Counting())
        for byte in b"x" * 500:
            text.push([byte])
        assert longest <= 2


class TestChunks:
    @pytest.mark.parametrize("depth", [None, 0, 1, 3, 16])
    @pytest.mark.parametrize("num_right", [0, 2, 99])
    def test_spell_the_text(self, depth: int | None, num_right: int) -> None:
        stream = make_stream(list(TEXT.encode()), depth=depth, num_right=num_right)
        chunks = list(stream)
        done = stream.result()
        assert "".join(chunk.text for chunk in chunks) == done.text == TEXT
        assert [chunk.round for chunk in chunks] == list(done.trace.rounds)
        assert tuple(i for chunk in chunks for i in chunk.token_ids) == done.token_ids
        assert not any("\ufffd" in chunk.text for chunk in chunks)

    def test_tell_drafted_text_from_the_targets_own(self) -> None:
        stream = make_stream(b"abcdefghij", depth=4, num_right=2)
        assert [(c.drafted_text, c.own_text, c.num_accepted) for c in stream] == [
            ("", "a", 0), ("bc", "d", 2), ("ef", "g", 2), ("hi", "j", 2),
        ]  # fmt: skip

    def test_a_character_begun_by_a_draft_belongs_to_who_completes_it(self) -> None:
        stream = make_stream("aéé".encode(), depth=2)
        # a | C3 A9 + C3 | A9: the second é is begun by the target and completed by the next round.
        assert [(c.drafted_text, c.own_text) for c in stream] == [("", "a"), ("é", ""), ("", "é")]

    def test_text_cut_inside_a_character_is_shown_to_its_end(self) -> None:
        for depth in (None, 2):
            stream = make_stream("ab🙂".encode()[:-1], depth=depth)
            shown = "".join(texts(stream))
            assert stream.result().text == "ab\ufffd"
            assert shown == "ab\ufffd"


class TestResult:
    def test_before_the_first_chunk(self) -> None:
        stream = make_stream(b"abc")
        done = stream.result()
        assert (done.text, done.token_ids, done.finish_reason) == ("", (), "interrupted")
        assert (done.prompt_ids, done.plan) == (tuple(PROMPT), PLAN)
        assert texts(stream) == ["a", "b", "c"]

    @pytest.mark.parametrize("num_chunks", [1, 2, 3])
    def test_after_a_few(self, num_chunks: int) -> None:
        stream = make_stream(b"abcdefghij", depth=2)
        chunks = iter(stream)
        seen = "".join(next(chunks).text for _ in range(num_chunks))
        done = stream.result()
        assert done.text == seen == "abcdefghij"[: 3 * num_chunks - 2]
        assert done.token_ids == tuple(seen.encode())
        assert done.finish_reason == "interrupted"
        assert "".join([seen, *(chunk.text for chunk in chunks)]) == "abcdefghij"
        assert stream.result().finish_reason == "length"

    def test_listening_again_goes_on(self) -> None:
        stream = make_stream(b"abcdef")
        for chunk in stream:
            if chunk.text == "c":
                break
        assert texts(stream) == ["d", "e", "f"]
        assert stream.result().token_ids == tuple(b"abcdef")
        assert texts(stream) == []

    @pytest.mark.parametrize(
        ("eos", "max_new_tokens", "text", "reason"),
        [
            ([], 6, "abcdef", "length"),
            ([ord("d")], 6, "abcd", "stop"),
            ([ord("d")], 4, "abcd", "stop"),
            ([ord("d")], 3, "abc", "length"),
            ([ord("a")], 6, "a", "stop"),
        ],
    )
    @pytest.mark.parametrize("depth", [None, 3])
    def test_the_reason_it_ended(
        self, eos: list[int], max_new_tokens: int, text: str, reason: str, depth: int | None
    ) -> None:
        stream = make_stream(b"abcdef", depth=depth, max_new_tokens=max_new_tokens, eos=eos)
        assert "".join(texts(stream)) == text
        assert (stream.result().text, stream.result().finish_reason) == (text, reason)

    def test_times(self) -> None:
        stream = make_stream(b"abcdef", depth=2)
        list(stream)
        trace = stream.result().trace
        assert trace.prefill_ns > 0
        assert trace.num_prompt == len(PROMPT)
        assert all(r.verify_ns > 0 for r in trace.rounds[1:])

    def test_an_interrupt_between_rounds_keeps_them(self) -> None:
        stream = make_stream(b"abcdef")

        def interrupted() -> Any:
            source = stream._source
            for number, round_ in enumerate(source):
                if number == 3:
                    raise KeyboardInterrupt
                yield round_

        broken = Stream(interrupted(), stream._run, PROMPT, PLAN, ByteTokenizer(), FakeClock())
        seen: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            seen.extend(chunk.text for chunk in broken)
        assert broken.result().text == "abc"
        assert broken.result().finish_reason == "interrupted"
