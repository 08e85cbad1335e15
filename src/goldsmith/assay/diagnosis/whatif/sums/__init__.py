"""Changes of sums that are fitted to the candidate's numbers: the addends that are left at each place."""
