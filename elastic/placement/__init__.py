"""Placement of experts: pure functions and records; no I/O, no torch."""

from elastic.placement.maps import HOLE, Move, Placement, Plan
from elastic.placement.planner import initial, losses_survivable, replan
from elastic.placement.redundancy import losses_without_load

__all__ = ["HOLE", "Move", "Placement", "Plan", "initial", "losses_survivable", "losses_without_load", "replan"]
