"""Speech models: text in, codec frames or sound out, through the text-to-audio classes of ``transformers``.

**Tested with small random models built from real configurations only** (CSM, Bark, MusicGen, VITS,
FastSpeech2Conformer, SpeechT5); no trained checkpoint was run, so nothing here says how one sounds. Other
types of the same classes are run as ``generate`` or a plain forward on the text's ids: those that need a
voice, a language or a chat template take it through ``generate_options`` or fail with their own error.

A model that hands codes to a codec is judged by them: every code of every frame must be stock's. One frame
is one token: its codes packed into one number. What the codec makes of equal codes is not judged. Other
models are judged by their sound, as a distance between log-mel spectra in dB: it says that two sounds are
nearly the same, not that either is good, and two that differ in length are different.

Tokens are chosen greedily. Models that draw noise all the same (VITS, SpeechT5's dropout) get a fixed
seed before every run, so a candidate has to draw as stock does or replace ``seed`` on both sides.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.bench.workloads.base import Comparison, Inputs, Output, Workload
from draftproof.errors import ArchitectureError, ModelFileError, ModelNotFoundError, OptionError, PromptError
from draftproof.stats import first_difference

if TYPE_CHECKING:
    from torch import Tensor

MAIN, HOLDOUT = "main", "holdout"
TEXTS = {
    MAIN: "The ferry leaves the harbour at seven, turns past the old lighthouse, and reaches the far shore"
    " before the morning mist has lifted.",
    HOLDOUT: "When the orchestra had tuned, a single cellist began the slow movement, and nobody in the hall"
    " dared to cough.",
    "question": "Could you tell me which platform the train to the coast leaves from, and whether it stops at"
    " the village with the blue church?",
    "numbers": "On 14 March 2027 the lift carried 1,386 people, 12.5 percent more than the year before, at"
    " 3 dollars and 40 cents each.",
    "german": "Der Bäcker öffnet schon um fünf Uhr, denn die Fischer holen ihre Brötchen, bevor sie aufs Meer"
    " hinausfahren.",
    "chinese": "清晨的市场里，卖花的老人把茉莉和桂花摆成两排，路过的人都忍不住停下来闻一闻。",
}  # fmt: skip
DIVERSE = ("question", "numbers", "german", "chinese")

# Where the codes of a model of tokens pass on their way to the codec.
_CODECS = {
    "csm": "codec_model.decode",
    "bark": "codec_decode",
    "musicgen": "audio_encoder.decode",
    "musicgen_melody": "audio_encoder.decode",
}
# The layers that run once a token, or once in all where there are no tokens.
_STACKS = {
    "csm": "backbone_model.layers",
    "bark": "semantic.layers",
    "musicgen": "decoder.model.decoder.layers",
    "musicgen_melody": "decoder.model.decoder.layers",
    "vits": "text_encoder.encoder.layers",
    "speecht5": "speecht5.decoder.wrapped_decoder.layers",
}
_VOCODERS = {"speecht5": "SpeechT5HifiGan", "fastspeech2_conformer": "FastSpeech2ConformerHifiGan"}
# Where a configuration names no sampling rate: that of the only published checkpoint.
_RATES = {"fastspeech2_conformer": 22050, "fastspeech2_conformer_with_hifigan": 22050}
_CODE_BITS = 16

# Spectral distortion that listeners do not notice, by the usual criterion for coded speech (Paliwal and
# Atal, 1993): about 1 dB on average and no frame over 4 dB. Theirs is of envelopes, this one of log-mel.
MAX_MEAN_DB, MAX_FRAME_DB = 1.0, 4.0


class TTSWorkload(Workload):
    """A text-to-speech model of ``transformers``.

    Args:
        model: hub folder with model and tokenizer.
        dtype: of weights and activations.
        device: a torch device.
        max_frames: most codec frames to emit; a model without frames decides itself.
        seed: of the noise some models draw.
        texts: labels of the diverse inputs; the tokenizer of a model of one language may know no others.
        vocoder: hub folder of the vocoder, for models that end at a spectrogram, and only for those.
        generate_options: more keyword arguments for the model's call, such as a language.
        max_mean_db: greatest mean distance of two sounds that count as equal.
        max_frame_db: the same for every single frame of 256 samples.

    Raises:
        OptionError: an option that means nothing.
    """

    def __init__(
        self, *, model: str, dtype: str = "float32", device: str = "cpu", max_frames: int = 128,
        seed: int = 0, **more: Any,
    ) -> None:  # fmt: skip
        known: dict[str, Any] = {"texts": list(DIVERSE), "vocoder": None, "generate_options": {},
                 "max_mean_db": MAX_MEAN_DB, "max_frame_db": MAX_FRAME_DB}  # fmt: skip
        if unknown := sorted(set(more) - set(known)):
            raise OptionError(f"a speech workload has no option {unknown[0]!r}; known: {', '.join(known)}")
        super().__init__({"model": model, "dtype": dtype, "device": device, "max_frames": max_frames,
                          "seed": seed, **known, **more})  # fmt: skip
        if max_frames < 1:
            raise OptionError(f"max_frames must be 1 or more, got {max_frames}")
        if missing := [label for label in self.options["texts"] if label not in DIVERSE]:
            raise OptionError(f"no diverse text {missing[0]!r}; known: {', '.join(DIVERSE)}")
        self.model: Any = None
        self._vocoder: Any = None
        self._tokenizer: Any = None

    @property
    def folder(self) -> Path:
        """The model's hub folder."""
        return _folder(self.options["model"])

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when first asked for."""
        if self._tokenizer is None:
            from draftproof.models.load import load_tokenizer  # noqa: PLC0415 - imports torch

            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    @property
    def model_type(self) -> str:
        """The model's type by its loaded configuration."""
        return str(self.model.config.model_type)

    def load(self) -> None:
        """Load model and vocoder as users do: ``from_pretrained``, on the device, in evaluation mode."""
        import torch  # noqa: PLC0415 - the judge of codes needs none
        import transformers  # noqa: PLC0415

        from draftproof.models.load import DTYPES  # noqa: PLC0415

        if self.options["dtype"] not in DTYPES:
            raise OptionError(f"unknown dtype {self.options['dtype']!r}; known: {', '.join(DTYPES)}")
        place = {"dtype": DTYPES[self.options["dtype"]], "device": torch.device(self.options["device"])}
        kind, vocoder = _model_class(self.folder), self.options["vocoder"]
        self.model = _load(kind, self.folder, **place)
        needed = _VOCODERS.get(self.model_type)
        if (needed is None) != (vocoder is None):
            what = (
                "ends at a spectrogram: give a vocoder" if needed else "makes sound itself: give no vocoder"
            )
            raise OptionError(f"{self.model_type} {what}")
        if needed is not None:
            self._vocoder = _load(getattr(transformers, needed), _folder(vocoder), **place)

    def make_inputs(self, **overrides: Any) -> Inputs:
        """A text's ids; ``text`` is its label, ``max_frames`` replaces the workload's own.

        Raises:
            PromptError: the tokenizer knows none of the text, or needs a package that is missing.
        """
        options = {"text": MAIN, "max_frames": self.options["max_frames"], **overrides}
        if unknown := sorted(set(options) - {"text", "max_frames"}):
            raise OptionError(f"an input has no option {unknown[0]!r}")
        label = options["text"]
        if label not in TEXTS:
            raise OptionError(f"no text {label!r}; known: {', '.join(TEXTS)}")
        ids = self._encode(TEXTS[label])
        if ids == self._encode("") or set(ids) <= {self.tokenizer.unk_token_id}:
            raise PromptError(f"this model's tokenizer knows nothing of the text {label!r}: leave it out")
        return Inputs(token_ids=tuple(ids), max_new_tokens=options["max_frames"])

    def _encode(self, text: str) -> list[int]:
        kind = _read_config(self.folder).model_type
        try:
            # CSM's text begins with its speaker; Bark's is padded to a fixed length without end marks.
            spoken = f"[0]{text}" if kind == "csm" else text
            return list(self.tokenizer(spoken, add_special_tokens=kind != "bark")["input_ids"])
        except ImportError as error:
            reason = str(error).strip().splitlines()[0]
            raise PromptError(f"this model's tokenizer needs a package: {reason}") from error

    def run(self, inputs: Inputs) -> Output:
        """From ids to frames or sound; the codec runs too, as whoever listens needs it."""
        import torch  # noqa: PLC0415

        if self.model is None:
            raise OptionError("load the workload before running it")
        device = self.model.device
        ids = torch.tensor([list(inputs.token_ids)], dtype=torch.long, device=device)
        with seeded(self.options["seed"], device), torch.inference_mode():
            path = _CODECS.get(self.model_type)
            if path is None:
                return _sound(self._call(ids, inputs.max_new_tokens), self._sample_rate())
            with recorded(self.model, path) as seen:
                self._call(ids, inputs.max_new_tokens)
        return Output(token_ids=tuple(frame for codes in seen for frame in pack(codes)))

    def _call(self, ids: Tensor, max_frames: int) -> Any:
        """The model's own call, greedy."""
        import torch  # noqa: PLC0415

        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        more = self.options["generate_options"]
        if self.model_type in _VOCODERS:
            return self._speak(given | more)
        if not self.model.can_generate():
            return self.model(**given | more)
        if self.model_type == "bark":
            return self.model.generate(**self._bark(ids, max_frames) | more)
        options = {"do_sample": False, "max_new_tokens": max_frames}
        if self.model_type == "csm":
            options |= {"depth_decoder_do_sample": False, "output_audio": True}
        if self.model_type.startswith("seamless"):
            options = {}  # each of its parts has a length and a search of its own
        return self.model.generate(**given | options | more)

    def _bark(self, ids: Tensor, max_frames: int) -> dict[str, Any]:
        """Bark takes text of one length, samples even without ``do_sample``, and counts semantic tokens."""
        import torch  # noqa: PLC0415
        from transformers.models.bark import generation_configuration_bark as bark  # noqa: PLC0415

        config = self.model.generation_config
        semantic = bark.BarkSemanticGenerationConfig(**config.semantic_config)
        coarse = bark.BarkCoarseGenerationConfig(**config.coarse_acoustics_config)
        room = semantic.max_input_semantic_length
        if ids.shape[1] > room:
            raise PromptError(f"the text has {ids.shape[1]} ids, Bark takes {room}")
        padding = (0, room - ids.shape[1])
        per_frame = semantic.semantic_rate_hz / coarse.coarse_rate_hz
        return {
            "input_ids": torch.nn.functional.pad(ids, padding),
            "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), padding),
            "do_sample": False, "fine_temperature": 1.0,
            "semantic_max_new_tokens": max(1, round(max_frames * per_frame)),
        }  # fmt: skip

    def _speak(self, given: dict[str, Any]) -> Any:
        """A spectrogram and its vocoder."""
        if self.model_type == "speecht5":
            import torch  # noqa: PLC0415

            size = self.model.config.speaker_embedding_dim
            voice = torch.zeros(1, size, dtype=self.model.dtype, device=self.model.device)
            return self.model.generate(**{"speaker_embeddings": voice, "vocoder": self._vocoder} | given)
        return self._vocoder(self.model(**given).spectrogram)

    def _sample_rate(self) -> int:
        own = self.model.config
        configs = [getattr(self._vocoder, "config", None), own, getattr(own, "codec_config", None)]
        for config in configs:
            for name in ("sampling_rate", "sample_rate"):
                if getattr(config, name, None) is not None:
                    return int(getattr(config, name))
        if self.model_type in _RATES:
            return _RATES[self.model_type]
        raise ArchitectureError(f"the configuration of {self.model_type} names no sampling rate")

    def compare(self, expected: Output, actual: Output) -> Comparison:
        """Codes frame by frame, or the spectral distance of the sounds."""
        if expected.samples is None:
            return _compare_frames(expected.token_ids, actual.token_ids)
        if actual.samples is None or actual.sample_rate != expected.sample_rate:
            return Comparison(is_equal=False, detail=f"no sound at {expected.sample_rate} samples a second")
        from draftproof.bench.workloads.sound import compare_sounds  # noqa: PLC0415 - imports torch

        limits = {name: self.options[name] for name in ("max_mean_db", "max_frame_db")}
        return compare_sounds(expected.samples, actual.samples, **limits)

    def diverse_inputs(self) -> dict[str, dict[str, Any]]:
        """The texts of ``texts``: other content and language, about as long to say."""
        return {label: {"text": label} for label in self.options["texts"]}

    def holdout_options(self) -> dict[str, Any]:
        """Another English sentence."""
        return {"text": HOLDOUT}

    def counted_module(self) -> Any:
        """The last layer of the model that takes one step a token."""
        if self.model is None or self.model_type not in _STACKS:
            return super().counted_module()
        return attrgetter(_STACKS[self.model_type])(self.model)[-1]


def _folder(name: str) -> Path:
    if not Path(name).is_dir():
        raise ModelNotFoundError(f"no model folder {name!r}: speech models are loaded from hub folders")
    return Path(name)


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415 - imports torch

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelFileError(f"cannot read {folder}: {str(error).splitlines()[0]}") from error


def _model_class(folder: Path) -> Any:
    """The auto class that knows the folder's model type."""
    import transformers as hf  # noqa: PLC0415

    config = _read_config(folder)
    for kind, types in (
        (hf.AutoModelForTextToWaveform, hf.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING),
        (hf.AutoModelForTextToSpectrogram, hf.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING),
    ):
        if type(config) in types:
            return kind
    raise ArchitectureError(f"transformers knows no text-to-speech model of type {config.model_type!r}")


def _load(kind: Any, folder: Path, *, dtype: Any, device: Any) -> Any:
    try:
        module, report = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"cannot load {folder}: {str(error).splitlines()[0]}") from error
    if report["missing_keys"]:
        raise ModelFileError(f"{folder}: missing keys: {', '.join(sorted(report['missing_keys'])[:3])}")
    return module.to(device).eval()


@contextmanager
def seeded(seed: int, device: Any) -> Iterator[None]:
    """The global generators, which these models draw from, at ``seed``; as they were afterwards."""
    import torch  # noqa: PLC0415

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.random.manual_seed(seed)  # transformers' models take no generator
        yield


@contextmanager
def recorded(model: Any, path: str) -> Iterator[list[Tensor]]:
    """The codes that the method at ``path`` is called with, ``[codebooks, frames]`` each."""
    parent, _, name = path.rpartition(".")
    owner = attrgetter(parent)(model) if parent else model
    original, seen = getattr(owner, name), []

    def decode(*args: Any, **kwargs: Any) -> Any:
        codes = args[0] if args else kwargs["audio_codes"]
        seen.append(codes.detach().reshape(codes.shape[-2:]).cpu())
        return original(*args, **kwargs)

    setattr(owner, name, decode)
    try:
        yield seen
    finally:
        delattr(owner, name)


def pack(codes: Tensor) -> list[int]:
    """One number a frame of ``codes`` (``[codebooks, frames]``): 16 bits a code, the first one lowest."""
    frames = codes.T.tolist()
    for code in (code for frame in frames for code in frame):
        if not 0 <= code < 1 << _CODE_BITS:
            raise ArchitectureError(f"code {code} does not fit {_CODE_BITS} bits")
    top = 1 << (_CODE_BITS * codes.shape[0])  # keeps the number of codes when the last ones are 0
    return [top + sum(code << (_CODE_BITS * i) for i, code in enumerate(f)) for f in frames]


def unpack(frame: int) -> list[int]:
    """The codes of one frame of ``pack``."""
    num_codes = (frame.bit_length() - 1) // _CODE_BITS
    return [(frame >> (_CODE_BITS * i)) & ((1 << _CODE_BITS) - 1) for i in range(num_codes)]


def _compare_frames(expected: tuple[int, ...], actual: tuple[int, ...]) -> Comparison:
    index = first_difference(expected, actual)
    if index is None:
        return Comparison(is_equal=True)
    if index >= min(len(expected), len(actual)):
        detail = f"{len(actual)} frames, stock emits {len(expected)}"
    else:
        want, got = unpack(expected[index]), unpack(actual[index])
        book = first_difference(want, got)
        detail = f"frame {index} differs from codebook {book} on: {got[book:]}, stock emits {want[book:]}"
    return Comparison(is_equal=False, first_difference=index, detail=detail)


def _sound(output: Any, sample_rate: int) -> Output:
    """The sound of a model's answer, whatever it is wrapped in, as one channel."""
    import torch  # noqa: PLC0415

    for name in ("audio", "waveform"):
        output = getattr(output, name, output) if not isinstance(output, torch.Tensor) else output
    while isinstance(output, list | tuple) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        raise ArchitectureError(f"the model gave {type(output).__name__}, not the samples of a sound")
    if output.numel() != max(output.shape, default=1):
        raise ArchitectureError(f"the model gave sound of shape {list(output.shape)}, expected one channel")
    samples = output.reshape(-1).float().cpu().tolist()
    return Output(samples=struct.pack(f"<{len(samples)}f", *samples), sample_rate=sample_rate)
