"""What a user writes: targets, cases, and which results are discrete decisions."""
