"""``doctor --plan-only``: figures and forecast from headers, problems told, one line for unusable input."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.cli import main, plan_only
from draftproof.forecast import gain
from draftproof.models.inventory import take_inventory

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """``doctor(*arguments)``: the exit code of the whole command line, standard output and error."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftproof", "doctor", "--plan-only", *map(str, arguments)])
        capsys.readouterr()  # what making the model printed
        with pytest.raises(SystemExit) as done:
            main()
        captured = capsys.readouterr()
        return int(done.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def folder(tiny_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint with a head, cut off after its header."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder("qwen3_5_mtp", torch.bfloat16), copy)
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[: 8 + struct.unpack("<Q", data[:8])[0]])
    return copy


def test_json_is_one_document(doctor: Doctor, folder: Path) -> None:
    code, out, err = doctor("--model", folder, "--json", "--context", "10")
    assert (code, err, out.count("\n")) == (0, "", 1)
    document = json.loads(out)
    inventory = take_inventory(folder)
    assert document == json.loads(json.dumps(plan_only.document(inventory, 10)))
    assert (document["folder"], document["context"]) == (str(folder), 10)
    assert (document["model_type"], document["dtype"]) == ("qwen3_5_text", "bfloat16")
    assert (document["has_head"], document["problems"]) == (True, [])
    assert document["notes"] == ["less data than its header says: 1 file (model.safetensors)"]
    assert inventory.sizes is not None
    assert document["sizes"]["token_bytes"] == inventory.sizes.token_bytes(10)
    assert document["sizes"]["total_token_bytes"] == sum(inventory.sizes.token_bytes(10).values())
    assert document["sizes"]["state_bytes"] == inventory.sizes.state_bytes
    lookup, head = document["draftings"]
    assert lookup["step_bytes"] == 0
    assert head["step_bytes"] == inventory.sizes.draft_bytes(10, 288)
    assert [row["depth"] for row in head["break_even"]] == [1, 2, 3, 4]
    assert [row["acceptance"] for row in head["best"]] == [0.5, 0.7, 0.8, 0.9]


def test_text_shows_every_part(doctor: Doctor, folder: Path) -> None:
    code, out, err = doctor("-m", folder)
    assert (code, err) == (0, "")
    for words in (
        "qwen3_5_text with a native head", "figures at bfloat16", "One decoded token at 1024 positions",
        "linear-attention layers", "output layer", "snapshot of that size a pending row",
        "Predicted from bytes", "not measured", "less data than its header says",
    ):  # fmt: skip
        assert words in out, words
    (target,) = [line for line in out.splitlines() if line.startswith("│ target ")]
    sizes = take_inventory(folder).sizes
    assert sizes is not None
    assert f"{sizes.num_target_params:,}" in target
    assert f"{sum(sizes.token_bytes(1024).values()) / 1e6:,.2f}" in target


def test_a_tied_model_without_head_or_state(doctor: Doctor, tiny_folder: Callable[..., Path]) -> None:
    code, out, _ = doctor("-m", tiny_folder("gemma3_text"))
    assert code == 0
    assert "without a native head" in out
    assert "recurrent" not in out
    assert "native head, all" not in out
    (output,) = [line for line in out.splitlines() if "output layer" in line]
    assert "tied" in output
    assert "Note:" not in out


def test_the_dtype_is_the_folders_unless_given(doctor: Doctor, folder: Path) -> None:
    def total(*arguments: str) -> tuple[str, int]:
        document = json.loads(doctor("-m", folder, "--json", "--context", "0", *arguments)[1])
        sizes = document["sizes"]
        return document["dtype"], sizes["total_token_bytes"] - 2 * sizes["state_bytes"]

    assert total()[0] == "bfloat16"
    assert total("--dtype", "float32") == ("float32", 2 * total()[1])
    assert total("--dtype", "float16") == ("float16", total()[1])


def test_what_draft_tokens_cost(folder: Path) -> None:
    sizes = take_inventory(folder).sizes
    assert sizes is not None
    total = sum(sizes.token_bytes(100).values())
    lookup, head = plan_only.draftings(sizes, 100)
    assert lookup.ratio == 0
    assert lookup.extra == pytest.approx(sizes.row_bytes(100) / total)
    assert head.ratio == pytest.approx(sizes.draft_bytes(100, 288) / total)
    assert head.extra == pytest.approx(head.ratio + lookup.extra)
    assert head.break_even[1] == pytest.approx(head.extra, abs=1e-9)
    assert head.best[0.9][1] == gain(0.9, head.best[0.9][0], head.extra)


def test_shortlists_of_a_large_vocabulary(
    doctor: Doctor, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    out = doctor("-m", tiny_folder("qwen3_5_mtp", torch.bfloat16, vocab_size=9000))[1]
    assert "native head, 8192 ids" in out
    assert "32768" not in out


@pytest.fixture
def damaged(folder: Path, tiny_folder: Callable[..., Path]) -> Path:
    tensors = load_file(tiny_folder("qwen3_5_mtp", torch.bfloat16) / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["mtp.norm.weight"] = torch.zeros(3)
    tensors |= {f"odd.{i:02}": torch.zeros(1) for i in range(30)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def is_told(err: str, damaged: Path) -> bool:
    return err.count("\n") == 1 and err.startswith(f"draftproof: {damaged} does not map onto qwen3_5_text: ")


def test_problems_are_listed_and_end_in_one_line(doctor: Doctor, damaged: Path) -> None:
    code, out, err = doctor("-m", damaged)
    assert code == 2
    assert is_told(err, damaged)
    assert "1 missing (model.norm.weight); 1 unfit (mtp.norm.weight is (3,), expected (64,))" in err
    assert "32 problems" in out
    assert "mtp.norm.weight is (3,), expected (64,)" in out
    assert "and 12 more" in out


def test_problems_in_json(doctor: Doctor, damaged: Path) -> None:
    code, out, err = doctor("-m", damaged, "--json")
    assert code == 2
    assert is_told(err, damaged)
    problems = json.loads(out)["problems"]
    assert len(problems) == 32
    assert {"kind": "missing", "name": "model.norm.weight"}.items() <= problems[0].items()


def test_nothing_maps(doctor: Doctor, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_use_dedicated_embeddings": True}))
    code, out, err = doctor("-m", folder, "--json")
    assert (code, json.loads(out)["sizes"], json.loads(out)["draftings"]) == (2, None, None)
    assert "embedding of its own" in err
    assert doctor("-m", folder)[0] == 2


def _no_folder(path: Path) -> None:
    shutil.rmtree(path)


def _a_gguf_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"GGUF" + b"\0" * 100)


def _no_configuration(path: Path) -> None:
    (path / "config.json").unlink()


def _an_unknown_architecture(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "hal9000"}')


def _no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _a_corrupt_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"not json at all.")


def _a_corrupt_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map"')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_no_folder, "no model folder"),
        (_a_gguf_file, "is not a model folder"),
        (_no_configuration, "no config.json"),
        (_an_unknown_architecture, "hal9000"),
        (_no_weights, "no model.safetensors and no index"),
        (_a_corrupt_header, "broken header"),
        (_a_corrupt_index, "cannot read the weights"),
    ],
)
def test_unusable_folders(damage: Callable[[Path], None], words: str, doctor: Doctor, folder: Path) -> None:
    damage(folder)
    code, out, err = doctor("-m", folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a packaged model, no folder"),
        (["--model", "xyzzy"], "no model folder 'xyzzy'"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--context", "-1"], "context must be 0 or more"),
        (["--refresh", "--threads", "2"], "no use for --threads, --refresh"),
        (["--device", "cuda", "--claim", "bitwise"], "no use for --device, --claim"),
    ],
)
def test_unusable_options(
    arguments: list[str], words: str, doctor: Doctor, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = doctor(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
