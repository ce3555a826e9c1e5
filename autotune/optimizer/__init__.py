"""dPRO's optimizer: passes over a strategy, chosen by the critical path of its replay."""
