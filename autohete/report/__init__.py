"""What was planned and what happened, for people: tables."""
