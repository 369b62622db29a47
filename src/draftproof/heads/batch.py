"""Many sequences at once through a transformers model: greedy or sampled, finished rows dropped.

Prompts are read in groups of equal length, without padding; their caches are then joined, shorter ones
padded on the left and masked, so that rows of any length decode together and freed places are filled again.
On most machines a batched row is *not* the bits of a one-row call, so a near-tie can fall the other way: how
often is measured against stock by ``writer`` and recorded. The same requests in the same order with the same
batch size and threads give the same answers. Letters: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import inspect
import random
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from draftproof.errors import OptionError
from draftproof.heads.overlap import has_looping_tail

Reason = Literal["end", "length", "loop"]
_SPARE = 64
_LOOK_EVERY = 16
_REFILL_SHARE = 0.25
_GROUP = 16
_LIKELY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw a token; ``seed`` is the row's own."""

    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to decode; without ``sampling`` greedily."""

    ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The new ids, the end token included, and why they end."""

    ids: tuple[int, ...]
    reason: Reason


@dataclass(slots=True, kw_only=True)
class _Row:
    place: int
    request: Request
    ids: list[int] = field(default_factory=list)
    rng: random.Random

    def reason(self, end_ids: frozenset[int]) -> Reason | None:
        if self.ids[-1] in end_ids:
            return "end"
        if len(self.ids) % _LOOK_EVERY == 0 and has_looping_tail(self.ids):
            return "loop"
        return "length" if len(self.ids) >= self.request.max_new_tokens else None


class GrowingLayer(DynamicLayer):
    """Keys and values in buffers with room to grow: ``DynamicLayer`` copies all of them every step.

    Holds every position for sliding layers too; the model's mask hides what they must not see.
    """

    keys: Any
    values: Any
    _room: tuple[Tensor, ...] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[2]
        if self._room is None or after > self._room[0].shape[2]:
            self._room = (_grown(self.keys, key_states, after), _grown(self.values, value_states, after))
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, before:after] = new
        self._show(after)
        return self.keys, self.values

    def join(self, other: GrowingLayer, length: int) -> None:
        """Add the rows of ``other``, the shorter of both padded on the left to ``length``."""
        self._room = (_joined(self.keys, other.keys, length), _joined(self.values, other.values, length))
        self._show(length)

    def keep(self, holes: list[int], movers: list[int], count: int, unused: int) -> None:
        """Move rows into holes, keep ``count`` of them, and cut ``unused`` positions off the front."""
        length = self.get_seq_length() - unused
        for room in self._room or ():
            room[holes] = room[movers]
        self._room = tuple(room[:count, :, unused:] for room in self._room or ())
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys, self.values = (room[:, :, :length] for room in self._room or ())


def _grown(old: Tensor, like: Tensor, length: int) -> Tensor:
    room = like.new_empty((*like.shape[:2], length + _SPARE, like.shape[3]))
    if old.numel():
        room[:, :, : old.shape[2]] = old
    return room


def _joined(one: Tensor, other: Tensor, length: int) -> Tensor:
    """Both below one another, ending at ``length``; zeros before, as a masked NaN would still be one."""
    room = one.new_zeros((len(one) + len(other), one.shape[1], length + _SPARE, one.shape[3]))
    room[: len(one), :, length - one.shape[2] : length] = one
    room[len(one) :, :, length - other.shape[2] : length] = other
    return room


def _layer(layer: Any) -> Any:
    """Stock's layer, or the growing one in its place."""
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        make: Any = GrowingLayer
        return make()
    if type(layer) is LinearAttentionLayer:
        return layer
    raise OptionError(f"no batched decoding with a cache layer of type {type(layer).__name__}")


class _State:
    """Rows that decode together: cache, which positions are real, the token each row reads next."""

    def __init__(self, config: Any, ids_BL: Tensor) -> None:
        self.cache = DynamicCache(config=config.get_text_config(decoder=True))
        self.layers = [_layer(layer) for layer in self.cache.layers]
        self.cache.layers = self.layers
        self.mask_BL = torch.ones_like(ids_BL)
        self.rows: list[_Row] = []

    def keep(self, places: list[int]) -> None:
        """Keep these rows, and cut positions none of them uses.

        The last rows move into the places of those that ended, as copying all for every end moves the
        whole cache nearly each step.
        """
        count, kept = len(places), set(places)
        holes = [place for place in range(count) if place not in kept]
        movers = [place for place in places if place >= count]
        order = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        index = torch.tensor(order, device=self.mask_BL.device)
        self.rows = [self.rows[place] for place in order]
        mask_BL = self.mask_BL[index]
        unused = int(mask_BL.any(0).int().argmax())
        self.mask_BL = mask_BL[:, unused:]
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.keep(holes, movers, count, unused)
            else:
                layer.reorder_cache(index)

    def join(self, other: _State) -> None:
        """Add the rows of ``other`` below, the shorter side padded on the left."""
        length = max(self.mask_BL.shape[1], other.mask_BL.shape[1])
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, GrowingLayer):
                mine.join(theirs, length)
            else:
                _join_states(mine, theirs)
        masks = [F.pad(m, (length - m.shape[1], 0)) for m in (self.mask_BL, other.mask_BL)]
        self.mask_BL = torch.cat(masks)
        self.rows += other.rows


def _join_states(mine: Any, theirs: Any) -> None:
    """Recurrent states and convolution windows have no positions: rows are put below."""
    for states in ("conv_states", "recurrent_states"):
        own, other = getattr(mine, states), getattr(theirs, states)
        for key, value in own.items():
            if value is not None:
                own[key] = torch.cat([value, other[key]])


class BatchDecoder:
    """Decodes requests ``size`` at a time.

    Args:
        module: a causal LM of transformers, in evaluation mode.
        end_ids: tokens that end an answer.
        size: most rows decoding together.
    """

    def __init__(self, module: Any, end_ids: frozenset[int], size: int) -> None:
        self._module, self._end_ids, self._size = module, end_ids, size
        names = inspect.signature(module.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def decode(
        self, requests: Sequence[Request], progress: Callable[[int, int], None] = lambda *_: None,
        then: Callable[[int, Answer], Request | None] = lambda *_: None,
    ) -> list[Answer]:  # fmt: skip
        """The answers in order; ``progress`` hears of rows done and tokens decoded.

        ``then`` hears of each answer, with its place, and may ask on: the next request takes a free place
        among the others, so that no step of a conversation waits for all to reach it.
        """
        asked = list(requests)
        waiting = deque(sorted(range(len(asked)), key=lambda place: (len(asked[place].ids), place)))
        answers: dict[int, Answer] = {}
        state: _State | None = None
        num_tokens = 0
        while waiting or state is not None:
            num_free = self._size - (0 if state is None else len(state.rows))
            if state is None or (waiting and num_free >= self._size * _REFILL_SHARE):
                taken = [waiting.popleft() for _ in range(min(num_free, len(waiting)))]
                state = self._admit(state, asked, taken)
                num_tokens += len(taken)
            else:
                self._step(state)
                num_tokens += len(state.rows)
            state, ended = self._retire(state)
            for place, answer in ended:
                following = then(place, answer)
                if following is None:
                    answers[place] = answer
                else:
                    asked[place] = following
                    waiting.appendleft(place)
            progress(len(answers), num_tokens)
        return [answers[place] for place in range(len(requests))]

    def _admit(self, state: _State | None, requests: Sequence[Request], taken: list[int]) -> _State:
        """The state with these rows in it; they are joined among themselves first, as it is the larger."""
        ordered = sorted(taken, key=lambda place: (len(requests[place].ids), place))
        groups = [self._read(requests, group) for group in _equal_lengths(requests, ordered)]
        new = groups[0]
        for other in groups[1:]:
            new.join(other)
        if state is None:
            return new
        state.join(new)
        return state

    def _read(self, requests: Sequence[Request], group: list[int]) -> _State:
        """The first token of prompts of one length."""
        ids_BL = torch.tensor([requests[place].ids for place in group], device=self._module.device)
        state = _State(self._module.config, ids_BL)
        for place in group:
            how = requests[place].sampling
            rng = random.Random(how.seed if how else 0)
            state.rows.append(_Row(place=place, request=requests[place], rng=rng))
        _emit(state.rows, self._forward(state, ids_BL))
        return state

    def _step(self, state: _State) -> None:
        last_B1 = torch.tensor([[row.ids[-1]] for row in state.rows], device=self._module.device)
        state.mask_BL = F.pad(state.mask_BL, (0, 1), value=1)
        position_B1 = state.mask_BL.sum(1, keepdim=True) - 1
        logits_BV = self._forward(state, last_B1, attention_mask=state.mask_BL, position_ids=position_B1)
        _emit(state.rows, logits_BV)

    def _forward(self, state: _State, ids_BL: Tensor, **more: Any) -> Tensor:
        """Logits of the last position."""
        made = self._module(
            ids_BL, use_cache=True, logits_to_keep=1, **{self._cache_name: state.cache}, **more
        )
        logits_BV: Tensor = made.logits[:, -1]
        return logits_BV

    def _retire(self, state: _State) -> tuple[_State | None, list[tuple[int, Answer]]]:
        """What goes on, and the answers that ended."""
        going, ended = [], []
        for place, row in enumerate(state.rows):
            reason = row.reason(self._end_ids)
            if reason is None:
                going.append(place)
            else:
                ended.append((row.place, Answer(ids=tuple(row.ids), reason=reason)))
        if ended and going:
            state.keep(going)
        return (state if going else None), ended


def _equal_lengths(requests: Sequence[Request], places: Sequence[int]) -> Iterator[list[int]]:
    """Groups of prompts of one length, in order, small enough for the memory a prompt pass takes."""
    for _, group in groupby(places, key=lambda place: len(requests[place].ids)):
        members = iter(group)
        while some := list(islice(members, _GROUP)):
            yield some


def _emit(rows: Sequence[_Row], logits_BV: Tensor) -> None:
    """Append one token to every row."""
    tokens = logits_BV.argmax(-1).tolist()
    drawn = [(place, row.request.sampling, row) for place, row in enumerate(rows)]
    some = [(place, how, row.rng.random()) for place, how, row in drawn if how is not None]
    if some:
        places = [place for place, _, _ in some]
        hows, uniforms = [how for _, how, _ in some], [uniform for _, _, uniform in some]
        for place, token in zip(places, sample(logits_BV[places], hows, uniforms), strict=True):
            tokens[place] = token
    for row, token in zip(rows, tokens, strict=True):
        row.ids.append(token)


def sample(logits_BV: Tensor, hows: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """Of each row the token at its ``uniform`` of the mass of the fewest tokens that hold ``top_p``.

    Only when the likeliest few do not reach ``top_p`` is a row's whole vocabulary sorted.
    """
    heat_B1 = torch.tensor([[how.temperature] for how in hows], device=logits_BV.device)
    probs_BV = (logits_BV.float() / heat_B1).softmax(-1)
    reached_BK, tokens_BK = _cumulated(probs_BV, min(_LIKELY, probs_BV.shape[-1]))
    found = []
    for row, (how, uniform) in enumerate(zip(hows, uniforms, strict=True)):
        reached_K, tokens_K = reached_BK[row].tolist(), tokens_BK[row]
        if reached_K[-1] < how.top_p:
            all_V, tokens_K = _cumulated(probs_BV[row], probs_BV.shape[-1])
            reached_K = all_V.tolist()
        found.append(int(tokens_K[_place(reached_K, how.top_p, uniform)]))
    return found


def _cumulated(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mass up to each of the ``count`` likeliest tokens, and the tokens."""
    values, tokens = probs.topk(count)
    return values.cumsum(-1), tokens


def _place(reached: list[float], top_p: float, uniform: float) -> int:
    last = min(bisect_left(reached, top_p), len(reached) - 1)
    return min(bisect_right(reached, uniform * reached[last], 0, last + 1), last)
