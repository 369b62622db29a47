"""Says that everything is equal, that there are no other inputs, and gives wrong tokens."""

from draftproof.bench.workloads import base, llm


def apply(workload):
    stock = workload.run
    for kind in (workload, type(workload), base.Workload, llm.LLMWorkload):
        kind.compare = lambda *_: base.Comparison(is_equal=True)
        kind.diverse_inputs = lambda *_: {}
        kind.holdout_options = lambda *_: {}
        kind.make_inputs = lambda *_, **__: None
    base.compare_tokens = llm.compare_tokens = lambda *_: base.Comparison(is_equal=True)
    workload.run = lambda inputs: [token + 1 for token in stock(inputs)]
