"""Triton kernels of the fused path. `layers`, `chain` and the EAGLE-3 drafter launch them.

- linear: matrix products of few rows, with norm, rotation, activation or residual fused in.
- attention: attention over paged keys and values.
- rows: operations row by row: embedding, norms, rotation, activation.
- top: the best tokens of each row, with the drafters' noise. It also updates a chain for its next step.

Tested without a GPU under Triton's interpreter (TRITON_INTERPRET=1), which has no bfloat16 products.
"""
