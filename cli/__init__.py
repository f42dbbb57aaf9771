"""The ``mxquant`` command: one file a subcommand."""
