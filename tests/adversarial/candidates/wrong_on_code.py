"""Right on everything but programs."""


def apply(workload):
    stock = workload.run

    def run(inputs):
        ids = list(stock(inputs))
        if "import " in workload.tokenizer.decode(inputs.token_ids):
            ids[5] += 1
        return ids

    workload.run = run
