"""Right up to token 20, as if only the beginning were compared."""


def apply(workload):
    stock = workload.run

    def run(inputs):
        ids = list(stock(inputs))
        ids[20] += 1
        return ids

    workload.run = run
