"""The candidate's own trace: its values compared with the golden's, until the first line that goes wrong."""
