"""Language models: greedy decoding of long prompts that do not repeat themselves.

The main and the held-out prompt are cut from those parts of the packaged texts that no diverse prompt
reaches, so a candidate that has decoded one of them has not seen a line of the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftproof.bench.prompts import LABELS, BenchInput, build_prompt, diverse_inputs
from draftproof.bench.workloads.base import Comparison, Inputs, Output, Workload, compare_tokens
from draftproof.errors import OptionError, PromptError

if TYPE_CHECKING:
    from draftproof.models.stock import StockModel

Stop = Literal["fixed", "natural"]
MAIN, HOLDOUT = "main", "holdout"
_SOURCES = {
    MAIN: ("news", "question", "german", "maths", "dialogue", "code"),
    HOLDOUT: ("recipe", "poem", "french", "spanish", "table", "chinese"),
}
_REQUESTS = {
    MAIN: "Write a clear summary of the text above for someone who has not read it, and end with the one"
    " question it leaves open.",
    HOLDOUT: "Explain to a newcomer what happens in the passage above, step by step, and why it matters.",
}
_SENTENCE_ENDS = (". ", "! ", "? ", "\n", "。")


def evaluation_texts() -> dict[str, str]:
    """Everything an evaluation may decode, by label: what training data must not hold."""
    packaged = {item.label: item for item in diverse_inputs()}
    texts = {label: f"{item.context}\n\n{item.request}" for label, item in packaged.items()}
    for label, sources in _SOURCES.items():
        texts[label] = "\n\n".join([*(packaged[source].context for source in sources), _REQUESTS[label]])
    return texts


class LLMWorkload(Workload):
    """A causal language model of ``transformers``, decoded by its own ``generate(do_sample=False)``.

    Args:
        model: packaged name, hub folder or GGUF file.
        dtype: of weights and activations.
        device: a torch device.
        prompt_len: tokens of every prompt.
        max_new_tokens: most tokens to emit.
        stop: ``fixed`` masks the end tokens (``min_new_tokens=max_new_tokens``), so that every output has
            ``max_new_tokens`` tokens; ``natural`` stops where the model does.
        chat: the prompt is a user's turn in the model's chat template; ``None`` where it has one.

    Raises:
        OptionError: an option that means nothing.
    """

    def __init__(
        self, *, model: str, dtype: str = "bfloat16", device: str = "cpu", prompt_len: int = 512,
        max_new_tokens: int = 256, stop: Stop = "fixed", chat: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            {"model": model, "dtype": dtype, "device": device, "prompt_len": prompt_len,
             "max_new_tokens": max_new_tokens, "stop": stop, "chat": chat}
        )  # fmt: skip
        if stop not in ("fixed", "natural"):
            raise OptionError(f"stop must be fixed or natural, got {stop!r}")
        if max_new_tokens < 1:
            raise OptionError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
        self._stock: StockModel | None = None
        self._tokenizer: Any = None
        self._folder: Path | None = None

    @property
    def model(self) -> Any:
        """The transformers module, ``None`` before ``load``; a candidate may put another one here."""
        return self._stock.module if self._stock else None

    @model.setter
    def model(self, module: Any) -> None:
        if self._stock is None:
            raise OptionError("load the workload before replacing its model")
        self._stock.module = module

    @property
    def folder(self) -> Path:
        """The hub folder of the model, fetched and converted when first asked for."""
        if self._folder is None:
            from draftproof.models.load import DTYPES, resolve  # noqa: PLC0415 - imports torch

            if self.options["dtype"] not in DTYPES:
                raise OptionError(f"unknown dtype {self.options['dtype']!r}; known: {', '.join(DTYPES)}")
            self._folder = resolve(self.options["model"], self.options["dtype"])
        return self._folder

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when first asked for."""
        if self._tokenizer is None:
            from draftproof.models.load import load_tokenizer  # noqa: PLC0415 - imports torch

            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def load(self) -> None:
        """Load the weights as users do: ``from_pretrained``, moved to the device, in evaluation mode."""
        import torch  # noqa: PLC0415 - the judge needs none

        from draftproof.models.load import DTYPES, read_config  # noqa: PLC0415
        from draftproof.models.stock import StockModel  # noqa: PLC0415

        folder = self.folder
        read_config(folder)  # says in one line what is wrong with a folder
        self._stock = StockModel(folder, DTYPES[self.options["dtype"]], torch.device(self.options["device"]))

    def make_inputs(self, **overrides: Any) -> Inputs:
        """A prompt's ids.

        ``text`` names it (``main``, ``holdout`` or one of ``bench.prompts.LABELS``); ``prompt_len`` and
        ``max_new_tokens`` replace the workload's own.
        """
        options = {"text": MAIN, **self.options, **overrides}
        unknown = set(overrides) - {"text", "prompt_len", "max_new_tokens"}
        if unknown:
            raise OptionError(f"an input has no option {sorted(unknown)[0]!r}")
        chat = options["chat"]
        if chat is None:
            chat = bool(getattr(self.tokenizer, "chat_template", None))
        item = self._item(options["text"], options["prompt_len"])
        ids = build_prompt(item, self.tokenizer, options["prompt_len"], chat=chat)
        return Inputs(token_ids=tuple(ids), max_new_tokens=options["max_new_tokens"])

    def _item(self, text: str, prompt_len: int) -> BenchInput:
        packaged = {item.label: item for item in diverse_inputs()}
        if text in packaged:
            return packaged[text]
        if text not in _SOURCES:
            raise OptionError(f"no text {text!r}; known: {', '.join([MAIN, HOLDOUT, *LABELS])}")
        rests = [self._unread(packaged[label].context, prompt_len) for label in _SOURCES[text]]
        context = "\n\n".join(rest for rest in rests if rest)
        if not context:
            raise PromptError(f"no text left for the {text} prompt at {prompt_len} tokens; ask for fewer")
        return BenchInput(label=text, context=context, request=_REQUESTS[text])

    def _unread(self, context: str, prompt_len: int) -> str:
        """What a diverse prompt of ``prompt_len`` tokens cannot reach, from a sentence's start on."""
        ids = self.tokenizer.encode(context, add_special_tokens=False)
        rest = context[len(self.tokenizer.decode(ids[:prompt_len])) :]
        starts = [rest.find(end) + len(end) for end in _SENTENCE_ENDS if end in rest]
        return rest[min(starts) :].strip() if starts else ""

    def run(self, inputs: Inputs) -> Any:
        """The new ids of stock greedy decoding."""
        if self._stock is None:
            raise OptionError("load the workload before running it")
        length = inputs.max_new_tokens
        options = {"min_new_tokens": length} if self.options["stop"] == "fixed" else {}
        return self._stock.generate(inputs.token_ids, length, **options)

    def compare(self, expected: Output, actual: Output) -> Comparison:
        """Every token, to the end of the longer output."""
        return compare_tokens(expected.token_ids, actual.token_ids)

    def diverse_inputs(self) -> dict[str, dict[str, Any]]:
        """The twelve packaged texts, each at the main prompt's length."""
        return {label: {"text": label} for label in LABELS}

    def holdout_options(self) -> dict[str, Any]:
        """Another text of the same length."""
        return {"text": HOLDOUT}
