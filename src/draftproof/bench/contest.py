"""The real arms of an A/B: two judged candidates rebuilt from the run folders that entered the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.bench.evaluate import (
    Candidate,
    EvaluateSettings,
    base_line,
    freeze,
    judged_line,
    resolved,
)
from draftproof.bench.integrate import Arms, Choice, PairTimes
from draftproof.bench.run import Report
from draftproof.bench.runner import ChildRunner, Failure
from draftproof.bench.workloads.base import Inputs
from draftproof.bench.workloads.build import build_workload
from draftproof.clock import Clock, RealClock
from draftproof.errors import UsageError
from draftproof.folder import STOCK, Evidence, read_run
from draftproof.record import Leg, Machine
from draftproof.wire import decode

# The options a bench and a workload of a language model share.
_SHARED = ("model", "dtype", "device", "prompt_len", "max_new_tokens", "stop", "chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a candidate was judged: what to start, and on which workload."""

    candidate: Candidate
    settings: EvaluateSettings


def recipe(folder: Path) -> Recipe:
    """What the run in ``folder`` judged, read back from its request.

    Raises:
        UsageError: no run there, or its candidate's file has changed since.
    """
    evidence, _ = read_run(folder)
    request = evidence.request
    if evidence.kind == "bench":
        return _bench_recipe(evidence)
    told = dict(request["candidate"])
    digest = told.pop("sha256", None)
    candidate = Candidate(**told | ({"transform": Path(told["transform"])} if digest else {}))
    settings = EvaluateSettings(
        options=request["options"], workload=request["workload"], pairs=request["pairs"],
        seed=request["seed"], timeout=request["timeout"], threads=request["threads"],
    )  # fmt: skip
    return Recipe(candidate=candidate, settings=settings)


def _bench_recipe(evidence: Evidence) -> Recipe:
    """A bench judges a drafter of the engine on the packaged inputs."""
    request = evidence.request
    candidate = Candidate(
        drafter=request["drafter"], depth=request["depth"], claim=request["claim"],
        draft_model=request["draft_model"], exit_layer=request["exit_layer"],
        head=request.get("head"), shortlist=request.get("shortlist"),
    )  # fmt: skip
    options = {name: request[name] for name in _SHARED}
    return Recipe(candidate=candidate, settings=EvaluateSettings(options=options, threads=request["threads"]))


@contextmanager
def open_arms(choice: Choice, report: Report, clock: Clock | None = None) -> Iterator[Arms]:
    """Both arms in processes of their own, warm, on B's main input.

    Raises:
        UsageError: a run folder is gone, A was judged on another workload, or an arm cannot be loaded.
    """
    mine = recipe(Path(choice.row.run))
    other = recipe(Path(choice.base.run)) if choice.base else None
    options = resolved(mine.settings)
    if other is not None and resolved(other.settings) != options:
        raise UsageError(
            f"{choice.base_name} and {choice.row.name} were judged on different workloads; judge both alike"
        )
    case = freeze(build_workload(mine.settings.workload, options), mine.settings)
    line = base_line(mine.settings, options)
    timer = clock or RealClock()
    with ExitStack() as stack:
        report("starting both arms", 0, 0)
        first = {**line, "transform": None} if other is None else _line(other, line)
        a, machine = _open(stack, choice.base_name, first, mine.settings.timeout)
        b, _ = _open(stack, choice.row.name, _line(mine, line), mine.settings.timeout)
        name_a, name_b = _names(choice)
        arms = ((name_a, a), (name_b, b))
        for name, runner in arms:
            _leg(runner, name, 0, case.warm_up, timer)

        def run_pair(number: int) -> PairTimes:
            order = arms if number % 2 == 0 else tuple(reversed(arms))
            legs = {name: _leg(runner, name, number, case.inputs[0].inputs, timer) for name, runner in order}
            return PairTimes(a=legs[name_a], b=legs[name_b])

        yield Arms(run_pair=run_pair, machine=machine)


def _names(choice: Choice) -> tuple[str, str]:
    """The arms' names, told apart where a candidate meets an earlier version of itself."""
    is_same = choice.base_name == choice.row.name
    return (f"{choice.base_name} (integrated)" if is_same else choice.base_name), choice.row.name


def _line(made: Recipe, line: dict[str, Any]) -> dict[str, Any]:
    if made.candidate.drafter == STOCK:
        raise UsageError("a run of stock against itself cannot be integrated")
    return judged_line(made.candidate, line, made.candidate.read())


def _open(stack: ExitStack, name: str, line: dict[str, Any], timeout: float) -> tuple[ChildRunner, Machine]:
    runner = stack.enter_context(ChildRunner(line, timeout))
    if isinstance(runner.ready, Failure):
        raise UsageError(f"{name} could not be loaded: {runner.ready.reason}")
    return runner, decode(Machine, runner.ready["machine"])


def _leg(runner: ChildRunner, name: str, pair: int, inputs: Inputs, clock: Clock) -> Leg:
    start = clock.now_ns()
    reply = runner.run(inputs.token_ids, inputs.max_new_tokens)
    duration = clock.now_ns() - start
    if isinstance(reply, Failure):
        raise UsageError(f"{name} failed in round {pair + 1}: {reply.reason}")
    return Leg(
        label="main", arm=name, pair=pair, order=0, start_ns=start, duration_ns=duration,
        num_tokens=reply.output.size, tokens_sha256=reply.output.sha256, peak_bytes=reply.peak_bytes,
        peak_cuda_bytes=reply.peak_cuda_bytes, num_forwards=reply.num_forwards, counters=reply.counters,
    )  # fmt: skip
