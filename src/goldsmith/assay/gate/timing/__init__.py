"""Times of accepted candidates: the calls in the candidate's process, and what the judge makes of them."""
