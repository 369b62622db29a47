"""Selecting a head: a tiny model, real heads and decodes; what is damaged or changed is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.engine import Engine
from draftproof.errors import OptionError
from draftproof.heads import select as module
from draftproof.heads.select import SelectSettings, find_candidates, read_selection, select_head
from draftproof.record import Trace

Make = Callable[..., SelectSettings]
FACTS = {"argv": ["x"]}


@pytest.fixture
def make(
    tiny_folder: Callable[..., Path],
    head_folder: Callable[..., Path],
    corpus_of: Callable[[Path], Path],
    scratch_cache: Path,
) -> Make:
    """``make(**changes)``: two heads of a tiny Llama, two prompts that rank and one of the dev set."""
    model = tiny_folder("llama", max_position_embeddings=2048)
    corpus = corpus_of(model)
    heads = tuple(str(head_folder("llama", seed)) for seed in (1, 2))

    def settings(**changes: Any) -> SelectSettings:
        given: dict[str, Any] = {
            "model": str(model), "corpus": str(corpus), "heads": heads, "dtype": "float32", "depth": 2,
            "prompts": 2, "dev_prompts": 1, "max_new_tokens": 8,
        }  # fmt: skip
        return SelectSettings(**given | changes)

    return settings


def run(settings: SelectSettings, out: Path) -> dict[str, Any]:
    return select_head(settings, out, lambda *_: None, provenance=FACTS)


def test_all_are_ranked_and_the_best_is_copied(make: Make, tmp_path: Path) -> None:
    settings, out = make(), tmp_path / "out"
    summary = run(settings, out)
    assert summary["status"] == "complete"
    assert {one["name"] for one in summary["candidates"]} == set(settings.heads)
    assert summary["winner"] == summary["candidates"][0]["name"]
    assert summary["refused"] == []
    winner = Path(summary["winner"])
    assert (out / "head" / "model.safetensors").read_bytes() == (winner / "model.safetensors").read_bytes()
    document = read_selection(out)
    assert document["summary"] == json.loads(json.dumps(summary))
    assert document["runs"] == [FACTS]
    heats = [json.loads(line) for line in (out / "decodes.jsonl").read_text().splitlines()]
    assert len(heats) == 2
    for heat in heats:
        assert set(heat["candidates"]) == set(settings.heads)
        assert heat["serial"]["rounds"] == []
        for one in heat["candidates"].values():
            assert one["num_tokens"] == heat["serial"]["num_tokens"] == 7
            assert all(drafted <= 2 for drafted, _, _ in one["rounds"])


def test_the_second_run_decodes_nothing_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = make(), tmp_path / "out"
    first = run(settings, out)

    def fail(*_: Any) -> Any:
        raise AssertionError("decoded again")

    monkeypatch.setattr(module._Selection, "_heat", fail)
    assert run(settings, out) == first
    assert read_selection(out)["runs"] == [FACTS, FACTS]


def test_an_interrupt_keeps_what_was_decoded(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out, honest = make(), tmp_path / "out", module._Selection._heat

    def pressed(self: Any, arms: Any, row: Any, number: int) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        return honest(self, arms, row, number)

    monkeypatch.setattr(module._Selection, "_heat", pressed)
    summary = run(settings, out)
    assert (summary["status"], summary["num_decoded"], summary["winner"]) == ("interrupted", 1, None)
    kept = (out / "decodes.jsonl").read_text().splitlines()[0]
    monkeypatch.undo()
    assert run(settings, out)["status"] == "complete"
    assert (out / "decodes.jsonl").read_text().splitlines()[0] == kept


def lying(monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
    """Engines with the head of one of ``folders`` emit another last token where stock is compared."""
    honest = module._Selection._fault

    def fault(self: Any, name: str, engine: Engine, dev: Any, report: Any) -> Any:
        if name in folders:
            plain = engine.decode

            def decode(*given: Any, **options: Any) -> Trace:
                trace = plain(*given, **options)
                last = trace.rounds[-1]
                changed = last.emitted[:-1] + ((last.emitted[-1] + 1) % 50,)
                object.__setattr__(last, "emitted", changed)
                return trace

            monkeypatch.setattr(engine, "decode", decode)
        return honest(self, name, engine, dev, report)

    monkeypatch.setattr(module._Selection, "_fault", fault)


def test_one_that_leaves_stocks_text_is_refused_with_the_prompt(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make()
    best = run(settings, tmp_path / "first")["candidates"][0]["name"]
    lying(monkeypatch, best)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    summary = run(settings, tmp_path / "second")
    (refused,) = summary["refused"]
    assert (refused["name"], refused["from_token"]) == (best, 7)
    assert refused["messages"] == [("text", f"q{refused['prompt']}")]
    assert summary["winner"] not in (best, None)


def test_none_may_be_left(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make()
    lying(monkeypatch, *settings.heads)
    summary = run(settings, tmp_path / "out")
    assert (summary["winner"], len(summary["refused"])) == (None, 2)
    assert not (tmp_path / "out" / "head").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 0}, "--prompts must be 1 or more"),
        ({"dev_prompts": 0}, "--dev-prompts must be 1 or more"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be 1 or more"),
        ({"depth": 0}, "--depth must be 1 or more, or auto"),
        ({"depth": "deep"}, "--depth must be 1 or more, or auto"),
        ({"heads": ()}, "name at least one head"),
        ({"heads": ("nowhere",)}, "nowhere holds no head"),
        ({"prompts": 9}, "holds 3 held-out prompts that fit, not 9 and 1"),
    ],
)
def test_wrong_use(make: Make, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run(make(**changes), tmp_path / "out")


def test_a_training_stands_for_its_checkpoints(make: Make, tmp_path: Path) -> None:
    training = tmp_path / "training"
    for step, head in enumerate(make().heads):
        shutil.copytree(head, training / f"step-{step:06d}")
    (training / "train.json").write_text("{}")
    (training / "state.safetensors").write_bytes(b"no head")
    found = find_candidates([str(training)])
    assert [one.folder.name for one in found] == ["step-000000", "step-000001"]
    with pytest.raises(OptionError, match="named twice"):
        find_candidates([str(training), str(training / "step-000001")])


def test_another_request_needs_another_folder(make: Make, tmp_path: Path) -> None:
    run(make(), tmp_path / "out")
    with pytest.raises(OptionError, match="compared with another depth"):
        run(make(depth=1), tmp_path / "out")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "file").touch()
    with pytest.raises(OptionError, match="holds other files"):
        run(make(), tmp_path / "strange")
    with pytest.raises(OptionError, match="is a file"):
        run(make(), tmp_path / "strange" / "file")


def test_a_changed_head_is_another_request(make: Make, tmp_path: Path) -> None:
    settings = make()
    run(settings, tmp_path / "out")
    shutil.copy(Path(settings.heads[1]) / "model.safetensors", Path(settings.heads[0]) / "model.safetensors")
    with pytest.raises(OptionError, match="another candidates"):
        run(settings, tmp_path / "out")


@pytest.mark.parametrize("name", ["decodes.jsonl", "selection.json"])
def test_a_changed_file_is_named(make: Make, tmp_path: Path, name: str) -> None:
    run(make(), tmp_path / "out")
    path = tmp_path / "out" / name
    path.write_text(path.read_text().replace("7", "8", 1))
    with pytest.raises(OptionError, match=f"{name} is damaged"):
        run(make(), tmp_path / "out")


def test_kinds_take_turns() -> None:
    class Kind:
        def __init__(self, category: str) -> None:
            self.category = category

    groups = [[Kind("a"), Kind("a"), Kind("a")], [Kind("b")], [Kind("c"), Kind("c")]]
    order = "".join(kind.category for kind in module._in_turns(groups))  # type: ignore[arg-type]
    assert order == "abcaca"
