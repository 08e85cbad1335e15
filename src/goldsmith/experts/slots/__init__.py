"""experts.slots: the output of each slot's expert, before the weighted sum."""
