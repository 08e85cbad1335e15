"""Changes of the golden's inputs, scalars and output gradients."""
