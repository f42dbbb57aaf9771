"""PyTorch operators on packed weights, and the choice of the kernels that compute them."""
