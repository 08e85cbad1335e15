"""Report: a diagnosis as text, page, JSON and bundle; the sentences for people."""
