"""Drafts: what guesses the target's next tokens. A draft can only cost speed, never change the text."""

from __future__ import annotations

from drafts.base import Choose, Draft, DraftSession, InvalidLogits, Proposal
from drafts.head import HeadDraft, HeadSpec
from drafts.ngram import NgramDraft
from drafts.phrases import PhraseDraft, PhraseTable
from drafts.standalone import StandaloneDraft
from drafts.states import HiddenStates

__all__ = [
    "Choose",
    "Draft",
    "DraftSession",
    "HeadDraft",
    "HeadSpec",
    "HiddenStates",
    "InvalidLogits",
    "NgramDraft",
    "PhraseDraft",
    "PhraseTable",
    "Proposal",
    "StandaloneDraft",
]
