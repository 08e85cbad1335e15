"""What the commands in this folder share: options, what a machine must have, and the conditions of a row."""
