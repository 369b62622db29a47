"""Compare every logit of a decode with stock's, bit for bit, at several row counts.

    python benchmarks/prove_logits.py [--model NAME] [--dtype bfloat16] [--tokens 200] [--prompt-len 512]

Stock decodes one input of the diverse suite serially and keeps the logits of every step. The engine's target
then runs the same tokens 1, 2, 4, 8 and 16 rows at a time, committing them all, and once more with wrong
drafts rolled back in between. Prints one line a row count; exit code 1 if a bit differs under ``bitwise``.
"""

from __future__ import annotations

import argparse
import sys

import torch

from draftproof import engine as engines
from draftproof.bench.prompts import build_prompt, diverse_inputs
from draftproof.models.load import DTYPES
from draftproof.models.stock import SerialRun, StockModel

ROWS = (1, 2, 4, 8, 16)


def replay(
    engine: engines.Engine, prompt: list[int], run: SerialRun, rows: int, *, wrong: bool
) -> torch.Tensor:
    """``[n, V]`` logits of the engine's target over stock's tokens, ``rows`` at a time.

    With ``wrong`` every verification is first made with corrupted drafts, of which only the first row is
    right, and rolled back.
    """
    session = engine.target.open(len(prompt) + len(run.token_ids) + engine.target.max_rows)
    out, fed = [session.prefill(prompt)[None]], list(run.token_ids[:-1])
    for start in range(0, len(fed), rows):
        chunk = fed[start : start + rows]
        if wrong:
            session.verify([(token + 1) % engine.target.vocab_size for token in chunk])
            session.commit(0)
        out.append(session.verify(chunk))
        session.commit(len(chunk))
    return torch.cat(out)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--label", default="news")
    options = parser.parse_args()
    engine = engines.load(options.model, dtype=options.dtype)
    item = next(i for i in diverse_inputs() if i.label == options.label)
    chat = bool(getattr(engine.tokenizer, "chat_template", None))
    prompt = build_prompt(item, engine.tokenizer, options.prompt_len, chat=chat)
    stock = StockModel(engine.folder, DTYPES[options.dtype], torch.device("cpu"))
    run = stock.run(prompt, options.tokens, eos_token_id=None)
    sys.stdout.write(f"{options.model} {options.dtype}, {options.label}, claim {engine.plan.claim}\n")
    all_same = True
    for rows in ROWS:
        for wrong in (False, True):
            got = replay(engine, prompt, run, rows, wrong=wrong)
            same = int((got == run.logits_NV).all(1).sum())
            flips = int((got.float().argmax(1) != run.logits_NV.float().argmax(1)).sum())
            all_same &= same == len(run.token_ids)
            note = " after rolled-back drafts" if wrong else ""
            steps = f"{same} of {len(run.token_ids)} steps bit-equal"
            sys.stdout.write(f"{rows:2d} rows{note}: {steps}, {flips} argmax flips\n")
    return 0 if all_same or engine.plan.claim != "bitwise" else 1


if __name__ == "__main__":
    sys.exit(main())
