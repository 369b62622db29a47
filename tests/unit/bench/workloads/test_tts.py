"""Speech workloads on small random models of real configurations; no trained checkpoint is loaded."""

from __future__ import annotations

import inspect
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from draftproof.bench.workloads import tts
from draftproof.bench.workloads.base import Inputs, Output
from draftproof.bench.workloads.tts import DIVERSE, HOLDOUT, MAIN, TEXTS, TTSWorkload, pack, unpack
from draftproof.errors import ArchitectureError, ModelFileError, ModelNotFoundError, OptionError, PromptError

VOCAB = 300
_HIFIGAN = {
    "model_in_dim": 8, "upsample_initial_channel": 16, "upsample_rates": [4, 4],
    "upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
}  # fmt: skip
_VITS = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": 32, "flow_size": 16,
    "spectrogram_bins": 9, "duration_predictor_filter_channels": 16, "duration_predictor_num_flows": 2,
    "prior_encoder_num_flows": 2, "prior_encoder_num_wavenet_layers": 2, "speaking_rate": 5.0,
    "posterior_encoder_num_wavenet_layers": 2, **{k: v for k, v in _HIFIGAN.items() if k != "model_in_dim"},
}  # fmt: skip
_ENCODEC = {
    "model_type": "encodec", "num_filters": 4, "upsampling_ratios": [4, 2], "hidden_size": 16,
    "codebook_size": 32, "codebook_dim": 16, "num_lstm_layers": 1, "target_bandwidths": [120.0],
}  # fmt: skip
_MIMI = {
    "model_type": "mimi", "hidden_size": 16, "num_filters": 4, "upsampling_ratios": [4, 2],
    "codebook_size": 128, "codebook_dim": 8, "num_quantizers": 4, "vector_quantization_hidden_dimension": 8,
    "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "upsample_groups": 16,
}  # fmt: skip
_LLAMA = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 67,
          "num_codebooks": 4}  # fmt: skip
_CSM = {
    **_LLAMA, "text_vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "codebook_pad_token_id": 66, "codebook_eos_token_id": 0, "bos_token_id": None, "pad_token_id": 256,
    "audio_token_id": 257, "audio_eos_token_id": 258, "codec_config": _MIMI,
    "depth_decoder_config": {**_LLAMA, "backbone_hidden_size": 32, "hidden_size": 16, "num_hidden_layers": 1,
                             "intermediate_size": 32, "max_position_embeddings": 5},
}  # fmt: skip
_GPT = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "block_size": 512}
_BARK = {
    "semantic_config": {**_GPT, "input_vocab_size": 400, "output_vocab_size": 400},
    "coarse_acoustics_config": {**_GPT, "input_vocab_size": 200, "output_vocab_size": 200},
    "fine_acoustics_config": {**_GPT, "input_vocab_size": 40, "output_vocab_size": 40, "n_codes_total": 4,
                              "n_codes_given": 2},
    "codec_config": _ENCODEC,
}  # fmt: skip
# As in the published generation_config.json, with the vocabulary of the configuration above. The fine model
# samples at this temperature unless it is told not to.
_BARK_GENERATION = {
    "model_type": "bark", "codebook_size": 32,
    "semantic_config": {"eos_token_id": 64, "semantic_vocab_size": 64, "text_encoding_offset": 70,
                        "text_pad_token": 399, "semantic_infer_token": 398, "do_sample": True,
                        "temperature": 0.7},
    "coarse_acoustics_config": {"coarse_semantic_pad_token": 190, "coarse_infer_token": 191,
                                "max_coarse_history": 60, "do_sample": True, "temperature": 0.7},
    "fine_acoustics_config": {"n_fine_codebooks": 4, "max_fine_history_length": 64,
                              "max_fine_input_length": 128, "temperature": 0.5},
}  # fmt: skip
_MUSICGEN = {
    "text_encoder": {"model_type": "t5", "vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32,
                     "num_layers": 1, "num_heads": 2},
    "audio_encoder": _ENCODEC,
    "decoder": {"vocab_size": 32, "num_hidden_layers": 2, "ffn_dim": 32, "num_attention_heads": 2,
                "hidden_size": 16, "num_codebooks": 4, "pad_token_id": 32, "bos_token_id": 32},
}  # fmt: skip
_SPEECHT5 = {
    "vocab_size": VOCAB, "hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "speech_decoder_prenet_units": 16, "speech_decoder_postnet_units": 16, "speaker_embedding_dim": 8,
    "speech_decoder_postnet_layers": 2,
}  # fmt: skip
_FASTSPEECH2 = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_mel_bins": 8, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_linear_units": 32, "decoder_linear_units": 32, "duration_predictor_channels": 16,
    "energy_predictor_channels": 16, "pitch_predictor_channels": 16, "pitch_predictor_layers": 2,
    "speech_decoder_postnet_units": 16, "speech_decoder_postnet_layers": 2,
}  # fmt: skip
_BOTH = {"model_config": _FASTSPEECH2, "vocoder_config": _HIFIGAN}
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vits": ("VitsConfig", "VitsModel", _VITS),
    "csm": ("CsmConfig", "CsmForConditionalGeneration", _CSM),
    "bark": ("BarkConfig", "BarkModel", _BARK),
    "musicgen": ("MusicgenConfig", "MusicgenForConditionalGeneration", _MUSICGEN),
    "speecht5": ("SpeechT5Config", "SpeechT5ForTextToSpeech", _SPEECHT5),
    "fastspeech2": ("FastSpeech2ConformerConfig", "FastSpeech2ConformerModel", _FASTSPEECH2),
    "with_vocoder": ("FastSpeech2ConformerWithHifiGanConfig", "FastSpeech2ConformerWithHifiGan", _BOTH),
    "hifigan_speecht5": ("SpeechT5HifiGanConfig", "SpeechT5HifiGan", _HIFIGAN),
    "hifigan_fastspeech2": ("FastSpeech2ConformerHifiGanConfig", "FastSpeech2ConformerHifiGan", _HIFIGAN),
}
# Random weights would end SpeechT5's speech at once; these options hold it for a while.
_MORE: dict[str, dict[str, Any]] = {
    "speecht5": {"generate_options": {"minlenratio": 0.5, "maxlenratio": 0.6}},
}
TOKENS, SOUNDS = ("csm", "bark", "musicgen"), ("vits", "speecht5", "fastspeech2", "with_vocoder")
# Weights whose change no output may hide, by kind.
WEIGHTS = {
    "csm": "backbone_model.layers.0.self_attn.q_proj.weight",
    "bark": "semantic.layers.0.attn.att_proj.weight", "musicgen": "decoder.model.decoder.layers.0.fc1.weight",
    "vits": "decoder.conv_pre.weight",
    "speecht5": "speecht5.decoder.wrapped_decoder.layers.0.self_attn.v_proj.weight",
    "fastspeech2": "encoder.embed.weight", "with_vocoder": "model.encoder.embed.weight",
}  # fmt: skip

Folder = Callable[[str], Path]
Made = Callable[..., TTSWorkload]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = _save(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return make


@pytest.fixture(scope="module")
def loaded(folder: Folder) -> Made:
    """A workload with its model, loaded once a kind unless options are given."""
    made: dict[str, TTSWorkload] = {}

    def make(kind: str, **options: Any) -> TTSWorkload:
        if kind in made and not options:
            return made[kind]
        vocoder = f"hifigan_{kind}" if f"hifigan_{kind}" in _KINDS else None
        options = {"max_frames": 12, **_MORE.get(kind, {}), **options}
        if vocoder:
            options["vocoder"] = str(folder(vocoder))
        workload = TTSWorkload(model=str(folder(kind)), **options)
        workload.load()
        return made.setdefault(kind, workload)

    return make


def _save(folder: Path, kind: str) -> Path:
    config_name, model_name, fields = _KINDS[kind]
    with tts.seeded(7, torch.device("cpu")):
        module = getattr(hf, model_name)(getattr(hf, config_name)(**fields))
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        if parameter.ndim > 1 and kind != "vits":  # whose random durations would grow beyond memory
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * 2 / parameter[0].numel() ** 0.5
    module.save_pretrained(folder)
    if kind == "bark":
        (folder / "generation_config.json").write_text(json.dumps(_BARK_GENERATION))
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_only = tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
    tokenizer = tokenizers.Tokenizer(bytes_only)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


SHORT = Inputs(token_ids=tuple(range(40, 70)), max_new_tokens=12)


@pytest.mark.parametrize("kind", [*TOKENS, *SOUNDS])
def test_two_runs_are_equal_and_leave_the_generator_alone(loaded: Made, kind: str) -> None:
    workload = loaded(kind)
    before = torch.random.get_rng_state()
    first, second = workload.run(SHORT), workload.run(SHORT)
    assert first == second
    assert first.size > 1
    assert workload.compare(first, second).is_equal
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (first.samples is None) is (kind in TOKENS)


@pytest.mark.parametrize("kind", [*TOKENS, *SOUNDS])
def test_a_changed_weight_is_found(loaded: Made, kind: str) -> None:
    workload = loaded(kind)
    expected = workload.run(SHORT)
    weight = workload.model.get_parameter(WEIGHTS[kind])
    before = weight.detach().clone()
    try:
        weight.data = -before
        found = workload.compare(expected, workload.run(SHORT))
    finally:
        weight.data = before
    assert not found.is_equal
    assert found.detail


@pytest.mark.parametrize("kind", TOKENS)
def test_a_frame_is_a_token_and_their_number_is_bounded(loaded: Made, kind: str) -> None:
    workload = loaded(kind)
    frames = [unpack(frame) for frame in workload.run(SHORT).token_ids]
    assert 1 < len(frames) <= SHORT.max_new_tokens
    assert {len(frame) for frame in frames} == {4}
    assert max(map(max, frames)) < (128 if kind == "csm" else 32)
    shorter = workload.run(Inputs(token_ids=SHORT.token_ids, max_new_tokens=6))
    assert len(shorter.token_ids) <= 6


def test_csm_gives_the_codes_that_generate_returns(loaded: Made) -> None:
    workload = loaded("csm")
    ids = torch.tensor([SHORT.token_ids])
    codes = workload.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, depth_decoder_do_sample=False,
        max_new_tokens=12,
    )  # fmt: skip
    assert [unpack(frame) for frame in workload.run(SHORT).token_ids] == codes[0].tolist()


def test_the_codec_is_left_as_it_was(loaded: Made) -> None:
    workload = loaded("csm")
    workload.run(SHORT)
    assert "decode" not in vars(workload.model.codec_model)
    with pytest.raises(RuntimeError, match="stop"), tts.recorded(workload.model, "codec_model.decode"):
        raise RuntimeError("stop")
    assert "decode" not in vars(workload.model.codec_model)


@pytest.mark.parametrize("kind", ["vits", "speecht5"])
def test_the_seed_decides_what_a_noisy_model_says(loaded: Made, kind: str) -> None:
    workload = loaded(kind)
    expected = workload.run(SHORT)
    workload.options["seed"] = 1
    try:
        other = workload.run(SHORT)
    finally:
        workload.options["seed"] = 0
    assert other.samples != expected.samples


def test_the_sampling_rate_comes_from_the_configuration(loaded: Made) -> None:
    assert loaded("vits").run(SHORT).sample_rate == 16000
    assert loaded("with_vocoder").run(SHORT).sample_rate == 22050


@pytest.mark.parametrize(("kind", "part"), [
    ("csm", "backbone_model.layers"), ("bark", "semantic.layers"), ("vits", "text_encoder.encoder.layers"),
    ("musicgen", "decoder.model.decoder.layers"), ("speecht5", "speecht5.decoder.wrapped_decoder.layers"),
])  # fmt: skip
def test_forwards_are_counted_on_the_part_that_steps(loaded: Made, kind: str, part: str) -> None:
    workload = loaded(kind)
    assert workload.counted_module() is workload.model.get_submodule(part)[-1]


def test_one_step_a_frame_after_the_first(loaded: Made) -> None:
    workload, calls = loaded("csm"), []
    handle = workload.counted_module().register_forward_pre_hook(lambda *_: calls.append(1))
    output = workload.run(SHORT)
    handle.remove()
    assert len(calls) == len(output.token_ids)


def test_the_texts_are_the_main_one_the_holdout_and_four_others(loaded: Made) -> None:
    workload = loaded("csm")
    assert set(TEXTS) == {MAIN, HOLDOUT, *DIVERSE}
    assert list(workload.diverse_inputs()) == ["question", "numbers", "german", "chinese"]
    every = [workload.make_inputs(), workload.make_inputs(**workload.holdout_options())]
    every += [workload.make_inputs(**overrides) for overrides in workload.diverse_inputs().values()]
    assert len({inputs.token_ids for inputs in every}) == 6
    assert {inputs.max_new_tokens for inputs in every} == {12}
    assert workload.make_inputs(max_frames=3).max_new_tokens == 3
    assert any(char.isdigit() for char in TEXTS["numbers"])
    assert TEXTS["question"].endswith("?")


def test_inputs_need_no_weights(folder: Folder) -> None:
    workload = TTSWorkload(model=str(folder("bark")))
    text = TEXTS[MAIN].encode()
    assert len(workload.make_inputs().token_ids) == len(text)
    assert workload.model is None
    assert workload.counted_module() is None
    with pytest.raises(OptionError, match="load"):
        workload.run(SHORT)


def test_csm_says_who_speaks(folder: Folder) -> None:
    workload = TTSWorkload(model=str(folder("csm")))
    assert workload.tokenizer.decode(workload.make_inputs().token_ids).startswith("[0]The ferry")


def test_a_text_the_tokenizer_does_not_know_is_refused(folder: Folder) -> None:
    workload = TTSWorkload(model=str(folder("vits")), texts=["german"])
    assert list(workload.diverse_inputs()) == ["german"]

    class Latin:
        unk_token_id = 9

        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [0, *(1 for char in text if char.isascii())]}

    workload._tokenizer = Latin()
    assert workload.make_inputs(text="german").token_ids[0] == 0
    with pytest.raises(PromptError, match="'chinese': leave it out"):
        workload.make_inputs(text="chinese")


def test_a_tokenizer_without_its_package_is_refused(folder: Folder) -> None:
    workload = TTSWorkload(model=str(folder("vits")))

    def needs_more(text: str, **_: Any) -> None:
        raise ImportError("phonemizer is not installed\nmore")

    workload._tokenizer = needs_more
    with pytest.raises(PromptError, match="needs a package: phonemizer is not installed$"):
        workload.make_inputs()


@pytest.mark.parametrize(("options", "message"), [
    ({"max_frames": 0}, "max_frames must be 1 or more, got 0"),
    ({"texts": ["dutch"]}, "no diverse text 'dutch'"),
    ({"sead": 1}, "no option 'sead'"),
])  # fmt: skip
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TTSWorkload(model="m", **options)


def test_inputs_that_mean_nothing_are_refused(folder: Folder) -> None:
    workload = TTSWorkload(model=str(folder("vits")))
    with pytest.raises(OptionError, match="no option 'prompt_len'"):
        workload.make_inputs(prompt_len=3)
    with pytest.raises(OptionError, match="no text 'dutch'"):
        workload.make_inputs(text="dutch")


def test_folders_that_are_no_speech_model_are_refused(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelNotFoundError, match="no model folder 'nowhere'"):
        TTSWorkload(model="nowhere").load()
    with pytest.raises(ArchitectureError, match="no text-to-speech model of type 'llama'"):
        TTSWorkload(model=str(tiny_folder("llama"))).load()
    with pytest.raises(ModelFileError, match="cannot read"):
        TTSWorkload(model=str(tmp_path)).load()
    with pytest.raises(OptionError, match="unknown dtype 'int3'"):
        TTSWorkload(model=str(tiny_folder("llama")), dtype="int3").load()


def test_a_vocoder_is_for_spectrograms_only(folder: Folder) -> None:
    with pytest.raises(OptionError, match="speecht5 ends at a spectrogram: give a vocoder"):
        TTSWorkload(model=str(folder("speecht5"))).load()
    with pytest.raises(OptionError, match="vits makes sound itself: give no vocoder"):
        TTSWorkload(model=str(folder("vits")), vocoder=str(folder("hifigan_speecht5"))).load()


def test_missing_weights_are_refused(folder: Folder, tmp_path: Path) -> None:
    for file in folder("vits").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["decoder.conv_pre.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"missing keys: decoder\.conv_pre\.weight"):
        TTSWorkload(model=str(tmp_path)).load()


def test_a_text_too_long_for_bark_is_refused(loaded: Made) -> None:
    with pytest.raises(PromptError, match="has 257 ids, Bark takes 256"):
        loaded("bark").run(Inputs(token_ids=(5,) * 257, max_new_tokens=4))


def test_options_reach_the_model(loaded: Made, folder: Folder) -> None:
    slow = TTSWorkload(model=str(folder("vits")), generate_options={"speaking_rate": 2.5})
    slow.load()
    assert slow.run(SHORT).size > 1.5 * loaded("vits").run(SHORT).size


def test_frames_pack_and_unpack() -> None:
    codes = torch.tensor([[1, 0, 7], [2, 0, 65535]])  # [2 codebooks, 3 frames]
    assert pack(codes) == [(1 << 32) + (2 << 16) + 1, 1 << 32, (1 << 32) + (65535 << 16) + 7]
    assert [unpack(frame) for frame in pack(codes)] == [[1, 2], [0, 0], [7, 65535]]
    assert pack(torch.tensor([[3], [0]])) != pack(torch.tensor([[3]]))
    for bad in (65536, -1):
        with pytest.raises(ArchitectureError, match=f"code {bad} does not fit 16 bits"):
            pack(torch.tensor([[bad, 0]]))
    assert pack(torch.empty(4, 0, dtype=torch.long)) == []


def test_frames_are_compared_code_by_code() -> None:
    workload = TTSWorkload(model="m")
    expected = Output(token_ids=tuple(pack(torch.tensor([[1, 5], [2, 6], [3, 7]]))))
    other = Output(token_ids=tuple(pack(torch.tensor([[1, 5], [2, 6], [3, 8]]))))
    assert workload.compare(expected, expected).is_equal
    found = workload.compare(expected, other)
    assert (found.is_equal, found.first_difference) == (False, 1)
    assert found.detail == "frame 1 differs from codebook 2 on: [8], stock emits [7]"
    early = workload.compare(expected, Output(token_ids=expected.token_ids[:1]))
    assert (early.first_difference, early.detail) == (1, "1 frames, stock emits 2")


def test_sounds_are_compared_within_the_limits() -> None:
    wave = torch.randn(8000, generator=torch.Generator().manual_seed(1))
    quieter = wave * 10 ** (-2 / 20)
    expected, other = (_as_output(sound) for sound in (wave, quieter))
    found = TTSWorkload(model="m").compare(expected, other)
    assert not found.is_equal
    assert found.distance == pytest.approx(2.0, abs=0.2)
    assert TTSWorkload(model="m", max_mean_db=2.5).compare(expected, other).is_equal
    assert not TTSWorkload(model="m", max_mean_db=2.5, max_frame_db=0.5).compare(expected, other).is_equal


def test_another_rate_or_no_sound_is_not_equal() -> None:
    expected = _as_output(torch.zeros(10))
    other = Output(samples=expected.samples, sample_rate=8000)
    for actual in (other, Output(token_ids=(1, 2))):
        found = TTSWorkload(model="m").compare(expected, actual)
        assert (found.is_equal, found.detail) == (False, "no sound at 16000 samples a second")


@pytest.mark.parametrize("wrapped", [
    lambda wave: wave, lambda wave: wave[None, None], lambda wave: (wave[None], "lengths"),
    lambda wave: [wave], lambda wave: hf.utils.ModelOutput(waveform=wave[None]),
    lambda wave: hf.utils.ModelOutput(audio=[wave]),
])  # fmt: skip
def test_sound_is_found_in_what_models_return(wrapped: Callable[[torch.Tensor], Any]) -> None:
    wave = torch.tensor([0.5, -0.25, 1.0])
    output = tts._sound(wrapped(wave), 16000)
    assert output == Output(samples=struct.pack("<3f", 0.5, -0.25, 1.0), sample_rate=16000)


@pytest.mark.parametrize(("answer", "message"), [
    (torch.zeros(2, 5), r"shape \[2, 5\], expected one channel"),
    (torch.arange(5), "gave Tensor, not the samples"),
    ([], "gave list, not the samples"),
])  # fmt: skip
def test_what_is_no_sound_is_refused(answer: Any, message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        tts._sound(answer, 16000)


def test_the_docstring_says_what_was_tested() -> None:
    assert "small random models" in (inspect.getdoc(tts) or "")


def _as_output(sound: torch.Tensor) -> Output:
    return Output(samples=struct.pack(f"<{len(sound)}f", *sound.tolist()), sample_rate=16000)
