"""Programs that run in another environment and answer over their standard streams; they import nothing of ours."""
