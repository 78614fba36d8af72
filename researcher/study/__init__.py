"""What a study is: the request (StudySpec) and the frozen plan that it becomes (Plan)."""
