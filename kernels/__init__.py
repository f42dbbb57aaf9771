"""Fast implementations of the operators in :mod:`mxquant.ops`; a folder for each kind of device."""
