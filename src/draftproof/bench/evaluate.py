"""``evaluate_e2e``: judge a candidate end to end against pristine stock, each in a process of its own.

A candidate is a Python file with ``apply(workload)`` or a built-in drafter. Its inputs and the function that
compares are built here, before its process exists; it gets ids when they are needed, and answers ids. What
this does not defend against: code that leaves its process (it runs with the user's rights) or slows the whole
machine down in a way that stock's own legs do not show. ``arena`` adds a sandbox.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from draftproof import gate, results
from draftproof.bench.provenance import provenance
from draftproof.bench.run import pieces
from draftproof.bench.runner import ChildRunner, Failure, Runner
from draftproof.bench.trial import Case, JudgedInput, Report, Trial
from draftproof.bench.workloads.base import Inputs, Workload
from draftproof.bench.workloads.build import build_workload
from draftproof.clock import RealClock
from draftproof.drafters.build import check_head, check_name
from draftproof.errors import OptionError, UsageError
from draftproof.folder import SERIAL, STOCK, Evidence, write_run
from draftproof.models.load import load_tokenizer, resolve
from draftproof.record import CostCurve, Machine, MemoryFloor, Plan
from draftproof.results import SOLO
from draftproof.wire import decode, write_atomic

FEWEST_PAIRS = 5
TRANSFORM = "transform.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is judged: a file with ``apply(workload)``, or a drafter of the engine; never both.

    Raises:
        OptionError: neither or both, or an unknown drafter.
    """

    transform: Path | None = None
    drafter: str | None = None
    depth: int | str = "auto"
    claim: str = "auto"
    draft_model: str | None = None
    exit_layer: int | None = None
    head: str | None = None
    shortlist: str | None = None

    def __post_init__(self) -> None:
        if (self.transform is None) == (self.drafter is None):
            raise OptionError("give either a file with apply(workload) or a drafter")
        if self.drafter is not None:
            check_name(self.drafter)
        check_head(self.head, self.drafter or "")

    @property
    def arm(self) -> str:
        """Name of the judged arm: the file's without its suffix, or the drafter's."""
        name = self.drafter if self.transform is None else self.transform.stem
        return f"candidate-{name}" if name in (STOCK, SERIAL, SOLO) else str(name)

    def read(self) -> bytes | None:
        """The file's bytes, ``None`` for a drafter.

        Raises:
            UsageError: it cannot be read, is not Python, or cannot have a function ``apply``.
        """
        if self.transform is None:
            return None
        try:
            source = self.transform.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {self.transform}: {error.strerror}") from error
        try:
            tree = ast.parse(source.decode("utf-8"), filename=str(self.transform))
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{self.transform} is not Python in UTF-8: {error}") from error
        if not _may_define_apply(tree):
            raise UsageError(f"{self.transform} defines no function apply(workload)")
        return source


def _may_define_apply(tree: ast.Module) -> bool:
    """Whether executing the file can leave a name ``apply``, as far as its text tells."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == "apply":
            return True
        if isinstance(node, ast.Name) and node.id == "apply" and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in ("apply", "*"):
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateSettings:
    """How a candidate is judged; written to ``run.json`` as it was used.

    Attributes:
        workload: ``llm`` or ``tts``.
        options: the workload's own, such as ``model``, ``dtype``, ``device``, ``prompt_len``.
        pairs: interleaved pairs an input, 5 or more.
        seed: of the order within pairs and of the warm-up text.
        timeout: seconds a process has for each run; then it is stopped and has failed.
        threads: torch threads of both arms.
        quality: ``exact`` (every token), ``near-lossless`` or ``relaxed`` (language models only).
        limits: replaces limits of the quality gates, by their names in ``gate.Thresholds``.
    """

    options: dict[str, Any]
    workload: str = "llm"
    pairs: int = FEWEST_PAIRS
    seed: int = 0
    timeout: float = 600.0
    threads: int | None = None
    quality: str = "exact"
    limits: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pairs < FEWEST_PAIRS:
            raise OptionError(f"pairs must be {FEWEST_PAIRS} or more, got {self.pairs}")
        if self.timeout <= 0:
            raise OptionError(f"timeout must be more than 0 seconds, got {self.timeout:g}")
        if self.quality == "exact" and self.limits:
            raise OptionError(f"quality 'exact' has no limits to set, got {', '.join(self.limits)}")
        if self.quality != "exact" and self.workload != "llm":
            raise OptionError(f"quality {self.quality!r} is measured on language models; use 'exact'")

    @property
    def thresholds(self) -> gate.Thresholds | None:
        """The gates' limits, ``None`` when every token counts."""
        return None if self.quality == "exact" else gate.thresholds(self.quality, **self.limits)


def evaluate_e2e(
    candidate: Candidate, settings: EvaluateSettings, folder: Path, report: Report
) -> dict[str, Any]:
    """Judge ``candidate`` and write the run folder, after every input; the results as in ``run.json``.

    Raises:
        UsageError: bad settings, a bad file, or an unusable model; nothing was timed then. Also when stock
            itself fails; what was measured is in the folder.
    """
    source = candidate.read()
    report("fetching and converting the model", 0, 0)
    options = resolved(settings)
    workload = build_workload(settings.workload, options)
    if candidate.drafter is not None and settings.workload != "llm":
        raise OptionError("a drafter decodes language models; use --workload llm")
    settings = replace(settings, options={**workload.options, "model": settings.options["model"]})
    has_serial = candidate.drafter not in (None, "none")
    case = replace(freeze(workload, settings), has_serial=has_serial)
    base = base_line(settings, options)
    if source is not None:
        write_atomic(folder / TRANSFORM, source.decode("utf-8"))
    report("starting the stock process", 0, 0)
    with ExitStack() as stack:
        stock = stack.enter_context(ChildRunner({**base, "transform": None}, settings.timeout))
        if isinstance(stock.ready, Failure):
            raise UsageError(f"stock could not be loaded: {stock.ready.reason}")
        evidence = _evidence(candidate, settings, source, stock.ready, Path(options["model"]))
        writer = _Writer(folder, workload, settings.workload == "llm")
        trial = Trial(case, evidence, RealClock(), writer.write, report)

        def start() -> Runner | Failure:
            child = stack.enter_context(ChildRunner(judged_line(candidate, base, source), settings.timeout))
            if isinstance(child.ready, Failure):
                return child.ready
            trial.evidence = _with_engine(trial.evidence, child.ready)
            return child

        trial.run(stock, start)
    return writer.results


def resolved(settings: EvaluateSettings) -> dict[str, Any]:
    """The workload's options with the model as a folder, so that no child fetches or converts."""
    options = dict(settings.options)
    if "model" not in options:
        raise OptionError("a workload needs a model")
    folder = resolve(str(options["model"]), str(options.get("dtype", "bfloat16")))
    return {**options, "model": str(folder)}


def freeze(workload: Workload, settings: EvaluateSettings) -> Case:
    """Every input and the comparison, taken from a workload no candidate has touched."""
    main = workload.make_inputs()
    items = [
        JudgedInput(label="main", role="main", inputs=main),
        JudgedInput(
            label="holdout", role="holdout", inputs=workload.make_inputs(**workload.holdout_options())
        ),
    ]
    for label, overrides in workload.diverse_inputs().items():
        items.append(JudgedInput(label=label, role="diverse", inputs=workload.make_inputs(**overrides)))
    shuffled = list(main.token_ids)
    random.Random(settings.seed).shuffle(shuffled)
    warm = Inputs(token_ids=tuple(shuffled), max_new_tokens=main.max_new_tokens)
    return Case(
        inputs=tuple(items), warm_up=warm, compare=workload.compare, pairs=settings.pairs,
        seed=settings.seed, limits=settings.thresholds,
    )  # fmt: skip


def base_line(settings: EvaluateSettings, options: dict[str, Any]) -> dict[str, Any]:
    """What both processes are started with."""
    return {
        "kind": "workload", "workload": settings.workload, "options": options, "threads": settings.threads,
        "device": options.get("device", "cpu"),
    }  # fmt: skip


def judged_line(candidate: Candidate, base: dict[str, Any], source: bytes | None) -> dict[str, Any]:
    """The candidate's first line."""
    if candidate.transform is not None and source is not None:
        digest = hashlib.sha256(source).hexdigest()
        return {**base, "transform": str(candidate.transform.resolve()), "sha256": digest}
    options = base["options"]
    return {
        **base, "kind": "engine", "model": options["model"], "dtype": options.get("dtype", "bfloat16"),
        "stop": options.get("stop", "fixed"), "drafter": candidate.drafter, "depth": candidate.depth,
        "claim": candidate.claim, "draft_model": candidate.draft_model, "exit_layer": candidate.exit_layer,
        "head": candidate.head, "shortlist": candidate.shortlist,
    }  # fmt: skip


def _evidence(
    candidate: Candidate, settings: EvaluateSettings, source: bytes | None, ready: dict[str, Any],
    model: Path,
) -> Evidence:  # fmt: skip
    """The record before the first leg."""
    described = {k: v for k, v in asdict(candidate).items() if v is not None}
    if source is not None:
        described = {"transform": str(candidate.transform), "sha256": hashlib.sha256(source).hexdigest()}
    request = asdict(settings) | {
        "candidate": described, "model": settings.options["model"],
        "dtype": settings.options.get("dtype", "bfloat16"),
        "device": settings.options.get("device", "cpu"),
    }  # fmt: skip
    floor = ready.get("memory_floor")
    return Evidence(
        kind="evaluate", request=request, status="running", arm=candidate.arm, roles={},
        machine=decode(Machine, ready["machine"]),
        floor=None if floor is None else decode(MemoryFloor, floor),
        provenance=provenance(model, sys.argv[1:]),
    )  # fmt: skip


def _with_engine(evidence: Evidence, ready: dict[str, Any]) -> Evidence:
    """Plan and cost curve of a built-in drafter's engine; a transform has neither."""
    if "plan" not in ready:
        return evidence
    return replace(evidence, plan=decode(Plan, ready["plan"]), curve=decode(CostCurve, ready["cost_curve"]))


class _Writer:
    """Writes the run folder whenever an input is done."""

    def __init__(self, folder: Path, workload: Workload, has_text: bool) -> None:
        self._folder, self._workload = folder, workload
        self._tokenizer = load_tokenizer(Path(workload.options["model"])) if has_text else None
        self.results: dict[str, Any] = {}

    def write(self, evidence: Evidence) -> None:
        """The folder as it stands; published figures are computed from the rows alone."""
        evidence = replace(evidence, texts=self._texts(evidence))
        self.results = results.compute(evidence)
        write_run(self._folder, evidence, self.results)

    def _texts(self, evidence: Evidence) -> dict[str, dict[str, Any]]:
        """Prompt and the judged arm's first output as text, the output one piece a token."""
        if self._tokenizer is None:
            return {}
        return {
            label: {
                "prompt": self._tokenizer.decode(evidence.prompts[label], skip_special_tokens=False),
                "pieces": pieces(self._tokenizer, shown[0].token_ids),
            }
            for label in evidence.labels
            if (shown := evidence.of(label, evidence.arm))
        }
