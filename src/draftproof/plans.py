"""Plans and cost curves kept per machine fingerprint, probed once and read back afterwards.

A file a fingerprint in the cache folder. Kernels are probed in a child process (``python -m
draftproof.plans``): its test matrices never count towards the engine's memory, and a kernel that crashes
takes nothing with it. What is stored is evidence about kernels and shapes, never
anything about a prompt. A file that cannot be read is probed again and replaced.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from draftproof.clock import Clock, RealClock
from draftproof.errors import EvidenceError, ModelError, StorageError
from draftproof.machine import describe, fingerprint
from draftproof.models.base import Target
from draftproof.models.build import head_size_of
from draftproof.models.catalog import cache_dir
from draftproof.models.load import ARCHITECTURES
from draftproof.ops.linear import MAX_ROWS, LinearSpec
from draftproof.probe import (
    ClaimRequest,
    Progress,
    calibrate_margin,
    make_plan,
    measure_curve,
    probe_attention,
    probe_linear,
    probe_row_ops,
)
from draftproof.probe_delta import probe_delta
from draftproof.record import CostCurve, OpEvidence, Plan
from draftproof.wire import FORMAT_VERSION, canonical, decode, encode, write_atomic

_NO_PROGRESS: Progress = lambda stage, done, total: None  # noqa: E731


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the caller wants planned: the claim, for which dtype, device and shareability of weights.

    ``share`` restricts linears to the checkpoint's own layout, so that a loaded module's tensors serve.
    """

    claim: ClaimRequest = "auto"
    dtype: torch.dtype
    device: torch.device
    share: bool = False
    fixed_rows: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeShapes:
    """Everything a plan needs probed: linears, and heads, key heads and head size of the attention.

    ``recurrent`` holds key heads, value heads, key size, value size and convolution width of linear-attention
    layers, ``None`` where there are none.
    """

    linears: tuple[LinearSpec, ...]
    attention: tuple[int, int, int]
    inner: int
    dtype: str
    share: bool
    fixed_rows: int | None
    recurrent: tuple[int, int, int, int, int] | None = None

    @classmethod
    def of(cls, config: Any, request: PlanRequest) -> ProbeShapes:
        """The shapes of a configuration with a row-exact target."""
        linears = ARCHITECTURES[config.model_type].linear_specs(config)
        return cls(
            linears=linears,
            attention=(config.num_attention_heads, config.num_key_value_heads, head_size_of(config)),
            inner=next(spec.parts[0] for spec in linears if spec.name == "gate_up"),
            dtype=str(request.dtype).removeprefix("torch."),
            share=request.share,
            fixed_rows=request.fixed_rows if request.claim == "fixed" else None,
            recurrent=_recurrent_sizes(config),
        )

    def names(self) -> list[str]:
        """Names of the stored findings: one a linear, one for everything else."""
        how = f"{self.dtype} share={self.share} fixed={self.fixed_rows}"
        linears = [f"linear {spec.name} {spec.shape} {how}" for spec in self.linears]
        delta = "" if self.recurrent is None else f" delta {self.recurrent}"
        return [*linears, f"rows {self.linears[0].num_in} {self.inner} {self.attention} {self.dtype}{delta}"]


def _recurrent_sizes(config: Any) -> tuple[int, int, int, int, int] | None:
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    return (
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim, config.linear_conv_kernel_dim,
    )  # fmt: skip


class PlanStore:
    """The evidence file of this machine.

    Args:
        device: whose kernels are probed.
        clock: times the probes.
        refresh: ignore what is stored and measure again.
    """

    def __init__(self, device: torch.device, clock: Clock, *, refresh: bool = False) -> None:
        self.machine = describe(device)
        self.fingerprint = fingerprint(self.machine)
        self._device, self._clock, self._refresh = device, clock, refresh
        self.path: Path = cache_dir() / "plans" / f"{self.fingerprint}.json"
        self._entries: dict[str, Any] = {} if refresh else self._read()

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(document, dict) or document.get("format_version") != FORMAT_VERSION:
            return {}
        entries = document.get("entries")
        return entries if isinstance(entries, dict) else {}

    def _put(self, key: str, value: Any) -> None:
        self._entries[key] = value
        merged = {**self._read(), **self._entries}  # other processes and models store here, too
        write_atomic(self.path, canonical({
            "format_version": FORMAT_VERSION, "machine": encode(self.machine), "entries": merged,
        }))  # fmt: skip

    def plan(self, config: Any, request: PlanRequest, progress: Progress | None = None) -> Plan:
        """The plan for ``config``; probes what is not stored yet.

        Only operations its architecture runs count.
        """
        shapes = ProbeShapes.of(config, request)
        runs = {"attention", *ARCHITECTURES[config.model_type].row_ops, *(s.name for s in shapes.linears)}
        if any(self._evidence(name) is None for name in shapes.names()):
            self._probe_in_child(shapes, progress or _NO_PROGRESS)
        return make_plan(
            [e for name in shapes.names() for e in self._evidence(name) or () if e.op in runs],
            request=request.claim,
            dtype=request.dtype,
            fingerprint=self.fingerprint,
            fixed_rows=request.fixed_rows,
        )

    def _evidence(self, name: str) -> list[OpEvidence] | None:
        """What is stored under ``name``; ``None`` when there is nothing or it cannot be read."""
        try:
            return [decode(OpEvidence, row) for row in self._entries[name]] or None
        except (EvidenceError, KeyError, TypeError):
            return None

    def _probe_in_child(self, shapes: ProbeShapes, progress: Progress) -> None:
        """Run this file as a program for what is missing, then read its findings."""
        order = {
            "shapes": encode(shapes), "device": str(self._device), "threads": torch.get_num_threads(),
            "refresh": self._refresh,
        }  # fmt: skip
        command = [sys.executable, "-m", "draftproof.plans", canonical(order)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                for line in process.stdout or ():
                    report = json.loads(line)
                    if isinstance(report, dict):
                        raise StorageError(report["error"])
                    progress(*report)
                code = process.wait()
            except BaseException:
                process.kill()
                raise
        if code != 0:
            raise ModelError(f"probing this machine failed (exit code {code}); its message is above")
        found = self._read()
        self._entries |= {name: found[name] for name in shapes.names() if name in found}
        if any(self._evidence(name) is None for name in shapes.names()):
            raise ModelError(f"probing this machine found nothing it could store in {self.path}")

    def probe(self, shapes: ProbeShapes, progress: Progress) -> None:
        """Probe, in this process, every shape that is not stored yet."""
        dtype, names = getattr(torch, shapes.dtype), shapes.names()
        for index, (spec, name) in enumerate(zip(shapes.linears, names, strict=False)):
            if self._evidence(name) is None:
                progress(f"probing {spec.name} {'x'.join(map(str, spec.shape))}", index, len(names))
                found = probe_linear(
                    spec, dtype, self._device, self._clock, share=shapes.share, fixed_rows=shapes.fixed_rows
                )
                self._put(name, [encode(found)])
        if self._evidence(names[-1]) is None:
            progress("probing attention, norms, activations", len(names) - 1, len(names))
            heads, groups, size = shapes.attention
            others = probe_row_ops(shapes.linears[0].num_in, shapes.inner, size, dtype, self._device)
            others += (probe_attention(heads, groups, size, dtype, self._device),)
            if shapes.recurrent is not None:
                others += probe_delta(*shapes.recurrent, dtype, self._device)
            self._put(names[-1], [encode(e) for e in others])

    def _load(self, record_type: type[Any], key: str) -> Any:
        try:
            return decode(record_type, self._entries[key]) if key in self._entries else None
        except EvidenceError:
            return None

    def curve(self, target: Target, key: str, progress: Progress | None = None) -> CostCurve:
        """The cost curve of ``target``; ``key`` names model, dtype and plan.

        One that other load has bent is used, as nothing better is at hand, and measured again next time.
        """
        found: CostCurve | None = self._load(CostCurve, f"curve {key}")
        if found is None or not found.is_steady:
            found = measure_curve(target, self._clock, progress)
            if found.is_steady:
                self._put(f"curve {key}", encode(found))
        return found

    def margin(self, target: Target, key: str) -> float:
        """The calibrated margin bound of a guarded target; ``key`` names model, dtype and plan."""
        name = f"margin {key}"
        if not isinstance(self._entries.get(name), float):
            self._put(name, calibrate_margin(target))
        bound: float = self._entries[name]
        return bound


def plan_key(model: str, plan: Plan) -> str:
    """Names a model together with how it is run, for curves and margins."""
    forms = [(e.op, e.shape, e.form, e.max_rows) for e in plan.ops]
    text = canonical([plan.claim, plan.dtype, plan.fixed_rows, forms])
    return f"{model} {plan.dtype} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def generic_plan(dtype: torch.dtype, store_fingerprint: str, max_rows: int = MAX_ROWS) -> Plan:
    """The plan of a generic target before its margin is calibrated: nothing probed, nothing claimed."""
    name = str(dtype).removeprefix("torch.")
    return Plan(claim="unproved", dtype=name, fingerprint=store_fingerprint, ops=(), max_rows=max_rows)


def _probe_as_child(order: dict[str, Any]) -> None:
    """Probe what the parent asked for; progress goes to standard output, one JSON line a report."""

    def report(stage: str, done: int, total: int) -> None:
        sys.stdout.write(json.dumps([stage, done, total]) + "\n")
        sys.stdout.flush()

    logging.set_verbosity_error()  # its advice is for those who run the model; whoever asked has silenced it
    torch.set_num_threads(order["threads"])
    store = PlanStore(torch.device(order["device"]), RealClock(), refresh=order["refresh"])
    try:
        store.probe(decode(ProbeShapes, order["shapes"]), report)
    except StorageError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")


if __name__ == "__main__":
    _probe_as_child(json.loads(sys.argv[1]))
