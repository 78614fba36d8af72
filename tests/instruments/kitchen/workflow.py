"""Nothing is run by tests of the planner; a declaration needs its workflow to be there."""
