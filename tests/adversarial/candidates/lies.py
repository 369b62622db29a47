"""Stock decoding that claims to be a perfect speculator."""


def apply(workload):
    stock = workload.run

    def run(inputs):
        ids = stock(inputs)
        workload.report_stats(
            steps=2, verifies=2, drafted=len(ids), accepted=len(ids) - 3, tokens=len(ids) - 1
        )
        return ids

    workload.run = run
