"""The report as one self-contained HTML page, without scripts, network access or fonts."""
