"""The arithmetics of a GGUF file on a CPU, by name, and that of a GPU in which no row depends on others.

- exact: products of floats, of exactly the file's values.
- rounded: the same of values rounded to bfloat16, half the bytes of float32. Jobs of 0.2 may need it.
- integer: products of the file's own blocks with activations in 8 bits.
- auto: what fits the file (`specq.engines.native.loading.default_of`).
"""

AUTO, EXACT, ROUNDED, INTEGER = ARITHMETICS = ("auto", "exact", "rounded", "integer")
INVARIANT = "invariant"
