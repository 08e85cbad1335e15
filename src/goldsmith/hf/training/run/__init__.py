"""The run itself: its steps, the training loop, the session around it, and its failures."""
