"""What candidates speed up: language models and speech models, under one contract (``base.Workload``)."""
