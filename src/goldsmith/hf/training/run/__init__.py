"""The run itself: its plan, the training loop, the session around it, and its failures."""
