"""From a study spec to a plan: arms, hypotheses, stages, branches, seeds and price. Pure; it runs nothing."""
