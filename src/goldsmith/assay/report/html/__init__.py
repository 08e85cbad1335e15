"""The report as one self-contained HTML page: no script, no network, no fonts."""
