"""The search for the first NaN or Inf of a call, its report, and planted faults for tests."""
