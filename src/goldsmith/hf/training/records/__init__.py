"""The files a run leaves: checkpoints, the log, and the page that shows the loss."""
