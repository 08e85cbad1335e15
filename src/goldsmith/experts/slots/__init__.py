"""experts.slots: what each slot's expert gives, before the weighted sum."""
