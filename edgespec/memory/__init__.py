"""What is resident, what is free, and what fits."""

from __future__ import annotations
