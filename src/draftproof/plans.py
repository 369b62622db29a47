"""Plans and cost curves kept per machine fingerprint, probed once and read back afterwards.

A file a fingerprint in the cache folder. What is stored is evidence about kernels and shapes, never
anything about a prompt. A file that cannot be read is probed again and replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof.clock import Clock
from draftproof.errors import EvidenceError
from draftproof.machine import describe, fingerprint
from draftproof.models.base import Target
from draftproof.models.build import head_size_of, linear_specs
from draftproof.models.catalog import cache_dir
from draftproof.ops.linear import LinearSpec
from draftproof.probe import (
    MAX_ROWS,
    ClaimRequest,
    Progress,
    calibrate_margin,
    make_plan,
    measure_curve,
    probe_attention,
    probe_linear,
    probe_row_ops,
)
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
        self._device, self._clock = device, clock
        self.path: Path = cache_dir() / "plans" / f"{self.fingerprint}.json"
        self._entries: dict[str, Any] = {} if refresh else self._read()

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        is_ours = document.get("format_version") == FORMAT_VERSION
        entries: dict[str, Any] = document.get("entries", {}) if is_ours else {}
        return entries

    def _put(self, key: str, value: Any) -> None:
        self._entries[key] = value
        write_atomic(self.path, canonical({
            "format_version": FORMAT_VERSION, "machine": encode(self.machine), "entries": self._entries,
        }))  # fmt: skip

    def plan(self, config: Any, request: PlanRequest, progress: Progress | None = None) -> Plan:
        """The plan for a llama-like ``config``; probes what is not stored yet."""
        evidence = self._evidence(config, request, progress or _NO_PROGRESS)
        return make_plan(
            evidence, request=request.claim, dtype=request.dtype, fingerprint=self.fingerprint,
            fixed_rows=request.fixed_rows,
        )  # fmt: skip

    def _evidence(self, config: Any, request: PlanRequest, progress: Progress) -> list[OpEvidence]:
        specs = linear_specs(config)
        evidence = []
        for index, spec in enumerate(specs):
            key = f"linear {spec.name} {spec.shape} {request.dtype} share={request.share}"
            found = self._load(OpEvidence, key)
            if found is None:
                progress(f"probing {spec.name} {'x'.join(map(str, spec.shape))}", index, len(specs) + 1)
                found = probe_linear(spec, request.dtype, self._device, self._clock, share=request.share)
                self._put(key, encode(found))
            evidence.append(found)
        progress("probing attention, norms, activations", len(specs), len(specs) + 1)
        return evidence + self._row_ops(config, request.dtype, specs)

    def _row_ops(self, config: Any, dtype: torch.dtype, specs: Sequence[LinearSpec]) -> list[OpEvidence]:
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, head_size_of(config)
        key = f"rows {specs[0].num_in} {config.intermediate_size} {heads} {groups} {size} {dtype}"
        if key not in self._entries:
            found = probe_row_ops(specs[0].num_in, config.intermediate_size, size, dtype, self._device)
            found += (probe_attention(heads, groups, size, dtype, self._device),)
            self._put(key, [encode(e) for e in found])
        return [decode(OpEvidence, row) for row in self._entries[key]]

    def _load(self, record_type: type[Any], key: str) -> Any:
        try:
            return decode(record_type, self._entries[key]) if key in self._entries else None
        except EvidenceError:
            return None

    def curve(self, target: Target, key: str, progress: Progress | None = None) -> CostCurve:
        """The cost curve of ``target``; ``key`` names model, dtype and plan."""
        found: CostCurve | None = self._load(CostCurve, f"curve {key}")
        if found is None:
            found = measure_curve(target, self._clock, progress)
            self._put(f"curve {key}", encode(found))
        return found

    def margin(self, target: Target, key: str) -> float:
        """The calibrated margin bound of a guarded target; ``key`` names model, dtype and plan."""
        name = f"margin {key}"
        if not isinstance(self._entries.get(name), float):
            self._put(name, calibrate_margin(target))
        bound: float = self._entries[name]
        return bound


def plan_key(folder_name: str, plan: Plan) -> str:
    """Names a model together with how it is run, for curves and margins."""
    forms = [(e.op, e.shape, e.form, e.max_rows) for e in plan.ops]
    text = canonical([plan.claim, plan.dtype, plan.fixed_rows, forms])
    return f"{folder_name} {plan.dtype} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def generic_plan(dtype: torch.dtype, store_fingerprint: str, max_rows: int = MAX_ROWS) -> Plan:
    """The plan of a generic target before its margin is calibrated: nothing probed, nothing claimed."""
    name = str(dtype).removeprefix("torch.")
    return Plan(claim="unproved", dtype=name, fingerprint=store_fingerprint, ops=(), max_rows=max_rows)
