"""The engines as this process sees them: which can run, what each rounds, and how it is started."""
