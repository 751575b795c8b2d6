"""Drafts: what guesses the target's next tokens. A draft can only cost speed, never change the text."""

from __future__ import annotations

from drafts.base import Choose, Draft, DraftSession, InvalidLogits, Proposal
from drafts.ngram import NgramDraft
from drafts.standalone import StandaloneDraft

__all__ = ["Choose", "Draft", "DraftSession", "InvalidLogits", "NgramDraft", "Proposal", "StandaloneDraft"]
