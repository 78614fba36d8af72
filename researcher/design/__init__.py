"""Turns a study spec into a plan: arms, hypotheses, stages, branches, seeds and price. Pure; it runs nothing."""
