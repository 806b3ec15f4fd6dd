"""A check of thresholds on questions that calibration did not see."""
