"""A first look: a small open pair, exported, calibrated quickly, and asked a question in three ways."""
