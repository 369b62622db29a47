"""Make the small Qwen3.5 hybrid that tests run: corpus, training, check.

    python benchmarks/small_hybrid.py all [--work runs/small-hybrid] [--out tests/data/small-hybrid]

``corpus`` lets the default model answer a few hundred narrow prompts (greedily, every fourth batch sampled)
and appends its answers to ``corpus.jsonl``. ``train`` learns a byte-level vocabulary of 2048 tokens, trains a
text model of three million parameters together with a multi-token-prediction head, then freezes the model and
distils the head on text the model itself decodes, several steps deep, as a drafter runs it. ``check`` decodes
held-out prompts with the engine and compares every token with stock. Each step goes on where it was stopped.

What this does not give: a model that knows anything, or one whose acceptance says something about large
models. Letters: B sequences, L positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from draftproof import engine as engines
from draftproof.clock import RealClock
from draftproof.errors import DraftproofError
from draftproof.models import catalog
from draftproof.models.load import DTYPES, resolve
from draftproof.models.stock import StockModel

ROOT = Path(__file__).resolve().parents[1]
SEED = 20261130

# ---------------------------------------------------------------- corpus

SYSTEM = "You answer in simple, plain English."
TASKS = (
    "Write a short story about {}.", "Explain what {} is to a child.",
    "Write a short letter to a friend about {}.", "Give a list of five facts about {}.",
    "How do I take care of {}? Answer step by step.", "Why do people like {}?",
    "Describe {} in one paragraph.", "Write a short poem about {}.",
)  # fmt: skip
_ADJECTIVES = ("", "small ", "old ", "red ", "happy ", "young ")
_NOUNS = (
    "cat", "dog", "horse", "bird", "fish", "rabbit", "cow", "fox", "bear", "duck", "garden", "tree", "river",
    "lake", "house", "kitchen", "farm", "school", "library", "market", "boat", "train", "bicycle", "car",
    "bridge", "king", "teacher", "doctor", "baker", "farmer", "sailor", "painter", "robot", "clock", "lamp",
    "book", "guitar", "apple tree", "flower", "mountain",
)  # fmt: skip
HELD_OUT_PERCENT = 12
_LOOP_SHARE, _SAME_SHARE = 0.4, 0.5
_MIN_WORDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt and what was decoded after it; ``finished`` where the text came to its own end."""

    prompt: str
    text: str
    finished: bool
    is_sampled: bool


def all_prompts() -> list[str]:
    """Every task about every topic, in one fixed order that mixes them."""
    topics = [f"{_article(a + n)} {a}{n}" for n in _NOUNS for a in _ADJECTIVES]
    prompts = [task.format(topic) for task in TASKS for topic in topics]
    random.Random(SEED).shuffle(prompts)
    return prompts


def _article(phrase: str) -> str:
    return "an" if phrase[0] in "aeiou" else "a"


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is kept from training: its own hash decides, so no other prompt can change it."""
    return int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def _shingles(text: str, size: int) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


def is_loop(text: str) -> bool:
    """Whether a text is too short or repeats itself: few of its runs of four words are distinct."""
    runs = _shingles(text, 4)
    return len(runs) < _MIN_WORDS or len(set(runs)) < _LOOP_SHARE * len(runs)


def without_near_duplicates(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Samples of which no earlier one holds half the runs of five words."""
    seen: dict[tuple[str, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        runs = set(_shingles(sample.text, 5))
        shared = Counter(other for run in runs for other in seen.get(run, ()))
        if shared and max(shared.values()) > _SAME_SHARE * len(runs):
            continue
        for run in runs:
            seen.setdefault(run, []).append(index)
        yield sample


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention over grouped heads that copies no keys and values: stock's copies cost half a step."""
    batch, heads, length, size = query.shape
    groups = key.shape[1]
    grouped = query.reshape(batch, groups, heads // groups * length, size)
    scores = (grouped @ key.transpose(-1, -2) * scaling).view(batch, groups, -1, length, key.shape[2])
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, length, key.shape[2], dtype=torch.bool).tril(key.shape[2] - length)
    scores = scores.masked_fill(~attention_mask[:, :, None], -1e30)
    mixed = scores.softmax(-1).view(batch, groups, -1, key.shape[2]) @ value
    return mixed.view(batch, heads, length, size).transpose(1, 2).contiguous(), None


def read_samples(file: Path) -> list[Sample]:
    """The samples of a JSONL file; a last line cut short by a kill is left out."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [Sample(**json.loads(line)) for line in lines if line]


def make_corpus(options: argparse.Namespace) -> int:
    """Answer the first ``--prompts`` prompts, in batches that are appended as they come."""
    file = options.work / "corpus.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    drop_cut_line(file)
    prompts = all_prompts()[: options.prompts]
    batches = [prompts[i : i + options.batch] for i in range(0, len(prompts), options.batch)]
    folder = resolve(catalog.DEFAULT_MODEL, "float32")
    writer = _Writer(folder)
    progress = Progress("corpus: prompts", len(prompts))
    number, of = options.part
    for index, batch in enumerate(batches):
        done = {sample.prompt for sample in read_samples(file)}
        todo = [prompt for prompt in batch if prompt not in done]
        if index % of != number or not todo:
            continue
        samples = writer.answer(todo, index, options.new_tokens)
        with file.open("a", encoding="utf-8") as stream:
            stream.write("".join(json.dumps(asdict(s), ensure_ascii=False) + "\n" for s in samples))
        progress.tell(len(done) + len(samples))
    facts = {"model": catalog.DEFAULT_MODEL, "prompts": len(prompts), "new_tokens": options.new_tokens}
    write_json(file.with_suffix(".json"), provenance(options) | facts)
    return 0


def drop_cut_line(file: Path) -> None:
    """Take off a last line that a kill cut short."""
    if file.exists() and not (text := file.read_text(encoding="utf-8")).endswith("\n"):
        file.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


class _Writer:
    """The default model in fp32, answering batches of prompts."""

    def __init__(self, folder: Path) -> None:
        transformers.AttentionInterface.register("grouped", grouped_attention)
        masks = transformers.masking_utils
        masks.AttentionMaskInterface.register("grouped", masks.sdpa_mask)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        module: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="grouped"
        )
        self._module = module.eval()

    @torch.inference_mode()
    def answer(self, prompts: list[str], index: int, new_tokens: int) -> list[Sample]:
        """Samples of one batch; the batch's index seeds it, and every fourth is sampled."""
        chats = [
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}] for prompt in prompts
        ]
        batch = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        is_sampled = index % 4 == 0
        how: dict[str, Any] = {"do_sample": False}
        if is_sampled:
            # generate() draws from torch's global generator. min_p needs no sort of the vocabulary.
            torch.random.default_generator.manual_seed(SEED + index)
            how = {"do_sample": True, "temperature": 0.5, "min_p": 0.1, "top_k": 0}
        out = self._module.generate(**batch, max_new_tokens=new_tokens, **how)
        end = self._tokenizer.eos_token_id
        samples = []
        for prompt, row in zip(prompts, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
            ids = row[: row.index(end)] if end in row else row
            text = self._tokenizer.decode(ids).strip()
            samples.append(Sample(prompt=prompt, text=text, finished=end in row, is_sampled=is_sampled))
        return samples


# ---------------------------------------------------------------- shared


class Progress:
    """One line on stderr that says how far a step is and how long the rest may take."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._clock = what, total, RealClock()
        self._start_ns, self._first = self._clock.now_ns(), -1

    def tell(self, done: int, note: str = "") -> None:
        """Rewrite the line; where stderr is a file, add one."""
        if self._first < 0:
            self._first, self._start_ns = done, self._clock.now_ns()
        seconds = (self._clock.now_ns() - self._start_ns) / 1e9
        rest = seconds / max(done - self._first, 1) * (self._total - done)
        line = f"{self._what} {done}/{self._total}, {seconds:.0f} s, {rest:.0f} s left {note}"
        sys.stderr.write(f"\r{line:<100}" if sys.stderr.isatty() else line + "\n")
        sys.stderr.flush()


def sha256_of(file: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_whole(file: Path, text: str) -> None:
    """Write through a temporary file, so that none is ever half written."""
    part = file.with_suffix(file.suffix + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def write_json(file: Path, facts: dict[str, Any]) -> None:
    """Facts, one a line."""
    write_whole(file, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """How this run was called, and with what."""
    versions = {name: version(name) for name in ("draftproof", "torch", "transformers", "tokenizers")}
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, python {platform.python_version()}"
    return {"argv": sys.argv[1:], "seed": SEED, "versions": versions, "machine": machine,
            "corpus_sha256": sha256_of(options.work / "corpus.jsonl")}  # fmt: skip


# ---------------------------------------------------------------- model

VOCAB, MAX_LENGTH, BATCH, SAVE_EVERY = 2048, 256, 8, 50
PAD, END, USER, ASSISTANT, SYSTEM_ROLE = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "partial_rotary_factor": 0.5,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "mtp_num_hidden_layers": 1,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
_IGNORED = -100


class MtpHead(nn.Module):
    """The head of ``draftproof.models.mtp`` for training, of stock's own modules.

    Parameter names are those of a checkpoint under ``mtp.``. Slot ``p`` reads token ``p + 1`` and the normed
    hidden row ``p``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        alone = copy.deepcopy(config)
        alone.num_hidden_layers, alone.layer_types = 1, ["full_attention"]
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(alone, 0)])
        self.norm = Qwen3_5RMSNorm(hidden, eps)

    def forward(
        self, embedded_BLD: Tensor, hidden_BLD: Tensor, rotary: tuple[Tensor, Tensor], mask_LL: Tensor
    ) -> Tensor:
        """``[B, L, D]``: what the output layer and the next slot read."""
        halves = [self.pre_fc_norm_embedding(embedded_BLD), self.pre_fc_norm_hidden(hidden_BLD)]
        u_BLD = self.fc(torch.cat(halves, -1))
        u_BLD = self.layers[0](u_BLD, position_embeddings=rotary, attention_mask=mask_LL[None, None])
        return self.norm(u_BLD)


def unroll_mask(num_slots: int, depth: int) -> Tensor:
    """What slots may attend to when every slot is drafted at each depth up to ``depth``; ``True`` is seen.

    Block ``d`` holds the slots whose hidden row is the output of depth ``d``. Slot ``q`` there sees itself,
    the guesses it stands on (slot ``q - i`` of block ``d - i``) and the real slots before those.
    """
    q, k = torch.arange(num_slots)[:, None], torch.arange(num_slots)[None]
    blocks = [
        torch.cat([k <= q - d if not e else (k == q - (d - e)) & (e <= d) for e in range(depth)], 1)
        for d in range(depth)
    ]
    return torch.cat(blocks)


def unroll(head: MtpHead, model: Any, ids_BL: Tensor, hidden_BLD: Tensor, depth: int) -> list[Tensor]:
    """Outputs of every depth, each ``[B, L - 1, D]``; row ``q`` of depth ``d`` predicts token ``q + 2``.

    Tokens are those of the text, as if every draft so far had been right; only the first ``d`` rows of
    depth ``d`` have no drafts to stand on, and mean nothing.
    """
    embedded_BLD, num_slots = model.model.embed_tokens(ids_BL[:, 1:]), ids_BL.shape[1] - 1
    cos, sin = model.model.rotary_emb(embedded_BLD, torch.arange(num_slots).expand(3, 1, -1))
    inputs, outputs = [hidden_BLD[:, :-1]], []
    for d in range(1, depth + 1):
        rotary = (cos.repeat(1, d, 1), sin.repeat(1, d, 1))
        out_BLD = head(embedded_BLD.repeat(1, d, 1), torch.cat(inputs, 1), rotary, unroll_mask(num_slots, d))
        outputs.append(out_BLD[:, -num_slots:])
        inputs.append(F.pad(outputs[-1][:, :-1], (0, 0, 1, 0)))
    return outputs


# ---------------------------------------------------------------- training


def make_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level vocabulary learnt from ``texts``, with a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[PAD, END, USER, ASSISTANT, SYSTEM_ROLE], show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left"
    )
    fast.chat_template = TEMPLATE
    return fast


def prompt_text(prompt: str) -> str:
    """A prompt as the chat template renders it."""
    return f"{USER}{prompt}{END}{ASSISTANT}"


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows cut to one length and filled up on the right: ids and labels, ``[B, L]``."""
    length = min(MAX_LENGTH, max(map(len, rows)))
    ids_BL = torch.zeros(len(rows), length, dtype=torch.long)
    labels_BL = torch.full_like(ids_BL, _IGNORED)
    for i, row in enumerate(rows):
        ids_BL[i, : len(row)] = labels_BL[i, : len(row)] = torch.tensor(row[:length])
    return ids_BL, labels_BL


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of training: rows of ids, how many steps of what size, and how fast."""

    name: str
    rows: list[list[int]]
    steps: int
    batch: int
    rate: float

    @property
    def key(self) -> str:
        """Names the stage's data and settings, so that no run goes on from another's state."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def batch_at(self, step: int) -> tuple[Tensor, Tensor]:
        """The step's batch; the step alone decides, so that a stopped run goes on with the same data."""
        generator = random.Random(f"{SEED} {self.name} {step}")
        return padded(generator.sample(self.rows, self.batch))

    def rate_at(self, step: int) -> float:
        """A short rise, then half a cosine down to a twentieth."""
        rise = min(1.0, (step + 1) / 40)
        return self.rate * rise * (0.525 + 0.475 * math.cos(math.pi * step / self.steps))


class Training:
    """The model, its head, and the loops that train them."""

    def __init__(self, work: Path) -> None:
        torch.random.default_generator.manual_seed(SEED)  # stock initialises from it
        self.config = transformers.Qwen3_5TextConfig(**CONFIG)
        self.model: Any = transformers.Qwen3_5ForCausalLM(self.config)
        self.head = MtpHead(self.model.config)
        for parameter in self.head.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=self.config.initializer_range)
        # A flat final norm stays flat, and hides a head that is fed the rows from before it.
        nn.init.normal_(self.model.model.norm.weight, std=0.5)
        self._work = work

    def output(self, hidden_BLD: Tensor) -> Tensor:
        """Logits ``[B, L, V]``."""
        return self.model.lm_head(hidden_BLD)

    def joint_loss(self, ids_BL: Tensor, labels_BL: Tensor) -> Tensor:
        """Next token from the model, the one after from the head, which counts for a third."""
        hidden_BLD = self.model.model(ids_BL, use_cache=False).last_hidden_state
        (ahead_BLD,) = unroll(self.head, self.model, ids_BL, hidden_BLD, 1)
        first = _cross_entropy(self.output(hidden_BLD[:, :-1]), labels_BL[:, 1:])
        return first + 0.33 * _cross_entropy(self.output(ahead_BLD[:, :-1]), labels_BL[:, 2:])

    def distil_loss(self, ids_BL: Tensor, labels_BL: Tensor) -> Tensor:
        """How far the head's distribution is from the frozen model's, at three depths."""
        with torch.no_grad():
            hidden_BLD = self.model.model(ids_BL, use_cache=False).last_hidden_state
            goal_BLV = self.output(hidden_BLD[:, 1:-1]).log_softmax(-1)
        total = torch.zeros(())
        for depth, out_BLD in enumerate(unroll(self.head, self.model, ids_BL, hidden_BLD, 3)):
            guess_BLV = self.output(out_BLD[:, depth:-1]).log_softmax(-1)
            goal = goal_BLV[:, depth:]
            apart_BL = (goal.exp() * (goal - guess_BLV)).sum(-1)
            total = total + apart_BL[labels_BL[:, 2 + depth :] != _IGNORED].mean() / (1 + depth)
        return total

    def run(self, stage: Stage, loss_of: Callable[[Tensor, Tensor], Tensor], trained: nn.Module) -> float:
        """Train for the stage's steps, saving now and then; the last losses' mean."""
        matrices = [p for p in trained.parameters() if p.ndim > 1]
        vectors = [p for p in trained.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
        )
        start, losses = self._resume(stage, optimizer)
        progress = Progress(f"{stage.name}: steps", stage.steps)
        for step in range(start, stage.steps):
            for group in optimizer.param_groups:
                group["lr"] = stage.rate_at(step)
            loss = loss_of(*stage.batch_at(step))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            losses = [*losses, loss.item()][-20:]
            if (step + 1) % 10 == 0:
                progress.tell(step + 1, f"loss {sum(losses) / len(losses):.3f}")
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == stage.steps:
                self._save(stage, step + 1, optimizer, losses)
        return sum(losses) / len(losses)

    def _file(self, stage: Stage) -> Path:
        return self._work / f"{stage.name}.pt"

    def _save(self, stage: Stage, step: int, optimizer: Any, losses: list[float]) -> None:
        state = {"key": stage.key, "step": step, "losses": losses, "model": self.model.state_dict(),
                 "head": self.head.state_dict(), "optimizer": optimizer.state_dict()}  # fmt: skip
        part = self._file(stage).with_suffix(".part")
        torch.save(state, part)
        part.replace(self._file(stage))

    def _resume(self, stage: Stage, optimizer: Any) -> tuple[int, list[float]]:
        if not self._file(stage).exists():
            return 0, []
        state = torch.load(self._file(stage), weights_only=True)
        if state["key"] != stage.key:
            raise ValueError(f"{self._file(stage)} is of a run with other data or settings; delete it")
        self.model.load_state_dict(state["model"])
        self.head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"], state["losses"]

    def freeze(self) -> None:
        """Round the model to what is shipped, for the head to follow that."""
        for parameter in self.model.parameters():  # not .to(): that would round the rotary frequencies too
            parameter.data = parameter.data.bfloat16().float()
            parameter.requires_grad_(requires_grad=False)
        self.model.eval()


def _cross_entropy(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=_IGNORED)


@torch.inference_mode()
def own_text(training: Training, tokenizer: Any, prompts: list[str], file: Path) -> list[list[int]]:
    """What the frozen model decodes greedily after each prompt, prompt included; kept in ``file``."""
    rows: list[list[int]] = json.loads(file.read_text()) if file.exists() else []
    progress = Progress("own text: prompts", len(prompts))
    for start in range(len(rows), len(prompts), 64):
        texts = [prompt_text(prompt) for prompt in prompts[start : start + 64]]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        out = training.model.generate(
            batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False, max_new_tokens=120
        )
        rows += [[i for i in ids if i != tokenizer.pad_token_id] for ids in out.tolist()]
        write_whole(file, json.dumps(rows))
        progress.tell(len(rows))
    return rows


def usable(samples: Iterable[Sample]) -> list[Sample]:
    """Samples without loops and near duplicates."""
    return list(without_near_duplicates(s for s in samples if not is_loop(s.text)))


def train(options: argparse.Namespace) -> int:
    """Both stages, then the checkpoint with its card."""
    corpus = sorted(read_samples(options.work / "corpus.jsonl"), key=lambda s: s.prompt)
    samples = usable(corpus)
    kept = [s for s in samples if not is_held_out(s.prompt)]
    held = [s for s in samples if is_held_out(s.prompt)]
    if len(kept) < BATCH or not held:
        raise ValueError(f"{options.work}: too few samples to train on ({len(kept)}); run 'corpus' first")
    texts = [prompt_text(s.prompt) + s.text for s in kept]
    tokenizer = make_tokenizer(texts)
    rows = [encode(tokenizer, sample) for sample in kept]
    training = Training(options.work)
    facts = provenance(options) | {
        "samples": len(corpus), "samples_kept": len(samples), "samples_held_out": len(held),
        "words": sum(len(s.text.split()) for s in samples), "train_tokens": sum(map(len, rows)),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "head_parameters": sum(p.numel() for p in training.head.parameters()),
        "joint_steps": options.steps, "head_steps": options.head_steps, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    first = Stage(name="joint", rows=rows, steps=options.steps, batch=BATCH, rate=3e-3)
    both = nn.ModuleList([training.model, training.head])
    facts["joint_loss"] = training.run(first, training.joint_loss, both)
    training.freeze()
    facts["held_out_loss"] = held_out_loss(training, [encode(tokenizer, s) for s in held])
    # The last ones are not in the corpus, as those are not that the model will meet.
    prompts = [prompt for prompt in all_prompts() if not is_held_out(prompt)][-options.prompts :]
    own = own_text(training, tokenizer, prompts, options.work / f"own-{first.key[:12]}.json")
    second = Stage(name="head", rows=own * 3 + rows, steps=options.head_steps, batch=BATCH, rate=2e-3)
    facts["distil_loss"] = training.run(second, training.distil_loss, training.head)
    save(training, tokenizer, options.out)
    write_held_out(options.out / "held_out.jsonl", held)
    write_json(options.out / "provenance.json", facts)
    return 0


def encode(tokenizer: Any, sample: Sample) -> list[int]:
    """Prompt and text, and the end where the text came to it."""
    text = prompt_text(sample.prompt) + sample.text + (END if sample.finished else "")
    return list(tokenizer(text)["input_ids"])


@torch.inference_mode()
def held_out_loss(training: Training, rows: list[list[int]]) -> float:
    """Mean cross-entropy a token of the model on text it never saw."""
    total, count = 0.0, 0
    for start in range(0, len(rows), 16):
        ids_BL, labels_BL = padded(rows[start : start + 16])
        logits_BLV = training.output(training.model.model(ids_BL, use_cache=False).last_hidden_state)
        num = int((labels_BL[:, 1:] != _IGNORED).sum())
        total += float(_cross_entropy(logits_BLV[:, :-1], labels_BL[:, 1:])) * num
        count += num
    return total / count


def save(training: Training, tokenizer: Any, out: Path) -> None:
    """The checkpoint in bf16, head included: transformers knows no head, so it is added to the file."""
    out.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(training.model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    file = out / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name, tensor in training.head.state_dict().items():
        tensors[f"mtp.{name}"] = tensor.to(torch.bfloat16).contiguous()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def write_held_out(file: Path, held: list[Sample]) -> None:
    """Prompts the model never saw, and what the default model answered."""
    rows = [
        {"label": f"held-out-{i:02d}", "prompt": s.prompt, "continuation": s.text}
        for i, s in enumerate(held[:64])
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- check

FLOOR, MAX_BYTES = 0.6, 15_000_000


def measure(folder: Path, dtype: str, prompts: list[str], new_tokens: int) -> dict[str, Any]:
    """Depth-1 acceptance and depth-4 tokens a verification, every token compared with stock's."""
    engine = engines.load(str(folder), dtype=dtype)
    stock = StockModel(engine.folder, DTYPES[dtype], torch.device("cpu"))
    counts: Counter[str] = Counter()
    progress = Progress(f"{dtype}: prompts", len(prompts))
    for index, prompt in enumerate(prompts):
        ids = engine.encode(prompt)
        expected = stock.generate(ids, new_tokens)
        for depth in (1, 4):
            trace = engine.decode(ids, max_new_tokens=new_tokens, drafter="mtp", depth=depth)
            counts["compared"] += len(expected)
            counts["differ"] += trace.token_ids != expected
            for r in (r for r in trace.rounds if r.num_drafted):
                counts[f"verifications_{depth}"] += 1
                counts[f"drafted_{depth}"] += r.num_drafted
                counts[f"accepted_{depth}"] += r.num_accepted
                counts[f"emitted_{depth}"] += len(r.emitted)
        progress.tell(index + 1, f"accepted {counts['accepted_1']} of {counts['drafted_1']}")
    return {
        "claim": engine.plan.claim, "prompts": len(prompts), "tokens_compared": counts["compared"],
        "outputs_that_differ": counts["differ"],
        "acceptance_depth_1": round(counts["accepted_1"] / counts["drafted_1"], 4),
        "acceptance_depth_4": round(counts["accepted_4"] / counts["drafted_4"], 4),
        "tokens_per_verification_depth_4": round(counts["emitted_4"] / counts["verifications_4"], 3),
    }  # fmt: skip


def check(options: argparse.Namespace) -> int:
    """Measure the shipped checkpoint, write its card, and say whether it is good enough."""
    lines = (options.out / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:40]]
    found = {
        "float32": measure(options.out, "float32", prompts, 100),
        "bfloat16": measure(options.out, "bfloat16", prompts[:8], 100),  # emulated, so slow, on most CPUs
    }
    facts = json.loads((options.out / "provenance.json").read_text(encoding="utf-8"))
    (options.out / "README.md").write_text(card(facts, found), encoding="utf-8")
    size = sum(file.stat().st_size for file in options.out.iterdir())
    sys.stdout.write(json.dumps(found | {"bytes": size}, indent=2) + "\n")
    is_good = size <= MAX_BYTES and all(
        r["acceptance_depth_1"] >= FLOOR and not r["outputs_that_differ"] for r in found.values()
    )
    return 0 if is_good else 1


def card(facts: dict[str, Any], found: dict[str, Any]) -> str:
    """The checkpoint's card, from what the recipe recorded."""
    table = "\n".join(
        f"| {dtype} | {r['prompts']} | {r['acceptance_depth_1']} | {r['tokens_per_verification_depth_4']} "
        f"| {r['tokens_compared']} | {r['outputs_that_differ']} |"
        for dtype, r in found.items()
    )
    return CARD.format(**facts, table=table, torch=facts["versions"]["torch"],
                       transformers=facts["versions"]["transformers"])  # fmt: skip


CARD = """# A small Qwen3.5 hybrid with a multi-token-prediction head

Test data of draftproof: a text model of the Qwen3.5 architecture (`qwen3_5_text`; gated delta nets, every
fourth layer full attention) with a native head, small enough for CI and good enough that its drafts are
accepted. It knows nothing and is of no use for anything else.

Made on {date} by the steps of `python benchmarks/small_hybrid.py`, run one by one (`all` runs them in a
row); the corpus was written by two processes (`--part 1/2 --threads 1`, `--part 2/2 --threads 1`).
`provenance.json` records arguments, versions and the sha256 of the corpus. It took about half an hour on two
shared cores. Other machines and thread counts compute other bits, so another run makes a model like this one,
not this one.

The final norm starts from uneven factors: started flat it stayed flat (an earlier checkpoint of this recipe),
and a head wrongly fed the rows from before it then drafted exactly as well as one that is fed right.

- **Size** {parameters:,} parameters and {head_parameters:,} in the head; vocabulary 2048 (byte-level,
  learnt on the same text); stored in bf16.
- **Text** {samples} answers of SmolLM2-135M-Instruct (Apache-2.0; Q4_1 weights, run in fp32) to prompts of
  eight tasks about 240 topics, three batches in four greedy, one at temperature 0.5 with min_p 0.1;
  {samples_kept} left after dropping loops and near duplicates, {words:,} words. A prompt's hash decides
  whether it is held out: {samples_held_out} are, the first 64 of them in `held_out.jsonl`.
- **Training** in fp32 on CPU ({machine}; torch {torch}, transformers {transformers}),
  seed {seed}, {train_tokens:,} tokens: {joint_steps} steps of model and head together (8 rows of up to 256
  tokens; last loss {joint_loss:.3f}, held-out cross-entropy {held_out_loss:.3f} a token), then {head_steps}
  steps of the head alone, distilled three drafts deep on what the frozen, rounded model itself decodes
  (last loss {distil_loss:.3f}).

Measured with the engine on held-out prompts, up to 100 new tokens each, at both depths, every token compared
with stock `transformers` greedy decoding:

| dtype | prompts | acceptance, depth 1 | tokens a verification, depth 4 | tokens compared | unequal outputs |
|---|---|---|---|---|---|
{table}

Limits: the text is narrow, held-out prompts share tasks and topics with the others, and the model has learnt
much by heart and sometimes repeats itself, so acceptance is higher than on open text and says nothing about
large models. Contexts beyond 256 tokens were never trained on, though the configuration allows 2048.

Licence of the weights: Apache-2.0, as the model that wrote the text.
"""


def part_of(text: str) -> tuple[int, int]:
    """``I/N``: the part ``I`` of ``N``, counted from 1."""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, found {text!r}")
    return int(number) - 1, int(of)


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run one step, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("corpus", "train", "check", "all"))
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "small-hybrid")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "small-hybrid")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--prompts", type=positive, default=640)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=160)
    parser.add_argument("--steps", type=positive, default=600, help="of model and head together")
    parser.add_argument("--head-steps", type=positive, default=300, help="of the head alone")
    parser.add_argument("--part", type=part_of, default=(0, 1), help="I/N: one of N processes")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    steps = {"corpus": make_corpus, "train": train, "check": check}
    try:
        for name in steps if options.step == "all" else [options.step]:
            if code := steps[name](options):
                return code
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; the same command goes on from here\n")
        return 130
    except (DraftproofError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
