"""Makes one shard: prompts, the target's batched answers, what is removed, and a comparison with stock.

A shard depends on the settings and its number alone (and, at near-ties, on threads and machine), so one that
was lost is made again. How often a batched greedy row is what stock decodes alone is measured on a sample of
every early shard and of some later ones, and so is how much faster; both go into the shard's facts.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftproof.clock import Clock, RealClock
from draftproof.errors import OptionError
from draftproof.heads.batch import Answer, BatchDecoder, Request, Sampling
from draftproof.heads.chat import Chat, Message
from draftproof.heads.overlap import Guard, Hit, has_looping_tail, is_repetitive
from draftproof.heads.prompts import Prompt, Shares, draw
from draftproof.heads.shards import Row, Shard, split_of
from draftproof.machine import describe
from draftproof.models.load import DTYPES, load_tokenizer
from draftproof.models.stock import StockModel, eos_ids
from draftproof.models.weights import identity
from draftproof.stats import first_difference
from draftproof.wire import canonical, encode

Progress = Callable[[int, int], None]
_FIRST_SHARDS, _ROWS_EARLY, _ROWS_LATE, _EVERY = 8, 2, 1, 16
_FEWEST_TOKENS, _FEWEST_CHARACTERS = 8, 6
_USER_TURN_TOKENS, _EARLIER_SHARE = 64, 0.5
_MOST_EXAMPLES = 5
# A user's turn is drawn warmer than an answer: one opening must give many.
_TURN_TEMPERATURE, _ANSWER_TEMPERATURE, _TOP_P = 1.0, 0.8, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """All a shard depends on besides its number; ``evaluation`` are the texts its own must not overlap."""

    model: str
    dtype: str
    device: str
    seed: int
    batch: int
    max_new_tokens: int
    sampled_share: float
    self_instruct_share: float
    held_out_share: float
    evaluation: dict[str, str]
    threads: int | None = None

    def request(self) -> dict[str, Any]:
        """What decides the texts, evaluation texts as hashes; threads are in every shard's machine."""
        made = asdict(self)
        del made["threads"]
        texts = sorted(self.evaluation.items())
        return made | {"evaluation": {k: hashlib.sha256(v.encode()).hexdigest() for k, v in texts}}

    def fingerprint(self) -> str:
        """Hash of that."""
        return hashlib.sha256(canonical(self.request()).encode()).hexdigest()

    @property
    def shares(self) -> Shares:
        """Parts of a draw."""
        return Shares(sampled=self.sampled_share, self_instruct=self.self_instruct_share)


@dataclass(slots=True)
class _Making:
    """What is counted while a shard is made."""

    removed: Counter[str] = field(default_factory=Counter)
    by_text: Counter[str] = field(default_factory=Counter)
    hits: list[dict[str, Any]] = field(default_factory=list)
    num_decoded: int = 0
    decode_ns: int = 0
    num_ended: int = 0
    due: list[int] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)
    num_alone: int = 0
    alone_ns: int = 0

    def hit(self, index: int, where: str, found: Hit) -> None:
        self.by_text[found.label] += 1
        if len(self.hits) < _MOST_EXAMPLES:
            self.hits.append({"index": index, "where": where, "text": found.label, "gram": found.gram})


@dataclass(slots=True, kw_only=True)
class _Item:
    """A prompt on its way to a row: the conversation so far, its user turns."""

    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    row: Row | None = None

    @property
    def turns(self) -> tuple[str, ...]:
        return tuple(text for role, text in self.messages if role != "assistant")


class ShardWriter:
    """Holds the target, loaded as stock; ``folder`` is where its weights are."""

    def __init__(self, settings: WriterSettings, folder: Path, clock: Clock | None = None) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = torch.device(settings.device)
        self._settings, self._clock = settings, clock or RealClock()
        self._stock = StockModel(folder, DTYPES[settings.dtype], device)
        self._chat = Chat(load_tokenizer(folder))
        if settings.self_instruct_share and not self._chat.has_template:
            raise OptionError("--self-instruct-share needs a model with a chat template: give 0")
        module = self._stock.module
        self._decoder = BatchDecoder(module, eos_ids(module.generation_config), settings.batch)
        self._guard = Guard(settings.evaluation)
        config = module.config.get_text_config()
        self._room = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        self._machine = {
            "machine": encode(describe(device)), "weights": identity(folder), "host": platform.node(),
            "request": settings.fingerprint(),
        }  # fmt: skip

    def make(self, number: int, first: int, count: int, progress: Progress = lambda *_: None) -> Shard:
        """The shard of ``count`` prompts from index ``first`` on; ``progress`` hears of (done, count)."""
        making = _Making(due=self._when_to_compare(number, count))
        drawn = [draw(self._settings.seed, i, self._settings.shares) for i in range(first, first + count)]
        rows = self._answered([_Item(prompt=prompt) for prompt in drawn], making, progress)
        rows.sort(key=lambda row: row.index)
        greedy = [row for row in rows if not row.is_sampled and row.index not in making.compared]
        for row in greedy[: len(making.due)]:
            self._compare(row, making)
        facts = {
            **self._machine, "first": first, "count": count, "removed": dict(making.removed),
            "overlap": {"by_text": dict(making.by_text), "examples": making.hits},
            "num_decoded": making.num_decoded, "decode_ns": making.decode_ns,
            "stock": {
                "num_rows": len(making.compared), "num_equal": len(making.compared) - len(making.differences),
                "num_tokens": making.num_alone, "duration_ns": making.alone_ns,
                "differences": making.differences,
            },
        }  # fmt: skip
        return Shard(number=number, rows=tuple(rows), facts=facts)

    def _answered(self, items: Sequence[_Item], making: _Making, progress: Progress) -> list[Row]:
        """Every item through its turns, all in one stream of batches."""
        asked = [(item, request) for item in items if (request := self._first(item, making))]
        start = self._clock.now_ns()
        self._decoder.decode(
            [request for _, request in asked], lambda done, _: progress(done, len(asked)),
            lambda place, answer: self._next(asked[place][0], answer, making),
        )  # fmt: skip
        making.decode_ns = self._clock.now_ns() - start - making.alone_ns
        return [item.row for item in items if item.row]

    def _first(self, item: _Item, making: _Making) -> Request | None:
        """What an item asks first: an answer, or the user's turn itself."""
        if item.prompt.turns:
            return self._begin(item, making)
        opening = self._chat.opening(item.prompt.hint)
        if opening is None:
            raise OptionError("--self-instruct-share: the chat template hides the user's turn; give 0")
        how = Sampling(temperature=_TURN_TEMPERATURE, top_p=_TOP_P, seed=item.prompt.seed + 1)
        return Request(ids=opening, max_new_tokens=_USER_TURN_TOKENS, sampling=how)

    def _next(self, item: _Item, answer: Answer, making: _Making) -> Request | None:
        """What an item asks after an answer; ``None`` after its last."""
        making.num_decoded += len(answer.ids)
        text = self._chat.text(answer.ids)
        if not item.messages:
            if answer.reason != "end" or len(text) < _FEWEST_CHARACTERS or is_repetitive(text):
                making.removed["no user turn"] += 1
                return None
            item.prompt = item.prompt.with_turn(text)
            return self._begin(item, making)
        if len(item.turns) == len(item.prompt.turns):
            self._end(item, answer, making)
            return None
        item.messages += [("assistant", text), ("user", item.prompt.turns[len(item.turns)])]
        return self._ask(item, making)

    def _end(self, item: _Item, answer: Answer, making: _Making) -> None:
        """Keep or drop the last answer; now and then compare one with stock while the others wait."""
        item.row = self._row(item, answer, making)
        making.num_ended += 1
        is_due = bool(making.due) and making.num_ended >= making.due[0]
        if is_due and item.row and not item.row.is_sampled:
            making.due.pop(0)
            self._compare(item.row, making)

    def _begin(self, item: _Item, making: _Making) -> Request | None:
        """The first answer's request, unless the turns overlap an evaluation text."""
        found = self._guard.hit("\n".join(item.prompt.turns))
        if found:
            making.hit(item.prompt.index, "prompt", found)
            making.removed["overlap in prompt"] += 1
            return None
        item.messages = [("text" if item.prompt.is_raw else "user", item.prompt.turns[0])]
        return self._ask(item, making)

    def _ask(self, item: _Item, making: _Making) -> Request | None:
        """An answer to the last turn, half as long where another turn follows."""
        most, ids = self._settings.max_new_tokens, self._chat.ids(item.messages)
        if not 0 < len(ids) <= self._room - most:
            making.removed["prompt too long"] += 1
            return None
        if len(item.turns) < len(item.prompt.turns):
            most = max(int(most * _EARLIER_SHARE), 1)
        seed = item.prompt.seed + 1 + len(item.messages)
        how = Sampling(temperature=_ANSWER_TEMPERATURE, top_p=_TOP_P, seed=seed)
        return Request(ids=ids, max_new_tokens=most, sampling=how if item.prompt.is_sampled else None)

    def _row(self, item: _Item, answer: Answer, making: _Making) -> Row | None:
        """The row, or ``None`` with the reason counted."""
        text, prompt = self._chat.text(answer.ids), item.prompt
        if answer.reason == "loop" or has_looping_tail(answer.ids) or is_repetitive(text):
            making.removed["loop"] += 1
            return None
        if len(answer.ids) < _FEWEST_TOKENS:
            making.removed["too short"] += 1
            return None
        found = self._guard.hit(text)
        if found:
            making.hit(prompt.index, "answer", found)
            making.removed["overlap in answer"] += 1
            return None
        ids = self._chat.ids(item.messages)
        return Row(
            index=prompt.index, category=prompt.category, language=prompt.language, origin=prompt.origin,
            split=split_of(item.turns, self._settings.held_out_share),
            is_raw=prompt.is_raw or not self._chat.has_template, is_sampled=prompt.is_sampled,
            finished=answer.reason == "end", messages=tuple(item.messages), text=text,
            ids=(*ids, *answer.ids), prompt_length=len(ids),
        )  # fmt: skip

    def _when_to_compare(self, number: int, count: int) -> list[int]:
        """After how many ended answers one is compared, spread over the shard."""
        wanted = _ROWS_EARLY if number < _FIRST_SHARDS else _ROWS_LATE * (number % _EVERY == 0)
        return [max(count * (place + 1) // (wanted + 2), 1) for place in range(wanted)]

    def _compare(self, row: Row, making: _Making) -> None:
        """Decode a greedy row again, alone, by stock: whether it is equal, and how long that takes."""
        start = self._clock.now_ns()
        alone = self._stock.generate(row.ids[: row.prompt_length], row.num_tokens)
        making.alone_ns += self._clock.now_ns() - start
        making.num_alone += len(alone)
        making.compared.append(row.index)
        batched = row.ids[row.prompt_length :]
        same = first_difference(alone, batched)
        if same is not None:
            making.differences.append({"index": row.index, "from_token": same, "of": len(batched)})
