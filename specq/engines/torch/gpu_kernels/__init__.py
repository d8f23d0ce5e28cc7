"""Triton kernels of the fused path, one room each; what launches them is `fused_layers` and `chain`, and
`specq.drafting.eagle3`.

    linear      matrix products of few rows, with norm, rotation, activation or residual fused in
    attention   attention over paged keys and values
    rows        what is done row by row: embedding, norms, rotation, activation
    top         the best tokens of each row, with the drafters' noise, and a chain's move to its next step

Tested without a GPU under Triton's interpreter (TRITON_INTERPRET=1), which has no bfloat16 products.
"""
