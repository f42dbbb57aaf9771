"""Triton kernels for NVIDIA and AMD GPUs; ``mxquant.kernels.triton.backend`` is the door."""
