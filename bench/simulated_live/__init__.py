"""How right the simulator is: `python -m headway.bench.simulated_live`."""
