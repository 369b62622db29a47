"""A GGUF file becomes a folder once, whole or not at all; what cannot be converted is one clear line."""

from __future__ import annotations

import errno
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftproof.errors import DraftproofError, ModelFileError, StorageError
from draftproof.models import catalog
from draftproof.models import gguf as conversion
from draftproof.models.gguf import hub_folder
from draftproof.models.load import load_tokenizer, read_config, refusal, resolve

Usage = namedtuple("Usage", "total used free")
HIDDEN, INNER, HEADS, VOCAB = 32, 64, 2, 40
TENSORS = {
    "token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,), "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN), "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN, HIDDEN), "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN), "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}  # fmt: skip


def write_llama(path: Path) -> dict[str, np.ndarray]:
    """A real GGUF file of a Llama with one layer and 40 tokens; the tensors written."""
    rng = np.random.default_rng(3)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in TENSORS.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"abcdefghijklmnopqrstuvwxyz0123456789", "ab", "cd", "<s>", "</s>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 38 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(38)
    writer.add_eos_token_id(39)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def refused(error: type[DraftproofError], call: Callable[[], object], cache: Path, *words: str) -> None:
    """Exactly this error, one line long, and nothing in the cache that was not there before."""
    before = sorted(cache.rglob("*")) if cache.is_dir() else []
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert [word for word in words if word not in message] == []
    after = sorted(cache.rglob("*")) if cache.is_dir() else []
    assert [path for path in after if path not in before and path.name != "converted"] == []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Conversion by writing two small files: the calls made."""
    calls: list[tuple[str, str]] = []

    def convert(file: Path, dtype: str, out: Path) -> None:
        calls.append((file.name, dtype))
        (out / "model.safetensors").write_bytes(file.read_bytes())
        (out / "config.json").write_text(dtype)

    monkeypatch.setattr(conversion, "_convert_in_child", convert)
    return calls


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + b"x" * 100)
    return path


def test_a_file_is_converted_once(fake: list[tuple[str, str]], file: Path, scratch_cache: Path) -> None:
    folder = hub_folder(file, "bfloat16")
    assert files_in(folder) == ["config.json", "model.safetensors"]
    assert folder.parent == scratch_cache / "converted"
    assert folder.name.startswith("tiny-")
    assert hub_folder(file, "bfloat16") == folder
    assert fake == [("tiny.gguf", "bfloat16")]
    assert [path.name for path in (scratch_cache / "converted").iterdir()] == [folder.name]


def test_content_and_dtype_decide_not_the_name(
    fake: list[tuple[str, str]], file: Path, tmp_path: Path, scratch_cache: Path
) -> None:
    folders = [hub_folder(file, dtype) for dtype in ("bfloat16", "float32")]
    file.write_bytes(b"GGUF" + b"y" * 100)
    folders += [hub_folder(file, dtype) for dtype in ("bfloat16", "float32")]
    assert len(set(folders)) == 4
    assert [(f / "config.json").read_text() for f in folders] == ["bfloat16", "float32"] * 2
    assert [(f / "model.safetensors").read_bytes()[4] for f in folders] == [*b"xx", *b"yy"]


@pytest.mark.parametrize("content", [b"", b"GGU", b"ggml" + b"x" * 50, b"PK\x03\x04" + b"x" * 50])
def test_not_a_gguf_file(content: bytes, file: Path, scratch_cache: Path) -> None:
    file.write_bytes(content)
    refused(
        ModelFileError, lambda: hub_folder(file, "bfloat16"), scratch_cache, str(file), "is not a GGUF file"
    )


def test_no_file(file: Path, tmp_path: Path, scratch_cache: Path) -> None:
    file.unlink()
    refused(ModelFileError, lambda: hub_folder(file, "bfloat16"), scratch_cache, str(file))
    refused(ModelFileError, lambda: hub_folder(tmp_path, "bfloat16"), scratch_cache, str(tmp_path))


def test_a_cache_that_cannot_be_used(
    fake: list[tuple[str, str]], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(blocked))
    refused(StorageError, lambda: hub_folder(file, "bfloat16"), blocked, "a-file")


def test_too_little_space(
    fake: list[tuple[str, str]], file: Path, scratch_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: Usage(1000, 1000, 500))
    refused(StorageError, lambda: hub_folder(file, "bfloat16"), scratch_cache, "tiny.gguf", "free")
    assert fake == []


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ModelFileError("no"), ModelFileError),
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), StorageError),
    ],
    ids=["conversion", "full-disk", "quota"],
)
def test_a_failed_conversion_leaves_nothing(
    raised: Exception,
    expected: type[DraftproofError],
    file: Path,
    scratch_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def convert(file: Path, dtype: str, out: Path) -> None:
        (out / "config.json").write_text("half")
        raise raised

    monkeypatch.setattr(conversion, "_convert_in_child", convert)
    refused(expected, lambda: hub_folder(file, "bfloat16"), scratch_cache)


def test_an_interrupted_conversion_leaves_nothing(
    file: Path, scratch_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(file: Path, dtype: str, out: Path) -> None:
        (out / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_convert_in_child", convert)
    with pytest.raises(KeyboardInterrupt):
        hub_folder(file, "bfloat16")
    assert list((scratch_cache / "converted").iterdir()) == []


def test_another_process_may_be_faster(
    file: Path, scratch_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renames its folder while ours is still being made: one of both is used, ours is removed."""

    def convert(file: Path, dtype: str, out: Path) -> None:
        (out / "config.json").write_text("mine")
        name = f"tiny-{conversion._hash(file)}-{dtype}-{conversion._FORMAT}"
        (out.parent / name).mkdir()
        (out.parent / name / "config.json").write_text("theirs")

    monkeypatch.setattr(conversion, "_convert_in_child", convert)
    folder = hub_folder(file, "bfloat16")
    assert (folder / "config.json").read_text() == "theirs"
    assert list((scratch_cache / "converted").iterdir()) == [folder]


@pytest.mark.slow
def test_a_real_file(tmp_path: Path, scratch_cache: Path) -> None:
    """Converted in a child process: configuration, every tensor in the dtype, and the tokenizer."""
    path = tmp_path / "real.gguf"
    written = write_llama(path)
    folder = resolve(str(path), "bfloat16")
    config = read_config(folder)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", HIDDEN, 1)
    assert refusal(config) is None
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == len(TENSORS)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers.0.mlp.down_proj", "blk.0.ffn_down"),
    ):
        assert torch.equal(
            tensors[f"{ours}.weight"], torch.from_numpy(written[f"{theirs}.weight"]).bfloat16()
        )
    assert load_tokenizer(folder)("abe", add_special_tokens=False).input_ids == [36, 4]
    assert [p.name for p in (scratch_cache / "converted").iterdir()] == [folder.name]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [40, 2000, -1000])
def test_a_truncated_file(kept: int, tmp_path: Path, scratch_cache: Path) -> None:
    """In the header, in the token list, in the tensors."""
    path = tmp_path / "cut.gguf"
    write_llama(path)
    path.write_bytes(path.read_bytes()[:kept])
    refused(ModelFileError, lambda: hub_folder(path, "float32"), scratch_cache, f"cannot convert {path}: ")


@pytest.mark.model
def test_the_default_model(tmp_path: Path) -> None:
    """Pulled and converted before: the folder is found again and runs row-exact."""
    file = catalog.pulled_path(catalog.CATALOG[catalog.DEFAULT_MODEL])
    assert file is not None, "run 'draftproof models pull'"
    folder = hub_folder(file, "bfloat16")
    assert hub_folder(file, "bfloat16") == folder
    assert refusal(read_config(folder)) is None
    assert load_tokenizer(folder)("Hello").input_ids
