"""Proven rounding bounds: |computed - exact| <= e for the golden's formula, in any order of its sums."""
