"""`goldsmith bench generate`: whole models, from token to token, beside other programs."""
