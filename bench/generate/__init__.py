"""How fast generation is on this machine, beside what else runs the same model: `python -m headway.bench.generate`."""
