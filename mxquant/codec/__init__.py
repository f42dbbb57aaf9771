"""The arithmetic, in plain PyTorch: numbers, scales, blocks, packing, tensors, rounding."""
