"""Fitting: arithmetic on the wrong tensor and the golden's own tensors. Nothing here runs the candidate."""
