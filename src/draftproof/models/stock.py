"""The pristine serial control: the only file that calls transformers' ``generate``.

Also builds, without loading weights, the logits processors and stopping criteria that ``generate`` would
use, so that the engine applies stock's own objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StopStringCriteria

from draftproof.errors import OptionError
from draftproof.rules import RuleSet

# Settings that change what greedy decoding means; the engine refuses them before the first token.
_REFUSED = {
    "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "penalty_alpha": None,
    "dola_layers": None, "constraints": None, "force_words_ids": None, "guidance_scale": None,
    "return_dict_in_generate": False, "output_scores": False, "output_logits": False,
    "output_attentions": False, "output_hidden_states": False, "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None, "cache_implementation": None, "max_time": None, "watermarking_config": None,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "token_healing": False,
    "diversity_penalty": 0.0, "num_beam_groups": 1, "generation_config": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialRun:
    """What stock emitted, and the logits of every step as stock computed them (``[n, V]``)."""

    token_ids: tuple[int, ...]
    logits_NV: Tensor


class StockModel:
    """A transformers model loaded as its users load it, decoding greedily one token a forward."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.module = module.to(device).eval()

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any) -> tuple[int, ...]:
        """The new ids of ``generate(do_sample=False)``."""
        out = self._generate(prompt_ids, max_new_tokens, **options)
        return tuple(out[0, len(prompt_ids) :].tolist())

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any) -> SerialRun:
        """Like ``generate``, keeping the raw logits of every step."""
        out = self._generate(
            prompt_ids, max_new_tokens, return_dict_in_generate=True, output_logits=True, **options
        )
        ids = tuple(out.sequences[0, len(prompt_ids) :].tolist())
        return SerialRun(token_ids=ids, logits_NV=torch.cat(out.logits))

    def _generate(self, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any) -> Any:
        ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=self.module.device)
        return self.module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
            **options,
        )  # fmt: skip


class RuleFactory:
    """Builds a request's rules the way ``generate`` does, from a model that holds no weights."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            self._shell: Any = AutoModelForCausalLM.from_config(config)
        if (folder / "generation_config.json").exists():
            self._shell.generation_config = GenerationConfig.from_pretrained(folder)
        self._device = device

    def build(self, num_prompt: int, max_new_tokens: int, tokenizer: Any, **options: Any) -> RuleSet:
        """Rules for one prompt of ``num_prompt`` ids; ``options`` are ``generate``'s keyword arguments.

        Raises:
            OptionError: an option stock does not know, or one that is not greedy decoding.
        """
        processors = list(options.pop("logits_processor", None) or [])
        criteria = list(options.pop("stopping_criteria", None) or [])
        refuse_options(options)
        options.pop("do_sample", None)
        try:
            config, made = self._prepare(num_prompt, max_new_tokens, processors, options)
        except (ValueError, TypeError) as error:
            raise OptionError(f"transformers refuses these options: {str(error).splitlines()[0]}") from error
        if config.stop_strings:
            criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
        return RuleSet(
            max_new_tokens=max_new_tokens, eos_ids=eos_ids(config), processors=tuple(made),
            criteria=tuple(criteria),
        )  # fmt: skip

    def _prepare(
        self, num_prompt: int, max_new_tokens: int, processors: list[Any], options: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """Stock's resolved configuration, the model folder's own settings included, and its processors."""
        shell = self._shell
        config, unused = shell._prepare_generation_config(
            None, do_sample=False, max_new_tokens=max_new_tokens, **options
        )
        if unused:
            raise OptionError(f"generate() has no option {', '.join(map(repr, sorted(unused)))}")
        refuse_options({name: getattr(config, name, None) for name in _REFUSED})
        ids = torch.zeros(1, num_prompt, dtype=torch.long, device=self._device)
        shell._prepare_special_tokens(config, True, device=self._device)
        shell._prepare_generated_length(
            generation_config=config, has_default_max_length=True, has_default_min_length=True,
            model_input_name="input_ids", input_ids_length=num_prompt, inputs_tensor=ids,
        )  # fmt: skip
        made = shell._get_logits_processor(
            generation_config=config, input_ids_seq_length=num_prompt, encoder_input_ids=ids,
            prefix_allowed_tokens_fn=None, logits_processor=processors, device=str(self._device),
            model_kwargs={},
        )  # fmt: skip
        return config, list(made)


def refuse_options(options: dict[str, Any]) -> None:
    """Refuse settings that are not greedy decoding of one sequence, and values that mean nothing."""
    for name in ("min_new_tokens", "min_length", "no_repeat_ngram_size"):
        if isinstance(options.get(name), int) and options[name] < 0:
            raise OptionError(f"{name} must be 0 or more, got {options[name]}")
    stops = options.get("stop_strings") or []
    if "" in ([stops] if isinstance(stops, str) else stops):
        raise OptionError("a stop string must not be empty")
    for name, neutral in _REFUSED.items():
        value = options.get(name, neutral)
        if value != neutral and value is not None:
            raise OptionError(
                f"{name}={value!r} is not exact greedy decoding; draftproof supports logits processors,"
                " stop strings and length limits"
            )


def eos_ids(config: Any) -> frozenset[int]:
    """The ids that end the output: none, one or several."""
    value = config.eos_token_id
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else [int(v) for v in value])
