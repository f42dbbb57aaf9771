"""How operators are made fast: kernels for CPUs and GPUs behind the operators of mxquant.ops."""
