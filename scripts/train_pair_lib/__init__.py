"""Parts of `scripts/train_pair.py`, one stage a module; `architecture` and `decoding` serve several stages.

The rule kept here: nothing under the benchmark directory is ever read by a training stage.
"""
