"""Fast implementations of the operators in :mod:`mxquant.ops.operators`; a folder for each kind of device."""
