"""The lab's commands: every option arrives, and wrong use is one line and exit code 2."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from draftproof import cli
from draftproof.cli import export, head_select, shortlist
from draftproof.heads import train_loop
from draftproof.heads.shards import Row, Shard, write_manifest, write_shard
from draftproof.models.load import load_tokenizer


def run(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["draftproof", "head", "train", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def options(tiny_folder: Callable[..., Path], tmp_path: Path) -> list[str]:
    """Arguments of a training of two steps."""
    model = tiny_folder("llama", max_position_embeddings=2048)
    tokenizer, rows = load_tokenizer(model), []
    for index in range(4):
        ids = tuple(range(40 + index, 60))
        rows.append(Row(
            index=index, category="news", language="en", origin="template",
            split="held-out" if index == 2 else "train", is_raw=True, is_sampled=False, finished=True,
            messages=(("text", f"q{index}"),), text=str(tokenizer.decode(list(ids[3:]))).strip(), ids=ids,
            prompt_length=3,
        ))  # fmt: skip
    digests = write_shard(tmp_path / "corpus", Shard(number=0, rows=tuple(rows), facts={}))
    shards = [{"shard": 0, "files": digests, "num_rows": 4}]
    write_manifest(tmp_path / "corpus", {"shards": shards, "removed_rows": []})
    return ["--model", str(model), "--dtype", "float32", "--corpus", str(tmp_path / "corpus"), "--out",
            str(tmp_path / "t"), "--steps", "2"]  # fmt: skip


def test_every_option_arrives(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"--depth": 2, "--batch-tokens": 50, "--lr": 0.5, "--warmup": 0.25, "--weight-decay": 0.125,
            "--clip": 2.0, "--loss": "tv", "--step-decay": 0.5, "--init-from": "fresh", "--seed": 9,
            "--checkpoint-every": 1, "--sample-rows": 3}  # fmt: skip
    arguments = [*options, *(str(word) for pair in more.items() for word in pair), "--autocast", "--json"]
    assert run(*arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["num_steps"], summary["depth"]) == ("complete", 2, 2)
    document = json.loads((tmp_path / "t" / "train.json").read_text())
    request = document["request"]
    assert [request[name] for name in (
        "batch_tokens", "rate", "warmup", "weight_decay", "clip", "loss", "step_decay", "start", "seed",
        "checkpoint_every", "sample_rows", "autocast",
    )] == [50, 0.5, 0.25, 0.125, 2.0, "tv", 0.5, "fresh", 9, 1, 3, True]  # fmt: skip
    (facts,) = document["runs"]
    assert facts["argv"] == ["head", "train", *arguments]
    assert {"torch", "transformers"} <= set(facts["versions"])
    assert facts["machine"]["torch"]


def test_ctrl_c_says_how_to_go_on(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train_loop.Run._step

    def pressed(self: train_loop.Run, step: int) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return plain(self, step)

    monkeypatch.setattr(train_loop.Run, "_step", pressed)
    assert run(*options) == 130
    assert "interrupted after step 1 of 2: the same command goes on" in capsys.readouterr().out
    monkeypatch.undo()
    assert run(*options) == 0
    assert "best held-out length" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such"], "no model 'no-such'"),
        (["--epochs", "2"], "give either --epochs or --steps"),
        (["--loss", "mse"], "unknown loss 'mse'; known: kl, tv, argmax"),
        (["--dtype", "float16"], "heads are trained beside a bfloat16 or float32 target"),
        (["--corpus", "nowhere"], "no corpus in nowhere"),
        (["--init-from", "native"], "holds no head of its own"),
        (["--stpes", "2"], "No such option: --stpes"),
        (["--device", "gpu"], "unknown device 'gpu'"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    options: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*options, *arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert message in captured.err


def test_the_group_holds_them() -> None:
    group: Any = typer.main.get_command(cli.app)
    assert {"corpus", "train", "shortlist", "select", "export", "import"} <= set(
        group.commands["head"].commands
    )


def test_every_option_reaches_the_shortlist_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[shortlist.Wishes] = []

    def note(wishes: shortlist.Wishes) -> int:
        seen.append(wishes)
        return 130

    monkeypatch.setattr(shortlist, "run", note)
    options = ["--corpus", "c", "--model", "m", "--size", "9", "--size", "auto", "--cost", "--depth", "2",
               "--acceptance", "0.4", "--head", "h", "--dtype", "float32", "--device", "cuda", "--threads",
               "3", "--out", "o.json", "--json"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["draftproof", "head", "shortlist", *options])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
    (wishes,) = seen
    assert (str(wishes.corpus), wishes.model, wishes.dtype) == ("c", "m", "float32")
    assert (wishes.numbers, wishes.is_auto, wishes.is_timed) == ((9,), True, True)
    assert wishes.timing == {
        "depth": 2, "acceptance": 0.4, "head": "h", "device": "cuda", "threads": 3
    }  # fmt: skip
    assert (str(wishes.out), wishes.json_output) == ("o.json", True)


def test_every_option_reaches_export_and_import(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(export, "export", lambda *given: seen.append(given) or 0)
    monkeypatch.setattr(export, "import_", lambda *given: seen.append(given) or 0)
    shared = ["--model", "m", "--out", "o", "--json"]
    for words in (
        ["export", "h", "--to", "sglang", "--depth", "5", "--shortlist", "s.json", *shared],
        ["import", "d", *shared],
    ):
        monkeypatch.setattr(sys, "argv", ["draftproof", "head", *words])
        with pytest.raises(SystemExit):
            cli.main()
    (ends, layout, depth, ids), (back,) = seen
    assert (str(ends.source), ends.model, str(ends.out), ends.json_output) == ("h", "m", "o", True)
    assert (layout, depth, str(ids)) == ("sglang", 5, "s.json")
    assert (str(back.source), back.model, str(back.out), back.json_output) == ("d", "m", "o", True)


def test_every_option_reaches_select(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def note(settings: dict[str, Any], out: Path, *, json_output: bool) -> int:
        seen.append((settings, str(out), json_output))
        return 1

    monkeypatch.setattr(head_select, "run", note)
    words = [
        "a",
        "b",
        "--corpus",
        "c",
        "--out",
        "o",
        "--model",
        "m",
        "--dtype",
        "float32",
        "--device",
        "cuda",
    ]
    words += ["--depth", "auto", "--prompts", "7", "--dev-prompts", "2", "--max-new-tokens", "9"]
    words += ["--seed", "4", "--threads", "3", "--json"]
    monkeypatch.setattr(sys, "argv", ["draftproof", "head", "select", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert seen == [(
        {
            "model": "m", "corpus": "c", "heads": ("a", "b"), "dtype": "float32", "device": "cuda",
            "depth": "auto", "prompts": 7, "dev_prompts": 2, "max_new_tokens": 9, "seed": 4, "threads": 3,
        }, "o", True,
    )]  # fmt: skip
