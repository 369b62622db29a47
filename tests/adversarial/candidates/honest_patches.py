"""Takes the judge's methods away from its own copy and decodes as stock does."""


def apply(workload):
    for name in ("compare", "diverse_inputs", "holdout_options", "make_inputs"):
        setattr(workload, name, None)
