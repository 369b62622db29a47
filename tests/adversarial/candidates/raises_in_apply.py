"""Cannot be applied."""


def apply(workload):
    raise RuntimeError(f"cannot speed up {type(workload.model).__name__}")
