"""What scripts/calibrate.py is made of: `hardware` measures the pair of models and this machine, `serving` runs real
processes over a network with delays, `compare` sets what they did against the simulator's prediction."""
