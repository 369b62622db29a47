"""``head select``: candidates ranked by what they do in the engine on held-out prompts; the best is checked.

Teacher-forced acceptance flatters a head: in the engine it stands on its own drafts, at the depth that will
be used. So every prompt is decoded by each candidate and serially, in an order drawn anew for each, and
``ranking`` judges the paired figures. The best then decodes a dev set of further held-out prompts, and stock
does, one token a forward; where a token differs the candidate is refused with the prompt, and the next best
is checked. Candidates that lost stay in the table. A prompt once decoded by all is not decoded again.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftproof.engine import Depth, Engine, load
from draftproof.errors import EvidenceError, OptionError, StorageError
from draftproof.heads.ranking import Decoded, Heat, Standing, standings
from draftproof.heads.shards import Row, read_corpus
from draftproof.models.load import DTYPES
from draftproof.models.stock import StockModel
from draftproof.models.weights import identity
from draftproof.record import Trace
from draftproof.stats import first_difference
from draftproof.wire import (
    FORMAT_VERSION,
    canonical,
    chain,
    check_chain,
    decode,
    encode,
    write_atomic,
    write_lines,
)

Report = Callable[[str, int, int], None]
SELECTION, DECODES, WINNER = "selection.json", "decodes.jsonl", "head"
_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectSettings:
    """What is compared, and on what.

    Attributes:
        model: packaged name, folder or GGUF file of the target.
        corpus: folder that ``head corpus`` made; only held-out prompts are read.
        heads: head folders, or folders of ``head train``, whose checkpoints all take part.
        depth: draft tokens a round, or ``auto``.
        prompts: held-out prompts that rank.
        dev_prompts: further held-out prompts that the winner must decode as stock does.
        max_new_tokens: most tokens of an answer.
        seed: of the choice and the order.
    """

    model: str
    corpus: str
    heads: tuple[str, ...]
    dtype: str = "bfloat16"
    device: str = "cpu"
    depth: Depth = 3
    prompts: int = 36
    dev_prompts: int = 12
    max_new_tokens: int = 96
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        counts = {"prompts": self.prompts, "dev-prompts": self.dev_prompts,
                  "max-new-tokens": self.max_new_tokens}  # fmt: skip
        for name, value in counts.items():
            if value < 1:
                raise OptionError(f"--{name} must be 1 or more, got {value}")
        if self.depth != "auto" and (not isinstance(self.depth, int) or self.depth < 1):
            raise OptionError(f"--depth must be 1 or more, or auto, got {self.depth}")
        if not self.heads:
            raise OptionError("name at least one head folder, or a folder of head train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A head folder by the name it has in tables; ``sha256`` of its tensors."""

    name: str
    folder: Path
    sha256: str


def find_candidates(paths: Sequence[str]) -> tuple[Candidate, ...]:
    """The heads that ``paths`` name: a folder with safetensors, or every ``step-*`` of a training.

    Raises:
        OptionError: a folder holds no head, or one is named twice.
    """
    found: dict[Path, Candidate] = {}
    for text in paths:
        path = Path(text).expanduser()
        folders = [path] if any(path.glob("*.safetensors")) and not (path / "train.json").exists() else []
        folders = folders or [p for p in sorted(path.glob("step-[0-9]*")) if any(p.glob("*.safetensors"))]
        if not folders:
            raise OptionError(f"{text} holds no head: name a folder with safetensors, or one of head train")
        for folder in folders:
            if folder.resolve() in found:
                raise OptionError(f"{folder} is named twice")
            found[folder.resolve()] = Candidate(name=str(folder), folder=folder, sha256=_sha256(folder))
    return tuple(found.values())


def _sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("shortlist.json"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def select_head(
    settings: SelectSettings, out: Path, report: Report, *, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Rank, check and write ``out``; the summary, with ``status``.

    ``out`` gets ``decodes.jsonl`` (one chained line a prompt), ``selection.json`` and, where a candidate
    passed, a copy of it in ``head``.

    Args:
        settings: what to compare.
        out: folder of the selection; one of the same settings is gone on with.
        report: hears of (stage, done, total).
        provenance: facts about this run.

    Raises:
        UsageError: a candidate, the corpus or the folder cannot be used; the message says why.
    """
    candidates = find_candidates(settings.heads)
    engine = load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        progress=report,
    )
    ranking, dev = choose_prompts(settings, engine.target.max_context)
    request = {
        **encode(settings), "weights": identity(engine.folder),
        "candidates": {one.name: one.sha256 for one in candidates},
        "rows": hashlib.sha256(canonical([row.index for row in (*ranking, *dev)]).encode()).hexdigest(),
    }  # fmt: skip
    job = _Selection(settings, out, engine, candidates, json.loads(canonical(request)), dict(provenance))
    return job.run(ranking, dev, report)


def choose_prompts(settings: SelectSettings, max_context: int) -> tuple[list[Row], list[Row]]:
    """Held-out rows that rank, and others for the dev set; categories take turns.

    Raises:
        OptionError: the corpus holds too few that fit.
    """
    kinds: dict[str, list[Row]] = {}
    for row in read_corpus(Path(settings.corpus), "held-out"):
        if row.prompt_length + settings.max_new_tokens <= max_context:
            kinds.setdefault(row.category, []).append(row)
    rng = random.Random(settings.seed)
    for kind in sorted(kinds):
        rng.shuffle(kinds[kind])
    turns = list(_in_turns([kinds[kind] for kind in sorted(kinds)]))
    wanted = settings.prompts + settings.dev_prompts
    if len(turns) < wanted:
        raise OptionError(
            f"{settings.corpus} holds {len(turns)} held-out prompts that fit, not {settings.prompts} and"
            f" {settings.dev_prompts}: ask for fewer with --prompts and --dev-prompts, or make more"
        )
    return turns[: settings.prompts], turns[settings.prompts : wanted]


def _in_turns(groups: Sequence[Sequence[Row]]) -> Iterator[Row]:
    for place in range(max(map(len, groups), default=0)):
        yield from (group[place] for group in groups if place < len(group))


class _Selection:
    """One selection in its folder."""

    def __init__(
        self, settings: SelectSettings, out: Path, engine: Engine, candidates: Sequence[Candidate],
        request: dict[str, Any], provenance: dict[str, Any],
    ) -> None:  # fmt: skip
        self._settings, self._out, self._engine = settings, out, engine
        self._candidates, self._request = list(candidates), request
        self._runs = [*self._earlier(), provenance]
        self._heats = self._read_heats()

    def run(self, ranking: Sequence[Row], dev: Sequence[Row], report: Report) -> dict[str, Any]:
        """Decode, rank, check; what came of it."""
        refused: list[dict[str, Any]] = []
        ranked: list[Standing] = []
        winner: str | None = None
        try:
            self._decode(ranking, report)
            ranked = standings(self._heats)
            winner = self._check(ranked, dev, refused, report)
        except KeyboardInterrupt:
            return self._finish("interrupted", ranked, refused, None, len(ranking))
        return self._finish("complete", ranked, refused, winner, len(ranking))

    def _decode(self, rows: Sequence[Row], report: Report) -> None:
        """Every prompt not yet decoded, by every arm."""
        arms: dict[str | None, Engine] = {None: self._engine}
        for one in self._candidates:
            arms[one.name] = self._engine.with_head(str(one.folder))
        if len(self._heats) < len(rows):
            for name, engine in arms.items():
                self._arm(engine, name, rows[0].ids[: rows[0].prompt_length][::-1], _WARM_TOKENS)
        for done in range(len(self._heats), len(rows)):
            report("decoding held-out prompts", done, len(rows))
            self._heats.append(self._heat(arms, rows[done], done))
            write_lines(self._out / DECODES, chain([encode(heat) for heat in self._heats]))
        report("decoding held-out prompts", len(rows), len(rows))

    def _heat(self, arms: Mapping[str | None, Engine], row: Row, number: int) -> Heat:
        order = list(arms)
        random.Random(f"{self._settings.seed} {number}").shuffle(order)
        traces: dict[str | None, Trace] = {}
        for name in order:
            prompt = row.ids[: row.prompt_length]
            traces[name] = self._arm(arms[name], name, prompt, self._settings.max_new_tokens)
        return Heat(
            label=str(row.index), category=row.category, language=row.language, serial=decoded(traces[None]),
            candidates={one.name: decoded(traces[one.name]) for one in self._candidates},
        )  # fmt: skip

    def _arm(self, engine: Engine, name: str | None, prompt: Sequence[int], num_new: int) -> Trace:
        if name is None:
            return engine.decode(prompt, max_new_tokens=num_new, drafter="none")
        return engine.decode(prompt, max_new_tokens=num_new, drafter="mtp", depth=self._settings.depth)

    def _check(
        self, ranked: Sequence[Standing], dev: Sequence[Row], refused: list[dict[str, Any]], report: Report
    ) -> str | None:
        """The best candidate whose every token on the dev set is stock's; others are noted in ``refused``."""
        folders = {one.name: one.folder for one in self._candidates}
        for standing in ranked:
            engine = self._engine.with_head(str(folders[standing.name]))
            fault = self._fault(standing.name, engine, dev, report)
            if fault is None:
                return standing.name
            refused.append({"name": standing.name, **fault})
        return None

    def _fault(self, name: str, engine: Engine, dev: Sequence[Row], report: Report) -> dict[str, Any] | None:
        for done, row in enumerate(dev):
            report(f"checking {name} against stock", done, len(dev))
            prompt = row.ids[: row.prompt_length]
            got = self._arm(engine, name, prompt, self._settings.max_new_tokens).token_ids
            place = first_difference(self._wanted(row), got)
            if place is not None:
                return {"prompt": row.index, "messages": list(row.messages), "from_token": place}
        return None

    def _wanted(self, row: Row) -> tuple[int, ...]:
        """Stock's tokens for a prompt, decoded once."""
        if row.index not in self._serial:
            prompt = row.ids[: row.prompt_length]
            self._serial[row.index] = self._stock.generate(prompt, self._settings.max_new_tokens)
        return self._serial[row.index]

    @cached_property
    def _serial(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def _stock(self) -> StockModel:
        return StockModel(
            self._engine.folder, DTYPES[self._settings.dtype], torch.device(self._settings.device)
        )

    def _earlier(self) -> list[dict[str, Any]]:
        """Runs that worked on this folder before; refuses a folder of anything else."""
        if self._out.exists() and not self._out.is_dir():
            raise OptionError(f"{self._out} is a file: name a folder with --out")
        path = self._out / SELECTION
        if not path.exists():
            if self._out.is_dir() and any(self._out.iterdir()):
                raise OptionError(f"{self._out} holds other files: name an empty folder with --out")
            self._write({"status": "started"}, [])
            return []
        earlier = read_selection(self._out)
        for name, value in self._request.items():
            if earlier["request"].get(name) != value:
                raise OptionError(f"{self._out} compared with another {name}: name another folder with --out")
        return list(earlier["runs"])

    def _read_heats(self) -> list[Heat]:
        path = self._out / DECODES
        if not path.exists():
            return []
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            check_chain(rows)
            names = set(Heat.__slots__)
            return [decode(Heat, {k: v for k, v in row.items() if k in names}) for row in rows]
        except (OSError, ValueError, AttributeError, EvidenceError) as error:
            raise OptionError(f"{path} is damaged: {error}; name another folder with --out") from error

    def _finish(
        self, status: str, ranked: Sequence[Standing], refused: Sequence[Mapping[str, Any]],
        winner: str | None, num_prompts: int,
    ) -> dict[str, Any]:  # fmt: skip
        if winner is not None:
            self._copy(next(one for one in self._candidates if one.name == winner))
        summary = {
            "status": status, "model": self._settings.model, "depth": self._settings.depth,
            "claim": self._engine.plan.claim, "num_decoded": len(self._heats), "num_prompts": num_prompts,
            "num_dev_prompts": self._settings.dev_prompts, "winner": winner,
            "refused": [dict(one) for one in refused], "candidates": [asdict(one) for one in ranked],
            "out": str(self._out),
        }  # fmt: skip
        self._write(summary, self._runs)
        return summary

    def _write(self, summary: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
        body = json.loads(canonical({
            "format_version": FORMAT_VERSION, "kind": "head selection", "request": self._request,
            "runs": list(runs), "summary": dict(summary),
        }))  # fmt: skip
        digest = hashlib.sha256(canonical(body).encode()).hexdigest()
        document = json.dumps({**body, "hash": digest}, indent=1, ensure_ascii=False) + "\n"
        write_atomic(self._out / SELECTION, document)

    def _copy(self, winner: Candidate) -> None:
        """The winner's folder as ``head``, whole or not at all."""
        whole, part = self._out / WINNER, self._out / f".{WINNER}-part"
        try:
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(winner.folder, part)
            shutil.rmtree(whole, ignore_errors=True)
            part.replace(whole)
        except OSError as error:
            raise StorageError(f"cannot write {whole}: {error.strerror}") from error
        if _sha256(whole) != winner.sha256:
            raise StorageError(f"{winner.folder} changed while it was compared: run again with another --out")


def decoded(trace: Trace) -> Decoded:
    """What ``ranking`` needs of a trace."""
    rounds = trace.rounds[1:]
    return Decoded(
        duration_ns=sum(r.draft_ns + r.verify_ns + r.commit_ns for r in rounds),
        num_tokens=sum(len(r.emitted) for r in rounds),
        rounds=tuple((r.num_drafted, r.num_accepted, len(r.emitted)) for r in rounds if r.num_drafted),
    )


def read_selection(folder: Path) -> dict[str, Any]:
    """The document of a selection, its hash checked.

    Raises:
        OptionError: it is damaged.
    """
    path = folder / SELECTION
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        digest = document.pop("hash")
        if hashlib.sha256(canonical(document).encode()).hexdigest() != digest:
            raise EvidenceError("its hash is another")
        return document
    except (OSError, ValueError, KeyError, AttributeError, EvidenceError) as error:
        raise OptionError(f"{path} is damaged: {error}; name another folder with --out") from error
