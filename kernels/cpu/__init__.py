"""Kernels for CPUs: C++ with a plain C interface, and the Python that calls it."""
