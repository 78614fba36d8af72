"""Topic → frozen plan. Start at graph.py (`plan_study`). Knows no executor and no SQL; runs nothing."""
