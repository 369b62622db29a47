"""What a candidate speeds up: how to load it, its inputs, one run, and when two outputs are the same.

A transform is a Python file with ``apply(workload)``. It may replace ``workload.run``, ``workload.model`` or
anything below, and tells what its loop did through ``workload.report_stats``. Nothing it changes is asked for
a verdict: inputs and ``compare`` are taken from another object, in the judge's process.
"""

from __future__ import annotations

import base64
import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftproof.errors import UsageError
from draftproof.record import Counters
from draftproof.stats import first_difference
from draftproof.wire import tokens_sha256

_BYTES_OF_SAMPLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What one run is given: plain ids, and the most tokens (for speech: frames) it may emit."""

    token_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one run emitted: ids, or sound where the model emits none.

    Attributes:
        token_ids: new ids, without the prompt's.
        samples: mono sound as little-endian float32, ``None`` for a model of tokens.
        sample_rate: samples a second, with ``samples``.
    """

    token_ids: tuple[int, ...] = ()
    samples: bytes | None = None
    sample_rate: int | None = None

    @property
    def size(self) -> int:
        """Tokens, or samples where there are none."""
        return len(self.token_ids) if self.samples is None else len(self.samples) // _BYTES_OF_SAMPLE

    @property
    def sha256(self) -> str:
        """Hash of the ids joined by commas, or of the sound's bytes."""
        if self.samples is None:
            return tokens_sha256(self.token_ids)
        return hashlib.sha256(self.samples).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        if self.samples is None:
            return {"token_ids": list(self.token_ids)}
        sound = base64.b64encode(self.samples).decode()
        return {"token_ids": list(self.token_ids), "samples": sound, "sample_rate": self.sample_rate}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Output:
        """The output back; raises ``ValueError`` for anything ``to_json`` does not write."""
        sound, rate, ids = value.get("samples"), value.get("sample_rate"), value.get("token_ids")
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError("token ids must be whole numbers from 0")
        if sound is None:
            return cls(token_ids=tuple(ids))
        samples = base64.b64decode(sound, validate=True)
        if len(samples) % _BYTES_OF_SAMPLE or type(rate) is not int or rate < 1:
            raise ValueError("sound must be whole samples at a positive rate")
        return cls(token_ids=tuple(ids), samples=samples, sample_rate=rate)


def as_output(value: Any) -> Output:
    """What a run returned as plain values: an ``Output``, a sequence of ids, or a tensor of one row of ids.

    Raises:
        TypeError: anything else.
    """
    if isinstance(value, Output):
        return value
    rows = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(rows, list | tuple) and len(rows) == 1 and isinstance(rows[0], list | tuple):
        rows = rows[0]
    if not isinstance(rows, list | tuple) or not all(type(i) is int and i >= 0 for i in rows):
        raise TypeError(
            f"run() must return the new token ids as a list, a tuple or one row, not {type(value).__name__}"
        )
    return Output(token_ids=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Whether an output is the expected one; ``detail`` says in one line how it differs, or how close it is.

    ``first_difference`` is the index of the first token that differs, the shorter length where one output
    ends early, and ``None`` where the outputs are equal or have no tokens. ``distance`` and ``limit`` are
    what outputs without tokens are judged by, in the workload's own unit.
    """

    is_equal: bool
    first_difference: int | None = None
    detail: str = ""
    distance: float | None = None
    limit: float | None = None


def compare_tokens(expected: Sequence[int], actual: Sequence[int]) -> Comparison:
    """Every token, to the end of the longer output."""
    index = first_difference(expected, actual)
    if index is None:
        return Comparison(is_equal=True)
    if index < min(len(expected), len(actual)):
        detail = f"token {index} is {actual[index]}, stock emits {expected[index]}"
    else:
        detail = f"{len(actual)} tokens, stock emits {len(expected)}"
    return Comparison(is_equal=False, first_difference=index, detail=detail)


class Workload(ABC):
    """One model and its inputs. Options are JSON-able, so that another process can build the same workload.

    Attributes:
        options: everything that decides what is loaded and run.
        model: the torch module after ``load``, ``None`` before.
    """

    model: Any

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = dict(options)
        self._counters: Counters | None = None

    @abstractmethod
    def load(self) -> None:
        """Load the model as its users load it."""

    @abstractmethod
    def make_inputs(self, **overrides: Any) -> Inputs:
        """The main input, or the one that ``overrides`` describe; never needs the model's weights."""

    @abstractmethod
    def run(self, inputs: Inputs) -> Any:
        """One whole inference; anything ``as_output`` understands."""

    @abstractmethod
    def compare(self, expected: Output, actual: Output) -> Comparison:
        """Whether ``actual`` is what stock emits, judged over the complete output."""

    @abstractmethod
    def diverse_inputs(self) -> dict[str, dict[str, Any]]:
        """Overrides of ``make_inputs`` by label: inputs of the main one's shape and other content."""

    @abstractmethod
    def holdout_options(self) -> dict[str, Any]:
        """Overrides of ``make_inputs`` for an input no candidate is developed on."""

    def counted_module(self) -> Any:
        """The module whose calls are counted as forwards: the last of the model's layers.

        Every forward of the whole model calls it once, also where a candidate calls an inner module; a
        draft from the first layers does not reach it. The model itself where it has no stack of layers.
        """
        layer = None if self.model is None else last_layer(self.model)
        return self.model if layer is None else layer

    def report_stats(
        self, *, steps: int = 0, verifies: int = 0, drafted: int = 0, accepted: int = 0, tokens: int = 0
    ) -> None:
        """Add to the counters of the current run.

        One verification of a K-token draft that accepted n tokens: ``steps=1, verifies=1, drafted=K,
        accepted=n, tokens=n + 1``. One plain decode step: ``steps=1, tokens=1``. The prompt's own forward
        and the token it gives are not reported.
        """
        new = {"steps": steps, "verifies": verifies, "drafted": drafted, "accepted": accepted,
               "tokens": tokens}  # fmt: skip
        old = asdict(self._counters or Counters())
        self._counters = Counters(**{name: old[name] + _whole(name, new[name]) for name in new})

    def take_stats(self) -> Counters | None:
        """The counters since the last call, which start again from zero; ``None`` if nothing was reported."""
        counters, self._counters = self._counters, None
        return counters


def _whole(name: str, value: Any) -> int:
    """A counter as a plain integer, also from a NumPy or torch scalar."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise UsageError(f"report_stats: {name} must be a whole number, got {value!r}") from error
    if number < 0:
        raise UsageError(f"report_stats: {name} must be 0 or more, got {value!r}")
    return number


def last_layer(model: Any) -> Any:
    """The last entry of the shallowest (then longest) module list below ``model``, ``None`` without one."""
    import torch  # noqa: PLC0415 - the judge builds inputs without it

    stacks = [
        (name.count("."), -len(module), module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module)
    ]
    return min(stacks, key=lambda stack: stack[:2])[2][-1] if stacks else None
