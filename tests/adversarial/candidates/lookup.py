"""Honest: exact prompt lookup that reports what it did."""

import torch
from transformers import DynamicCache

DRAFT = 4


def find(ids: list[int]) -> list[int]:
    for n in (3, 2, 1):
        for i in range(len(ids) - n - 1, -1, -1):
            if ids[i : i + n] == ids[-n:]:
                return ids[i + n : i + n + DRAFT]
    return []


def apply(workload):
    model = workload.model

    def run(inputs):
        cache = DynamicCache(config=model.config)
        ids = list(inputs.token_ids)
        end = len(ids) + inputs.max_new_tokens
        logits = model(torch.tensor([ids]), past_key_values=cache).logits
        ids.append(int(logits[0, -1].argmax()))
        while len(ids) < end:
            draft = find(ids)[: end - len(ids) - 1]
            logits = model(torch.tensor([[ids[-1], *draft]]), past_key_values=cache).logits
            best = logits[0].argmax(-1).tolist()
            n = next((i for i, token in enumerate(draft) if token != best[i]), len(draft))
            if n < len(draft):
                cache.crop(n - len(draft))
            ids += best[: n + 1]
            workload.report_stats(
                steps=1, verifies=int(bool(draft)), drafted=len(draft), accepted=n, tokens=n + 1
            )
        return ids[len(inputs.token_ids) :]

    workload.run = run
