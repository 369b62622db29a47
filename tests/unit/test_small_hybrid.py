"""The recipe of the small hybrid, and the checkpoint it made."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftproof import engine as engines
from draftproof.models.decoder import DecoderTarget
from draftproof.models.stock import StockModel

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "data" / "small-hybrid"


def _load_recipe() -> ModuleType:
    name = "small_hybrid_recipe"
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "small_hybrid.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


recipe: Any = _load_recipe()


def sample(text: str, prompt: str = "p") -> Any:
    return recipe.Sample(prompt=prompt, text=text, finished=True, is_sampled=False)


def test_the_prompts_are_many_distinct_and_always_the_same() -> None:
    prompts = recipe.all_prompts()
    assert len(prompts) == len(set(prompts)) == 8 * 40 * 6
    assert prompts == recipe.all_prompts()


def test_the_split_depends_on_the_prompt_alone() -> None:
    prompts = recipe.all_prompts()
    held = {p for p in prompts if recipe.is_held_out(p)}
    assert held == {p for p in prompts[::-1] if recipe.is_held_out(p)}
    assert 0.09 < len(held) / len(prompts) < 0.15


def test_loops_and_short_texts_are_dropped() -> None:
    assert recipe.is_loop("a few words only")
    assert recipe.is_loop("the cat sat on the mat and " * 20)
    assert not recipe.is_loop(" ".join(f"word{i}" for i in range(80)))


def test_a_near_duplicate_of_an_earlier_text_is_dropped() -> None:
    words = [f"word{i}" for i in range(80)]
    first, near = sample(" ".join(words)), sample(" ".join([*words[:70], *("other" for _ in range(10))]))
    far = sample(" ".join([*words[:20], *(f"else{i}" for i in range(60))]))
    assert list(recipe.without_near_duplicates([first, near, far])) == [first, far]


def test_a_line_cut_by_a_kill_is_neither_read_nor_kept(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    whole = json.dumps({"prompt": "p", "text": "é", "finished": False, "is_sampled": True}) + "\n"
    file.write_text(whole + whole[:20], encoding="utf-8")
    assert [s.text for s in recipe.read_samples(file)] == ["é"]
    recipe.drop_cut_line(file)
    assert file.read_text(encoding="utf-8") == whole


def test_grouped_attention_is_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (6, 2, 2))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    got, _ = recipe.grouped_attention(None, q, k, v, None, 8**-0.5)
    torch.testing.assert_close(got, want.transpose(1, 2))


def test_guesses_see_real_slots_before_them_and_the_guesses_they_stand_on() -> None:
    mask = recipe.unroll_mask(4, 3)
    seen = [divmod(int(i), 4) for i in mask[2 * 4 + 3].nonzero()]  # slot 3 at depth 3
    assert seen == [(0, 0), (0, 1), (1, 2), (2, 3)]
    assert torch.equal(mask[:4, :4], torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.slow
@pytest.mark.usefixtures("scratch_cache")
def test_the_head_it_trains_is_the_head_the_engine_runs(tiny_folder: Callable[..., Path]) -> None:
    """A prompt's slots at once, then two drafted ones on the head's own output."""
    folder, depth, num_real = tiny_folder("qwen3_5_mtp"), 3, 6
    target = engines.load(str(folder), dtype="float32").target
    assert isinstance(target, DecoderTarget)
    generator = torch.Generator().manual_seed(3)
    ids_T = torch.randint(0, 288, (num_real + depth,), generator=generator)
    hidden_TD = torch.randn(num_real + depth, 64, generator=generator)
    found = _engine_outputs(target, ids_T, hidden_TD, num_real, depth)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = recipe.MtpHead(model.config)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    head.load_state_dict({k.removeprefix("mtp."): v for k, v in tensors.items() if k.startswith("mtp.")})
    with torch.inference_mode():
        outputs = recipe.unroll(head, model, ids_T[None], hidden_TD[None], depth)
    torch.testing.assert_close(outputs[0][0, :num_real], found[0], rtol=1e-4, atol=1e-4)
    for d in range(1, depth):
        torch.testing.assert_close(outputs[d][0, num_real - 1 + d], found[d][0], rtol=1e-4, atol=1e-4)


def _engine_outputs(
    target: DecoderTarget, ids_T: Tensor, hidden_TD: Tensor, num_real: int, depth: int
) -> list[Tensor]:
    session = target.parts.native_head.open(32, target.max_rows, target.tables(32))
    outputs = [session.prefill(ids_T[1 : num_real + 1], hidden_TD[:num_real])]
    for d in range(1, depth):
        slot = num_real - 1 + d
        outputs.append(session.extend(ids_T[slot + 1 : slot + 2], outputs[-1][-1:]))
    return outputs


def stage(**changes: Any) -> Any:
    rows = [[i % 50 + 5 for i in range(start, start + 12)] for start in range(20)]
    return recipe.Stage(**{"name": "joint", "rows": rows, "steps": 4, "batch": 2, "rate": 1e-3} | changes)


def test_a_stopped_training_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "SAVE_EVERY", 2)

    def weights(work: Path, *, stop_at: int | None) -> dict[str, Tensor]:
        work.mkdir(exist_ok=True)
        training, calls = recipe.Training(work), []

        def loss(ids_BL: Tensor, labels_BL: Tensor) -> Tensor:
            calls.append(ids_BL)
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            return training.joint_loss(ids_BL, labels_BL)

        training.run(stage(), loss, torch.nn.ModuleList([training.model, training.head]))
        return training.model.state_dict() | training.head.state_dict()

    with pytest.raises(KeyboardInterrupt):
        weights(tmp_path / "stopped", stop_at=4)
    resumed, whole = weights(tmp_path / "stopped", stop_at=None), weights(tmp_path / "whole", stop_at=None)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    training = recipe.Training(tmp_path)
    training.run(stage(steps=1), training.joint_loss, training.model)
    with pytest.raises(ValueError, match="delete it"):
        training.run(stage(steps=2), training.joint_loss, training.model)


def test_bad_use_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main(["train", "--work", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for wrong in (["--part", "3/2"], ["--batch", "0"], ["--threads", "two"]):
        with pytest.raises(SystemExit) as caught:
            recipe.main(["corpus", *wrong])
        assert caught.value.code == 2


def test_the_checkpoint_is_small_and_holds_a_whole_head() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= recipe.MAX_BYTES
    with safetensors.safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        assert sum(name.startswith("mtp.") for name in file.keys()) == 15  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.usefixtures("scratch_cache")
def test_the_checkpoints_drafts_are_accepted_and_its_tokens_are_stocks() -> None:
    lines = (CHECKPOINT / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[40:46]]
    engine = engines.load(str(CHECKPOINT), dtype="float32")
    stock = StockModel(CHECKPOINT, torch.float32, torch.device("cpu"))
    drafted = accepted = 0
    for prompt in prompts:
        ids = engine.encode(prompt)
        trace = engine.decode(ids, max_new_tokens=48, drafter="mtp", depth=1)
        assert trace.token_ids == stock.generate(ids, 48)
        drafted += sum(r.num_drafted for r in trace.rounds)
        accepted += sum(r.num_accepted for r in trace.rounds)
    assert accepted >= recipe.FLOOR * drafted > 0
