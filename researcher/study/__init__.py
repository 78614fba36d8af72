"""A study's request (`StudySpec`) and the frozen plan made from it (`Plan`)."""
