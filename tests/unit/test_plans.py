"""Evidence is measured once for each machine and shape, read back as it was, and measured again if broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from draftproof import plans, probe
from draftproof.clock import RealClock
from draftproof.errors import ModelError
from draftproof.machine import describe, fingerprint
from draftproof.models.build import linear_specs
from draftproof.ops.linear import MAX_ROWS
from draftproof.plans import PlanRequest, PlanStore, ProbeShapes, generic_plan, plan_key
from draftproof.record import CostCurve, Plan
from draftproof.testing import FakeClock, TableTarget
from draftproof.wire import FORMAT_VERSION

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
CONFIG = LlamaConfig(**SMALL)
AUTO = PlanRequest(dtype=BF16, device=CPU)
LINEARS = ["qkv", "out", "gate_up", "down", "head"]
ROW_OPS = ["norm", "norm_shifted", "rotary", "silu_gate", "gelu_gate", "attention"]

NEEDED = ["norm", "rotary", "silu_gate", "attention"]


def is_complete(plan: Plan) -> bool:
    """Everything a Llama runs is there once; what it does not run may be left out."""
    ops = [e.op for e in plan.ops]
    return len(set(ops)) == len(ops) and set(LINEARS + NEEDED) <= set(ops) <= set(LINEARS + ROW_OPS)


pytestmark = pytest.mark.usefixtures("scratch_cache")


def quiet(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[ProbeShapes]:
    """Probe without a child, which takes seconds to start: the shapes it would have been asked for."""
    asked: list[ProbeShapes] = []

    def run(store: PlanStore, shapes: ProbeShapes, progress: Any, *_: Any) -> None:
        asked.append(shapes)
        PlanStore(store._device, RealClock()).probe(shapes, progress)
        store._entries = {**store._entries, **store._read()}

    monkeypatch.setattr(PlanStore, "_probe_in_child", run)
    return asked


def fresh(*, refresh: bool = False) -> PlanStore:
    return PlanStore(CPU, RealClock(), refresh=refresh)


def test_shapes_of_a_configuration() -> None:
    shapes = ProbeShapes.of(CONFIG, AUTO)
    assert shapes.linears == linear_specs(CONFIG)
    assert (shapes.attention, shapes.inner, shapes.dtype) == ((4, 2, 8), 64, "bfloat16")
    assert (shapes.share, shapes.fixed_rows) == (False, None)
    assert ProbeShapes.of(CONFIG, replace(AUTO, claim="fixed")).fixed_rows == 8
    assert ProbeShapes.of(CONFIG, replace(AUTO, claim="fixed", fixed_rows=4)).fixed_rows == 4
    assert ProbeShapes.of(CONFIG, replace(AUTO, share=True, claim="bitwise")).share


@pytest.mark.parametrize(
    ("config", "request_", "num_shared"),
    [
        (CONFIG, AUTO, 6),
        (CONFIG, replace(AUTO, claim="guarded"), 6),
        (CONFIG, replace(AUTO, dtype=FP32), 0),
        (CONFIG, replace(AUTO, share=True), 1),
        (CONFIG, replace(AUTO, claim="fixed"), 1),
        (LlamaConfig(**SMALL | {"vocab_size": 51}), AUTO, 5),
        (LlamaConfig(**SMALL | {"intermediate_size": 65}), AUTO, 3),
        (LlamaConfig(**SMALL | {"num_key_value_heads": 4}), AUTO, 4),
    ],
    ids=["same", "claim", "dtype", "share", "fixed", "vocabulary", "inner", "groups"],
)
def test_findings_are_shared_where_the_question_is_the_same(
    config: Any, request_: PlanRequest, num_shared: int
) -> None:
    names = ProbeShapes.of(CONFIG, AUTO).names()
    assert len(set(names)) == len(names) == 6
    assert len(set(names) & set(ProbeShapes.of(config, request_).names())) == num_shared


def test_everything_is_probed_once(in_process: list[ProbeShapes], monkeypatch: pytest.MonkeyPatch) -> None:
    store = fresh()
    first = store.plan(CONFIG, AUTO)
    assert is_complete(first)
    assert first.fingerprint == store.fingerprint == fingerprint(describe(CPU))
    assert len(in_process) == 1
    for name in ("probe_linear", "probe_row_ops", "probe_attention"):
        monkeypatch.setattr(plans, name, None)
    assert store.plan(CONFIG, AUTO) == first
    assert fresh().plan(CONFIG, AUTO) == first
    assert len(in_process) == 1


def test_what_is_stored_is_what_was_found(in_process: list[ProbeShapes]) -> None:
    """Also what a probe of the same shape finds again: counts exactly, times as they were."""
    store = fresh()
    plan = store.plan(CONFIG, replace(AUTO, claim="bitwise", dtype=FP32))
    document = json.loads(store.path.read_text())
    assert document["format_version"] == FORMAT_VERSION
    assert document["machine"]["torch"] == torch.__version__
    for spec in linear_specs(CONFIG):
        found = plan.form(spec.name)
        again = probe.probe_linear(spec, FP32, CPU, RealClock())
        assert found.shape == again.shape == spec.shape
        assert found.num_checked == again.num_checked
        if found.form == again.form:
            assert (found.max_rows, found.is_exact) == (again.max_rows, again.is_exact)


@pytest.mark.parametrize(
    ("config", "request_"),
    [
        (CONFIG, replace(AUTO, dtype=FP32)),
        (CONFIG, replace(AUTO, share=True)),
        (CONFIG, replace(AUTO, claim="fixed")),
        (LlamaConfig(**SMALL | {"vocab_size": 51}), AUTO),
        (LlamaConfig(**SMALL | {"intermediate_size": 65}), AUTO),
        (LlamaConfig(**SMALL | {"num_key_value_heads": 4}), AUTO),
        (LlamaConfig(**SMALL | {"num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 16}), AUTO),
    ],
    ids=["dtype", "share", "fixed", "vocabulary", "inner", "groups", "heads"],
)
def test_another_question_is_another_probe(
    config: Any, request_: PlanRequest, in_process: list[ProbeShapes]
) -> None:
    fresh().plan(CONFIG, AUTO)
    fresh().plan(config, request_)
    assert len(in_process) == 2
    fresh().plan(CONFIG, AUTO)
    fresh().plan(config, request_)
    assert len(in_process) == 2


def test_models_of_one_shape_share_their_evidence(in_process: list[ProbeShapes]) -> None:
    fresh().plan(CONFIG, AUTO)
    fresh().plan(LlamaConfig(**SMALL | {"num_hidden_layers": 9, "rms_norm_eps": 1e-3}), AUTO)
    fresh().plan(CONFIG, replace(AUTO, claim="guarded"))
    assert len(in_process) == 1


@pytest.mark.parametrize(
    "text",
    [
        "", "not json", "{", "[]", "7", "null", "{}", '{"format_version": 1}',
        '{"format_version": 1, "entries": []}', '{"format_version": 1, "entries": null}',
        b"\xff\xfe\x00",
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_replaced(text: str | bytes, in_process: list[ProbeShapes]) -> None:
    store = fresh()
    want = store.plan(CONFIG, AUTO)
    store.path.write_bytes(text if isinstance(text, bytes) else text.encode())
    got = fresh().plan(CONFIG, AUTO)
    assert len(in_process) == 2
    assert [e.op for e in got.ops] == [e.op for e in want.ops]
    assert json.loads(store.path.read_text())["entries"]
    fresh().plan(CONFIG, AUTO)
    assert len(in_process) == 2


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, FORMAT_VERSION - 1, "1", None])
def test_a_file_of_another_version_is_not_believed(version: object, in_process: list[ProbeShapes]) -> None:
    store = fresh()
    store.plan(CONFIG, AUTO)
    document = json.loads(store.path.read_text())
    store.path.write_text(json.dumps(document | {"format_version": version}))
    fresh().plan(CONFIG, AUTO)
    assert len(in_process) == 2


@pytest.mark.parametrize("value", [None, {}, [], 5, [{}], [{"op": "qkv"}], "qkv"], ids=str)
@pytest.mark.parametrize("kind", ["linear qkv", "linear head", "rows"])
def test_a_broken_entry_is_probed_again(kind: str, value: object, in_process: list[ProbeShapes]) -> None:
    """Alone: what can be read stays as it was measured."""
    store = fresh()
    want = store.plan(CONFIG, AUTO)
    document = json.loads(store.path.read_text())
    (name,) = (name for name in document["entries"] if name.startswith(kind))
    document["entries"][name] = value
    store.path.write_text(json.dumps(document))
    got = fresh().plan(CONFIG, AUTO)
    assert is_complete(got)
    assert len(in_process) == 2
    kept = [op for op in LINEARS if kind != f"linear {op}"]
    assert [got.form(op) for op in kept] == [want.form(op) for op in kept]


def test_refresh_keeps_what_other_models_know(in_process: list[ProbeShapes]) -> None:
    other = LlamaConfig(**SMALL | {"vocab_size": 51})
    fresh().plan(other, AUTO)
    fresh(refresh=True).plan(CONFIG, AUTO)
    fresh().plan(other, AUTO)
    assert len(in_process) == 2


def test_another_machine_is_another_file(
    in_process: list[ProbeShapes], scratch_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: other environment variables that steer kernels, and another number of threads."""
    paths = {fresh().path}
    fresh().plan(CONFIG, AUTO)
    monkeypatch.setenv("ONEDNN_SOME_SWITCH", "1")
    paths.add(fresh().path)
    fresh().plan(CONFIG, AUTO)
    monkeypatch.delenv("ONEDNN_SOME_SWITCH")
    torch.set_num_threads(1)
    try:
        paths.add(fresh().path)
    finally:
        torch.set_num_threads(2)
    assert len(in_process) == 2
    assert len(paths) == 3
    assert {path.parent for path in paths} == {scratch_cache / "plans"}
    assert all(path.name == f"{path.stem}.json" for path in paths)


def test_two_stores_do_not_undo_each_other(in_process: list[ProbeShapes]) -> None:
    left, right = fresh(), fresh()
    other = LlamaConfig(**SMALL | {"vocab_size": 51})
    left.plan(CONFIG, AUTO)
    right.plan(other, AUTO)
    left.margin(TableTarget(), "m")
    both = fresh()
    both.plan(CONFIG, AUTO)
    both.plan(other, AUTO)
    assert len(in_process) == 2


def test_progress_names_every_step(in_process: list[ProbeShapes]) -> None:
    told: list[tuple[str, int, int]] = []
    fresh().plan(CONFIG, AUTO, lambda *report: told.append(report))
    assert [done for _, done, _ in told] == list(range(6))
    assert {total for _, _, total in told} == {6}
    assert told[0][0] == "probing qkv 32x32x16x16"
    assert told[5][0] == "probing attention, norms, activations"


GEMMA = Gemma3TextConfig(**SMALL)


@pytest.mark.parametrize(
    ("config", "op", "claim"),
    [
        (CONFIG, "norm", "guarded"),
        (CONFIG, "silu_gate", "guarded"),
        (CONFIG, "rotary", "guarded"),
        (CONFIG, "attention", "guarded"),
        (CONFIG, "gelu_gate", "bitwise"),
        (CONFIG, "norm_shifted", "bitwise"),
        (GEMMA, "gelu_gate", "guarded"),
        (GEMMA, "norm_shifted", "guarded"),
        (GEMMA, "silu_gate", "bitwise"),
        (GEMMA, "norm", "bitwise"),
    ],
    ids=lambda x: getattr(x, "model_type", x),
)
def test_only_what_the_architecture_runs_limits_its_claim(
    config: Any, op: str, claim: str, in_process: list[ProbeShapes]
) -> None:
    store = fresh()
    store.plan(config, AUTO)
    document = json.loads(store.path.read_text())
    for name, rows in document["entries"].items():
        for row in rows:
            row["is_exact"] = row["op"] != op
            row["max_rows"] = 5 if row["op"] == op and name.startswith("rows") else MAX_ROWS
    store.path.write_text(json.dumps(document))
    assert fresh().plan(config, AUTO).claim == claim


def test_the_probe_runs_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one: it finds what this process would find, and reports on the way."""
    told: list[tuple[str, int, int]] = []
    for name in ("probe_linear", "probe_row_ops", "probe_attention"):
        monkeypatch.setattr(plans, name, None)
    store = fresh()
    plan = store.plan(CONFIG, replace(AUTO, claim="bitwise"), lambda *report: told.append(report))
    assert is_complete(plan)
    assert [done for _, done, _ in told] == list(range(6))
    assert fresh().plan(CONFIG, replace(AUTO, claim="bitwise")) == plan


def test_a_refresh_reaches_the_child() -> None:
    store = fresh()
    store.probe(ProbeShapes.of(CONFIG, AUTO), quiet)
    text = store.path.read_text()
    assert '"num_checked":1584' in text
    assert fresh().plan(CONFIG, AUTO).form("qkv").num_checked == 1584
    store.path.write_text(text.replace('"num_checked":1584', '"num_checked":3'))
    assert fresh(refresh=True).plan(CONFIG, AUTO).form("qkv").num_checked == 1584


def test_a_child_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho '[\"probing\", 0, 6]'\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr(plans.sys, "executable", str(broken))
    store, told = fresh(), []
    with pytest.raises(ModelError, match="probing this machine failed .exit code 7.") as caught:
        store.plan(CONFIG, AUTO, lambda *report: told.append(report))
    assert len(str(caught.value).splitlines()) == 1
    assert told == [("probing", 0, 6)]
    assert not store.path.exists()


def test_a_child_that_finds_nothing_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No evidence is not good evidence."""
    idle = tmp_path / "python"
    idle.write_text("#!/bin/sh\nexit 0\n")
    idle.chmod(0o755)
    monkeypatch.setattr(plans.sys, "executable", str(idle))
    with pytest.raises(ModelError):
        fresh().plan(CONFIG, AUTO)


def test_an_interrupt_stops_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = tmp_path / "python"
    endless.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho '[\"a\", 0, 1]'\nexec sleep 600\n")
    endless.chmod(0o755)
    monkeypatch.setattr(plans.sys, "executable", str(endless))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fresh().plan(CONFIG, AUTO, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often a curve or a margin is measured."""
    calls: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(plans, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    for name in ("measure_curve", "calibrate_margin"):
        monkeypatch.setattr(plans, name, counting(name))
    return calls


TARGET = TableTarget(period=1)


def test_curves_are_measured_once_a_key(measured: list[str]) -> None:
    curve = PlanStore(CPU, FakeClock()).curve(TARGET, "one")
    assert fresh().curve(TARGET, "one") == curve
    assert measured == ["measure_curve"]
    fresh().curve(TARGET, "two")
    assert measured == ["measure_curve"] * 2
    fresh(refresh=True).curve(TARGET, "one")
    assert measured == ["measure_curve"] * 3


def test_a_curve_bent_by_other_load_is_used_once_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bent = CostCurve(rows=(1,), contexts=(64, 512), seconds=((3.0,), (1.0,)))
    steady = CostCurve(rows=(1,), contexts=(64, 512), seconds=((1.0,), (1.5,)))
    made = iter([bent, bent, steady])
    monkeypatch.setattr(plans, "measure_curve", lambda *_: next(made))
    assert fresh().curve(TARGET, "one") == bent
    assert fresh().curve(TARGET, "one") == bent
    assert fresh().curve(TARGET, "one") == steady
    assert fresh().curve(TARGET, "one") == steady


def test_margins_are_measured_once_a_key(measured: list[str]) -> None:
    margin = fresh().margin(TARGET, "one")
    assert margin == pytest.approx(8e-6)
    assert fresh().margin(TARGET, "one") == margin
    assert measured == ["calibrate_margin"]
    fresh().margin(TARGET, "two")
    fresh(refresh=True).margin(TARGET, "one")
    assert measured == ["calibrate_margin"] * 3


@pytest.mark.parametrize("value", [None, "0.5", [], {}, {"rows": [1]}], ids=str)
def test_broken_curves_and_margins_are_measured_again(value: object, measured: list[str]) -> None:
    store = PlanStore(CPU, FakeClock())
    curve, margin = store.curve(TARGET, "k"), store.margin(TARGET, "k")
    document = json.loads(store.path.read_text())
    document["entries"] = dict.fromkeys(document["entries"], value)
    store.path.write_text(json.dumps(document))
    again = PlanStore(CPU, FakeClock())
    assert again.curve(TARGET, "k") == curve
    assert again.margin(TARGET, "k") == margin
    assert measured == ["measure_curve", "calibrate_margin"] * 2


def test_a_key_names_all_that_changes_speed_or_margin(in_process: list[ProbeShapes]) -> None:
    plan = fresh().plan(CONFIG, replace(AUTO, claim="bitwise"))
    first, rest = plan.ops[0], plan.ops[1:]
    changed: list[Plan] = [
        replace(plan, claim="guarded"),
        replace(plan, dtype="float32"),
        replace(plan, claim="fixed", fixed_rows=8),
        replace(plan, claim="fixed", fixed_rows=16),
        replace(plan, ops=(replace(first, form="spaced:7"), *rest)),
        replace(plan, ops=(replace(first, max_rows=3), *rest)),
        replace(plan, ops=(replace(first, shape=(1, 2)), *rest)),
        replace(plan, ops=rest),
    ]
    keys = {plan_key("m", plan), plan_key("other", plan), *(plan_key("m", p) for p in changed)}
    assert len(keys) == len(changed) + 2
    unchanged = [
        replace(plan, margin_bound=0.5),
        replace(plan, ops=(replace(first, seconds_by_rows={1: 9.0}, rejected={}), *rest)),
    ]
    assert {plan_key("m", p) for p in unchanged} == {plan_key("m", plan)}


def test_a_generic_plan_claims_nothing() -> None:
    plan = generic_plan(BF16, "abc", max_rows=5)
    assert (plan.claim, plan.dtype, plan.fingerprint) == ("unproved", "bfloat16", "abc")
    assert (plan.ops, plan.max_rows, plan.margin_bound, plan.fixed_rows) == ((), 5, None, None)
    assert generic_plan(FP32, "abc").max_rows == MAX_ROWS
