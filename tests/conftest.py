"""Fixtures and switches shared by all tests."""

from __future__ import annotations

import os

# Nothing in the tests may reach the network, whatever the machine.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
