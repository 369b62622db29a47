"""The bench: stock in its own process, the engine in another, interleaved pairs, every token compared.

Writes the run folder as it goes (after every input), so an interrupted run keeps what it measured and can be
resumed. What is published is computed from the raw rows by ``draftproof.results``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from draftproof import engine as engines
from draftproof import results
from draftproof.bench.prompts import BenchInput, build_prompt, diverse_inputs, read_suite
from draftproof.bench.provenance import provenance
from draftproof.bench.station import Station, StationSettings
from draftproof.clock import RealClock
from draftproof.drafters.build import check_head, check_name
from draftproof.engine import Engine
from draftproof.errors import EvidenceError, OptionError, PromptError, UsageError
from draftproof.folder import (
    CHAINED,
    RUN,
    STOCK,
    Decode,
    Evidence,
    read_chained,
    read_json,
    salvage,
    write_run,
)
from draftproof.machine import describe, memory_floor
from draftproof.models.decoder import DecoderTarget
from draftproof.models.load import load_tokenizer, resolve
from draftproof.stream import TextStream
from draftproof.wire import check_version, tokens_sha256

Report = Callable[[str, int, int], None]
AGAIN = "stock-again"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Everything that decides what a bench measures; written to ``run.json`` as it was used.

    ``drafter='stock'`` compares stock with itself (A/A). ``stop='fixed'`` keeps every output at
    ``max_new_tokens`` by masking the end tokens in both arms; ``natural`` lets the model end it.
    """

    model: str
    drafter: str = "auto"
    depth: int | str = "auto"
    suite: str = "diverse"
    labels: tuple[str, ...] = ()
    pairs: int = 6
    max_new_tokens: int = 256
    prompt_len: int = 512
    stop: str = "natural"
    chat: bool | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    claim: str = "auto"
    threads: int | None = None
    draft_model: str | None = None
    exit_layer: int | None = None
    head: str | None = None
    shortlist: str | None = None

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise OptionError(f"pairs must be 1 or more, got {self.pairs}")
        check_head(self.head, self.drafter)
        if self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")
        if self.drafter != STOCK:
            check_name(self.drafter)
        if self.drafter == "none":
            raise OptionError("drafter 'none' is the own serial arm, which every bench times anyway")
        if isinstance(self.depth, str) and self.depth != "auto":
            raise OptionError(f"depth must be a number or 'auto', got {self.depth!r}")
        if self.stop not in ("natural", "fixed"):
            raise OptionError(f"stop must be natural or fixed, got {self.stop!r}")

    @property
    def arm(self) -> str:
        """Name of the judged arm."""
        return AGAIN if self.drafter == STOCK else self.drafter

    @property
    def options(self) -> dict[str, Any]:
        """What ``generate`` gets besides the prompt, in both arms."""
        return {"min_new_tokens": self.max_new_tokens} if self.stop == "fixed" else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One pair of one input: the smallest piece of a bench, never split between machines."""

    label: str
    pair: int
    prompt_ids: tuple[int, ...]


Announce = Callable[[Item], None]


class Place(Protocol):
    """Where pairs are decoded: this machine, or several."""

    def __call__(self, settings: StationSettings, warm_ids: Sequence[int]) -> AbstractContextManager[Runner]:
        """Start the processes."""


class Runner(Protocol):
    """Decodes items; yields each one's legs as it is done, in any order."""

    def run(self, items: Sequence[Item], announce: Announce) -> Iterator[tuple[Item, list[Decode]]]:
        """Every item once; ``announce`` is told of each when it starts."""


class Here(Station):
    """This machine, one item after the other."""

    def run(self, items: Sequence[Item], announce: Announce) -> Iterator[tuple[Item, list[Decode]]]:
        """Items in order."""
        for item in items:
            announce(item)
            yield item, self.pair(item.label, item.pair, item.prompt_ids)


def run_bench(
    settings: BenchSettings, folder: Path, report: Report, *, place: Place = Here, resume: bool = False
) -> dict[str, Any]:
    """Measure and write the run folder; returns the results as they stand in ``run.json``.

    Args:
        settings: what to measure.
        folder: the run folder.
        report: told (stage, done, total).
        place: where to decode.
        resume: keep the finished pairs of an earlier, interrupted run of the same settings in ``folder``.

    Raises:
        UsageError: bad settings, an unusable model, or a suite that cannot be read.
    """
    report("fetching and converting the model", 0, 0)
    model = resolve(settings.model, settings.dtype)
    tokenizer = load_tokenizer(model)
    prompts = _prompts(settings, tokenizer)
    evidence = _start(settings, model, prompts, report)
    if resume:
        evidence = replace(evidence, decodes=_kept(folder, evidence))
    todo = _todo(settings, prompts, evidence.decodes)
    base = {
        "folder": str(model), "dtype": settings.dtype, "device": settings.device, "claim": settings.claim,
        "threads": settings.threads, "draft_model": settings.draft_model, "exit_layer": settings.exit_layer,
        "head": settings.head, "shortlist": settings.shortlist,
    }  # fmt: skip
    run = _Run(evidence, folder, tokenizer)
    if not todo:
        return run.write("complete")
    station = StationSettings(
        base=base, drafter=settings.drafter, depth=settings.depth, arm=settings.arm,
        max_new_tokens=settings.max_new_tokens, options=settings.options,
    )  # fmt: skip
    report("starting the stock process and the engine process", 0, 0)
    warm = next(iter(prompts.values()))[::-1]
    with place(station, warm) as runner:
        return _measure(run, runner, todo, report)


class _Run:
    """What a bench has gathered so far, and where it writes it."""

    def __init__(self, evidence: Evidence, folder: Path, tokenizer: Any) -> None:
        self.evidence, self._folder, self._tokenizer = evidence, folder, tokenizer
        self._ends = {d.leg.host: d.leg.start_ns + d.leg.duration_ns for d in evidence.decodes}
        self._shifts: dict[str, int] = {}

    def add(self, decodes: Sequence[Decode]) -> None:
        """Legs of one more pair."""
        numbered = _numbered([self._after_reboot(d) for d in decodes], len(self.evidence.decodes))
        self.evidence = replace(self.evidence, decodes=(*self.evidence.decodes, *numbered))

    def _after_reboot(self, decode: Decode) -> Decode:
        """A resumed run's legs come after those it kept, also where the clock has begun anew since."""
        leg = decode.leg
        shift = self._shifts.setdefault(leg.host, max(0, self._ends.get(leg.host, 0) - leg.start_ns))
        return replace(decode, leg=replace(leg, start_ns=leg.start_ns + shift)) if shift else decode

    def write(self, status: str) -> dict[str, Any]:
        """The run folder as it stands."""
        self.evidence = replace(self.evidence, status=status, texts=_texts(self.evidence, self._tokenizer))
        computed = results.compute(self.evidence)
        write_run(self._folder, self.evidence, computed)
        return computed


def _measure(run: _Run, runner: Runner, todo: Sequence[Item], report: Report) -> dict[str, Any]:
    """All items; written as often as an input takes, and whatever happens."""
    num_done = 0

    def announce(item: Item) -> None:
        report(f"{item.label}, pair {item.pair + 1}", num_done, len(todo))

    every = max(1, len(todo) // max(1, len({item.label for item in todo})))
    try:
        for _, decodes in runner.run(todo, announce):
            run.add(decodes)
            num_done += 1
            if num_done % every == 0:
                run.write("running")
    except KeyboardInterrupt:
        return run.write("interrupted")
    except UsageError as error:
        run.write(f"failed: {error}")
        raise
    return run.write("complete")


def _start(
    settings: BenchSettings, model: Path, prompts: dict[str, tuple[int, ...]], report: Report
) -> Evidence:
    """Probe here first, so that no leg pays for it; then let the engine go, so that memory is the arms'."""
    engine: Engine = engines.load(
        str(model), dtype=settings.dtype, device=settings.device, claim=settings.claim,  # type: ignore[arg-type]
        threads=settings.threads, progress=report,
    )  # fmt: skip
    _check_lengths(settings, prompts, engine.target.max_context)
    is_engine_judged, target, device = settings.drafter != STOCK, engine.target, torch.device(settings.device)
    return Evidence(
        kind="bench", request=asdict(settings) | {"labels": list(settings.labels), "quality": "exact"},
        status="running", arm=settings.arm, roles=dict.fromkeys(prompts, "diverse"),
        machine=describe(device), plan=engine.plan if is_engine_judged else None,
        curve=engine.curve if is_engine_judged else None,
        floor=memory_floor(target.nbytes, device, RealClock()) if isinstance(target, DecoderTarget) else None,
        prompts=prompts, provenance=provenance(model, sys.argv[1:]),
    )  # fmt: skip


def _check_lengths(settings: BenchSettings, prompts: dict[str, tuple[int, ...]], most: int) -> None:
    """Refuse a prompt too long before a process decodes it, which takes minutes where it does not fit."""
    for label, ids in prompts.items():
        if len(ids) + settings.max_new_tokens > most:
            raise PromptError(
                f"{label}: {len(ids)} prompt tokens and {settings.max_new_tokens} new ones exceed the model's"
                f" context of {most}; shorten the prompt or lower --max-new-tokens"
            )


def _prompts(settings: BenchSettings, tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Prompt ids by label, in the suite's order."""
    items: Sequence[BenchInput] = (
        diverse_inputs() if settings.suite == "diverse" else read_suite(Path(settings.suite))
    )
    known = [item.label for item in items]
    unknown = [label for label in settings.labels if label not in known]
    if unknown:
        raise OptionError(f"no input {unknown[0]!r} in this suite; known: {', '.join(known)}")
    chosen = [item for item in items if not settings.labels or item.label in settings.labels]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    chat = has_template if settings.chat is None else settings.chat
    return {
        item.label: tuple(build_prompt(item, tokenizer, settings.prompt_len, chat=chat)) for item in chosen
    }


def _kept(folder: Path, wanted: Evidence) -> tuple[Decode, ...]:
    """The whole pairs an earlier run left; refused when it measured something else.

    A run killed while it wrote may hold rows of a pair whose legs it had not written yet: they are dropped.
    """
    check_version(read_json(folder / RUN))
    for name in CHAINED:
        read_chained(folder / name)
    found = salvage(folder)
    before = found.evidence
    if before is None:
        raise EvidenceError(f"{folder}: {found.problems[0]}")
    different = [name for name, value in wanted.request.items() if before.request.get(name) != value]
    facts = {
        "prompts": before.prompts == wanted.prompts, "machine": before.machine == wanted.machine,
        "weights": before.provenance.get("weights") == wanted.provenance["weights"],
        "commit": before.provenance.get("commit") == wanted.provenance.get("commit"),
    }  # fmt: skip
    different += [name for name, is_same in facts.items() if not is_same]
    if different:
        raise UsageError(f"{folder} holds another run (other {', '.join(different)}); choose another --out")
    of_pair: dict[tuple[str, int], set[str]] = {}
    for d in before.decodes:
        if tokens_sha256(d.token_ids) != d.leg.tokens_sha256:
            raise EvidenceError(f"{folder}: {d.leg.label}, {d.leg.arm}: its tokens are not its leg's")
        of_pair.setdefault((d.leg.label, d.leg.pair), set()).add(d.leg.arm)
    arms = {d.leg.arm for d in before.decodes}
    return _numbered([d for d in before.decodes if of_pair[d.leg.label, d.leg.pair] == arms], 0)


def _numbered(decodes: Sequence[Decode], first: int) -> tuple[Decode, ...]:
    """The decodes with their legs counted from ``first``."""
    return tuple(replace(d, leg=replace(d.leg, order=first + i)) for i, d in enumerate(decodes))


def _todo(settings: BenchSettings, prompts: dict[str, tuple[int, ...]], kept: Sequence[Decode]) -> list[Item]:
    done = {(d.leg.label, d.leg.pair) for d in kept}
    return [
        Item(label=label, pair=pair, prompt_ids=ids)
        for label, ids in prompts.items()
        for pair in range(settings.pairs)
        if (label, pair) not in done
    ]


def _texts(evidence: Evidence, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Prompt and output of the judged arm's first leg as text, the output one piece a token."""
    texts: dict[str, dict[str, Any]] = {}
    for label in evidence.labels:
        known = evidence.texts.get(label)
        shown = evidence.of(label, evidence.arm)
        if known is None and shown:
            known = {
                "prompt": tokenizer.decode(evidence.prompts[label], skip_special_tokens=False),
                "pieces": pieces(tokenizer, shown[0].token_ids),
            }
        if known is not None:
            texts[label] = known
    return texts


def pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text each token completes; joined they are the output. Half a character waits for its rest."""
    stream = TextStream(tokenizer)
    out = [stream.push([token]) for token in token_ids]
    if out:
        out[-1] += stream.flush()
    return out
