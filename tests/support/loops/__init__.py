"""Training loops as people write them: one file for each subject, and how a loop is judged."""
