"""Stock decoding that tells nothing of itself."""


def apply(workload):
    stock = workload.run
    workload.run = lambda inputs: stock(inputs)
