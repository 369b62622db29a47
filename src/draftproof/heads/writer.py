"""Makes one shard: prompts, the target's batched answers, what is removed, and a comparison with stock.

A shard depends on the settings and its number alone (and, at near-ties, on threads and machine), so one that
was lost is made again. How often a batched greedy row is what stock decodes alone is measured on a sample of
every early shard and of some later ones, and so is how much faster; both go into the shard's facts.
"""

from __future__ import annotations

import hashlib
import platform
import random
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

    def hit(self, index: int, where: str, found: Hit) -> None:
        self.by_text[found.label] += 1
        if len(self.hits) < _MOST_EXAMPLES:
            self.hits.append({"index": index, "where": where, "text": found.label, "gram": found.gram})


@dataclass(slots=True, kw_only=True)
class _Item:
    """A prompt on its way to a row: the conversation so far, its user turns."""

    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    is_removed: bool = False

    @property
    def turns(self) -> tuple[str, ...]:
        return tuple(text for role, text in self.messages if role != "assistant")

    def remove(self, reason: str, making: _Making) -> None:
        self.is_removed = True
        making.removed[reason] += 1


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
        making = _Making()
        drawn = [draw(self._settings.seed, i, self._settings.shares) for i in range(first, first + count)]
        rows = self._answered([_Item(prompt=prompt) for prompt in drawn], making, progress)
        rows.sort(key=lambda row: row.index)
        facts = {
            **self._machine, "first": first, "count": count, "removed": dict(making.removed),
            "overlap": {"by_text": dict(making.by_text), "examples": making.hits},
            "num_decoded": making.num_decoded, "decode_ns": making.decode_ns,
            "stock": self._compare(number, rows),
        }  # fmt: skip
        return Shard(number=number, rows=tuple(rows), facts=facts)

    def _answered(self, items: Sequence[_Item], making: _Making, progress: Progress) -> list[Row]:
        """Every item through its turns, all in one stream of batches."""
        asked = [(item, request) for item in items if (request := self._first(item, making))]
        start = self._clock.now_ns()
        answers = self._decoder.decode(
            [request for _, request in asked], lambda done, _: progress(done, len(asked)),
            lambda place, answer: self._next(asked[place][0], answer, making),
        )  # fmt: skip
        making.decode_ns += self._clock.now_ns() - start
        pairs = zip(asked, answers, strict=True)
        rows = [self._row(item, answer, making) for (item, _), answer in pairs if not item.is_removed]
        return [row for row in rows if row]

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
                item.remove("no user turn", making)
                return None
            item.prompt = item.prompt.with_turn(text)
            return self._begin(item, making)
        if len(item.turns) == len(item.prompt.turns):
            return None
        item.messages += [("assistant", text), ("user", item.prompt.turns[len(item.turns)])]
        return self._ask(item, making)

    def _begin(self, item: _Item, making: _Making) -> Request | None:
        """The first answer's request, unless the turns overlap an evaluation text."""
        found = self._guard.hit("\n".join(item.prompt.turns))
        if found:
            making.hit(item.prompt.index, "prompt", found)
            item.remove("overlap in prompt", making)
            return None
        item.messages = [("text" if item.prompt.is_raw else "user", item.prompt.turns[0])]
        return self._ask(item, making)

    def _ask(self, item: _Item, making: _Making) -> Request | None:
        """An answer to the last turn, half as long where another turn follows."""
        most, ids = self._settings.max_new_tokens, self._chat.ids(item.messages)
        if not 0 < len(ids) <= self._room - most:
            item.remove("prompt too long", making)
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
            item.remove("loop", making)
            return None
        if len(answer.ids) < _FEWEST_TOKENS:
            item.remove("too short", making)
            return None
        found = self._guard.hit(text)
        if found:
            making.hit(prompt.index, "answer", found)
            item.remove("overlap in answer", making)
            return None
        ids = self._chat.ids(item.messages)
        return Row(
            index=prompt.index, category=prompt.category, language=prompt.language, origin=prompt.origin,
            split=split_of(item.turns, self._settings.held_out_share),
            is_raw=prompt.is_raw or not self._chat.has_template, is_sampled=prompt.is_sampled,
            finished=answer.reason == "end", messages=tuple(item.messages), text=text,
            ids=(*ids, *answer.ids), prompt_length=len(ids),
        )  # fmt: skip

    def _compare(self, number: int, rows: Sequence[Row]) -> dict[str, Any]:
        """Decode a few greedy rows again, each alone, by stock: how many are equal, and how long it took."""
        wanted = _ROWS_EARLY if number < _FIRST_SHARDS else _ROWS_LATE * (number % _EVERY == 0)
        greedy = [row for row in rows if not row.is_sampled]
        some = random.Random(f"stock {self._settings.seed} {number}").sample(greedy, min(wanted, len(greedy)))
        num_tokens, duration_ns, differences = 0, 0, []
        for row in some:
            start = self._clock.now_ns()
            alone = self._stock.generate(row.ids[: row.prompt_length], row.num_tokens)
            duration_ns += self._clock.now_ns() - start
            num_tokens += len(alone)
            batched = row.ids[row.prompt_length :]
            if alone != batched:
                same = len(_common(alone, batched))
                differences.append({"index": row.index, "from_token": same, "of": len(batched)})
        return {"num_rows": len(some), "num_equal": len(some) - len(differences), "num_tokens": num_tokens,
                "duration_ns": duration_ns, "differences": differences}  # fmt: skip


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """What both begin with."""
    end = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return list(one[:end])
