"""Checks the invariants of the design against what ranks, daemon and clients wrote down during a run.

Reads `chaos.records` alone, and shares no deciding code with what it checks: a planner or a barrier that is wrong is not asked
whether it is right. Each module holds the checks of one kind of record; `check` runs them all.

====  =======================================================================  ==========================================
 No.  Invariant                                                                Checked in
====  =======================================================================  ==========================================
   1  Coverage before traffic                                                  `coverage`
   2  One map                                                                  `steps`: agreement of ranks, barrier
   3  Addresses never move, survivors capture nothing                          `steps`
   4  A step is a transaction                                                  `steps`, `tokens`
   5  Nothing lost, nothing twice                                              `tokens`
   6  Bounded; one reconfiguration at a time                                   `sequences`
   7  Fenced: one writer, epochs only grow                                     `sequences`, `steps`
   8  Unknown is neither healthy nor sick                                      `removals`
   9  No healthy rank is removed                                               `removals`
  10  Crash-safe: nothing is forgotten, serving goes on without the daemon     `journal`
====  =======================================================================  ==========================================
"""

from chaos.invariants.suite import check
from chaos.invariants.violation import Violation

__all__ = ["Violation", "check"]
