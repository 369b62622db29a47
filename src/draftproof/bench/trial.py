"""The order of an evaluation, over two runners and a clock: what is timed when, and when it stops.

Stock alone on the main input; the candidate is loaded; both warmed up on another text; main and held-out
input in interleaved pairs; where both are right, the whole diverse set. Every output is compared to the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftproof import gate
from draftproof.bench.runner import Failure, Reply, Runner
from draftproof.bench.workloads.base import Comparison, Inputs, Output
from draftproof.clock import Clock
from draftproof.errors import EvidenceError, UsageError
from draftproof.folder import SERIAL, STOCK, Decode, Evidence, Role
from draftproof.record import Leg
from draftproof.results import SOLO
from draftproof.wire import encode

Report = Callable[[str, int, int], None]
Publish = Callable[[Evidence], None]
Start = Callable[[], Runner | Failure]
Compare = Callable[[Output, Output], Comparison]

_GATE_ROLES: tuple[Role, ...] = ("main", "holdout")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedInput:
    """One input, built before the candidate's process exists."""

    label: str
    role: Role
    inputs: Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything that decides an evaluation, frozen before the candidate is loaded.

    Attributes:
        inputs: main, held-out and diverse ones, in this order.
        warm_up: a text that is none of them.
        compare: judges an output against stock's; runs in the judge's process.
        pairs: interleaved pairs an input.
        seed: of the order within the pairs.
        limits: quality gates, ``None`` for exact.
        has_serial: the candidate's process can also decode without drafts, so that the gain can be split.
    """

    inputs: tuple[JudgedInput, ...]
    warm_up: Inputs
    compare: Compare
    pairs: int
    seed: int = 0
    limits: gate.Thresholds | None = None
    has_serial: bool = False


class StockError(UsageError):
    """The control itself failed: nothing can be said of the candidate."""


class Trial:
    """One evaluation as it goes.

    Args:
        case: what is judged.
        evidence: the record so far: request, machine and the candidate's name.
        clock: times both arms.
        publish: given the evidence after every input.
        report: told (stage, done, total).
    """

    def __init__(
        self, case: Case, evidence: Evidence, clock: Clock, publish: Publish, report: Report
    ) -> None:
        roles = {item.label: item.role for item in case.inputs}
        self._case, self._clock, self._publish, self._report = case, clock, publish, report
        self.evidence = replace(evidence, roles=roles)
        self._outputs: dict[str, tuple[Output, Output]] = {}
        self._failed: str | None = None
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._rng = random.Random(case.seed)

    def run(self, baseline: Runner, start: Start) -> Evidence:
        """Everything in order; what was measured is published whatever happens.

        Raises:
            UsageError: the control failed.
        """
        try:
            self._measure(baseline, start)
        except KeyboardInterrupt:
            return self._write("interrupted")
        except StockError as error:
            self._write(f"failed: {error}")
            raise
        return self._write("complete" if self._failed is None else f"failed: {self._failed}")

    def _write(self, status: str) -> Evidence:
        self.evidence = replace(self.evidence, status=status)
        self._publish(self.evidence)
        return self.evidence

    def _measure(self, baseline: Runner, start: Start) -> None:
        first = next(item for item in self._case.inputs if item.role == "main")
        self._report("warming stock up", 0, 0)
        self._warm(baseline, STOCK)
        for index in range(self._case.pairs):
            self._report(f"stock alone, run {index + 1} of {self._case.pairs}", index, self._case.pairs)
            self._stock(baseline, first, SOLO, index)
        self._report("loading the candidate", 0, 0)
        candidate = start()
        if isinstance(candidate, Failure):
            self._fail("loading", candidate)
        elif self._warm(candidate, self.evidence.arm) and self._all_inputs(baseline, candidate):
            self._gates(baseline, candidate)

    def _warm(self, runner: Runner, arm: str) -> bool:
        warm = self._case.warm_up
        reply = runner.run(warm.token_ids, warm.max_new_tokens)
        if not isinstance(reply, Failure):
            return True
        if arm == STOCK:
            raise StockError(f"stock: {reply.reason}")
        self._fail("warm-up", reply)
        return False

    def _all_inputs(self, baseline: Runner, candidate: Runner) -> bool:
        """Whether every input was measured and is right."""
        for index, item in enumerate(self._case.inputs):
            is_right, is_alive = self._input(baseline, candidate, item, index)
            is_gate = item.role in _GATE_ROLES
            left = self._case.inputs[index + 1 :]
            if not is_alive or (is_gate and not is_right):
                if left:
                    names = ", ".join(other.label for other in left)
                    self._note(f"not run, as {item.label} did not pass: {names}")
                return False
            self._write("running")
        return self._failed is None

    def _input(self, baseline: Runner, candidate: Runner, item: JudgedInput, index: int) -> tuple[bool, bool]:
        """All pairs of an input, or those up to the first wrong one: (is right, is alive)."""
        expected: Output | None = None
        for pair in range(self._case.pairs):
            self._report(
                f"{item.label}, pair {pair + 1} of {self._case.pairs}",
                index * self._case.pairs + pair, len(self._case.inputs) * self._case.pairs,
            )  # fmt: skip
            outputs: dict[str, Output] = {}
            for arm in self._arms(pair):
                if arm == STOCK:
                    outputs[arm] = self._stock(baseline, item, STOCK, pair)
                    continue
                reply = self._leg(candidate, item, arm, pair)
                if isinstance(reply, Failure):
                    self._fail(item.label, reply)
                    return False, not reply.is_final
                outputs[arm] = reply
            expected = expected or outputs[STOCK]
            if not self._is_right(item, expected, outputs):
                return False, True
        return True, True

    def _arms(self, pair: int) -> list[str]:
        """The order within a pair; an input's first one ends with the serial arm, which is not judged."""
        both = [STOCK, self.evidence.arm]
        if not self._case.has_serial:
            return self._rng.sample(both, 2)
        return [*self._rng.sample(both, 2), SERIAL] if pair == 0 else self._rng.sample([*both, SERIAL], 3)

    def _is_right(self, item: JudgedInput, expected: Output, outputs: dict[str, Output]) -> bool:
        """Compare a pair's outputs with stock's first."""
        stock, actual = outputs[STOCK], outputs[self.evidence.arm]
        again = self._case.compare(expected, stock)
        if not again.is_equal:
            raise StockError(f"stock is not deterministic: {item.label}: {again.detail}")
        self._outputs.setdefault(item.label, (expected, actual))
        found = self._case.compare(expected, actual)
        if expected.samples is not None:
            self._distance(item.label, found)
        plain = outputs.get(SERIAL)
        is_plain_right = plain is None or self._case.compare(expected, plain).is_equal
        return (found.is_equal and is_plain_right) or self._case.limits is not None

    def _distance(self, label: str, found: Comparison) -> None:
        """Outputs without tokens are judged by distance; the worst of an input's legs is kept."""
        if found.distance is None or found.limit is None:
            if not found.is_equal and self._failed is None:
                self._failed = f"{label}: {found.detail}"
            return
        rows = [row for row in self.evidence.gates if row["label"] == label]
        if rows and rows[0]["value"] >= found.distance:
            return
        row = gate.GateRow(
            label=label, gate="distance", value=found.distance, limit=found.limit, is_met=found.is_equal,
            quality="exact",
        )  # fmt: skip
        others = [row for row in self.evidence.gates if row["label"] != label]
        self.evidence = replace(self.evidence, gates=(*others, encode(row)))

    def _stock(self, baseline: Runner, item: JudgedInput, arm: str, pair: int) -> Output:
        reply = self._leg(baseline, item, arm, pair)
        if isinstance(reply, Failure):
            raise StockError(f"stock: {item.label}: {reply.reason}")
        return reply

    def _leg(self, runner: Runner, item: JudgedInput, arm: str, pair: int) -> Output | Failure:
        """Time one run, from handing the ids over until plain ids have arrived."""
        ids = item.inputs.token_ids
        plain = {"is_plain": True} if arm == SERIAL else {}
        start = self._clock.now_ns()
        reply = runner.run(ids, item.inputs.max_new_tokens, **plain)
        duration = self._clock.now_ns() - start
        if isinstance(reply, Failure):
            return reply
        seen = ("stock" if arm == SOLO else arm, ids)
        leg = self._record(reply, item.label, arm, pair)
        leg = replace(leg, start_ns=start, duration_ns=duration, is_first_seen=seen not in self._seen)
        self._seen.add(seen)
        done = Decode(leg=leg, token_ids=reply.output.token_ids, trace=reply.trace)
        prompts = {**self.evidence.prompts, item.label: ids}
        self.evidence = replace(self.evidence, decodes=(*self.evidence.decodes, done), prompts=prompts)
        return reply.output

    def _record(self, reply: Reply, label: str, arm: str, pair: int) -> Leg:
        return Leg(
            label=label, arm=arm, pair=pair, order=len(self.evidence.decodes), start_ns=0, duration_ns=1,
            num_tokens=reply.output.size, tokens_sha256=reply.output.sha256, peak_bytes=reply.peak_bytes,
            peak_cuda_bytes=reply.peak_cuda_bytes, num_forwards=reply.num_forwards, counters=reply.counters,
        )  # fmt: skip

    def _fail(self, where: str, failure: Failure) -> None:
        """The first failure is the reason; later ones are notes."""
        text = f"{where}: the candidate failed ({failure.kind}): {failure.reason}"
        if self._failed is None:
            self._failed = text
        else:
            self._note(text)

    def _note(self, text: str) -> None:
        self.evidence = replace(self.evidence, notes=(*self.evidence.notes, text))

    def _gates(self, baseline: Runner, candidate: Runner) -> None:
        """The quality gates over all inputs, where the run is not exact."""
        limits = self._case.limits
        if limits is None:
            return
        samples = []
        for index, item in enumerate(self._case.inputs):
            self._report(f"{item.label}, quality gate", index, len(self._case.inputs))
            found = self._sample(baseline, candidate, item)
            if isinstance(found, Failure):
                self._fail(f"{item.label}, quality gate", found)
                return
            samples.append(found)
        rows = tuple(encode(sample) for sample in samples)  # judged by ``results``, again by the audit
        self.evidence = replace(self.evidence, gates=(*self.evidence.gates, *rows))

    def _sample(self, baseline: Runner, candidate: Runner, item: JudgedInput) -> gate.GateSample | Failure:
        """Both arms' figures on one input, teacher forced on stock's own continuation."""
        from draftproof.bench import quality  # noqa: PLC0415 - torch, for runs that are not exact only

        prompt_ids = list(item.inputs.token_ids)
        want, got = (list(o.token_ids[: quality.NUM_TOKENS]) for o in self._outputs[item.label])

        def ask(runner: Runner, kind: str, token_ids: Sequence[int], **more: Any) -> Any:
            request = {"score": kind, "prompt_ids": prompt_ids, "token_ids": list(token_ids), **more}
            answer = runner.score(request)
            if runner is baseline and isinstance(answer, Failure):
                raise StockError(f"stock: {item.label}: {answer.reason}")
            return answer

        reference = ask(baseline, "reference", want)
        forward = ask(candidate, "forward", want, top_ids=reference["top_ids"])
        if isinstance(forward, Failure):
            return forward
        nll = ask(baseline, "own_nll", got)
        try:
            return quality.sample(item.label, reference, forward, nll)
        except (KeyError, TypeError, ValueError, EvidenceError) as error:
            return Failure(kind="error", reason=f"answered nonsense: {error!r}")
