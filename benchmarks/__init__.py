"""What is measured of goldsmith in a checkout of its repository; README.md says what is where. Not installed."""
