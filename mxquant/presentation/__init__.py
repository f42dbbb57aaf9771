"""How results are shown: tables and pictures, for every command and report."""
