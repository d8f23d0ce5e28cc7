"""The torch engine on an NVIDIA GPU.

- forward: runs Triton kernels and CUDA graphs. Its parts are layers, taps (hidden states), tiles (sizes) and weights
  (their layout).
- attention_plan: what attention computes in a step, laid out by C code.
- chain: chains of draft tokens; top: the best tokens of each row.
- gpu_kernels: the Triton kernels.
- replays: copies of numbers to a device and back. Work of fixed shapes, recorded as CUDA graphs.
"""
