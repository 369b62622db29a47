"""Never answers a held-out prompt, or any other it has not seen twice."""

import threading


def apply(workload):
    stock, seen = workload.run, []

    def run(inputs):
        if len(set(seen)) == 2 and inputs.token_ids not in seen:
            threading.Event().wait()
        seen.append(inputs.token_ids)
        return stock(inputs)

    workload.run = run
