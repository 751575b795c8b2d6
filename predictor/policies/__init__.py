"""Policies: ours and the published ones, behind one interface, live and in replay."""

from predictor.holding import Holding, View
from predictor.policies.base import Policy
from predictor.policies.locked import LockedPolicy
from predictor.policies.making import POLICIES, make_policy

__all__ = ["POLICIES", "Holding", "LockedPolicy", "Policy", "View", "make_policy"]
